"""Settings of the site, from the environment: folder, keys, addresses, databases, e-mail.

The settings and ``manage.py up`` import this module, so it imports neither Django nor any package.
Blanks around a value and capitals of a name make no difference. Every process of the site ends
with one sentence, which names the variable, instead of a traceback.
"""

import base64
import os
import secrets
import ssl
from collections.abc import Callable, Mapping, MutableMapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

from runners.hub.settings import HUB_TOKEN, HubSettings, HubSettingsError, from_environment
from runners.shared.addresses import (
    AddressError,
    Network,
    WebAddress,
    entries,
    host_name,
    networks,
    web_address,
)
from runners.shared.environment import creation_error
from runners.shared.redis_address import RedisAddressError, UnsafeAddressError, checked
from runners.shared.timing import VARIABLE as SCALE_VARIABLE
from runners.shared.timing import scale_of
from webapp.core.password_files import has_hashes
from webapp.core.time_zones import time_zone


class SettingError(SystemExit):
    """A variable cannot be used; ends the process with a message that names it."""


def flag(variables: Mapping[str, str], name: str) -> bool:
    """Return whether a variable switches something on.

    Raises:
        SettingError: it says neither yes nor no.
    """
    value = variables.get(name, "").strip().lower()
    if value in ("1", "true", "yes", "on"):
        return True
    if value in ("", "0", "false", "no", "off"):
        return False
    raise SettingError(f"{name} is {value!r}: give 1 for yes, or 0 or nothing for no.")


# The site's data folder and secret key.


KEY_VARIABLE = "SLIPWAY_SECRET_KEY"


class DataFolderError(SettingError):
    """The folder or the key is unusable."""


def data_path(variables: Mapping[str, str], default: Path) -> Path:
    """Return the path of the site's data folder; ``~`` is the home of who runs the site."""
    typed = variables.get("SLIPWAY_DATA_DIR", "").strip()
    try:
        return Path(typed or default).expanduser().resolve()
    except (RuntimeError, ValueError) as error:
        raise DataFolderError(
            f"SLIPWAY_DATA_DIR is {typed!r}: {error}. Give the whole path of a folder."
        ) from None


def data_folder(variables: Mapping[str, str], default: Path) -> Path:
    """Return the site's data folder, created if missing.

    Raises:
        DataFolderError: the folder cannot be created.
    """
    folder = data_path(variables, default)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        remedy = "set SLIPWAY_DATA_DIR to another folder"
        raise DataFolderError(creation_error(folder, error, remedy)) from None
    return folder


def secret_key(variables: Mapping[str, str], folder: Path) -> str:
    """Return the site's secret from the environment, or from a 0600 file created on first use.

    The file is written atomically, so that it is never incomplete.

    Raises:
        DataFolderError: the file cannot be read or created, or it is empty.
    """
    if (given := variables.get(KEY_VARIABLE, "")).strip():
        return given
    path = folder / "secret_key"
    try:
        if not path.exists():
            write_secret(path, secrets.token_urlsafe(48))
        key = path.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        verb = "read" if path.exists() else "made"
        words = error.strerror if isinstance(error, OSError) else "the file is not UTF-8 text"
        raise DataFolderError(
            f"The site's key {path} cannot be {verb}: {words}. Correct its owner and mode (it is "
            f"for the user that runs the site), restore it from a backup, or set {KEY_VARIABLE}."
        ) from None
    if not key:
        raise DataFolderError(
            f"The site's key {path} is empty. Restore it from a backup. Without one, delete the "
            "file: a new key is made, everybody logs in again, and hosts enrol again."
        )
    return key


