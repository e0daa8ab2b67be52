"""The host's client of the server's HTTP API: enrol, heartbeat, claim, ship, upload.

One method per call. No call is retried here, but for an older server in a form that it knows: the
heartbeat and shipping loops repeat them.
"""

from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit

import httpx
from pydantic import BaseModel, ValidationError

from runners.facts import BEFORE_VENDORS
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
    """A call failed; the text is one readable sentence."""


class UnreachableError(ServerError):
    """The server did not answer."""


class RefusedError(ServerError):
    """The server rejected the call, with its Retry-After delay if it sent one."""

    def __init__(
        self, status: int, message: str, retry_after_seconds: float | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_seconds = retry_after_seconds

    @property
    def is_unauthorized(self) -> bool:
        """Return whether the credential itself was rejected."""
        return self.status in UNAUTHORIZED

    @property
    def is_passing(self) -> bool:
        """Return whether a retry of the same call may succeed."""
        return httpx.codes.is_server_error(self.status) or self.status in BUSY


class ServerClient:
    """Calls of one host to its server; thread-safe."""

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
        return self._post_facts("/hosts/enroll", request, EnrollReply)

    def use(self, credential: str) -> None:
        """Use another credential from now on."""
        self._http.headers["Authorization"] = f"Bearer {credential}"

    def rotate(self, request: RotateRequest) -> RotateReply:
        """Replace the host's secrets by those with the given digests."""
        return self._post("/hosts/rotate", request, RotateReply)

    def echo(self, data: bytes, num_bytes: int) -> int:
        """Send bytes and request ``num_bytes`` back; return how many arrived."""
        request = self._http.build_request(
            "POST", f"{API}/hosts/echo", params={"num_bytes": num_bytes}, content=data
        )
        return len(self._send(request).content)

    def beat(self, beat: Beat) -> BeatReply:
        """Send a heartbeat and return the host's orders."""
        return self._post_facts("/hosts/beat", beat, BeatReply)

    def claim(self, attempt_id: str, request: ClaimRequest) -> ClaimReply:
        """Return the attempt's spec; exactly one claim gets it."""
        return self._post(f"/attempts/{quote(attempt_id)}/claim", request, ClaimReply)

    def send_events(self, batch: EventBatch) -> EventAck:
        """Send consecutive events and return the acknowledged number."""
        return self._post(f"/attempts/{quote(batch.attempt_id)}/events", batch, EventAck)

    def received_bytes(self, attempt_id: str, name: str, path: PurePosixPath) -> int:
        """Return how many bytes of an artefact's file the server has."""
        reply = self._send(self._http.build_request("GET", _artefact_url(attempt_id, name, path)))
        return self._parse(reply, UploadState).received_bytes

    def send_part(
        self, attempt_id: str, name: str, path: PurePosixPath, offset: int, data: bytes
    ) -> int:
        """Send one part of an artefact's file; return how many bytes the server then has."""
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
        """Yield an attempt's training data in chunks."""
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

    def _post_facts(self, path: str, body: Beat | EnrollRequest, reply_type: type[Reply]) -> Reply:
        """Send a message with a host's inventory; a site that is older gets what it knows."""
        try:
            return self._post(path, body, reply_type)
        except RefusedError as refusal:
            if refusal.status != httpx.codes.UNPROCESSABLE_ENTITY or body.facts is None:
                raise
        return self._post(path, body, reply_type, leaving_out={"facts": BEFORE_VENDORS})

    def _post(
        self,
        path: str,
        body: BaseModel,
        reply_type: type[Reply],
        leaving_out: dict[str, Any] | None = None,
    ) -> Reply:
        request = self._http.build_request(
            "POST",
            f"{API}{path}",
            content=body.model_dump_json(exclude=leaving_out),
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
        endpoint = f"{request.method} {request.url.path}"
        message = f"{self.server} refused {endpoint} with {reply.status_code}: {_detail(reply)}"
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
    """Return the Retry-After delay of a busy server in seconds; the date form is ignored."""
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
