"""What a server says of itself, over HTTP: its models, its engine and release, its figures.

A look is a handful of GETs to one address: a name is resolved once, its addresses are checked
before anything is sent, and the connection goes to a checked one. No redirect is followed, so
that a key goes nowhere else; an answer is read as far as its limit, each path within its time.
"""

import asyncio
import json
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import cache
from http import HTTPStatus
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from typing import Any

import httpx

from webapp.servers.engines import BY_NAME, ENGINES, Engine, Reading, read_metrics

NAME_SECONDS = 3.0  # to find its addresses
CONNECT_SECONDS = 2.5  # to one of them
READ_SECONDS = 6.0  # of the models and of the figures, which are asked side by side
RELEASE_SECONDS = 2.0  # of what only adds to them
MOST_METRICS_BYTES = 2 * 1024**2
MOST_JSON_BYTES = 1024**2
MOST_MODELS = 200
MOST_NAME = 300  # characters of a model's name
MOST_RELEASE = 80
MOST_ADDRESSES = 4  # of a name, that are tried
MOST_SLOTS = 4096
MODELS, METRICS = "/v1/models", "/metrics"
IDENTITY = "identity"  # a compressed answer could be of any size
Clock = Callable[[], float]
Resolver = Callable[[str, int], Awaitable[list[str]]]
Address = IPv4Address | IPv6Address

# Beside the link-local ones: where clouds answer a machine with its credentials or settings.
METADATA = frozenset(
    map(ip_address, ("fd00:ec2::254", "100.100.100.200", "168.63.129.16"))  # AWS, Alibaba, Azure
)
NAT64 = IPv6Network("64:ff9b::/96")  # RFC 6052
THIS_NETWORK = IPv4Network("0.0.0.0/8")  # RFC 6890
IPV4_COMPATIBLE = IPv6Network("::/96")  # RFC 4291, deprecated