def write_secret(path: Path, text: str, *, replaces: bool = False) -> None:
    """Write a file atomically with mode 0600; without ``replaces``, an existing file stays.

    With concurrent first writers, one wins.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(handle)
        if replaces:
            temporary.replace(path)
        else:
            os.link(temporary, path)
    except FileExistsError:
        return
    finally:
        temporary.unlink(missing_ok=True)


# The names under which the site answers, and TLS, which its public URL implies.
#
# A loopback installation has no TLS settings: it has no certificate, and browsers would reject
# secure cookies.


YEAR_SECONDS = 31_536_000
# Paths used over plain loopback: health checks and calls of the local host agent.
PLAIN_PATHS = [r"^healthz$", r"^readyz$", r"^api/v1/(hosts|attempts)/"]


class PublicUrlError(SettingError):
    """SLIPWAY_PUBLIC_URL is not the URL of a site."""


def allowed_hosts(text: str) -> list[str]:
    """Return the names of SLIPWAY_ALLOWED_HOSTS as browsers send them.

    An entry may be a name, an address, ``.example.org`` for every name below it, ``*``, or the
    URL of the site under that name.

    Raises:
        SettingError: an entry is none of these.
    """
    return list(dict.fromkeys(_allowed_host(entry) for entry in entries(text)))


def _allowed_host(entry: str) -> str:
    if entry == "*":
        return entry
    try:
        host = _host_of_entry(entry)
    except AddressError as error:
        raise SettingError(
            f"SLIPWAY_ALLOWED_HOSTS has {entry!r}: {error}. Give names and addresses separated by "
            "commas, such as slipway.example.org,10.0.0.5."
        ) from None
    return f".{host}" if entry.startswith((".", "*.")) else host


def _host_of_entry(entry: str) -> str:
    if "://" in entry:
        host = web_address(entry).host
    else:
        bare = entry.removeprefix("*").removeprefix(".")
        # A port, as in 10.0.0.5:8000; several colons are an IPv6 address.
        name, _, port = bare.rpartition(":")
        has_port = port.isdecimal() and (name.endswith("]") or ":" not in name)
        host = host_name(name if has_port and name else bare)
    if "_" in host:
        raise AddressError("Django refuses a name with _ as no name of RFC 1034")
    return host


def public_url(text: str) -> WebAddress | None:
    """Return the site's public address; None without one.

    Raises:
        PublicUrlError: the text is not the https URL of a site's root.
    """
    if not text.strip():
        return None
    try:
        return web_address(text, ("https",))
    except AddressError as error:
        raise PublicUrlError(
            f"SLIPWAY_PUBLIC_URL is {text!r}: {error}. Give the https address of the site's first "
            "page, such as https://slipway.example.org, or unset the variable for a site on one "
            "machine."
        ) from None


def public_hosts(text: str) -> list[str]:
    """Return the host of a site's public URL as a list."""
    address = public_url(text)
    return [address.host] if address else []


def public_site(text: str) -> dict[str, Any]:
    """Return the Django settings of a public URL; {} without one.

    Raises:
        PublicUrlError: the text is not the https URL of a site's root.
    """
    address = public_url(text)
    if address is None:
        return {}
    return {
        "CSRF_TRUSTED_ORIGINS": [address.url],
        "SESSION_COOKIE_NAME": "__Host-session",
        "SESSION_COOKIE_SECURE": True,
        "SECURE_SSL_REDIRECT": True,
        "SECURE_SSL_HOST": address.url.removeprefix("https://"),
        "SECURE_REDIRECT_EXEMPT": PLAIN_PATHS,
        "SECURE_HSTS_SECONDS": YEAR_SECONDS,
        "SECURE_HSTS_INCLUDE_SUBDOMAINS": True,
        # W021: HSTS preloading is permanent for a whole domain, so it is the owner's choice.
        # W003: a subclass of the CSRF middleware is installed.
        "SILENCED_SYSTEM_CHECKS": ["security.W021", "security.W003"],
    }


# The proxies whose X-Forwarded-For and X-Forwarded-Proto are believed.


PROXIES_VARIABLE = "FORWARDED_ALLOW_IPS"
LOOPBACK = ("127.0.0.1", "::1")


def is_behind_proxy(variables: Mapping[str, str]) -> bool:
    """Return whether to trust a proxy's headers.

    Without a proxy, any program on this machine could send another address with every password
    attempt. A site with a public URL has a proxy, because it has no TLS itself.
    """
    names = ("SLIPWAY_PUBLIC_URL", PROXIES_VARIABLE)
    return any(variables.get(name, "").strip() for name in names)


def trusted_proxies(variables: Mapping[str, str]) -> list[str]:
    """Return the addresses and networks of the trusted proxies; this machine's is always one.

    Raises:
        SettingError: an entry is neither; the server would silently trust nobody by it.
    """
    if not is_behind_proxy(variables):
        return []
    text = variables.get(PROXIES_VARIABLE, "")
    if "*" in entries(text):
        return ["*"]
    try:
        given = [str(each).removesuffix(f"/{each.max_prefixlen}") for each in networks(text)]
    except AddressError as error:
        raise SettingError(
            f"{PROXIES_VARIABLE} is {text!r}: {error}. Give the addresses from which your proxies "
            "connect, separated by commas, such as 10.0.0.7,10.1.0.0/16; a name is not taken. "
            "This machine's own proxy is trusted without it."
        ) from None
    return list(dict.fromkeys([*LOOPBACK, *given]))


