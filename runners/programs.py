"""Programs whose words are read as they come."""

import subprocess
from collections.abc import Mapping, Sequence


def heard(
    argv: Sequence[str],
    env: Mapping[str, str] | None,
    *,
    stdin: int = subprocess.DEVNULL,
    stderr: int = subprocess.PIPE,
    has_own_group: bool = False,
) -> subprocess.Popen[str]:
    """Return a started program whose output is text, whatever bytes it writes.

    ``stdin`` and ``stderr`` are subprocess's constants; in a group of its own a program can be
    ended with all that it started.
    """
    return subprocess.Popen(
        argv,
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        errors="replace",
        env=env,
        start_new_session=has_own_group,
    )
