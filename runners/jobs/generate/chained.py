"""Generation over several hosts: stages as servers, and the links between them."""

import contextlib
import hashlib
import hmac
import json
import os
import queue
import secrets
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from transformers import PreTrainedTokenizerFast

from runners.jobs.events import EVENT_FD_VARIABLE
from runners.jobs.generate.stage_model import (
    Chain,
    EmbeddingAndHead,
    Layers,
    PassArguments,
    even_layer_ranges,
    run_stages,
)
from runners.jobs.loading import TORCH_DTYPES, load_tokenizer, pick_device
from runners.jobs.memory import tensor_bytes
from runners.jobs.model_files import opened_model
from runners.jobs.runtime import BadInputError, Job, num_threads, open_job, prepare_process
from runners.jobspec import ArtefactModel, FolderModel, GenerateSpec
from runners.jobspec.generate import StageChain
from runners.shared.messages import Gang
from runners.supervision.child import die_with

# ---------------------------------------------------------------------------
# Authenticated messages between a client and its stage servers; without pickle.
#
# A message is a JSON object and tensors in safetensors' format. Both ends have a shared key.
# From it and both ends' nonces they derive one key per direction, which signs every message with
# its sequence number: a forged, repeated or changed message closes the connection. Nothing is
# encrypted: anyone on the network path can read the hidden states.
# ---------------------------------------------------------------------------


MAGIC = b"slipway-stage-1\n"
NONCE_BYTES = 32
MAC_BYTES = hashlib.sha256().digest_size
SIZES = struct.Struct(">IQ")  # of the JSON, of the tensors
NUMBER = struct.Struct(">Q")
MAX_HEADER_BYTES = 64 * 1024
MAX_PAYLOAD_BYTES = 8 * 1024**3
GREETING_SECONDS = 30.0
PIECE_BYTES = 1024**2
# Keepalive detects a vanished host after about a minute, even without traffic.
SOCKET_OPTIONS = (
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)


class LinkClosedError(Exception):
    """The other end disconnected, did not respond in time, or failed authentication."""


class LinkMessage(NamedTuple):
    """One message."""

    order: dict[str, Any]
    tensors: dict[str, torch.Tensor]


