"""One endpoint from its start to its end: told to stop, asked by nobody, or by a fault.

Whatever writes the answers, the door, the keys, the figures and the idle stop are the same.
"""

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Generator
from typing import Literal, NamedTuple, Protocol

import uvicorn

from runners.jobs.energy import Work
from runners.jobs.runtime import (
    BadInputError,
    Job,
    checkpoint_on_sigterm,
    end_by_sigterm,
    num_threads,
)
from runners.jobs.serve.contract import EngineLostError, Ready, Relay
from runners.jobs.serve.door import Door
from runners.jobs.serve.figures import Figures
from runners.jobs.serve.service import Service
from runners.jobspec import ServeSpec
from runners.messages import EndpointBody
from runners.timing import scaled

LOADING = "Loading the model"
RESTARTING = "Starting the engine again"
SERVING = "Serving"
DRAINING = "Finishing what was asked"
TICK_SECONDS = 0.1
FIGURES_SECONDS = 1.0
QUIET_FIGURES_SECONDS = 15.0  # while nobody asks
DRAIN_SECONDS = scaled(8.0, least=0.3)  # within the grace of a stop
LAST_WORDS_SECONDS = 2  # so long clients may take to hear of an error
STALL_SECONDS = 600.0  # one pass takes no longer, or its device hangs
MOST_RESTARTS = 3  # of an engine that is a process of its own, within
RESTART_WINDOW_SECONDS = 600.0

Ending = Literal["stopped", "idle", "failed"]


class EngineStalledError(Exception):
    """One forward pass did not come back."""


class LostError(BadInputError):
    """The engine ended more often than it is started again."""

    prefix = "ENGINE_LOST"


class Took(NamedTuple):
    """What an endpoint took of its host."""

    peak_memory_bytes: int
    how: str  # it was measured
    device: str


class Backend(Protocol):
    """One way to write answers."""

    def load(self, job: Job, spec: ServeSpec, figures: Figures) -> Ready | Relay:
        """Return the model, ready to be asked.

        Raises:
            BadInputError: it cannot be served, or not as asked.
        """

    def took(self) -> Took:
        """Return what it took of the host so far."""

    def notes(self, spec: ServeSpec) -> dict[str, str]:
        """Return how the figures came about, beside what every endpoint says."""


def serve(job: Job, backend: Backend) -> None:
    """Run one endpoint attempt.

    Raises:
        BadInputError: the model cannot be served as asked, or the engine was lost for good.
    """
    checkpoint_on_sigterm(job)
    spec = job.spec_of(ServeSpec)
    with listening(spec) as door:
        endpoint = Endpoint(job, spec, door, backend)
        ending = asyncio.run(endpoint.run())
    if isinstance(endpoint.fault, EngineLostError):
        raise LostError(str(endpoint.fault)) from endpoint.fault
    if endpoint.fault is not None:
        raise endpoint.fault
    endpoint.publish(ending)
    if ending == "stopped":
        end_by_sigterm(job)


def listening(spec: ServeSpec) -> socket.socket:
    """Return a bound socket: what asks too early hears that the model is loading.

    Raises:
        BadInputError: somebody else has the port, or the address is not ours.
    """
    family = socket.AF_INET6 if ":" in spec.host else socket.AF_INET
    # Named as TCP, for asyncio to send each token at once: else Nagle's rule keeps the first ones
    # back until the client's delayed acknowledgement, 40 ms later.
    found = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((spec.host, spec.port))
    except OSError as error:
        found.close()
        msg = (
            f"cannot listen on {spec.host} port {spec.port}: {error.strerror}; choose another "
            "port, or 0 for a free one"
        )
        raise BadInputError(msg) from error
    return found


class QuietServer(uvicorn.Server):
    """uvicorn without handlers of its own: the job's own say when it ends."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leave the signals to the job."""
        yield