class UnreadableError(Exception):
    """A server, or one of its answers, cannot be read; the message is a sentence for people.

    ``status`` is that of the answer, None without one.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Served:
    """A model that a server lists: its name for clients, what it is, its longest request."""

    name: str
    root: str = ""  # the repository or folder, if the server says it
    max_model_len: int | None = None
    slots: int | None = None  # that each have ``max_model_len``, of llama.cpp

    def as_json(self) -> dict[str, Any]:
        """Return it as it is stored."""
        length, slots = self.max_model_len, self.slots
        return {"name": self.name, "root": self.root, "max_model_len": length, "slots": slots}


@dataclass(frozen=True)
class Target:
    """What is looked at: the address, its key ("" without one), and the engine of the last look.

    ``allows_loopback`` is for a site of one machine, whose servers are there too.
    """

    url: str
    key: str = field(default="", repr=False)
    engine: str = ""
    team: str = ""
    allows_loopback: bool = False


@dataclass(frozen=True)
class ProbeResult:
    """What a server answered. ``note`` says what is missing of a server that does answer.

    ``read_at`` is when its figures had arrived, on the clock of the look.
    """

    models: tuple[Served, ...] = ()
    engine: str = ""
    release: str = ""
    reading: Reading | None = None
    note: str = ""
    read_at: float = 0.0


@cache
def _threads() -> ThreadPoolExecutor:
    """Return the threads that ask for names: a name server that is silent holds no look."""
    return ThreadPoolExecutor(32, "names-of-servers")


async def resolve(host: str, port: int) -> list[str]:
    """Return the addresses of a host's name, or the one that it is.

    Raises:
        OSError: the name has none.
    """
    loop = asyncio.get_running_loop()
    found = await loop.run_in_executor(
        _threads(), lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    )
    return list(dict.fromkeys(str(each[4][0]) for each in found))


def check_address(text: str, *, allows_loopback: bool) -> None:
    """Check that an address is one that a server of models may have.

    Raises:
        UnreadableError: it is link-local, a cloud's metadata, multicast, unspecified, or loopback
            where that is not allowed; also inside another one, as IPv6 maps IPv4.
    """
    for address in _all_of(ip_address(text.partition("%")[0])):
        if address.is_link_local or address in METADATA:
            raise UnreadableError(
                f"Its address {text} is link-local or that of a cloud's metadata, where no server "
                "of models is."
            )
        if address.is_multicast or address.is_unspecified or _is_of_no_machine(address):
            raise UnreadableError(f"Its address {text} is none of a single machine.")
        if address.is_loopback and not allows_loopback:
            raise UnreadableError(
                f"Its address {text} is the site's own machine, which a site with users on other "
                "machines does not read: give the machine's address in its network."
            )


def _is_of_no_machine(address: Address) -> bool:
    if isinstance(address, IPv4Address):
        return address.is_reserved or address in THIS_NETWORK
    return address in IPV4_COMPATIBLE and not address.is_loopback


def _all_of(address: Address) -> list[Address]:
    """Return an address and that of IPv4 which stands in it (mapped, 6to4 or NAT64)."""
    if isinstance(address, IPv4Address):
        return [address]
    inner = address.ipv4_mapped or address.sixtofour
    if address in NAT64:
        inner = IPv4Address(int(address) & 0xFFFFFFFF)
    if inner is None:
        return [address]
    return [inner] if address.ipv4_mapped else [address, inner]


async def probe(
    target: Target,
    transport: httpx.AsyncBaseTransport | None = None,
    *,
    clock: Clock = time.monotonic,
    names: Resolver = resolve,
) -> ProbeResult:
    """Ask a server once what it is and does.

    Raises:
        UnreadableError: it does not answer, or neither its models nor its figures can be read.
    """
    headers = _headers(target.key)
    addresses = await _addresses(target, names)
    async with httpx.AsyncClient(
        follow_redirects=False,
        trust_env=False,
        timeout=httpx.Timeout(READ_SECONDS, connect=CONNECT_SECONDS),
        headers=headers,
        transport=transport,
    ) as client:
        return await _Probe(client, target, addresses, clock).run()


async def _addresses(target: Target, names: Resolver) -> list[str]:
    """Return the checked addresses of a server.

    Raises:
        UnreadableError: its name has none, or one where no server may be.
    """
    try:
        url = httpx.URL(target.url)
        async with asyncio.timeout(NAME_SECONDS):
            found = await names(url.raw_host.decode(), url.port or 0)
    except (OSError, UnicodeError, httpx.InvalidURL) as error:  # a TimeoutError is an OSError
        raise UnreadableError(f"No address is found of {_shown(target.url, 120)}.") from error
    for each in found:
        check_address(each, allows_loopback=target.allows_loopback)
    return found[:MOST_ADDRESSES]


def _shown(text: str, most: int) -> str:
    """Return a foreign text for pages and terminals: what does not show is one sign each."""
    return "".join(
        each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in text[:most]
    )


def _headers(key: str) -> dict[str, str]:
    headers = {"Accept-Encoding": IDENTITY, "User-Agent": "slipway"}
    return headers | {"Authorization": f"Bearer {key}"} if key else headers


NO_CONNECTION = (
    "Check that the server listens on this address, and that Slipway's machine reaches it."
)


def _words(path: str, error: Exception) -> str:
    if isinstance(error, httpx.ConnectError):
        cause = _shown(str(error), 120).rstrip(".") or "refused"
        return f"No connection: {cause}. {NO_CONNECTION}"
    return f"{path}: the answer broke off ({type(error).__name__})."


class _Probe:
    def __init__(
        self, client: httpx.AsyncClient, target: Target, addresses: list[str], clock: Clock
    ) -> None:
        self._client, self._target, self._clock = client, target, clock
        self._addresses = addresses
        self._read_at = 0.0

    async def run(self) -> ProbeResult:
        (models, why_no_models), (engine, reading, why_no_figures) = await asyncio.gather(
            self._models(), self._figures()
        )
        if why_no_models and reading is None:
            raise UnreadableError(why_no_models)
        known = engine or BY_NAME.get(self._owner)
        known, release, context, slots = await self._release(known)
        if context is not None:
            models = tuple(
                replace(each, max_model_len=context, slots=slots or None) for each in models
            )
        if self._has_no_metrics and known is not None and known.switch:
            why_no_figures = f"{why_no_figures} Start {known.title} with {known.switch}."
        note = why_no_figures if reading is None else why_no_models
        name = known.name if known else ""
        return ProbeResult(models, name, release, reading, note, self._read_at or self._clock())

    _owner = ""  # the engine that the list of models names
    _has_no_metrics = False  # it says that there is no such path

    async def _get(self, path: str, most_bytes: int, seconds: float | None = None) -> bytes:
        """Return the body of an answer with status 200, within its time.

        Raises:
            UnreadableError: no answer, another status, or more bytes than there may be.
        """
        seconds = READ_SECONDS if seconds is None else seconds
        try:
            async with asyncio.timeout(seconds):
                return await self._read(path, most_bytes)
        except httpx.ConnectTimeout as error:
            raise UnreadableError(f"No connection within {CONNECT_SECONDS:g} s.") from error
        except (TimeoutError, httpx.TimeoutException) as error:
            raise UnreadableError(f"{path} did not answer within {seconds:g} s.") from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise UnreadableError(_words(path, error)) from error

    async def _read(self, path: str, most_bytes: int) -> bytes:
        async with aclosing(await self._sent(path)) as answer:
            if answer.status_code != HTTPStatus.OK:
                raise UnreadableError(_refusal(path, answer), answer.status_code)
            if answer.headers.get("Content-Encoding", IDENTITY) != IDENTITY:
                raise UnreadableError(f"{path} answers compressed, which was not asked for.")
            body = bytearray()
            async for part in answer.aiter_raw():
                body += part
                if len(body) > most_bytes:
                    raise UnreadableError(
                        f"{path} answers with more than {most_bytes // 1024:,} KiB."
                    )
            return bytes(body)

    async def _sent(self, path: str) -> httpx.Response:
        """Send a GET to the first checked address that takes a connection."""
        url = httpx.URL(f"{self._target.url}{path}")
        name = url.raw_host.decode()
        for number, address in enumerate(self._addresses, start=1):
            request = self._client.build_request(
                "GET",
                url.copy_with(host=address),
                headers={"Host": url.netloc.decode()},
                extensions={"sni_hostname": name},  # whose certificate is checked
            )
            try:
                return await self._client.send(request, stream=True)
            except (httpx.ConnectError, httpx.ConnectTimeout):
                if number == len(self._addresses):
                    raise
        raise httpx.ConnectError("the name has no address")

    async def _json(self, path: str, seconds: float | None = None) -> Mapping[str, Any]:
        body = await self._get(path, MOST_JSON_BYTES, seconds)
        try:
            document = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise UnreadableError(f"{path} answers with something else than JSON.") from error
        if not isinstance(document, dict):
            raise UnreadableError(f"{path} answers with JSON that is no object.")
        return document

    async def _models(self) -> tuple[tuple[Served, ...], str]:
        try:
            document = await self._json(MODELS)
        except UnreadableError as error:
            return (), str(error)
        rows = document.get("data")
        if not isinstance(rows, list):
            return (), f"{MODELS} answers without a list of models."
        rows = [each for each in rows if isinstance(each, dict) and each.get("id")]
        owners = {str(each.get("owned_by", "")) for each in rows}
        self._owner = next(
            (each.name for each in ENGINES if each.owned_by and each.owned_by in owners), ""
        )
        return tuple(_served(each) for each in rows[:MOST_MODELS]), ""

    async def _figures(self) -> tuple[Engine | None, Reading | None, str]:
        try:
            body = await self._get(METRICS, MOST_METRICS_BYTES)
        except UnreadableError as error:
            self._has_no_metrics = error.status == HTTPStatus.NOT_FOUND
            return None, None, f"No figures: {error}"
        self._read_at = self._clock()
        try:
            # In a thread: parsing keeps no other look from its answers.
            engine, reading = await asyncio.to_thread(lambda: read_metrics(body.decode()))
        except (ValueError, LookupError) as error:  # UnicodeDecodeError is one
            return (
                None,
                None,
                f"No figures: {METRICS} is not read as Prometheus text: {_shown(str(error), 99)}.",
            )
        if engine is None:
            return None, None, f"No figures: {METRICS} has none of an engine that is known here."
        return engine, reading, ""

    async def _release(
        self, known: Engine | None
    ) -> tuple[Engine | None, str, int | None, int | None]:
        """Return the engine, its release, the context of its requests and the number of slots.

        An engine that neither the figures nor the list of models name is the one whose own address
        says so; that of the last look is asked first, and has to be confirmed like every other.
        """
        asked = [known] if known else _candidates(self._target.engine)
        try:
            async with asyncio.timeout(RELEASE_SECONDS):
                for engine in asked:
                    if not engine.release_path:
                        continue
                    try:
                        facts = await self._json(engine.release_path, RELEASE_SECONDS)
                    except UnreadableError:
                        continue
                    release = facts.get(engine.release_field)
                    text = _shown(release, MOST_RELEASE) if isinstance(release, str) else ""
                    is_told = engine.told_by in facts if engine.told_by else bool(text)
                    if known is None and not is_told:
                        continue
                    slots = _whole(facts.get(engine.slots_field), MOST_SLOTS)
                    return engine, text, max_model_len_of(engine, facts), slots
        except TimeoutError:
            pass
        return known, "", None, None


def _candidates(last: str) -> list[Engine]:
    first = [BY_NAME[last]] if last in BY_NAME else []
    return first + [each for each in ENGINES if each.told_by and each.name != last]


def _whole(value: object, most: int = 2**31 - 1) -> int | None:
    """Return a number of tokens or slots, None if it is none; ``True`` is an int of Python."""
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return value if is_number and 0 < value <= most else None  # type: ignore[operator,return-value]


def _served(row: Mapping[str, Any]) -> Served:
    root = row.get("root")
    return Served(
        _shown(str(row["id"]), MOST_NAME),
        _shown(root, MOST_NAME) if isinstance(root, str) else "",
        _whole(row.get("max_model_len")),
    )


def max_model_len_of(engine: Engine, facts: Mapping[str, Any]) -> int | None:
    """Return the longest request in tokens where only the engine's own address says it."""
    found: object = facts if engine.context_field else None
    for name in engine.context_field:
        found = found.get(name) if isinstance(found, dict) else None
    return _whole(found)


def _refusal(path: str, answer: httpx.Response) -> str:
    status = answer.status_code
    if status in {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN}:
        return f"{path} refuses the key (status {status}): give its key under Change."
    if answer.is_redirect:
        place = _shown(answer.headers.get("Location", ""), 120)
        return f"{path} redirects to {place}, which is not followed: give that address instead."
    return f"{path} answers with status {status}."