# The gateways to which hosts with endpoints connect.


GATEWAYS_VARIABLE = "SLIPWAY_GATEWAYS"
TUNNEL_PATH = "/tunnel/"


def gateways(variables: Mapping[str, str]) -> tuple[str, ...]:
    """Return the WebSocket URLs of the gateways; none: this site's own alone.

    Raises:
        SettingError: an entry is no such URL.
    """
    found = entries(variables.get(GATEWAYS_VARIABLE, ""))
    try:
        return tuple(dict.fromkeys(map(_gateway, found)))
    except ValueError as error:  # without the entry itself: somebody may have put a key into it
        raise SettingError(
            f"{GATEWAYS_VARIABLE} has an address that is none: {error}. Give the addresses at "
            "which hosts reach each gateway process, separated by commas, such as "
            "wss://gateway.example.org/tunnel/."
        ) from None


def _gateway(entry: str) -> str:
    parts = urlsplit(entry)
    if parts.scheme not in ("ws", "wss"):
        raise AddressError("it does not begin with ws:// or wss://")
    if parts.query or parts.fragment:
        raise AddressError("it has a query")
    root = web_address(f"http{parts.scheme.removeprefix('ws')}://{parts.netloc}").url
    return f"ws{root.removeprefix('http')}{parts.path if parts.path.strip('/') else TUNNEL_PATH}"


# The path of the administration.


def admin_path(variables: Mapping[str, str]) -> str:
    """Return the path of the administration, with a slash at its end.

    Raises:
        SettingError: it has characters that a URL does not keep as they are.
    """
    path = variables.get("SLIPWAY_ADMIN_PATH", "").strip().strip("/") or "admin"
    if not all(character.isascii() and (character.isalnum() or character in "-._~/")
               for character in path):  # fmt: skip
        raise SettingError(
            f"SLIPWAY_ADMIN_PATH is {path!r}: give letters, digits, - _ . ~ and / alone, such as "
            "staff-7f3a."
        )
    return f"{path}/"


def admin_networks(variables: Mapping[str, str]) -> tuple[Network, ...]:
    """Return the networks from which the administration is reachable; none: from everywhere.

    Raises:
        SettingError: an entry is neither an address nor a network.
    """
    text = variables.get("SLIPWAY_ADMIN_NETWORKS", "")
    try:
        return networks(text)
    except AddressError as error:
        raise SettingError(
            f"SLIPWAY_ADMIN_NETWORKS is {text!r}: {error}. Give addresses and networks separated "
            "by commas, such as 10.0.0.0/8,192.0.2.7, or unset the variable."
        ) from None


# Databases and brokers. A message never has the address itself: it may hold a password.


DATABASE_SCHEMES = ("postgresql", "postgres", "sqlite")


def database_url(variables: Mapping[str, str]) -> str:
    """Return the URL of the database; "" for SQLite files in the data folder.

    Raises:
        SettingError: it cannot be read, or names a database that Slipway does not support.
    """
    url = variables.get("DATABASE_URL", "").strip()
    if not url:
        return ""
    if not _is_database(url):
        raise SettingError(
            "DATABASE_URL cannot be read. Give it as postgresql://user:password@host:5432/name or "
            "sqlite:////folder/file, with / ? # @ and : of a password as %2F %3F %23 %40 and %3A."
        )
    return url


def _is_database(url: str) -> bool:
    scheme, separator, _ = url.partition("://")
    try:
        parts = urlsplit(url)
        is_known = bool(separator) and scheme in DATABASE_SCHEMES and parts.port != 0
    except ValueError:
        return False
    if scheme == "sqlite":  # memory is of one process alone
        return is_known and bool(parts.path.strip("/")) and ":memory:" not in url
    # What a password holds unescaped ends the host or the path.
    return is_known and not parts.fragment and "@" not in parts.path + parts.query


def redis_url(variables: Mapping[str, str], name: str) -> str:
    """Return the URL of a Redis; "" if the variable is not set.

    Raises:
        SettingError: it is no URL of a Redis, or one that hosts on other machines cannot use.
    """
    typed = variables.get(name, "").strip()
    if not typed:
        return ""
    try:
        url = checked(typed)
    except UnsafeAddressError as error:
        raise SettingError(f"{name} is not safe: {error}.") from None
    except RedisAddressError as error:
        raise SettingError(
            f"{name} cannot be read: {error}. Give it as redis://user:password@host:6379/0, or "
            "rediss:// for TLS."
        ) from None
    if name == "SLIPWAY_HOST_REDIS_URL" and url.startswith("unix"):
        raise SettingError(
            f"{name} is a socket of this machine, which no other reaches. Give rediss://host:6380/0."
        )
    return url


