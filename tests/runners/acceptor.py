"""A small server for the host's tests: it keeps the server's side of the contract in memory.

It accepts an event only when its number follows the last one stored, gives a spec to one
claim, and takes artefacts in parts. What it cannot show (database, pages) is tested against
the real server.
"""

import hashlib
import json
import re
import secrets
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

from runners.jobspec import BenchmarkSpec, DemoModel, JobSpec
from runners.shared.facts import Microbench
from runners.shared.messages import (
    Beat,
    BeatReply,
    ClaimReply,
    ClaimRequest,
    EnrollReply,
    EnrollRequest,
    EpochShown,
    EventAck,
    EventBatch,
    Message,
    RotateReply,
    RotateRequest,
    RunEvent,
    RunRequest,
    StopOrder,
    UploadState,
    WantedAttempt,
    option_paths,
)
from runners.shared.reasons import Reason


class Stored:
    """One attempt as the server knows it."""

    def __init__(self, attempt_id: str, spec: JobSpec, max_duration_seconds: float | None) -> None:
        self.fence = secrets.token_hex(16)
        self.claim_id = ""
        self.events: list[RunEvent] = []
        self.num_duplicates = 0
        self.stop: StopOrder | None = None
        self.request = RunRequest(
            attempt_id=attempt_id,
            job_id=f"job-{attempt_id}",
            number=1,
            fence=self.fence,
            spec=spec,
            max_duration_seconds=max_duration_seconds,
        )

    @property
    def has_exited(self) -> bool:
        return bool(self.events) and self.events[-1].kind == "exited"

    @property
    def exit(self) -> dict:
        return self.events[-1].body

    def kinds(self) -> list[str]:
        return [event.kind for event in self.events]

    def of_kind(self, kind: str) -> list[dict]:
        return [event.body for event in self.events if event.kind == kind]

    def accept(self, batch: EventBatch) -> int:
        for event in batch.events:
            if event.seq == len(self.events) + 1:
                self.events.append(event)
            elif event.seq <= len(self.events):
                self.num_duplicates += 1
        return len(self.events)


