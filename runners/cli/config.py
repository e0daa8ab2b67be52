"""The user's configuration and folders: ``config.toml`` with the server, and kept plans.

Folders follow the XDG Base Directory Specification. ``SLIPWAY_SERVER`` and ``SLIPWAY_TOKEN``
replace the values of the file.
"""

import contextlib
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from runners.cli.errors import CliError, ExitCode

SERVER, TOKEN = "SLIPWAY_SERVER", "SLIPWAY_TOKEN"
FIELDS = ("server", "token")
OTHERS_BITS = 0o077


@dataclass(frozen=True)
class Config:
    """The server that commands talk to and the token for it; both may be absent."""

    path: Path
    server: str | None = None
    token: str | None = None

    @property
    def is_readable_by_others(self) -> bool:
        """Return whether other users of the machine may read the file."""
        return self.path.exists() and bool(self.path.stat().st_mode & OTHERS_BITS)


def config_path(variables: Mapping[str, str] | None = None) -> Path:
    """Return the path of the configuration file, whether it exists or not."""
    return _folder("XDG_CONFIG_HOME", ".config", variables) / "config.toml"


def data_folder(variables: Mapping[str, str] | None = None) -> Path:
    """Return the folder of what commands keep on this machine: plans, measured rates."""
    return _folder("XDG_DATA_HOME", ".local/share", variables)


def write_private(path: Path, text: str) -> None:
    """Write a file that only its owner reads, whole or not at all.

    Raises:
        CliError: the folder cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary.touch(mode=0o600)
        temporary.write_text(text, "utf-8")
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise CliError(
            f"{path} cannot be written ({error.strerror}): make its folder writable, or set "
            "XDG_DATA_HOME to another one",
            code="not_written",
            exit_code=ExitCode.FAILED,
        ) from error


def _folder(variable: str, default: str, variables: Mapping[str, str] | None) -> Path:
    """Return Slipway's folder below a base folder; a relative base is ignored, as XDG says."""
    value = (os.environ if variables is None else variables).get(variable, "")
    if Path(value).is_absolute():
        return Path(value) / "slipway"
    try:
        return Path.home() / default / "slipway"
    except RuntimeError:
        raise CliError(
            f"the home folder is not known: set HOME, or {variable} to a folder of your own",
            code="no_home",
        ) from None


def load_config(variables: Mapping[str, str] | None = None) -> Config:
    """Return the configuration of the file and the environment.

    Raises:
        CliError: the file is not TOML, has an unknown field, or an address is not a URL.
    """
    variables = os.environ if variables is None else variables
    path = config_path(variables)
    values = {**_file_values(path), **_environment_values(variables)}
    server = values.get("server")
    if server is not None:
        parts = urlsplit(server)
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise CliError(
                f"server is {server!r}: it must be an address such as https://slipway.example.org"
                f", in {path} or {SERVER}",
                field="server",
            )
        server = server.rstrip("/")
    return Config(path, server, values.get("token"))


def _environment_values(variables: Mapping[str, str]) -> dict[str, str]:
    named = zip(FIELDS, (SERVER, TOKEN), strict=True)
    found = {field: variables.get(name, "").strip() for field, name in named}
    return {field: value for field, value in found.items() if value}


def _file_values(path: Path) -> dict[str, str]:
    try:
        document = tomllib.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise CliError(f"{path} cannot be read as TOML: {error}", code="bad_config") from error
    for name, value in document.items():
        if name not in FIELDS:
            known = " and ".join(FIELDS)
            raise CliError(f"{path} has a field {name!r}: it takes {known}", field=name)
        if not isinstance(value, str):
            raise CliError(
                f"{path}: {name} is {value!r}, but it must be text in quotes", field=name
            )
    return document
