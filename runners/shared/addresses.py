"""Addresses as people type them, this machine's own, and the proxy of a request.

Every address, list of names and proxy of the environment is read here. ``manage.py up`` imports
this module before the packages are installed: psutil and httpx are imported where they are used.
"""

import fnmatch
import importlib
import importlib.util
import ipaddress
import re
import socket
import unicodedata
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple
from urllib.parse import urlsplit

IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network
PORTS = {"http": 80, "https": 443}
ANY_ADDRESS = ("0.0.0.0", "::", "")  # noqa: S104 -- compared, not bound
_NAME = re.compile(r"[a-z0-9_]([a-z0-9_.-]{0,251}[a-z0-9_])?")


class AddressError(ValueError):
    """A text is not an address; the message says why."""


@dataclass(frozen=True)
class WebAddress:
    """The root of a web site; ``host`` is written as in a Host header."""

    scheme: str
    host: str
    port: int | None  # None: the scheme's own

    @property
    def url(self) -> str:
        """The address as browsers send it, without a slash at its end."""
        return f"{self.scheme}://{self.host}{'' if self.port is None else f':{self.port}'}"


def web_address(text: str, schemes: tuple[str, ...] = ("http", "https")) -> WebAddress:
    """Return the address of a site's first page.

    Blanks around it, capitals and the scheme's own port make no difference.

    Raises:
        AddressError: it has another scheme, no host, a user, a path, or a port that is none.
    """
    try:
        parts = urlsplit(text.strip())
        port = parts.port
    except ValueError as error:
        raise AddressError(f"{error}") from None
    if parts.scheme not in schemes or not parts.hostname:
        raise AddressError(f"it does not begin with {' or '.join(schemes)}:// and a name")
    if parts.username is not None or parts.path.strip("/") or parts.query or parts.fragment:
        raise AddressError("it has a user, a path or a query besides the name and the port")
    if port == 0:
        raise AddressError("a port is 1 to 65535")
    return WebAddress(
        parts.scheme, host_name(parts.hostname), None if port == PORTS[parts.scheme] else port
    )


def host_name(text: str) -> str:
    """Return a host as browsers send it: small letters, ``xn--`` names, IPv6 in brackets.

    Raises:
        AddressError: it is neither a name nor an address.
    """
    name = text.strip().lower().removesuffix(".")
    bare = name[1:-1] if name[:1] == "[" and name[-1:] == "]" else name
    if ":" in bare or bare != name:
        try:
            return f"[{ipaddress.IPv6Address(bare).compressed}]"
        except ValueError:
            raise AddressError(f"{text.strip()!r} is not an IPv6 address") from None
    name = _in_ascii(name)
    if not _NAME.fullmatch(name) or ".." in name:
        raise AddressError(f"{text.strip()!r} is neither a host name nor an address")
    return name


def _in_ascii(name: str) -> str:
    """Return an international name as ``xn--``, by the rules of browsers where httpx is there."""
    if name.isascii():
        return name
    composed = unicodedata.normalize("NFC", name)
    words = f"{name!r} is not an international name"
    if importlib.util.find_spec("httpx") is None:
        try:
            return composed.encode("idna").decode()
        except UnicodeError as error:
            raise AddressError(f"{words}: {error}") from None
    httpx = importlib.import_module("httpx")
    try:
        return str(httpx.URL(f"https://{composed}").raw_host.decode())
    except httpx.InvalidURL as error:
        raise AddressError(f"{words}: {error}") from None


def in_url(address: str) -> str:
    """Return an address as it stands in a URL: IPv6 in brackets."""
    return f"[{address}]" if ":" in address else address


def networks(text: str) -> tuple[Network, ...]:
    """Return the addresses and networks of a list with commas or blanks.

    Raises:
        AddressError: an entry is neither; the message names it.
    """
    found: list[Network] = []
    for entry in entries(text):
        try:
            found.append(ipaddress.ip_network(entry.replace("[", "").replace("]", "")))
        except ValueError as error:
            raise AddressError(f"{entry!r} is no address and no network: {error}") from None
    return tuple(found)


def entries(text: str) -> list[str]:
    """Return the entries of a list with commas or blanks between them."""
    return [entry for entry in re.split(r"[,\s]+", text) if entry]


# ---------------------------------------------------------------------------
# This machine's own addresses, read from its interfaces: its name stands for a loopback address
# in /etc/hosts of Debian and of most images.
# ---------------------------------------------------------------------------


def own_addresses(chosen: str | None = None) -> tuple[str, ...]:
    """Return this machine's addresses for other machines, the chosen one first.

    IPv4 comes before IPv6. Interfaces that are down, loopback and link-local addresses are left
    out.
    """
    import psutil

    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    found = [
        ip
        for interface, ip in _on_interfaces()
        if interface in up and not (ip.is_loopback or ip.is_link_local)
    ]
    by_version = [str(ip) for ip in sorted(dict.fromkeys(found), key=lambda ip: ip.version)]
    return tuple(dict.fromkeys([*([chosen] if chosen else ()), *by_version]))