class Acceptor:
    """The server: start it as a context manager and read what came in."""

    def __init__(self, uploads: Path | None = None) -> None:
        self.attempts: dict[str, Stored] = {}
        self.beats: list[Beat] = []
        self.enrolments: list[EnrollRequest] = []
        self.microbench: Microbench | None = None
        self.tokens = {"good-token"}
        self.credentials: set[str] = {"host-credential"}
        self.redis_url: str | None = None
        self.redis_ca_pem: str | None = None
        self.uploads = uploads
        self.lose_replies = 0  # of claims and rotations: they are taken, and the answer is lost
        self.wants_rotation = False
        self.wants_recheck = False
        self.epoch: EpochShown | None = None
        self.tunnels: tuple[str, ...] = ()
        self.observe: tuple[str, ...] = ()  # jobs of somebody else
        self.echoed: list[int] = []  # bytes that hosts asked back
        self.digests: set[str] = set()  # of secrets that hosts made themselves
        self.caller = ""
        self.is_away = False
        self.is_newer = False  # every object of a reply has a field that no host knows
        self.busy_enrolments = 0  # so many are told to wait
        self.retry_after_seconds = 1
        self.data: dict[str, bytes] = {}  # training data by the dataset's id
        self.lock = threading.Lock()
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.url = f"http://127.0.0.1:{self._http.server_port}"

    def __enter__(self) -> "Acceptor":
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()

    def want(
        self,
        attempt_id: str,
        spec: JobSpec | None = None,
        max_duration_seconds: float | None = None,
    ) -> Stored:
        stored = Stored(attempt_id, spec or BenchmarkSpec(model=DemoModel()), max_duration_seconds)
        self.attempts[attempt_id] = stored
        return stored

    def order_stop(self, attempt_id: str, grace_seconds: float = 1.0) -> None:
        self.attempts[attempt_id].stop = StopOrder(
            attempt_id=attempt_id, reason=Reason.STOPPED_BY_USER, grace_seconds=grace_seconds
        )

    # One method per call, each returning a status and a reply

    def enroll(self, request: EnrollRequest) -> tuple[int, object]:
        if self.busy_enrolments:
            self.busy_enrolments -= 1
            return 429, {"detail": "too many at once."}
        if request.token not in self.tokens:
            return 401, {"detail": "the token is unknown, used or older than an hour"}
        self.tokens.discard(request.token)
        self.enrolments.append(request)
        credential = secrets.token_hex(8)
        self.credentials.add(credential)
        return 200, EnrollReply(
            host_id=request.host_id or "h1",
            name=request.name or request.facts.hostname,
            credential=credential,
            command_key="command-key",
            redis_url=self.redis_url,
            redis_secret="redis-secret" if self.redis_url else None,
            redis_ca_pem=self.redis_ca_pem,
            server_time_ms=0,
            beat_seconds=0.2,
        )

    def beat(self, beat: Beat) -> tuple[int, object]:
        self.beats.append(beat)
        self.microbench = beat.microbench or self.microbench
        self.wants_recheck = self.wants_recheck and beat.facts is None
        running = {status.attempt_id for status in beat.attempts if status.phase != "exited"}
        stored = self.attempts
        return 200, BeatReply(
            server_time_ms=0,
            wanted=tuple(
                WantedAttempt(attempt_id=key, fence=each.fence)
                for key, each in stored.items()
                if not each.claim_id
            ),
            stop=tuple(each.stop for key, each in stored.items() if each.stop and key in running),
            acked={key: len(each.events) for key, each in stored.items()},
            forget=tuple(
                status.attempt_id
                for status in beat.attempts
                if (each := stored.get(status.attempt_id)) and each.has_exited
            ),
            run_microbench=self.microbench is None,
            rotate=self.wants_rotation,
            recheck=self.wants_recheck,
            epoch=self.epoch,
            tunnels=self.tunnels,
            observe=self.observe,
        )

    def rotate(self, request: RotateRequest) -> tuple[int, object]:
        self.credentials.discard(self.caller)
        self.digests = {request.credential_hash}
        self.wants_rotation = False
        if self.lose_replies:
            self.lose_replies -= 1
            return 503, {"detail": "the reply was lost"}
        return 200, RotateReply(command_key="fresh-key", redis_url=None, has_redis_user=False)

    def knows(self, credential: str) -> bool:
        digest = hashlib.sha256(credential.encode()).hexdigest()
        return credential in self.credentials or digest in self.digests

    def echo(self, num_bytes: int) -> bytes:
        self.echoed.append(num_bytes)
        return b"x" * num_bytes

    def claim(self, attempt_id: str, request: ClaimRequest) -> tuple[int, object]:
        stored = self.attempts.get(attempt_id)
        if stored is None or stored.fence != request.fence:
            return 409, {"detail": "no such attempt with this fence"}
        if stored.claim_id not in ("", request.claim_id):
            return 409, {"detail": "another claim has it"}
        stored.claim_id = request.claim_id
        if self.lose_replies:
            self.lose_replies -= 1
            return 503, {"detail": "the reply was lost"}
        return 200, ClaimReply(request=stored.request)

    def events(self, attempt_id: str, batch: EventBatch) -> tuple[int, object]:
        with self.lock:
            stored = self.attempts.get(attempt_id)
            if stored is None or stored.fence != batch.fence:
                return 404, {"detail": "no such attempt"}
            return 200, EventAck(attempt_id=attempt_id, acked_seq=stored.accept(batch))

    def artefact(self, path: str, offset: int | None, data: bytes) -> tuple[int, object]:
        target = self.uploads / path
        target.parent.mkdir(parents=True, exist_ok=True)
        have = target.stat().st_size if target.exists() else 0
        if offset is not None and offset == have:
            with target.open("ab") as file:
                file.write(data)
            have += len(data)
        return 200, UploadState(received_bytes=have)