class Link:
    """A connection whose two ends have authenticated each other."""

    def __init__(self, connection: socket.socket, own: bytes, other: bytes) -> None:
        self._socket = connection
        self._own, self._other = own, other
        self._sent = self._received = 0
        self.is_closed = False

    @classmethod
    def connect(cls, address: str, port: int, key: bytes) -> Self:
        """Connect to a listener and authenticate.

        Raises:
            LinkClosedError: nothing listens there, or the key is wrong.
        """
        try:
            connection = socket.create_connection((address, port), GREETING_SECONDS)
        except OSError as error:
            raise LinkClosedError(f"{address} port {port}: {error}") from error
        return cls._handshake(connection, key, is_dialler=True)

    @classmethod
    def accept(cls, connection: socket.socket, key: bytes) -> Self:
        """Authenticate an accepted connection.

        Raises:
            LinkClosedError: the other end has a wrong key.
        """
        return cls._handshake(connection, key, is_dialler=False)

    @classmethod
    def _handshake(cls, connection: socket.socket, key: bytes, *, is_dialler: bool) -> Self:
        """Exchange nonces, and authenticate with a first message."""
        connection.settimeout(GREETING_SECONDS)
        for level, option, value in SOCKET_OPTIONS:
            connection.setsockopt(level, option, value)
        own_nonce = secrets.token_bytes(NONCE_BYTES)
        link = cls(connection, b"", b"")
        try:
            link._send_all(MAGIC + own_nonce)
            other_nonce = link._take_nonce()
            nonces = own_nonce + other_nonce if is_dialler else other_nonce + own_nonce
            names = (b"dialler", b"listener") if is_dialler else (b"listener", b"dialler")
            link._own, link._other = (hmac.digest(key, name + nonces, "sha256") for name in names)
            link.send({"greeting": True})
            link.receive(most_bytes=0)  # an unauthenticated end cannot make us allocate memory
        except LinkClosedError:
            link.close()
            raise
        return link

    def wait_at_most(self, seconds: float | None) -> None:
        """Set the time after which a silent end counts as lost; None: never."""
        self._socket.settimeout(seconds)

    def send(
        self, order: Mapping[str, Any], tensors: Mapping[str, torch.Tensor] | None = None
    ) -> None:
        """Send one message.

        Raises:
            LinkClosedError: the other end has disconnected.
        """
        header = json.dumps(order).encode()
        contiguous = {
            name: each.detach().cpu().contiguous() for name, each in (tensors or {}).items()
        }
        payload = save(contiguous) if contiguous else b""
        signature = _signature(self._own, self._sent, header, payload)
        self._sent += 1
        self._send_all(SIZES.pack(len(header), len(payload)) + header)
        self._send_all(payload)
        self._send_all(signature)

    def receive(self, most_bytes: int = MAX_PAYLOAD_BYTES) -> LinkMessage:
        """Return the next message, with at most ``most_bytes`` of tensors.

        Raises:
            LinkClosedError: no message came, or authentication failed.
        """
        header_bytes, payload_bytes = SIZES.unpack(self._take(SIZES.size))
        if header_bytes > MAX_HEADER_BYTES or payload_bytes > most_bytes:
            raise LinkClosedError(
                f"a message of {header_bytes} + {payload_bytes} bytes is too long"
            )
        header, payload = self._take(header_bytes), self._take(payload_bytes)
        expected = _signature(self._other, self._received, header, payload)
        if not hmac.compare_digest(self._take(MAC_BYTES), expected):
            raise LinkClosedError("a message is not signed with the chain's key")
        self._received += 1
        try:
            return LinkMessage(json.loads(header), load(payload) if payload else {})
        except (ValueError, SafetensorError) as error:
            raise LinkClosedError(f"a message is not valid JSON with tensors: {error}") from error

    def close(self) -> None:
        """Close the connection, and interrupt any thread that waits on it."""
        self.is_closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _send_all(self, data: bytes) -> None:
        try:
            self._socket.sendall(data)
        except OSError as error:
            raise LinkClosedError(f"the other end is gone: {error}") from error

    def _take_nonce(self) -> bytes:
        greeting = self._take(len(MAGIC) + NONCE_BYTES)
        if not greeting.startswith(MAGIC):
            raise LinkClosedError(
                "the peer is not a stage server of this version; use one version on all hosts"
            )
        return greeting[len(MAGIC) :]

    def _take(self, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            try:
                piece = self._socket.recv(min(count - len(data), PIECE_BYTES))
            except OSError as error:
                raise LinkClosedError(f"no data: {error}") from error
            if not piece:
                raise LinkClosedError("the other end has closed the connection")
            data += piece
        return bytes(data)


def _signature(key: bytes, number: int, header: bytes, payload: bytes) -> bytes:
    sizes = SIZES.pack(len(header), len(payload))
    signed = hmac.new(key, NUMBER.pack(number) + sizes + header, hashlib.sha256)
    signed.update(payload)
    return signed.digest()


# ---------------------------------------------------------------------------
# A server of a chain: it runs decoder layers on the hidden states that the client sends.
#
# ``python -m runners.jobs.generate.chained ATTEMPT_DIR ADDRESS PORT`` connects to the client;
# the chain's key is read from stdin in hexadecimal. The client chooses the layers. After a lost
# connection the server reconnects without any layers, and the client replays.
# ---------------------------------------------------------------------------


EXIT_LOST = 4  # the client was unreachable for longer than the job allows
PAUSE_SECONDS = 0.2


class ServerPlace(NamedTuple):
    """The client's address, and the key that authenticates to it."""

    address: str
    port: int
    key: bytes


class StageServer:
    """The layers that the client of one connection has assigned."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        self._folder, self._dtype = folder, dtype
        self._held: dict[int, Layers] = {}

    def serve(self, link: Link) -> None:
        """Serve requests until the client sends the end.

        Raises:
            LinkClosedError: the connection broke.
        """
        link.wait_at_most(None)
        while True:
            message = link.receive()
            if message.order.get("order") == "end":
                return
            try:
                hidden = self._answer(message)
            except BadInputError as error:
                link.send({"refused": str(error)})
                continue
            link.send({}, {} if hidden is None else {"hidden": hidden})

    def _answer(self, message: LinkMessage) -> torch.Tensor | None:
        order, tensors = message
        request, stage = order["order"], int(order["stage"])
        if request == "take":
            which = range(int(order["first"]), int(order["end"]))
            self._held[stage] = Layers(self._folder, which, pick_device(), self._dtype)
        elif request == "forget":
            self._held[stage].forget(int(order["session"]))
        else:
            call = PassArguments(int(order["session"]), tensors["positions"], tensors.get("mask"))
            return self._held[stage].run(call, tensors["hidden"])
        return None


def serve_until_end(job: Job, place: ServerPlace) -> None:
    """Serve the client; reconnect whenever the connection breaks.

    Raises:
        LinkClosedError: the client was unreachable for longer than the job allows.
        BadInputError: this host cannot serve the model.
    """
    spec = job.spec_of(GenerateSpec)
    if not isinstance(spec.split, StageChain):
        raise BadInputError("the job requests no chain of stages")
    if not isinstance(spec.model, FolderModel | ArtefactModel):
        msg = f"stages read their layers from a model folder; source {spec.model.source} has none"
        raise BadInputError(f"{msg}; choose a model in a folder")
    folder = opened_model(spec.model, job.host_dir)
    wait_seconds = spec.parallel.start_timeout_seconds  # hosts start at different times
    deadline = time.monotonic() + wait_seconds
    while True:
        try:
            link = Link.connect(*place)
        except LinkClosedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(PAUSE_SECONDS)
            continue
        with contextlib.suppress(LinkClosedError), contextlib.closing(link):
            StageServer(folder, TORCH_DTYPES[spec.weight_dtype]).serve(link)
            return
        deadline = time.monotonic() + spec.split.replacement_timeout_seconds


def main(attempt_dir: str, address: str, port: str) -> None:
    """Run a server in a process started by the client or by a host of the chain."""
    die_with(os.getppid())
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the client stops the server
    key = bytes.fromhex(sys.stdin.readline().strip())
    prepare_process()
    job = open_job(Path(attempt_dir), "generate")
    try:
        serve_until_end(job, ServerPlace(address, int(port), key))
    except LinkClosedError as error:
        sys.stderr.write(f"a stage server ends: {error}\n")
        sys.exit(EXIT_LOST)
    except BadInputError as error:
        sys.stderr.write(f"{error.prefix}: {error}\n")
        sys.exit(1)


# ---------------------------------------------------------------------------
# Generation through a chain of fault-tolerant stage servers, on one host or several.
# ---------------------------------------------------------------------------


# The servers of a chain: the processes started on this host, and the listener for all of them.


SERVER = "runners.jobs.generate.chained"
POLL_SECONDS = 0.2


class Servers:
    """This host's server processes: restarted while the job allows, stopped with it."""

    def __init__(self, job: Job, place: ServerPlace, count: int, restarts: int) -> None:
        self._job, self._place = job, place
        self._restarts, self._count = restarts, count
        self._processes = [self._start(at) for at in range(count)]

    def restart_dead(self) -> bool:
        """Restart servers that died; return whether any is alive."""
        for at, process in enumerate(self._processes):
            if process.poll() not in (None, 0) and self._restarts:
                self._restarts -= 1
                self._processes[at] = self._start(at)
        return any(process.poll() is None for process in self._processes)

    def wait(self, seconds: float) -> bool:
        """Wait for the servers to exit, then kill the rest; return whether all exited normally."""
        deadline = time.monotonic() + seconds
        codes = []
        for process in self._processes:
            try:
                codes.append(process.wait(max(0.0, deadline - time.monotonic())))
            except subprocess.TimeoutExpired:
                process.kill()
                codes.append(process.wait())
        return not any(codes)

    @property
    def pids(self) -> list[int]:
        """Return the process ids of the latest starts."""
        return [process.pid for process in self._processes]

    def _start(self, at: int) -> "subprocess.Popen[str]":
        ours = {name: value for name, value in os.environ.items() if name != EVENT_FD_VARIABLE}
        env = ours | {"OMP_NUM_THREADS": str(max(1, num_threads() // self._count))}
        if torch.cuda.is_available():
            visible = env.get("CUDA_VISIBLE_DEVICES", "")
            names = (
                visible.split(",")
                if visible
                else [str(index) for index in range(torch.cuda.device_count())]
            )
            env["CUDA_VISIBLE_DEVICES"] = names[at % len(names)]
        where = [str(self._job.attempt_dir), self._place.address, str(self._place.port)]
        process = subprocess.Popen(
            [sys.executable, "-m", SERVER, *where],
            stdin=subprocess.PIPE,
            env=env,
            text=True,
            errors="replace",
        )
        if process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(f"{self._place.key.hex()}\n")
                process.stdin.close()
        return process


class StageListener:
    """Accepts and authenticates servers; they wait here until they get layers."""

    def __init__(self, address: str, port: int, key: bytes) -> None:
        """Start listening.

        Raises:
            BadInputError: the address cannot be bound.
        """
        self._key = key
        self._waiting: queue.SimpleQueue[Link] = queue.SimpleQueue()
        try:
            self._socket = socket.create_server((address, port))
        except OSError as error:
            msg = f"the chain cannot be met at {address} port {port}: {error.strerror}"
            raise BadInputError(f"{msg}; choose another address on the host's page") from error
        self.place = ServerPlace(address, self._socket.getsockname()[1], key)
        threading.Thread(target=self._accept, name="desk", daemon=True).start()

    def next_server(self, seconds: float) -> Link | None:
        """Return a server that waits for layers; None if none connects in time."""
        with contextlib.suppress(queue.Empty):
            return self._waiting.get(timeout=max(0.0, seconds))
        return None

    def close(self) -> None:
        """Stop all waiting servers, and stop listening."""
        while link := self.next_server(0.0):
            with contextlib.suppress(LinkClosedError):
                link.send({"order": "end"})
            link.close()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # unblocks accept()
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._greet, args=(connection,), daemon=True).start()

    def _greet(self, connection: socket.socket) -> None:
        with contextlib.suppress(LinkClosedError):
            self._waiting.put(Link.accept(connection, self._key))


LOOPBACK = "127.0.0.1"
KEY_BYTES = 32
END_SECONDS = 30.0
LOADING_SECONDS = 600.0  # a slow shared disk may take minutes per stage


class StageUnavailableError(Exception):
    """No server is available for some layers."""


@dataclass
class ChainStatistics:
    """Statistics of server failures and traffic."""

    lost: int = 0
    replayed_positions: int = 0
    replay_seconds: float = 0.0
    sent_bytes: int = 0


@dataclass
class ReplayInputs:
    """The inputs of a stage in one session, kept for a replay."""

    hidden: list[torch.Tensor] = field(default_factory=list)
    positions: list[torch.Tensor] = field(default_factory=list)
    mask: torch.Tensor | None = None

    def add(self, call: PassArguments, hidden: torch.Tensor) -> None:
        """Store the input of one pass."""
        self.hidden.append(hidden.cpu())
        self.positions.append(call.positions.cpu())
        self.mask = None if call.mask is None else call.mask.cpu()


FindServer = Callable[[], Link]


class RemoteStage:
    """Layers that run on a server."""

    def __init__(
        self,
        number: int,
        which: range,
        find: FindServer,
        options: StageChain,
        counts: ChainStatistics,
    ) -> None:
        self._number, self._which, self._find = number, which, find
        self._options, self._counts = options, counts
        self._past: dict[int, ReplayInputs] = {}
        self.link: Link | None = None

    def run(self, call: PassArguments, hidden: torch.Tensor) -> torch.Tensor:
        """Return the layers' output for ``hidden``; replace the server if it fails.

        Raises:
            StageUnavailableError: no server is left.
        """
        self._past.setdefault(call.session, ReplayInputs()).add(call, hidden)
        while True:
            try:
                link = self.link or self._attach(but_last_of=call.session)
                return self._forward(link, call.session, hidden, call.positions, call.mask)
            except LinkClosedError:
                self.lose()

    def forget(self, session: int) -> None:
        """Drop a session, here and on the server."""
        self._past.pop(session, None)
        if self.link is not None:
            try:
                self._exchange(self.link, {"order": "forget", "session": session})
            except LinkClosedError:
                self.lose()

    def attach(self) -> None:
        """Assign the layers to a server.

        Raises:
            StageUnavailableError: no server is available.
        """
        while self.link is None:
            try:
                self._attach(but_last_of=None)
            except LinkClosedError:
                self.lose()

    def lose(self) -> None:
        """Disconnect from the server."""
        if self.link is not None:
            self.link.close()
        self.link = None
        self._counts.lost += 1

    def _attach(self, *, but_last_of: int | None) -> Link:
        """Find a server, assign the layers to it, and replay their inputs."""
        link = self._find()
        link.wait_at_most(LOADING_SECONDS)
        first, end = self._which.start, self._which.stop
        self.link = link
        self._exchange(link, {"order": "take", "first": first, "end": end})
        link.wait_at_most(self._options.silence_seconds)
        began = time.monotonic()
        for session, past in self._past.items():
            count = len(past.hidden) - (session == but_last_of)
            if count:
                hidden = torch.cat(past.hidden[:count], dim=1)
                length = hidden.shape[1]
                mask = None if past.mask is None else past.mask[:, :length]
                self._forward(
                    link, session, hidden, torch.cat(past.positions[:count], dim=1), mask
                )
                self._counts.replayed_positions += length * len(hidden)
        self._counts.replay_seconds += time.monotonic() - began
        return link

    def _forward(
        self,
        link: Link,
        session: int,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        tensors = {"hidden": hidden, "positions": positions}
        if mask is not None:
            tensors["mask"] = mask
        return self._exchange(link, {"order": "run", "session": session}, tensors)["hidden"]

    def _exchange(
        self, link: Link, order: dict[str, object], tensors: dict[str, torch.Tensor] | None = None
    ) -> dict[str, torch.Tensor]:
        link.send({**order, "stage": self._number}, tensors)
        self._counts.sent_bytes += sum(map(tensor_bytes, (tensors or {}).values()))
        reply = link.receive()
        if refused := reply.order.get("refused"):
            raise BadInputError(f"stage {self._number} of the chain refuses: {refused}")
        return reply.tensors


class ServerChain(Chain):
    """The client of a chain: it runs the ends of the model and assigns the layers."""

    def __init__(self, job: Job, spec: GenerateSpec, options: StageChain) -> None:
        """Wait for the servers and assign the layers to them.

        Raises:
            BadInputError: the model cannot be divided so.
            StageUnavailableError: too few servers connected in time.
        """
        super().__init__()
        if not isinstance(spec.model, FolderModel | ArtefactModel):
            msg = f"stages read their layers from a model folder; source {spec.model.source}"
            raise BadInputError(f"{msg} has none; choose a model in a folder")
        folder, self.device = opened_model(spec.model, job.host_dir), pick_device()
        ends = EmbeddingAndHead(folder, self.device, TORCH_DTYPES[spec.weight_dtype])
        runs = even_layer_ranges(ends.model.config.num_hidden_layers, options.stages)
        self._ends, self.model = ends, ends.model
        self.tokenizer: PreTrainedTokenizerFast | None = load_tokenizer(folder)
        self.weight_bytes = sum(map(tensor_bytes, ends.model.parameters()))
        self.counts, self._options = ChainStatistics(), options
        gang = job.request.gang
        address, port = (gang.master_address, gang.master_port) if gang else (LOOPBACK, 0)
        self._listener = StageListener(address, port, key_of(gang))
        num_local = gang.num_processes if gang else options.stages + options.spares
        self.servers = Servers(job, self._listener.place, num_local, options.restarts)
        self.stages = [
            RemoteStage(number, which, self._find, options, self.counts)
            for number, which in enumerate(runs)
        ]
        self._is_on_one_host = gang is None
        self._wait_seconds = spec.parallel.start_timeout_seconds
        hosts = gang.num_nodes if gang else 1
        self.where = f"a chain of {options.stages} stages over {hosts} hosts; the client's figures"
        try:
            for stage in self.stages:
                stage.attach()
        except (BadInputError, StageUnavailableError):
            self._stop_servers(0.0)
            raise
        self._wait_seconds = options.replacement_timeout_seconds

    def next_tokens(self, call: PassArguments, ids: torch.Tensor) -> torch.Tensor:
        """Run tokens through the chain and return the next one of each row."""
        self.servers.restart_dead()
        return self._ends.choose(run_stages(self.stages, call, self._ends.embed(ids)))

    def forget(self, session: int) -> None:
        """Drop a session on every server."""
        for stage in self.stages:
            stage.forget(session)

    @property
    def cache_bytes(self) -> int:
        """Return 0: the servers hold the KV cache."""
        return 0

    def finish(self, *, is_stopped: bool) -> None:
        """Stop all servers."""
        del is_stopped  # no difference for the servers
        self._stop_servers(END_SECONDS)

    def _stop_servers(self, seconds: float) -> None:
        """Stop the servers; kill those of this host that have not exited in time."""
        for link in {stage.link for stage in self.stages if stage.link}:
            with contextlib.suppress(LinkClosedError):
                link.send({"order": "end"})
            link.close()
        self._listener.close()
        self.servers.wait(seconds)

    def result_metrics(self) -> dict[str, float]:
        """Return the statistics of server failures and traffic."""
        return {
            "servers_lost": float(self.counts.lost),
            "replayed_positions": float(self.counts.replayed_positions),
            "replay_seconds": self.counts.replay_seconds,
            "hidden_bytes_sent": float(self.counts.sent_bytes),
        }

    def _find(self) -> Link:
        """Return a server for some layers: a waiting or new one, else one with other layers."""
        deadline = time.monotonic() + self._wait_seconds
        while time.monotonic() < deadline:
            is_any_alive = self.servers.restart_dead()
            if link := self._listener.next_server(POLL_SECONDS):
                return link
            if self._is_on_one_host and not is_any_alive:
                break
        for stage in self.stages:
            if stage.link is not None and not stage.link.is_closed:
                return stage.link
        raise StageUnavailableError(
            f"no server connected within {self._wait_seconds:g} s, and no connected server is "
            "available for these layers"
        )


def key_of(gang: Gang | None) -> bytes:
    """Return the chain's key: from the control server for several hosts, else a random one."""
    if gang is None:
        return secrets.token_bytes(KEY_BYTES)
    if not gang.key:
        raise BadInputError("the site sent no key for this chain; update it, and try again")
    return bytes.fromhex(gang.key)


def run_chain(
    job: Job,
    spec: GenerateSpec,
    options: StageChain,
    run_client: Callable[[Callable[[], Chain]], bool],
) -> bool:
    """Run a chain's client or servers; return whether it was stopped."""
    gang = job.request.gang
    if gang is not None and gang.node_rank > 0:
        return run_chain_servers(job, options, gang)
    try:
        return run_client(lambda: ServerChain(job, spec, options))
    except StageUnavailableError as error:
        sys.exit(f"RANK_LOST: {error}")


def run_chain_servers(job: Job, options: StageChain, gang: Gang) -> bool:
    """Run this host's servers of a chain until the client stops them."""
    place = ServerPlace(gang.master_address, gang.master_port, key_of(gang))
    servers = Servers(job, place, gang.num_processes, options.restarts)
    while servers.restart_dead():
        if job.stop_requested.wait(POLL_SECONDS):
            servers.wait(END_SECONDS)
            return True
    if not servers.wait(0.0):
        sys.exit("RANK_LOST: the servers of this host ended before the client sent them home")
    return False


if __name__ == "__main__":
    main(*sys.argv[1:])