# Keys of job secrets, and the length of the demo.


SECRETS_VARIABLE = "SLIPWAY_SECRETS_KEYS"
FERNET_BYTES = 32
DEMO_SECONDS, LONGEST_DEMO_SECONDS = 120.0, 86_400.0


def secrets_keys(variables: Mapping[str, str]) -> list[str]:
    """Return the keys of job secrets, newest first; [] for those of the data folder.

    Raises:
        SettingError: one is no Fernet key; the message says which, and shows none.
    """
    found = entries(variables.get(SECRETS_VARIABLE, ""))
    for number, key in enumerate(found, 1):
        try:
            is_key = len(base64.urlsafe_b64decode(key)) == FERNET_BYTES
        except ValueError:
            is_key = False
        if not is_key:
            raise SettingError(
                f"{SECRETS_VARIABLE} has an invalid key, number {number} of {len(found)}. Create "
                "a key with `python -c 'from cryptography.fernet import Fernet; "
                "print(Fernet.generate_key().decode())'`."
            )
    return found


def demo_seconds(variables: Mapping[str, str]) -> float:
    """Return how long the demo trains, in seconds.

    Raises:
        SettingError: it is no number from 1 to a day.
    """
    text = variables.get("SLIPWAY_DEMO_SECONDS", "").strip()
    try:
        seconds = float(text) if text else DEMO_SECONDS
    except ValueError:
        seconds = 0.0
    if not 1 <= seconds <= LONGEST_DEMO_SECONDS:
        raise SettingError(
            f"SLIPWAY_DEMO_SECONDS is {text!r}: give seconds from 1 to {LONGEST_DEMO_SECONDS:.0f}."
        )
    return seconds


def speed_of_time(variables: Mapping[str, str]) -> float:
    """Return the factor of all periods and timeouts, which fault tests shorten.

    Raises:
        SettingError: it is no number above 0 and at most 1.
    """
    try:
        return scale_of(variables.get(SCALE_VARIABLE, "").strip() or "1")
    except ValueError as error:
        raise SettingError(f"{error}") from None


# Files that a variable names.


def certificates(variables: Mapping[str, str], name: str) -> str | None:
    """Return the path of the certificates that a variable names; None if it is not set.

    Raises:
        SettingError: there is no such file, this user may not read it, or it holds none.
    """
    path = named_file(variables, name)
    try:
        if path:
            ssl.create_default_context(cafile=path)
    except (ssl.SSLError, ValueError):
        raise SettingError(
            f"{name} is {path!r}: the file holds no certificate in PEM form. Give the certificate "
            "of the authority, which begins with -----BEGIN CERTIFICATE-----."
        ) from None
    return path


def named_file(variables: Mapping[str, str], name: str) -> str | None:
    """Return the path of the file that a variable names; None if it is not set.

    Raises:
        SettingError: there is no such file, or this user may not read it.
    """
    typed = variables.get(name, "").strip()
    if not typed:
        return None
    path = Path(typed).expanduser()
    if not (path.is_file() and os.access(path, os.R_OK)):
        raise SettingError(
            f"{name} is {typed!r}: there is no such file that this user may read. Correct the "
            "path or the file's mode, or unset the variable."
        )
    return str(path)


# E-mail settings from one URL; without it the site sends no e-mail.


TIMEOUT_SECONDS = 20
# Scheme -> (default port, STARTTLS, implicit TLS).
SCHEMES = {
    "smtp": (25, False, False),
    "smtp+tls": (587, True, False),
    "smtps": (465, False, True),
}


EMAIL_UNREADABLE = (
    "SLIPWAY_EMAIL_URL cannot be read: its server or port is none. Write / ? # @ and : of a "
    "password as %2F %3F %23 %40 and %3A."
)


class EmailUrlError(SettingError):
    """SLIPWAY_EMAIL_URL is not a valid mail server URL."""


