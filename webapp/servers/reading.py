"""What a server says of itself, over HTTP: its models, its engine and release, its figures.

A look is a handful of GETs to one origin: no redirect is followed, so that a key goes nowhere
else; an answer is read as far as its limit, and all of a look ends after ``LOOK_SECONDS``.
"""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from ipaddress import ip_address
from typing import Any

import httpx

from webapp.servers.engines import BY_NAME, ENGINES, Engine, Reading, read_metrics

LOOK_SECONDS = 8.0
MOST_METRICS_BYTES = 2 * 1024**2
MOST_JSON_BYTES = 1024**2
MOST_MODELS = 200
MOST_NAME = 300  # characters of a model's name
MOST_RELEASE = 80
MODELS, METRICS = "/v1/models", "/metrics"
IDENTITY = "identity"  # a compressed answer could be of any size


class UnreadableError(Exception):
    """A server, or one of its answers, cannot be read; the message is a sentence for people."""


@dataclass(frozen=True)
class Served:
    """A model that a server lists: its name for clients, what it is, its longest request."""

    name: str
    root: str = ""  # the repository or folder, if the server says it
    max_model_len: int | None = None

    def as_json(self) -> dict[str, Any]:
        """Return it as it is stored."""
        return {"name": self.name, "root": self.root, "max_model_len": self.max_model_len}


@dataclass(frozen=True)
class Target:
    """What is looked at: the address, its key ("" without one), and the engine known so far."""

    url: str
    key: str = field(default="", repr=False)
    engine: str = ""


@dataclass(frozen=True)
class Look:
    """What a server answered. ``note`` says what is missing of a server that does answer."""

    models: tuple[Served, ...] = ()
    engine: str = ""
    release: str = ""
    reading: Reading | None = None
    note: str = ""


async def look_at(target: Target, transport: httpx.AsyncBaseTransport | None = None) -> Look:
    """Look at a server once.

    Raises:
        UnreadableError: it does not answer, or neither its models nor its figures can be read.
    """
    try:
        async with (
            asyncio.timeout(LOOK_SECONDS),
            httpx.AsyncClient(
                follow_redirects=False,
                trust_env=False,
                timeout=LOOK_SECONDS,
                headers=_headers(target.key),
                transport=transport,
            ) as client,
        ):
            return await _Looker(client, target).look()
    except TimeoutError as error:
        raise UnreadableError(f"It did not answer within {LOOK_SECONDS:g} s.") from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise UnreadableError(_words(error)) from error


def _shown(text: str, most: int) -> str:
    """Return a foreign text for pages and terminals: what does not show is one sign each."""
    return "".join(
        each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in text[:most]
    )


def _headers(key: str) -> dict[str, str]:
    headers = {"Accept-Encoding": IDENTITY, "User-Agent": "slipway"}
    if key and not (key.isascii() and key.isprintable() and " " not in key):
        raise UnreadableError(
            "Its secret cannot be sent as a key: it holds blanks, line ends or letters beyond "
            "ASCII. Store the key alone."
        )
    return headers | {"Authorization": f"Bearer {key}"} if key else headers


def _words(error: Exception) -> str:
    if isinstance(error, httpx.TimeoutException):
        return f"It did not answer within {LOOK_SECONDS:g} s."
    if isinstance(error, httpx.ConnectError):
        return f"No connection: {_shown(str(error), 160) or 'refused'}."
    return f"The answer broke off: {type(error).__name__}."


class _Looker:
    def __init__(self, client: httpx.AsyncClient, target: Target) -> None:
        self._client, self._target = client, target

    async def look(self) -> Look:
        models, why_no_models = await self._models()
        engine, reading, why_no_figures = await self._figures()
        if why_no_models and reading is None:
            raise UnreadableError(why_no_models)
        known = engine or BY_NAME.get(self._owner) or BY_NAME.get(self._target.engine)
        known, release, context = await self._release(known)
        if context is not None:
            models = tuple(Served(each.name, each.root, context) for each in models)
        if reading is None and known is not None and known.switch:
            why_no_figures = f"{why_no_figures} Start {known.title} with {known.switch}."
        note = why_no_figures if reading is None else why_no_models
        return Look(models, known.name if known else "", release, reading, note)

    _owner = ""  # the engine that the list of models names

    async def _get(self, path: str, most_bytes: int) -> bytes:
        """Return the body of an answer with status 200.

        Raises:
            UnreadableError: another status, or more bytes than there may be.
        """
        async with self._client.stream("GET", f"{self._target.url}{path}") as answer:
            _refuse_link_local(answer)
            if answer.status_code != HTTPStatus.OK:
                raise UnreadableError(_refusal(path, answer))
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

    async def _json(self, path: str) -> Mapping[str, Any]:
        body = await self._get(path, MOST_JSON_BYTES)
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
            return None, None, f"No figures: {error}"
        try:
            engine, reading = read_metrics(body.decode())
        except (ValueError, LookupError) as error:  # UnicodeDecodeError is one
            return (
                None,
                None,
                f"No figures: {METRICS} is not Prometheus text ({_shown(str(error), 80)}).",
            )
        if engine is None:
            return None, None, f"No figures: {METRICS} has none of an engine that is known here."
        return engine, reading, ""

    async def _release(self, known: Engine | None) -> tuple[Engine | None, str, int | None]:
        """Return the engine, its release and the context of its requests; asked, if unknown."""
        for engine in [known] if known else [each for each in ENGINES if each.told_by]:
            if not engine.release_path:
                continue
            try:
                said = await self._json(engine.release_path)
            except UnreadableError:
                continue
            if known is None and engine.told_by not in said:
                continue
            release = said.get(engine.release_field)
            text = _shown(release, MOST_RELEASE) if isinstance(release, str) else ""
            return engine, text, _context(engine, said)
        return known, "", None


def _served(row: Mapping[str, Any]) -> Served:
    root = row.get("root")
    length = row.get("max_model_len")
    return Served(
        _shown(str(row["id"]), MOST_NAME),
        _shown(root, MOST_NAME) if isinstance(root, str) else "",
        length if isinstance(length, int) and 0 < length < 2**31 else None,
    )


def _context(engine: Engine, said: Mapping[str, Any]) -> int | None:
    """Return the longest request in tokens where only the engine's own address says it."""
    found: object = said if engine.context_field else None
    for name in engine.context_field:
        found = found.get(name) if isinstance(found, dict) else None
    return found if isinstance(found, int) and 0 < found < 2**31 else None


def _refuse_link_local(answer: httpx.Response) -> None:
    """Refuse an answer from a link-local address: clouds serve a machine's credentials there.

    Raises:
        UnreadableError: the address, also that of a name, is link-local.
    """
    stream = answer.extensions.get("network_stream")
    peer = stream.get_extra_info("server_addr") if stream is not None else None
    if peer and ip_address(str(peer[0]).partition("%")[0]).is_link_local:
        raise UnreadableError("Its address is link-local, where no server of models is.")


def _refusal(path: str, answer: httpx.Response) -> str:
    status = answer.status_code
    if status in {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN}:
        return f"{path} refuses the key (status {status}): name a secret that holds a valid one."
    if answer.is_redirect:
        place = _shown(answer.headers.get("Location", ""), 120)
        return f"{path} redirects to {place}, which is not followed: give that address instead."
    return f"{path} answers with status {status}."
