"""Send events, metrics and logs to the site, over HTTP or a Redis stream."""

import logging
import math
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from pathlib import Path, PurePosixPath
from typing import Any, Protocol, TypeVar
from urllib.parse import quote

import httpx
import redis
from pydantic import BaseModel, ValidationError

from runners.host import redis_access
from runners.launchers.attempts import AttemptFolder, attempt_folders
from runners.shared import addresses
from runners.shared.config import HostConfig, HostDir
from runners.shared.facts import BEFORE_VENDORS, NetworkMeasurement
from runners.shared.messages import (
    MAX_BATCH_EVENTS,
    ArtefactBody,
    Beat,
    BeatReply,
    ClaimReply,
    ClaimRequest,
    CopyEnd,
    CopyFiles,
    CopyState,
    EnrollReply,
    EnrollRequest,
    EventAck,
    EventBatch,
    RotateReply,
    RotateRequest,
    RunEvent,
    RunRequest,
    UploadState,
    option_paths,
)
from runners.shared.spool import Event, SpoolReader, trim
from runners.shared.timing import scale_duration
from runners.supervision import child
from runners.supervision.child import LockedError

# ---------------------------------------------------------------------------
# The host's client of the server's HTTP API: enrol, heartbeat, claim, ship, upload.
#
# One method per call. No call is retried here, but for an older server in a form that it knows:
# the heartbeat and shipping loops repeat them.
# ---------------------------------------------------------------------------


API = "/api/v1"
JSON = {"Content-Type": "application/json"}
PART_BYTES = 4 * 1024**2
TIMEOUT = httpx.Timeout(15.0, connect=3.0)
UPLOAD_TIMEOUT = httpx.Timeout(60.0, connect=3.0)
UNAUTHORIZED = frozenset({httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN})
BUSY = frozenset({httpx.codes.REQUEST_TIMEOUT, httpx.codes.TOO_MANY_REQUESTS})
ASK_TO_WAIT = frozenset({httpx.codes.TOO_MANY_REQUESTS, httpx.codes.SERVICE_UNAVAILABLE})
_MAX_DETAIL_CHARACTERS = 300

Reply = TypeVar("Reply", bound=BaseModel)


class ServerError(Exception):
    """A call failed; the text is one readable sentence."""


class UnreachableError(ServerError):
    """The server did not answer."""