def email_of(variables: Mapping[str, str]) -> dict[str, Any]:
    """Return the Django settings of the mail server that the environment names; {} without one.

    Raises:
        EmailUrlError: the URL or the sender is invalid.
    """
    return email_settings(
        *(variables.get(f"SLIPWAY_EMAIL_{part}", "") for part in ("URL", "FROM"))
    )


def email_settings(url: str, sender: str) -> dict[str, Any]:
    """Return the Django settings of a mail server; {} without one.

    Raises:
        EmailUrlError: the URL or the sender is invalid.
    """
    url, sender = url.strip(), sender.strip()
    if not url:
        return {}
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:  # its text may hold a part of the password
        raise EmailUrlError(EMAIL_UNREADABLE) from None
    if "@" in parts.path + parts.query + parts.fragment:
        raise EmailUrlError(EMAIL_UNREADABLE)
    if parts.scheme not in SCHEMES or not parts.hostname:
        raise EmailUrlError(
            f"SLIPWAY_EMAIL_URL begins with {parts.scheme!r} and names the server "
            f"{parts.hostname!r}: give it as smtp+tls://user:password@mail.example.org:587, "
            "with smtps:// for TLS from the start and smtp:// for none"
        )
    if "@" not in sender:
        raise EmailUrlError(
            f"SLIPWAY_EMAIL_FROM is {sender!r}: name the address from which e-mail is sent, "
            "such as slipway@example.org"
        )
    default_port, starts_tls, is_tls = SCHEMES[parts.scheme]
    return {
        "EMAIL_HOST": parts.hostname,
        "EMAIL_PORT": port or default_port,
        "EMAIL_HOST_USER": unquote(parts.username or ""),
        "EMAIL_HOST_PASSWORD": unquote(parts.password or ""),
        "EMAIL_USE_TLS": starts_tls,
        "EMAIL_USE_SSL": is_tls,
        "EMAIL_TIMEOUT": TIMEOUT_SECONDS,
        "DEFAULT_FROM_EMAIL": sender,
    }


# The collector that receives a copy of the log.


SYSLOG_VARIABLE = "SLIPWAY_SYSLOG"
SYSLOG_PORTS = {"tls": 6514, "tcp": 601, "udp": 514}  # IANA's


class SyslogAddress(NamedTuple):
    """Where a collector listens: host and port, or the path of a Unix socket."""

    scheme: str
    host: str
    port: int
    path: str

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{self.path or f'{host}:{self.port}'}"


def syslog_address(variables: Mapping[str, str]) -> SyslogAddress | None:
    """Return the address of the log collector, or None if no variable names one.

    Raises:
        SettingError: it is no address of a collector.
    """
    text = variables.get(SYSLOG_VARIABLE, "").strip()
    if not text:
        return None
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        parts, port = urlsplit(""), None
    is_socket = parts.scheme == "unix" and not parts.netloc and len(parts.path) > 1
    is_server = parts.scheme in SYSLOG_PORTS and parts.hostname and parts.path in ("", "/")
    if not (is_socket or is_server) or "@" in text or parts.query or parts.fragment:
        shown = "an address with more than a host and a port" if "@" in text else repr(text)
        raise SettingError(
            f"{SYSLOG_VARIABLE} is {shown}: give tls://logs.example.org:6514, tcp:// or udp:// "
            "with a host and a port, or unix:///run/collector.sock."
        )
    if is_socket:
        return SyslogAddress(parts.scheme, "", 0, unquote(parts.path))
    port = port or SYSLOG_PORTS[parts.scheme]
    return SyslogAddress(parts.scheme, parts.hostname or "", port, "")


# The list of breached passwords.


BREACHED_VARIABLE = "SLIPWAY_BREACHED_PASSWORDS"


def breached_passwords(variables: Mapping[str, str]) -> str:
    """Return the path of a list of breached passwords, or the URL of a range API; "" for none.

    Raises:
        SettingError: it is neither; the message says what is wrong with the file.
    """
    text = variables.get(BREACHED_VARIABLE, "").strip()
    if not text:
        return ""
    if "://" in text:
        address = urlsplit(text)
        if address.scheme != "https" or not address.hostname or "@" in text or address.query:
            raise SettingError(
                f"{BREACHED_VARIABLE} is a URL that is not taken: give the path of a file, or "
                "https://api.pwnedpasswords.com."
            )
        return text
    try:
        path = Path(text).expanduser().resolve()
        has_hashes(path)
    except (RuntimeError, ValueError) as error:
        raise SettingError(
            f"{BREACHED_VARIABLE} is {text!r}, {error}. Give a file of SHA-1 hashes in order, as "
            "Have I Been Pwned publishes them, or of passwords, one on each line, or "
            "https://api.pwnedpasswords.com."
        ) from None
    return str(path)