MAPPINGS = {
    "acked",
    "secrets",
    "config",
    "scheduler_options",
}  # objects whose keys are data and no fields
NEWER = {"from_a_newer_server": {"value": 1}}


def of_newer_server(document: object) -> object:
    """Return a reply in which every object has one more field; a spec's is at its default."""
    if isinstance(document, list):
        return [of_newer_server(each) for each in document]
    if not isinstance(document, dict):
        return document
    grown = {
        name: value if name in MAPPINGS else of_newer_server(value)
        for name, value in document.items()
    }
    if "request" in document:
        spec = set(option_paths(grown["request"]["spec"]))
        known = set(option_paths(document["request"]["spec"]))
        grown["default_options"] = [*document["default_options"], *sorted(spec - known)]
    return grown | NEWER


def _handler(acceptor: Acceptor) -> type[BaseHTTPRequestHandler]:
    return type("Handler", (_Handler,), {"acceptor": acceptor})


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    acceptor: Acceptor

    def do_POST(self) -> None:
        body = self._body()
        if self.path.startswith("/api/v1/hosts/echo") and self._is_known():
            num_bytes = int(parse_qs(urlsplit(self.path).query)["num_bytes"][0])
            return self._send(200, self.acceptor.echo(num_bytes), "application/octet-stream")
        for pattern, kind, name in _POSTS:
            if found := re.fullmatch(pattern, self.path):
                if name != "enroll" and not self._is_known():
                    return self._answer(401, {"detail": "unknown credential"})
                call: Callable = getattr(self.acceptor, name)
                return self._answer(*call(*found.groups(), kind.model_validate_json(body)))
        return self._answer(404, {"detail": "no such address"})

    def do_PUT(self) -> None:
        self._artefact(self._body(), int(parse_qs(urlsplit(self.path).query)["offset"][0]))

    def do_GET(self) -> None:
        if found := re.fullmatch(r"/api/v1/attempts/[^/]+/data/([^/]+)", self.path):
            data = self.acceptor.data.get(found[1])
            if self.acceptor.is_away or data is None or not self._is_known():
                return self._answer(404, {"detail": "no such data"})
            return self._send(200, data, "application/octet-stream")
        return self._artefact(b"", None)

    def _artefact(self, body: bytes, offset: int | None) -> None:
        path = unquote(urlsplit(self.path).path).removeprefix("/api/v1/attempts/")
        if not self._is_known():
            return self._answer(401, {"detail": "unknown credential"})
        if self.acceptor.uploads is None:
            return self._answer(404, {"detail": "no such artefact"})
        return self._answer(*self.acceptor.artefact(path, offset, body))

    def _is_known(self) -> bool:
        sent = self.headers.get("Authorization", "").removeprefix("Bearer ")
        self.acceptor.caller = sent
        return self.acceptor.knows(sent)

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _answer(self, status: int, reply: object) -> None:
        if self.acceptor.is_away:
            status, reply = 503, {"detail": "the server is away"}
        document = reply if isinstance(reply, dict) else reply.model_dump(mode="json")
        if self.acceptor.is_newer:
            document = of_newer_server(document)
        self._send(status, json.dumps(document).encode(), "application/json")

    def _send(self, status: int, data: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Content-Type", kind)
        if status == 429:
            self.send_header("Retry-After", str(self.acceptor.retry_after_seconds))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


_POSTS: list[tuple[str, type[Message], str]] = [
    (r"/api/v1/hosts/enroll", EnrollRequest, "enroll"),
    (r"/api/v1/hosts/rotate", RotateRequest, "rotate"),
    (r"/api/v1/hosts/beat", Beat, "beat"),
    (r"/api/v1/attempts/([^/]+)/claim", ClaimRequest, "claim"),
    (r"/api/v1/attempts/([^/]+)/events", EventBatch, "events"),
]