class Endpoint:
    """The server in this thread, the engine in another, and what is told of both."""

    def __init__(self, job: Job, spec: ServeSpec, door: socket.socket, backend: Backend) -> None:
        self.job = job
        self.spec = spec
        self.door = door
        self.service = Service(spec)
        self.fault: BaseException | None = None
        self.backend = backend
        self._engine = threading.Thread(target=self._work, name="engine", daemon=True)
        self._is_announced = False
        self._figures_at = time.monotonic()

    async def run(self) -> Ending:
        """Serve until there is a reason to end, and return it."""
        config = uvicorn.Config(
            Door(self.service),
            lifespan="off",
            ws="none",
            log_config=None,
            access_log=False,
            timeout_keep_alive=30,
            timeout_graceful_shutdown=LAST_WORDS_SECONDS,
        )
        server = QuietServer(config)
        serving = asyncio.ensure_future(server.serve(sockets=[self.door]))
        self.job.emitter.phase(LOADING)
        self._engine.start()
        try:
            ending = await self._watch(serving)
            if ending != "failed":
                await self._drain()
        finally:
            server.should_exit = True
            await serving
        return ending

    def _work(self) -> None:
        """Load the model and answer until the engine is closed; keep what went wrong."""
        lost: list[float] = []
        try:
            while not self._write(lost):
                self.job.emitter.phase(RESTARTING)
        except BaseException as error:  # noqa: BLE001 - the main thread raises it
            self.fault = error
            self.service.state = "failed"

    def _write(self, lost: list[float]) -> bool:
        """Answer until the engine is closed; False when it got lost, but not too often.

        Raises:
            EngineLostError: it got lost again and again.
        """
        try:
            ready = self.backend.load(self.job, self.spec, self.service.figures)
            self.service.open(ready)
            if lost:
                self.job.emitter.phase(SERVING)
            ready.engine.run()
        except EngineLostError as error:
            self.service.lose()
            now = time.monotonic()
            lost[:] = [at for at in lost if now - at < RESTART_WINDOW_SECONDS] + [now]
            if len(lost) > MOST_RESTARTS or not self._is_announced:
                raise
            self.job.emitter.say(f"{error}; it is started again")
            return False
        return True

    async def _watch(self, serving: asyncio.Future[None]) -> Ending:
        while not serving.done():
            await asyncio.sleep(TICK_SECONDS)
            if self.fault is not None:
                return "failed"
            if self.job.stop_requested.is_set():
                return "stopped"
            if self.service.ready is not None:
                await self._look_after()
                if self._is_forgotten():
                    return "idle"
        self.fault = serving.exception() or RuntimeError("the HTTP server ended by itself")
        return "failed"

    async def _look_after(self) -> None:
        if not self._is_announced:
            await self._announce()
        self._tell_figures()
        engine = self.service.loaded.engine if self.service.loaded else None
        began = engine.step_began_at if engine else None
        if began is not None and time.perf_counter() - began > STALL_SECONDS:
            self.service.state = "failed"
            self.fault = EngineStalledError(f"a pass did not come back in {STALL_SECONDS:g} s")

    async def _announce(self) -> None:
        """Ask the endpoint itself over the network, and tell its address when it answers."""
        host, port = self.door.getsockname()[:2]
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(b"GET /health HTTP/1.0\r\n\r\n")
        status = await reader.readline()
        writer.close()
        if b" 200 " not in status:
            raise RuntimeError(f"the endpoint does not answer its own health check: {status!r}")
        self._is_announced = True
        has_keys = bool(self.spec.key_hashes)
        body = EndpointBody(host=host, port=port, model=self.spec.served_name, has_keys=has_keys)
        self.job.emitter.endpoint(body)
        self.job.emitter.phase(SERVING)
        self.job.emitter.say(f"answering on http://{host}:{port}/v1 as {self.spec.served_name}")

    def _tell_figures(self) -> None:
        since = time.monotonic() - self._figures_at
        is_quiet = self.service.loaded is None or self.service.loaded.engine.is_idle
        is_recent = time.monotonic() - self.service.asked_at < 2 * FIGURES_SECONDS
        due = QUIET_FIGURES_SECONDS if is_quiet and not is_recent else FIGURES_SECONDS
        if since >= due:
            self._tell_since(since)

    def _tell_since(self, seconds: float) -> None:
        self._figures_at = time.monotonic()
        self.job.emitter.metric(self.service.figures.since_last(seconds))

    def _is_forgotten(self) -> bool:
        limit = self.spec.idle_stop_seconds
        loaded = self.service.loaded
        if limit is None or loaded is None:
            return False
        if not loaded.engine.is_idle:
            self.service.touch()
        return time.monotonic() - self.service.asked_at >= limit

    async def _drain(self) -> None:
        """Take nothing new, finish what was asked, and let the engine end."""
        self.service.state = "draining"
        self.job.emitter.phase(DRAINING)
        loaded = self.service.loaded
        if loaded is None:
            return
        await asyncio.to_thread(loaded.engine.wait_until_idle, DRAIN_SECONDS)
        loaded.engine.close()
        await asyncio.to_thread(self._engine.join, LAST_WORDS_SECONDS)

    def publish(self, ending: Ending) -> None:
        """Leave the figures since they were told last, and those of the whole life."""
        self._tell_since(time.monotonic() - self._figures_at)
        took = self.backend.took()
        why = {
            "stopped": "it was told to stop",
            "idle": f"idle: nobody asked for {self.spec.idle_stop_seconds or 0:g} s",
        }
        notes = {"ended": why.get(ending, ending), "peak_memory_bytes": took.how}
        notes |= {"device": took.device, "threads": str(num_threads())}
        notes |= self.backend.notes(self.spec)
        measured = self.service.figures.measured()
        peak = float(took.peak_memory_bytes)
        work = Work((SERVING, DRAINING), measured["output_tokens"])
        self.job.emitter.result({**measured, "peak_memory_bytes": peak}, notes, work)