# Secrets in files: those of containers, and credentials of systemd.


FILE_SUFFIX = "_FILE"
LONGEST_SECRET_BYTES = 64 * 1024
IN_FILES = (
    "DATABASE_URL", "REDIS_URL", "SLIPWAY_HOST_REDIS_URL", KEY_VARIABLE, SECRETS_VARIABLE,
    "SLIPWAY_EMAIL_URL", HUB_TOKEN, "MODELSCOPE_API_TOKEN",
)  # fmt: skip


def read_secret_files(variables: MutableMapping[str, str]) -> None:
    """Replace each ``NAME_FILE`` by ``NAME`` with the text of that file, for every secret.

    Raises:
        SettingError: ``NAME`` is set as well, or the file cannot be used; shows nothing of it.
    """
    for name in IN_FILES:
        by_file = f"{name}{FILE_SUFFIX}"
        path = named_file(variables, by_file)
        if path is None:
            continue
        if variables.get(name, "").strip():
            raise SettingError(f"{by_file} is {path!r}, and {name} is set as well: unset one.")
        try:
            with Path(path).open("rb") as file:
                text = file.read(LONGEST_SECRET_BYTES + 1).decode("utf-8").strip()
        except (OSError, UnicodeDecodeError):
            text = ""
        if not text or "\0" in text or len(text.encode()) > LONGEST_SECRET_BYTES:
            raise SettingError(
                f"{by_file} is {path!r}, whose content is no value: give a file with the text of "
                f"{name}, in UTF-8 and of 1 to {LONGEST_SECRET_BYTES:,} bytes."
            )
        variables[name] = text
        del variables[by_file]


# The Hub, which the site asks for models by name.


def hub(variables: Mapping[str, str]) -> HubSettings:
    """Return where the Hub is, and with which token it is asked where a team has none.

    Raises:
        SettingError: an address or a token that cannot work.
    """
    try:
        return from_environment(variables)
    except HubSettingsError as error:
        raise SettingError(f"{error}.") from None


# Every variable of the site, and what reads it: `manage.py up` calls all before anything starts.


READERS: Mapping[str, Callable[[Mapping[str, str]], object]] = {
    "SLIPWAY_DATA_DIR": lambda variables: data_path(variables, Path("var")),
    "SLIPWAY_PUBLIC_URL": lambda variables: public_site(variables.get("SLIPWAY_PUBLIC_URL", "")),
    "SLIPWAY_ALLOWED_HOSTS": (
        lambda variables: allowed_hosts(variables.get("SLIPWAY_ALLOWED_HOSTS", ""))
    ),
    PROXIES_VARIABLE: trusted_proxies,
    "SLIPWAY_ADMIN_PATH": admin_path,
    "SLIPWAY_ADMIN_NETWORKS": admin_networks,
    GATEWAYS_VARIABLE: gateways,
    KEY_VARIABLE: lambda variables: variables.get(KEY_VARIABLE),
    SECRETS_VARIABLE: secrets_keys,
    "DATABASE_URL": database_url,
    "REDIS_URL": lambda variables: redis_url(variables, "REDIS_URL"),
    "SLIPWAY_HOST_REDIS_URL": lambda variables: redis_url(variables, "SLIPWAY_HOST_REDIS_URL"),
    "SLIPWAY_REDIS_CA": lambda variables: certificates(variables, "SLIPWAY_REDIS_CA"),
    "SLIPWAY_EMAIL_URL": email_of,
    "SLIPWAY_EMAIL_FROM": email_of,
    SYSLOG_VARIABLE: syslog_address,
    BREACHED_VARIABLE: breached_passwords,
    "HF_ENDPOINT": hub,
    HUB_TOKEN: hub,
    "SLIPWAY_DRILLS": lambda variables: flag(variables, "SLIPWAY_DRILLS"),
    "SLIPWAY_DEBUG": lambda variables: flag(variables, "SLIPWAY_DEBUG"),
    "SLIPWAY_DEMO_SECONDS": demo_seconds,
    SCALE_VARIABLE: speed_of_time,
    "TZ": time_zone,
}


def check(variables: Mapping[str, str]) -> None:
    """Read every variable.

    Raises:
        SettingError: one cannot be used; the message names it.
    """
    for read in READERS.values():
        read(variables)
