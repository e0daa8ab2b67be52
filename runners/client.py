"""The host's end of the server's HTTP API: enrol, beat, claim, ship, upload.

One method per call, each with its own sentence when it fails. Nothing here repeats a call
by itself but the upload: beats and shipping are loops anyway.
"""

from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import TypeVar
from urllib.parse import quote, urlsplit

import httpx
from pydantic import BaseModel, ValidationError

from runners.messages import (
    Beat,
    BeatReply,
    ClaimReply,
    ClaimRequest,
    EnrollReply,
    EnrollRequest,
    EventAck,
    EventBatch,
    RotateReply,
    RotateRequest,
    UploadState,
)

API = "/api/v1"
PART_BYTES = 4 * 1024**2
TIMEOUT = httpx.Timeout(15.0, connect=3.0)
UPLOAD_TIMEOUT = httpx.Timeout(60.0, connect=3.0)
UNAUTHORIZED = frozenset({httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN})
BUSY = frozenset({httpx.codes.REQUEST_TIMEOUT, httpx.codes.TOO_MANY_REQUESTS})
ASK_TO_WAIT = frozenset({httpx.codes.TOO_MANY_REQUESTS, httpx.codes.SERVICE_UNAVAILABLE})
LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
_MAX_DETAIL_CHARACTERS = 300

Reply = TypeVar("Reply", bound=BaseModel)


class ServerError(Exception):
    """A call that did not do what it should; the text is one sentence for a person."""


class UnreachableError(ServerError):
    """No answer came: the server is away, not against us."""


class RefusedError(ServerError):
    """The server answered, and said no; ``retry_after_seconds`` if it said for how long."""

    def __init__(
        self, status: int, message: str, retry_after_seconds: float | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_seconds = retry_after_seconds

    @property
    def is_unauthorized(self) -> bool:
        """Tell whether the credential itself was turned down."""
        return self.status in UNAUTHORIZED

    @property
    def is_passing(self) -> bool:
        """Tell whether the same call may well succeed in a moment."""
        return httpx.codes.is_server_error(self.status) or self.status in BUSY


class ServerClient:
    """Calls of one host to its server; safe to share between threads."""

    def __init__(
        self,
        server: str,
        credential: str | None = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self.server = server.rstrip("/")
        headers = {"Authorization": f"Bearer {credential}"} if credential else {}
        self._http = httpx.Client(
            base_url=self.server,
            headers=headers,
            timeout=TIMEOUT,
            transport=transport,
            trust_env=urlsplit(self.server).hostname not in LOOPBACK_NAMES,
        )

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def enroll(self, request: EnrollRequest) -> EnrollReply:
        """Exchange a one-time token for a credential."""
        return self._post("/hosts/enroll", request, EnrollReply)

    def use(self, credential: str) -> None:
        """Speak under another credential from now on."""
        self._http.headers["Authorization"] = f"Bearer {credential}"

    def rotate(self, request: RotateRequest) -> RotateReply:
        """Replace the host's secrets by those whose digests are given."""
        return self._post("/hosts/rotate", request, RotateReply)

    def echo(self, data: bytes, num_bytes: int) -> int:
        """Send bytes and have the server send some back; return how many came."""
        request = self._http.build_request(
            "POST", f"{API}/hosts/echo", params={"num_bytes": num_bytes}, content=data
        )
        return len(self._send(request).content)

    def beat(self, beat: Beat) -> BeatReply:
        """Say how the host is and return what it should do."""
        return self._post("/hosts/beat", beat, BeatReply)

    def claim(self, attempt_id: str, request: ClaimRequest) -> ClaimReply:
        """Return the attempt's spec, which exactly one claim gets."""
        return self._post(f"/attempts/{quote(attempt_id)}/claim", request, ClaimReply)

    def send_events(self, batch: EventBatch) -> EventAck:
        """Hand over consecutive events and return what the server has stored."""
        return self._post(f"/attempts/{quote(batch.attempt_id)}/events", batch, EventAck)

    def received_bytes(self, attempt_id: str, name: str, path: PurePosixPath) -> int:
        """Return how much of an artefact's file the server holds."""
        reply = self._send(self._http.build_request("GET", _artefact_url(attempt_id, name, path)))
        return self._parse(reply, UploadState).received_bytes

    def send_part(
        self, attempt_id: str, name: str, path: PurePosixPath, offset: int, data: bytes
    ) -> int:
        """Hand over one part of an artefact's file; return how much the server holds then."""
        request = self._http.build_request(
            "PUT",
            _artefact_url(attempt_id, name, path),
            params={"offset": offset},
            content=data,
            timeout=UPLOAD_TIMEOUT,
        )
        reply = self._send(request)
        return self._parse(reply, UploadState).received_bytes

    def data(self, attempt_id: str, dataset_id: str) -> Iterator[bytes]:
        """Yield the training data that an attempt was promised, piece by piece."""
        request = self._http.build_request(
            "GET",
            f"{API}/attempts/{quote(attempt_id)}/data/{quote(dataset_id)}",
            timeout=UPLOAD_TIMEOUT,
        )
        reply = self._send(request, is_streamed=True)
        try:
            yield from reply.iter_raw(PART_BYTES)
        except httpx.HTTPError as error:
            raise UnreachableError(f"{self.server} broke off: {error}") from None
        finally:
            reply.close()

    def _post(self, path: str, body: BaseModel, reply_type: type[Reply]) -> Reply:
        request = self._http.build_request(
            "POST",
            f"{API}{path}",
            content=body.model_dump_json(),
            headers={"Content-Type": "application/json"},
        )
        reply = self._send(request)
        return self._parse(reply, reply_type)

    def _send(self, request: httpx.Request, *, is_streamed: bool = False) -> httpx.Response:
        try:
            reply = self._http.send(request, stream=is_streamed)
            if not reply.is_success:
                reply.read()
        except httpx.TimeoutException:
            raise UnreachableError(f"{self.server} did not answer in time") from None
        except httpx.HTTPError as error:
            raise UnreachableError(f"{self.server} cannot be reached: {error}") from None
        if reply.is_success:
            return reply
        asked = f"{request.method} {request.url.path}"
        message = f"{self.server} refused {asked} with {reply.status_code}: {_detail(reply)}"
        raise RefusedError(reply.status_code, message, _retry_after_seconds(reply))

    def _parse(self, reply: httpx.Response, reply_type: type[Reply]) -> Reply:
        try:
            return reply_type.model_validate_json(reply.content)
        except ValidationError as error:
            raise ServerError(
                f"{self.server} answered something that is no {reply_type.__name__} "
                f"({error.errors()[0]['msg']}); do server and host have the same version?"
            ) from None


def _artefact_url(attempt_id: str, name: str, path: PurePosixPath) -> str:
    return f"{API}/attempts/{quote(attempt_id)}/artefacts/{quote(name)}/{quote(str(path))}"


def _retry_after_seconds(reply: httpx.Response) -> float | None:
    """Return the wait that a busy server asks for; a date, which proxies may send, is not read."""
    words = reply.headers.get("Retry-After", "").strip()
    if reply.status_code not in ASK_TO_WAIT or not words.isdecimal():
        return None
    return float(words)


def _detail(reply: httpx.Response) -> str:
    try:
        document = reply.json()
    except ValueError:
        return reply.reason_phrase
    detail = document.get("detail") if isinstance(document, dict) else None
    return str(detail or reply.reason_phrase)[:_MAX_DETAIL_CHARACTERS]
