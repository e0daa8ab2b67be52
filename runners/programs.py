"""Starts programs whose output is read as a text stream, and names the host's compiler."""

import os
import subprocess
from collections.abc import Mapping, Sequence


def start_text_process(
    argv: Sequence[str],
    env: Mapping[str, str] | None,
    *,
    stdin: int = subprocess.DEVNULL,
    stderr: int = subprocess.PIPE,
    has_own_group: bool = False,
) -> subprocess.Popen[str]:
    """Start a program whose output is read as text; undecodable bytes are replaced.

    ``stdin`` and ``stderr`` are subprocess's constants; with its own process group a program can
    be killed together with its children.
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


def compiler_name() -> str:
    """Return the C++ compiler that torch.compile calls: ``CXX``, or g++."""
    return os.environ.get("CXX") or "g++"