def _on_interfaces() -> Iterator[tuple[str, IpAddress]]:
    """Yield each address of each interface, whether the interface is up or down."""
    import psutil

    for interface, addresses in psutil.net_if_addrs().items():
        for each in addresses:
            if each.family in (socket.AF_INET, socket.AF_INET6):
                yield interface, ipaddress.ip_address(each.address.partition("%")[0])


def is_loopback(host: str) -> bool:
    """Return whether a name or address stands for the machine on which it is used, by its form."""
    name = host.strip("[]").lower().removesuffix(".")
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost" or name.endswith(".localhost")


def is_this_machine(host: str) -> bool:
    """Return whether a URL's host is this machine: loopback, an interface, or their name."""
    if is_loopback(host):
        return True
    found = _addresses_of(host.strip("[]").lower().removesuffix(".").partition("%")[0])
    return bool(found) and (
        all(ip.is_loopback or ip.is_unspecified for ip in found)
        or found <= {ip for _, ip in _on_interfaces()}
    )


def _addresses_of(name: str) -> set[IpAddress]:
    """Return the addresses that a name stands for; none if it is unknown here."""
    try:
        entries = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return set()
    found = {ipaddress.ip_address(str(entry[4][0]).partition("%")[0]) for entry in entries}
    return {getattr(ip, "ipv4_mapped", None) or ip for ip in found}


# ---------------------------------------------------------------------------
# The proxy of a request: HTTP_PROXY, HTTPS_PROXY, ALL_PROXY and NO_PROXY.
#
# httpx reads them too, but fails on ``[::1]`` and on networks of IPv6, and takes a network for the
# name of a host. An entry of NO_PROXY that nobody can read is left out, as other programs do.
# ---------------------------------------------------------------------------


class Proxy(NamedTuple):
    """A proxy, and the variable that names it."""

    variable: str
    url: str

    def __str__(self) -> str:
        """Return both without the proxy's password."""
        scheme, _, rest = self.url.partition("://")
        return f"the proxy {scheme}://{rest.rpartition('@')[2]} of {self.variable}"


def proxy_of(url: str, variables: Mapping[str, str]) -> Proxy | None:
    """Return the proxy of requests to a URL; none for this machine and for names of NO_PROXY."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    port = parts.port or PORTS.get(parts.scheme)
    _, exempt = _variable(variables, "no_proxy")
    for name in (f"{parts.scheme}_proxy", "all_proxy"):
        variable, value = _variable(variables, name)
        if value:
            if any(_covers(each, host, port) for each in entries(exempt)) or is_this_machine(host):
                return None
            return Proxy(variable, value if "://" in value else f"http://{value}")
    return None


def proxy_lines(variables: Mapping[str, str]) -> list[str]:
    """Return a line for each proxy variable that is set, and for what cannot be read of it."""
    lines = []
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        variable, value = _variable(variables, name)
        if value:
            proxy = str(Proxy(variable, value if "://" in value else f"http://{value}"))
            lines.append(f"{proxy}; addresses of this machine are asked without it")
    variable, exempt = _variable(variables, "no_proxy")
    unread = [entry for entry in entries(exempt) if _entry(entry) is None]
    if lines and unread:
        lines.append(
            f"{variable} has {', '.join(map(repr, unread))}, which is neither a name, an address "
            "nor a network: it is not used. Write it as [::1], fd00::/8, 10.0.0.0/8 or "
            ".example.org"
        )
    return lines


def _variable(variables: Mapping[str, str], name: str) -> tuple[str, str]:
    """Return which form of a variable is set, and its value; the form in small letters counts."""
    chosen = name if name in variables else name.upper()
    return chosen, variables.get(chosen, "").strip()


def _covers(entry: str, host: str, port: int | None) -> bool:
    """Return whether an entry of NO_PROXY stands for a host and port."""
    if (read := _entry(entry)) is None:
        return False
    place, wanted_port = read
    if wanted_port not in (None, port):
        return False
    if not isinstance(place, str):
        with suppress(ValueError):
            return ipaddress.ip_address(host) in place
        return False
    if "*" in place:
        return fnmatch.fnmatchcase(host, place)
    return host == place or host.endswith(f".{place}")


def _entry(text: str) -> tuple[Network | str, int | None] | None:
    """Return the network or name, and the port, of an entry of NO_PROXY; None if it has none."""
    bare = re.sub(r"^[a-z]+://", "", text.lower()).rstrip("/")
    place, port = bare, None
    if match := re.fullmatch(r"(\[.+\]|[^:]+):(\d{1,5})", bare):
        place, port = match[1], int(match[2])
    if ("[" in place) != ("]" in place):
        return None
    with suppress(ValueError):
        return ipaddress.ip_network(place.replace("[", "").replace("]", ""), strict=False), port
    name = place.removeprefix("*.").lstrip(".") if place != "*" else "*"
    if "*" in name:
        return (name, port) if re.fullmatch(r"[a-z0-9_.*-]+", name) else None
    with suppress(AddressError):
        return host_name(name), port
    return None