class RefusedError(ServerError):
    """The server rejected the call, with its Retry-After delay if it sent one."""

    def __init__(
        self, status: int, message: str, retry_after_seconds: float | None = None, code: str = ""
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code  # of the site's problem document; "" if something else answered
        self.retry_after_seconds = retry_after_seconds

    @property
    def is_unauthorized(self) -> bool:
        """Return whether the credential itself was rejected."""
        return self.status in UNAUTHORIZED

    @property
    def is_transient(self) -> bool:
        """Return whether a retry of the same call may succeed."""
        return httpx.codes.is_server_error(self.status) or self.status in BUSY


class UnknownOptionsError(ServerError):
    """The claimed job sets options that this version of the agent does not have."""

    def __init__(self, request: RunRequest, options: list[str]) -> None:
        super().__init__(
            "The server is newer than this host's agent, which does not know what the job sets: "
            f"{', '.join(options)[:_MAX_DETAIL_CHARACTERS]}. Upgrade Slipway on this host, or "
            "start the job without it."
        )
        self.request = request


class ConnectionSettingError(ServerError):
    """The server's address or a proxy of the environment cannot be used."""


class ServerClient:
    """Calls of one host to its server; thread-safe.

    Raises:
        ConnectionSettingError: on construction, if the address or the proxy cannot be used.
    """

    def __init__(
        self,
        server: str,
        credential: str | None = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self.server = server.rstrip("/")
        headers = {"Authorization": f"Bearer {credential}"} if credential else {}
        self.proxy = None if transport else _proxy(self.server)
        try:
            self._http = httpx.Client(
                base_url=self.server,
                headers=headers,
                timeout=TIMEOUT,
                transport=transport or _transport(self.server, self.proxy),
            )
        except httpx.InvalidURL as error:
            raise ConnectionSettingError(
                f"{self.server!r} is no address of a server: {error}; give one such as "
                "https://slipway.example.org"
            ) from None

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def enroll(self, request: EnrollRequest) -> EnrollReply:
        """Exchange a one-time token for a credential."""
        return self._post_known("/hosts/enroll", request, EnrollReply)

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
        return self._post_known("/hosts/beat", beat, BeatReply)

    def claim(self, attempt_id: str, request: ClaimRequest) -> ClaimReply:
        """Return the attempt's spec; exactly one claim gets it.

        Raises:
            UnknownOptionsError: the spec sets an option that this version does not have; without
                it the job would be another one.
        """
        response = self._call(f"/attempts/{quote(attempt_id)}/claim", request)
        reply = self._parse(response, ClaimReply)
        known = set(option_paths(reply.request.spec.model_dump(mode="json")))
        options = set(option_paths(response.json()["request"]["spec"])) - known
        if unknown := options - set(reply.default_options):
            raise UnknownOptionsError(reply.request, sorted(unknown))
        return reply

    def send_events(self, batch: EventBatch) -> EventAck:
        """Send consecutive events and return the acknowledged sequence number."""
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

    def copy_state(self, copy_id: str) -> CopyState:
        """Return how far a copy of a model is."""
        return self._parse(
            self._send(self._http.build_request("GET", _copy_url(copy_id))), CopyState
        )

    def announce_copy(self, copy_id: str, files: CopyFiles) -> CopyState:
        """Say what this host sends in a copy."""
        request = self._http.build_request(
            "PUT", f"{_copy_url(copy_id)}/files", content=files.model_dump_json(), headers=JSON
        )
        return self._parse(self._send(request), CopyState)

    def send_copy_part(self, copy_id: str, number: int, offset: int, data: bytes) -> int:
        """Send a part of a file of a copy; return how many bytes of it the server then has."""
        request = self._http.build_request(
            "PUT",
            f"{_copy_url(copy_id)}/files/{number}",
            params={"offset": offset},
            content=data,
            timeout=UPLOAD_TIMEOUT,
        )
        return self._parse(self._send(request), UploadState).received_bytes

    def take_copied(self, copy_id: str, number: int, *, is_right: bool) -> CopyState:
        """Report that a file of a copy was verified; a wrong one is sent again."""
        request = self._http.build_request(
            "POST",
            f"{_copy_url(copy_id)}/files/{number}/taken",
            params={"is_right": is_right},
        )
        return self._parse(self._send(request), CopyState)

    def end_copy(self, copy_id: str, problem: str = "") -> CopyState:
        """Report that a copy is complete here, or why it cannot go on."""
        return self._post(f"/copies/{quote(copy_id)}/end", CopyEnd(problem=problem), CopyState)

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

    def _post_known(self, path: str, body: Beat | EnrollRequest, reply_type: type[Reply]) -> Reply:
        """Send a message; a site that is older, and refuses it, gets what it knows.

        Without the links of the cache's report first, then also without newer facts.
        """
        forms: list[dict[str, Any]] = [{}]
        if isinstance(body, Beat) and body.cache and body.cache.links:
            forms.append({"cache": {"links": True}})
        if body.facts:
            forms.append(forms[-1] | {"facts": BEFORE_VENDORS})
        for leaving_out in forms[:-1]:
            try:
                return self._post(path, body, reply_type, leaving_out)
            except RefusedError as refusal:
                if refusal.status != httpx.codes.UNPROCESSABLE_ENTITY:
                    raise
        return self._post(path, body, reply_type, forms[-1])

    def _post(
        self,
        path: str,
        body: BaseModel,
        reply_type: type[Reply],
        leaving_out: dict[str, Any] | None = None,
    ) -> Reply:
        return self._parse(self._call(path, body, leaving_out), reply_type)

    def _call(
        self, path: str, body: BaseModel, leaving_out: dict[str, Any] | None = None
    ) -> httpx.Response:
        request = self._http.build_request(
            "POST",
            f"{API}{path}",
            content=body.model_dump_json(exclude=leaving_out),
            headers=JSON,
        )
        return self._send(request)

    def _send(self, request: httpx.Request, *, is_streamed: bool = False) -> httpx.Response:
        try:
            reply = self._http.send(request, stream=is_streamed)
            if not reply.is_success:
                reply.read()
        except httpx.TimeoutException:
            message = f"{self.server} did not answer in time{self._by_proxy()}"
            raise UnreachableError(message) from None
        except httpx.HTTPError as error:
            message = f"{self.server} cannot be reached{self._by_proxy()}: {error}"
            raise UnreachableError(message) from None
        if reply.is_success:
            return reply
        endpoint = f"{request.method} {request.url.path}"
        code = _code(reply)
        by = "" if code else self._by_proxy()
        message = (
            f"{self.server} refused {endpoint} with {reply.status_code}{by}: {_detail(reply)}"
        )
        raise RefusedError(reply.status_code, message, _retry_after_seconds(reply), code)

    def _by_proxy(self) -> str:
        """Return which proxy is between, and how to go without it; "" without one."""
        if self.proxy is None:
            return ""
        return f" (through {self.proxy}; to go without it, add the server's name to NO_PROXY)"

    def _parse(self, reply: httpx.Response, reply_type: type[Reply]) -> Reply:
        """Return a reply without the fields that only a newer server has."""
        try:
            return reply_type.model_validate_json(reply.content, extra="ignore")
        except ValidationError as error:
            raise ServerError(
                f"{self.server} did not answer with a valid {reply_type.__name__} "
                f"({error.errors()[0]['msg']}); do server and host have the same version?"
            ) from None


def _copy_url(copy_id: str) -> str:
    return f"{API}/copies/{quote(copy_id)}"


def _artefact_url(attempt_id: str, name: str, path: PurePosixPath) -> str:
    return f"{API}/attempts/{quote(attempt_id)}/artefacts/{quote(name)}/{quote(str(path))}"


def _retry_after_seconds(reply: httpx.Response) -> float | None:
    """Return the Retry-After delay of a busy server in seconds; the date form is ignored."""
    words = reply.headers.get("Retry-After", "").strip()
    if reply.status_code not in ASK_TO_WAIT or not words.isdecimal():
        return None
    return float(words)


def _proxy(server: str) -> addresses.Proxy | None:
    try:
        return addresses.proxy_of(server, os.environ)
    except ValueError as error:
        raise ConnectionSettingError(
            f"{server!r} is no address of a server: {error}; give one such as "
            "https://slipway.example.org"
        ) from None


def _transport(server: str, proxy: addresses.Proxy | None) -> httpx.HTTPTransport:
    """Return a transport that uses this proxy alone, whatever else the environment names."""
    is_https = server.startswith("https:")  # then the certificates of SSL_CERT_FILE count
    try:
        via = httpx.Proxy(proxy.url) if proxy else None
        return httpx.HTTPTransport(proxy=via, trust_env=is_https)
    except OSError as error:
        raise ConnectionSettingError(
            f"The certificates of SSL_CERT_FILE or SSL_CERT_DIR cannot be read: {error}. Correct "
            "the variable, or unset it for the usual ones."
        ) from None
    except (ImportError, ValueError, httpx.InvalidURL) as error:
        raise ConnectionSettingError(
            f"{proxy} cannot be used: {error}. Give it as http://proxy.example.org:3128, or unset "
            "the variable."
        ) from None


def _code(reply: httpx.Response) -> str:
    """Return the code of the site's refusal; "" if a proxy or another server answered."""
    return str(_document(reply).get("code") or "")


def _detail(reply: httpx.Response) -> str:
    if reply.has_redirect_location:
        return f"{reply.reason_phrase}, to {reply.headers['Location'][:_MAX_DETAIL_CHARACTERS]}"
    detail = _document(reply).get("detail")
    return str(detail or reply.reason_phrase)[:_MAX_DETAIL_CHARACTERS]


def _document(reply: httpx.Response) -> dict[str, Any]:
    try:
        document = reply.json()
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}


# Measures round trip and bandwidth between this host and its server over HTTP.


FIRST_BYTES = 64 * 1024
MAX_BYTES = 2 * 1024**2  # the server's limit per request
LONG_ENOUGH_SECONDS = 0.25
NUM_ROUND_TRIPS = 5
MOSTLY = 4  # a transfer shorter than this many round trips includes the round trip


def measure_network(client: ServerClient) -> NetworkMeasurement:
    """Return round trip and both bandwidths; slow connections get smaller transfers.

    Raises:
        ServerError: the server does not answer, or rejects the request.
    """
    client.echo(b"", 0)  # opens the connection
    round_trip = statistics.median(_echo_seconds(client, 0, 0) for _ in range(NUM_ROUND_TRIPS))
    return NetworkMeasurement(
        round_trip_seconds=round_trip,
        upload_bytes_per_second=_transfer_rate(client, round_trip, is_up=True),
        download_bytes_per_second=_transfer_rate(client, round_trip, is_up=False),
    )


def _transfer_rate(client: ServerClient, round_trip: float, *, is_up: bool) -> float:
    """Return bytes per second of the largest transfer; long ones exclude the round trip."""
    num_bytes = FIRST_BYTES
    while True:
        up, down = (num_bytes, 0) if is_up else (0, num_bytes)
        seconds = _echo_seconds(client, up, down)
        if seconds >= LONG_ENOUGH_SECONDS or num_bytes >= MAX_BYTES:
            is_mostly_waiting = seconds < MOSTLY * round_trip
            return num_bytes / (seconds if is_mostly_waiting else seconds - round_trip)
        num_bytes = min(num_bytes * 4, MAX_BYTES)


def _echo_seconds(client: ServerClient, up: int, down: int) -> float:
    data = os.urandom(up)  # incompressible for proxies
    began = time.perf_counter()
    client.echo(data, down)
    return time.perf_counter() - began


# ---------------------------------------------------------------------------
# Ships events and artefacts of attempts to the server until they are acknowledged.
# ---------------------------------------------------------------------------


# Ships events from the spool to the server until they are acknowledged.
#
# Two transports with one contract: a Redis stream if there is one, otherwise HTTP. Both may lose,
# repeat or reorder events; the server accepts only the next expected number, and the shipper
# returns to the acknowledged sequence number when acknowledgements stall.


STALL_SECONDS = scale_duration(2.0, least=0.5)
STALLS_BEFORE_HTTP = 2
STREAM_REST_SECONDS = scale_duration(30.0, least=1.0)  # how long a stalled stream is not used
MAX_IN_FLIGHT = 5_000
MAX_STREAM_ENTRIES = 10_000
SAVE_SECONDS = scale_duration(2.0, least=0.2)
REFUSED_REST_SECONDS = scale_duration(10.0, least=0.5)

log = logging.getLogger(__name__)


class EventStream(Protocol):
    """The fast transport: write without a reply, and read acknowledgements separately."""

    def add(self, batch: EventBatch) -> bool:
        """Send a batch; return False if the stream is full or unreachable."""

    def acked(self, attempt_id: str) -> int | None:
        """Return the acknowledged sequence number, or None when it cannot be read."""


class RedisStream:
    """Sends events to the host's stream and reads acknowledgements from its hash."""

    def __init__(self, url: str, host_id: str, ca_file: Path | None = None) -> None:
        self._redis = _client(url, ca_file)
        self._events = redis_access.events_key(host_id)
        self._acks = redis_access.ack_key(host_id)
        self._num_waiting = 0  # stream length when acknowledgements were last read

    def add(self, batch: EventBatch) -> bool:
        """Send a batch; return False if the stream is full or unreachable."""
        try:
            if self._num_waiting >= MAX_STREAM_ENTRIES:
                return False
            self._redis.xadd(self._events, redis_access.encode(batch))  # type: ignore[arg-type]  # dict is invariant there
        except redis.RedisError:
            return False
        return True

    def acked(self, attempt_id: str) -> int | None:
        """Return the acknowledged sequence number, or None when it cannot be read."""
        both = self._redis.pipeline(transaction=False)
        both.hget(self._acks, attempt_id)
        both.xlen(self._events)
        try:
            value, self._num_waiting = both.execute()
        except redis.RedisError:
            return None
        return int(str(value)) if value is not None else 0

    def use(self, url: str, ca_file: Path | None = None) -> None:
        """Reconnect with another address or secret."""
        before, self._redis = self._redis, _client(url, ca_file)
        before.close()

    def close(self) -> None:
        """Close the connections."""
        self._redis.close()


def _client(url: str, ca_file: Path | None) -> redis.Redis:
    return redis_access.connect(
        url, ca_file, socket_timeout=2.0, socket_connect_timeout=1.0, decode_responses=True
    )


class AttemptShipper:
    """Ships one attempt's events; a lock admits one process at a time."""

    def __init__(
        self,
        folder: AttemptFolder,
        client: ServerClient,
        event_stream: EventStream | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.folder = folder
        self.acked_seq = folder.acked_seq()
        self._client = client
        self._stream = event_stream
        self._clock = clock
        self._reader = SpoolReader(folder.spool)
        self._sent_seq = self.acked_seq
        self._moved_at = clock()
        self._stalls = 0
        self._fence: str | None = None
        self._saved_seq = self.acked_seq
        self._saved_at = -math.inf
        self._stream_rests_until = 0.0
        self._http_rests_until = 0.0
        self._lock: AbstractContextManager[None] = child.locked(folder.ship_lock)
        self._lock.__enter__()

    def close(self) -> None:
        """Store the acknowledged sequence number and release the lock."""
        with suppress(OSError):  # its folder was removed
            self._save(at_once=True)
        self._lock.__exit__(None, None, None)

    @property
    def is_done(self) -> bool:
        """Return whether the server has acknowledged every event up to the exit."""
        return self.folder.is_settled and self.acked_seq >= self._reader.last_seq()

    def record_acks(self, acked_seq: int) -> None:
        """Update the acknowledged sequence number, from either transport."""
        if acked_seq == self.acked_seq:
            return
        if acked_seq < self.acked_seq:  # the server lost something: a restored backup
            self._sent_seq = acked_seq
        self.acked_seq = acked_seq
        self._sent_seq = max(self._sent_seq, acked_seq)
        self._moved_at, self._stalls = self._clock(), 0
        self._save()

    def _save(self, *, at_once: bool = False) -> None:
        """Store the acknowledged number for the next shipper; a stale one only causes repeats."""
        is_due = at_once or self._clock() - self._saved_at >= SAVE_SECONDS
        if is_due and self.acked_seq != self._saved_seq:
            self.folder.save_acked_seq(self.acked_seq)
            self._saved_seq, self._saved_at = self.acked_seq, self._clock()

    def pump(self) -> int:
        """Send the next batch by the better transport; return the number of events sent."""
        self._save()
        if self._stream is not None and self._clock() >= self._stream_rests_until:
            return self._pump_stream()
        return self._pump_http()

    def finish(self) -> None:
        """Delete acknowledged segments of the spool."""
        self._save(at_once=True)
        trim(self.folder.spool, self.acked_seq)

    def _rest_stream(self, seconds: float) -> None:
        self._stream_rests_until = self._clock() + seconds
        self._sent_seq, self._stalls = self.acked_seq, 0

    def _pump_stream(self) -> int:
        event_stream = self._stream
        if event_stream is None:
            return 0
        acked = event_stream.acked(self.folder.attempt_id)
        if acked is None:
            self._rest_stream(STALL_SECONDS)
            return 0
        if acked > self.acked_seq:
            self.record_acks(acked)
        is_waiting = self._sent_seq > self.acked_seq
        # After a stall, send again from the acknowledged sequence number; after several, use HTTP.
        if is_waiting and self._clock() - self._moved_at > STALL_SECONDS:
            self._sent_seq, self._moved_at = self.acked_seq, self._clock()
            self._stalls += 1
            if self._stalls >= STALLS_BEFORE_HTTP:
                self._rest_stream(STREAM_REST_SECONDS)
        if self._sent_seq - self.acked_seq >= MAX_IN_FLIGHT:
            return 0
        batch = self._batch(self._sent_seq)
        if batch is None:
            return 0
        if not event_stream.add(batch):
            self._rest_stream(STALL_SECONDS)
            return 0
        if self._sent_seq == self.acked_seq:
            self._moved_at = self._clock()
        self._note_sent(batch)
        return len(batch.events)

    def _pump_http(self) -> int:
        if self._clock() < self._http_rests_until:
            return 0
        batch = self._batch(self.acked_seq)
        if batch is None:
            return 0
        try:
            ack = self._client.send_events(batch)
        except ServerError as error:
            is_final = isinstance(error, RefusedError) and not error.is_transient
            level = logging.WARNING if is_final else logging.INFO
            log.log(level, "attempt %s waits: %s", self.folder.attempt_id, error)
            rest = REFUSED_REST_SECONDS if is_final else STALL_SECONDS
            self._http_rests_until = self._clock() + rest
            return 0
        self._note_sent(batch)
        self.record_acks(ack.acked_seq)
        return len(batch.events)

    def _batch(self, after_seq: int) -> EventBatch | None:
        events: list[Event] = self._reader.read_after(after_seq, limit=MAX_BATCH_EVENTS)
        if events and self._fence is None and (claim := self.folder.claim()):
            self._fence = claim.fence
        if not events or self._fence is None:
            return None
        return EventBatch(
            attempt_id=self.folder.attempt_id,
            fence=self._fence,
            events=tuple(RunEvent(**event) for event in events),
        )

    def _note_sent(self, batch: EventBatch) -> None:
        self._sent_seq = batch.events[-1].seq


# Uploads the artefacts of ended attempts in parts; interrupted uploads are resumed.


def upload_artefacts(folder: AttemptFolder, client: ServerClient, cap_bytes: int) -> int:
    """Upload an ended attempt's artefacts of at most ``cap_bytes`` each; return the bytes sent.

    Larger artefacts stay on the host. A file that changed or that the server rejects is skipped
    and logged.

    Raises:
        ServerError: the server is unreachable; a later call resumes the upload.
    """
    total = 0
    for artefact in folder.artefacts():
        if artefact.total_bytes > cap_bytes:
            log.info(
                "artefact %s of %s stays here: %d bytes are more than %d",
                artefact.name, folder.attempt_id, artefact.total_bytes, cap_bytes,
            )  # fmt: skip
            continue
        try:
            total += _upload(folder, artefact, client)
        except (RefusedError, OSError, ValueError) as error:
            if isinstance(error, RefusedError) and (error.is_transient or error.is_unauthorized):
                raise
            log.warning("artefact %s of %s: %s", artefact.name, folder.attempt_id, error)
    folder.mark_uploaded()
    return total


def _upload(folder: AttemptFolder, artefact: ArtefactBody, client: ServerClient) -> int:
    root = (folder.output / artefact.name).resolve()
    if not root.is_relative_to(folder.output.resolve()):
        raise ValueError(f"artefact {artefact.name!r} is not in the attempt's output")
    return sum(
        _upload_file(root, PurePosixPath(path), size, (folder.attempt_id, artefact.name, client))
        for path, size in artefact.files.items()
    )


def _upload_file(
    root: Path, path: PurePosixPath, size: int, target: tuple[str, str, ServerClient]
) -> int:
    attempt_id, name, client = target
    handle = _open_below(root, path)
    with os.fdopen(handle, "rb") as file:
        if os.fstat(handle).st_size != size:
            raise ValueError(f"{path} has {os.fstat(handle).st_size} bytes instead of {size}")
        start = offset = client.received_bytes(attempt_id, name, path)
        while offset < size or size == 0:
            file.seek(offset)
            received = client.send_part(attempt_id, name, path, offset, file.read(PART_BYTES))
            if received <= offset:
                break
            offset = received
    return offset - start


def _open_below(root: Path, path: PurePosixPath) -> int:
    """Open a file below ``root`` without following links.

    Raises:
        ValueError: the path is outside of ``root``.
    """
    place = root / path
    is_file_itself = root.is_file() and str(path) == root.name
    if is_file_itself:
        place = root
    if path.is_absolute() or ".." in path.parts or place.resolve() != place:
        raise ValueError(f"{path} is outside of the artefact")
    return os.open(place, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)


BUSY_SECONDS = scale_duration(0.25, least=0.1)
IDLE_SECONDS = scale_duration(1.0, least=0.2)
UPLOAD_SECONDS = scale_duration(2.0, least=0.3)


class RepeatingThread(threading.Thread):
    """A daemon thread that repeats a step until it is stopped."""

    def __init__(self, name: str, step: Callable[[], float]) -> None:
        super().__init__(name=name, daemon=True)
        self._step = step
        self._stopped = threading.Event()
        self._wake_event = threading.Event()

    def run(self) -> None:
        """Repeat the step, which returns the pause in seconds; log failures and continue."""
        while not self._stopped.is_set():
            try:
                rest_seconds = self._step()
            except Exception:
                log.exception("%s failed; it goes on", self.name)
                rest_seconds = IDLE_SECONDS
            self._wake_event.wait(rest_seconds)
            self._wake_event.clear()

    def wake(self) -> None:
        """End the present pause."""
        self._wake_event.set()

    def stop(self) -> None:
        """Stop after the present step and wait for the thread."""
        self._stopped.set()
        self.wake()
        self.join(timeout=20.0)


class Shipping:
    """The shippers of all attempts with events that the server has not stored."""

    def __init__(
        self, host_dir: HostDir, client: ServerClient, event_stream: EventStream | None
    ) -> None:
        self._host_dir = host_dir
        self._client = client
        self._stream = event_stream
        self._shippers: dict[str, AttemptShipper] = {}
        self._acked: dict[str, int] = {}
        self._lock = threading.Lock()

    def record_acks(self, acked: Mapping[str, int]) -> None:
        """Record the acknowledged sequence numbers of a heartbeat reply, by attempt."""
        with self._lock:
            self._acked.update(acked)

    def step(self) -> float:
        """Ship every attempt's events once; return the seconds until the next step."""
        with self._lock:
            acked, self._acked = self._acked, {}
        num_sent = 0
        for folder in attempt_folders(self._host_dir.attempts):
            try:
                num_sent += self._ship(folder, acked.get(folder.attempt_id))
            except Exception:  # a damaged attempt must not block the others
                log.exception("attempt %s could not be shipped", folder.attempt_id)
        return BUSY_SECONDS if num_sent or self._shippers else IDLE_SECONDS

    def _ship(self, folder: AttemptFolder, acked_seq: int | None) -> int:
        shipper = self._shipper(folder)
        if shipper is None:
            return 0
        if acked_seq is not None:
            shipper.record_acks(acked_seq)
        num_sent = shipper.pump()
        if shipper.is_done:
            shipper.finish()
        return num_sent

    def close(self) -> None:
        """Release the shippers' locks for other processes."""
        for shipper in self._shippers.values():
            shipper.close()
        self._shippers.clear()

    def _shipper(self, folder: AttemptFolder) -> AttemptShipper | None:
        shipper = self._shippers.get(folder.attempt_id)
        if not folder.spool.is_dir():
            if shipper:
                shipper.close()
                del self._shippers[folder.attempt_id]
            return None
        if shipper is None:
            try:
                shipper = AttemptShipper(folder, self._client, self._stream)
            except LockedError:
                return None
            self._shippers[folder.attempt_id] = shipper
        return shipper


class Uploads:
    """Uploads the artefacts of ended attempts, one attempt at a time."""

    def __init__(self, host_dir: HostDir, client: ServerClient, config: HostConfig) -> None:
        self._host_dir = host_dir
        self._client = client
        self._config = config

    def step(self) -> float:
        """Upload the pending artefacts; return the seconds until the next step."""
        for folder in self.waiting():
            try:
                upload_artefacts(folder, self._client, self._config.upload_cap_bytes)
            except ServerError as error:
                log.info("the upload of %s waits: %s", folder.attempt_id, error)
                break
        return UPLOAD_SECONDS

    def waiting(self) -> list[AttemptFolder]:
        """Return the ended attempts with artefacts to upload."""
        return [
            folder
            for folder in attempt_folders(self._host_dir.attempts)
            if folder.is_settled and not folder.is_uploaded and folder.is_stored
        ]
