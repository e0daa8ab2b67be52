"""What a process takes from its environment, and says of it; what of it a service is given.

``manage.py up`` imports this module before the packages are installed.
"""

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from runners.shared.addresses import proxy_lines

CERTIFICATES = ("SSL_CERT_FILE", "SSL_CERT_DIR")
AUTHORITIES = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")  # files of certificates
PROXIES = ("HTTPS_PROXY", "HTTP_PROXY", "ALL_PROXY", "NO_PROXY")
# What a program that reaches another machine needs. A job's own program gets none of them: of the
# programs before it, each leaves them to the next one that needs them.
NETWORK = (*PROXIES, *(name.lower() for name in PROXIES), *AUTHORITIES, "SSL_CERT_DIR")
# Files and folders that an agent reads of its environment.
PATHS = (
    *AUTHORITIES, "SSL_CERT_DIR", "SLIPWAY_REDIS_CA", "SLIPWAY_POWERCAP_DIR", "HF_HOME",
    "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME",
)  # fmt: skip
NOT_USED = "it is not used"
# Names of variables that the programs before a job's own leave in place: for its tracker alone,
# which reaches a server; the job's own program takes them out again.
TRACKER_VARIABLE = "SLIPWAY_TRACKER_VARIABLES"


def tracker_variables() -> tuple[str, ...]:
    """Return the names of the variables of the network that this job's tracker gets."""
    return tuple(filter(None, os.environ.get(TRACKER_VARIABLE, "").split(",")))


def environment_lines(variables: Mapping[str, str]) -> list[str]:
    """Return a line for each variable of other programs that is set and counts here.

    A line about a value that cannot work has the words ``it is not used``.
    """
    return [*proxy_lines(variables), *_certificate_lines(variables), *_folder_lines(variables)]


def _certificate_lines(variables: Mapping[str, str]) -> Iterator[str]:
    for name, exists in zip(CERTIFICATES, (Path.is_file, Path.is_dir), strict=True):
        if not (value := variables.get(name, "")):
            continue
        if exists(Path(value)) and os.access(value, os.R_OK):
            yield f"the authorities of {name}, {value}, count for https addresses"
        else:
            yield (
                f"{name} is {value!r}, which is not there or not for this user: {NOT_USED}, and "
                "https addresses cannot be verified. Correct or unset it"
            )


def _folder_lines(variables: Mapping[str, str]) -> Iterator[str]:
    value = variables.get("TMPDIR", "")
    if value and not (Path(value).is_dir() and os.access(value, os.W_OK | os.X_OK)):
        yield (
            f"TMPDIR is {value!r}, which is not a folder that this user can write: {NOT_USED}, "
            "and temporary files go elsewhere. Correct or unset it"
        )


def service_lines(
    variables: Mapping[str, str], others: Sequence[str] = (), secrets: Sequence[str] = ()
) -> Iterator[str]:
    """Yield lines of a systemd unit that pass on to a service what it reads of its environment.

    They are certificates, proxies, Slipway's own and ``others``. A unit can be read by every user,
    so ``secrets``, and an address with a password, are only named.
    """
    usual = (*PATHS, *PROXIES, *map(str.lower, PROXIES), "SLIPWAY_TIME_SCALE")
    for name in dict.fromkeys((*usual, *others, *secrets)):
        value = variables.get(name, "").strip()
        if not value:
            continue
        if name in secrets or ("@" in value and name not in PATHS):
            what = "a secret" if name in secrets else "a password"
            yield f"# {name} holds {what}, which others could read here: EnvironmentFile=…\n"
            continue
        if name in PATHS:
            value = str(Path(value).expanduser().absolute())
        plain = value.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
        yield f'Environment="{name}={plain}"\n'


def escape_unknown_characters() -> None:
    """Let stdout and stderr escape what the terminal's encoding lacks, instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            cast("Any", stream).reconfigure(errors="backslashreplace")


def creation_error(folder: Path, error: OSError, remedy: str) -> str:
    """Return why a folder of Slipway cannot be created, and what to do about it."""
    return (
        f"{folder} cannot be created: {error.strerror}. Correct the owner of the folder above it, "
        f"or {remedy}."
    )
