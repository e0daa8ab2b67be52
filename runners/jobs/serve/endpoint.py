"""The life of one endpoint, from start to end: stopped, idle for too long, or failed.

HTTP server, keys, metrics and idle stop are the same for every engine, also for those in
environments without torch.
"""

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Generator
from typing import Any, Literal, NamedTuple, Protocol

import uvicorn

from runners.jobs.energy import Work
from runners.jobs.runtime import (
    BadInputError,
    Job,
    checkpoint_on_sigterm,
    end_by_sigterm,
    num_threads,
)
from runners.jobs.serve.contract import (
    EngineProcessError,
    ForwardingModel,
    ServingModel,
)
from runners.jobs.serve.figures import EndpointMetrics
from runners.jobs.serve.openai_server import OpenAIServer, ServiceState
from runners.jobspec import ServeSpec
from runners.shared.messages import MAX_COMMAND_CHARACTERS, EndpointBody
from runners.shared.timing import ENDPOINT_DRAIN_SECONDS, ENDPOINT_LAST_WORDS_SECONDS

LOADING = "Loading the model"
RESTARTING = "Starting the engine again"
SERVING = "Serving"
DRAINING = "Finishing open requests"
TICK_SECONDS = 0.1
FIGURES_SECONDS = 1.0
QUIET_FIGURES_SECONDS = 15.0  # while no request arrives
HEAD_SECONDS = 30.0  # for the head of a request; the server bounds the body's time itself
STALL_SECONDS = 600.0  # a step that takes longer counts as a hung device
MAX_RESTARTS = 3  # of an engine in its own process, within
RESTART_WINDOW_SECONDS = 600.0

Ending = Literal["stopped", "idle", "failed"]


class EngineStalledError(Exception):
    """One forward pass did not return in time."""


class EngineRestartsError(BadInputError):
    """The engine process exited more often than it is restarted."""

    prefix = "ENGINE_LOST"


class PeakUsage(NamedTuple):
    """The peak memory of an endpoint and its device."""

    peak_memory_bytes: int
    how: str  # how it was measured
    device: str


class Backend(Protocol):
    """An engine implementation that can serve a model."""

    def load(
        self, job: Job, spec: ServeSpec, figures: EndpointMetrics
    ) -> ServingModel | ForwardingModel:
        """Load the model and return it ready for requests.

        Raises:
            BadInputError: the model cannot be served, or not with these settings.
        """

    def peak_usage(self) -> PeakUsage:
        """Return the peak memory so far."""

    def command_line(self) -> str:
        """Return the command line of the engine that runs; "" in the job's own process."""

    def notes(self, spec: ServeSpec) -> dict[str, str]:
        """Return notes on how the figures were measured, beyond those of every endpoint."""


def serve(job: Job, backend: Backend) -> None:
    """Run one endpoint attempt.

    Raises:
        BadInputError: the settings cannot be served, or the engine failed for good.
    """
    checkpoint_on_sigterm(job)
    spec = job.spec_of(ServeSpec)
    with bind_socket(spec) as listener:
        endpoint = Endpoint(job, spec, listener, backend)
        ending = asyncio.run(endpoint.run())
    if isinstance(endpoint.fault, EngineProcessError):
        raise EngineRestartsError(str(endpoint.fault)) from endpoint.fault
    if endpoint.fault is not None:
        raise endpoint.fault
    endpoint.publish(ending)
    if ending == "stopped":
        end_by_sigterm(job)


def bind_socket(spec: ServeSpec) -> socket.socket:
    """Return a bound socket; requests that arrive while the model loads get a 503 response.

    Raises:
        BadInputError: the port is in use, or the address is not one of this host.
    """
    family = socket.AF_INET6 if ":" in spec.host else socket.AF_INET
    # IPPROTO_TCP makes asyncio set TCP_NODELAY, so each token is sent at once; with Nagle's
    # algorithm the first ones wait for the client's delayed acknowledgement, 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((spec.host, spec.port))
    except OSError as error:
        listener.close()
        msg = (
            f"cannot listen on {spec.host} port {spec.port}: {error.strerror}; choose another "
            "port, or 0 for a free one"
        )
        raise BadInputError(msg) from error
    return listener


class QuietServer(uvicorn.Server):
    """uvicorn without signal handlers: the job installs its own."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leave signal handling to the job."""
        yield


class HeadDeadline:
    """Closes connections that send no whole request head; uvicorn itself waits for ever."""

    def __init__(self, server: uvicorn.Server) -> None:
        self._server = server
        self._since: dict[Any, float] = {}  # by connection

    def close_late(self) -> None:
        """Close connections that have been sending a head for ``HEAD_SECONDS``."""
        now, before = time.monotonic(), self._since
        self._since = {
            each: before.get(each, now)
            for each in self._server.server_state.connections
            if self._is_reading_head(each)
        }
        for each, since in self._since.items():
            if now - since >= HEAD_SECONDS:
                each.transport.close()

    @staticmethod
    def _is_reading_head(connection: Any) -> bool:  # noqa: ANN401 - of uvicorn's two protocols
        """Return whether no request is being answered, and uvicorn has no timer of its own."""
        is_free = connection.cycle is None or connection.cycle.response_complete
        return is_free and connection.timeout_keep_alive_task is None


class Endpoint:
    """The HTTP server in this thread, the engine in another, and the reports on both."""

    def __init__(
        self, job: Job, spec: ServeSpec, listener: socket.socket, backend: Backend
    ) -> None:
        self.job = job
        self.spec = spec
        self.listener = listener
        self.service = ServiceState(spec, job.emitter.log)
        self.fault: BaseException | None = None
        self.backend = backend
        self._engine = threading.Thread(target=self._load_and_run, name="engine", daemon=True)
        self._is_announced = False
        self._figures_at = time.monotonic()

    async def run(self) -> Ending:
        """Serve until the endpoint has to end; return the reason."""
        config = uvicorn.Config(
            OpenAIServer(self.service),
            lifespan="off",
            ws="none",
            log_config=None,
            access_log=False,
            timeout_keep_alive=30,
            timeout_graceful_shutdown=ENDPOINT_LAST_WORDS_SECONDS,
        )
        server = QuietServer(config)
        heads = HeadDeadline(server)
        serving = asyncio.ensure_future(server.serve(sockets=[self.listener]))
        self.job.emitter.phase(LOADING)
        self._engine.start()
        try:
            ending = await self._watch(serving, heads)
            if ending != "failed":
                await self._drain()
        finally:
            server.should_exit = True
            await serving
        return ending

    def _load_and_run(self) -> None:
        """Load the model and run the engine until it is closed; store an error in ``fault``."""
        exit_times: list[float] = []
        try:
            while not self._run_engine(exit_times):
                self.job.emitter.phase(RESTARTING)
        except BaseException as error:  # noqa: BLE001 - the main thread raises it
            self.fault = error
            self.service.state = "failed"

    def _run_engine(self, exit_times: list[float]) -> bool:
        """Run the engine until it is closed; return False if it exited and may be restarted.

        Raises:
            EngineProcessError: the engine exited too often.
        """
        try:
            ready = self.backend.load(self.job, self.spec, self.service.figures)
            self.service.open(ready)
            if exit_times:
                self.job.emitter.phase(SERVING)
            ready.engine.run()
        except EngineProcessError as error:
            self.service.refuse_requests()
            now = time.monotonic()
            exit_times[:] = [at for at in exit_times if now - at < RESTART_WINDOW_SECONDS] + [now]
            if len(exit_times) > MAX_RESTARTS or not self._is_announced:
                raise
            self.job.emitter.log(f"{error}; it is started again")
            return False
        return True

    async def _watch(self, serving: asyncio.Future[None], heads: "HeadDeadline") -> Ending:
        while not serving.done():
            await asyncio.sleep(TICK_SECONDS)
            heads.close_late()
            if self.fault is not None:
                return "failed"
            if self.job.stop_requested.is_set():
                return "stopped"
            if self.service.ready is not None:
                await self._monitor()
                if self._is_idle_too_long():
                    return "idle"
        self.fault = serving.exception() or RuntimeError("the HTTP server ended by itself")
        return "failed"

    async def _monitor(self) -> None:
        if not self._is_announced:
            await self._announce()
        elapsed = time.monotonic() - self._figures_at
        is_quiet = self.service.loaded is None or self.service.loaded.engine.is_idle
        is_recent = time.monotonic() - self.service.asked_at < 2 * FIGURES_SECONDS
        interval = QUIET_FIGURES_SECONDS if is_quiet and not is_recent else FIGURES_SECONDS
        if elapsed >= interval:
            self._report_since(elapsed)
        engine = self.service.loaded.engine if self.service.loaded else None
        step_began = engine.step_began_at if engine else None
        if step_began is not None and time.perf_counter() - step_began > STALL_SECONDS:
            self.service.state = "failed"
            self.fault = EngineStalledError(f"a pass did not come back in {STALL_SECONDS:g} s")

    async def _announce(self) -> None:
        """Check the endpoint over the network, then report its address."""
        host, port = self.listener.getsockname()[:2]
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(b"GET /health HTTP/1.0\r\n\r\n")
        status = await reader.readline()
        writer.close()
        if b" 200 " not in status:
            raise RuntimeError(f"the endpoint does not answer its own health check: {status!r}")
        self._is_announced = True
        has_keys = bool(self.spec.key_hashes)
        loaded = self.service.loaded
        body = EndpointBody(
            host=host,
            port=port,
            model=self.spec.served_name,
            has_keys=has_keys,
            command=self.backend.command_line()[:MAX_COMMAND_CHARACTERS],
            has_chat_template=bool(loaded.template) if loaded is not None else None,
        )
        self.job.emitter.endpoint(body)
        self.job.emitter.phase(SERVING)
        self.job.emitter.log(f"answering on http://{host}:{port}/v1 as {self.spec.served_name}")

    def _report_since(self, seconds: float) -> None:
        self._figures_at = time.monotonic()
        self.job.emitter.metric(self.service.figures.since_last(seconds))

    def _is_idle_too_long(self) -> bool:
        limit = self.spec.idle_stop_seconds
        loaded = self.service.loaded
        if limit is None or loaded is None:
            return False
        if not loaded.engine.is_idle:
            self.service.touch()
        return time.monotonic() - self.service.asked_at >= limit

    async def _drain(self) -> None:
        """Refuse new requests, finish the running ones, and stop the engine."""
        self.service.state = "draining"
        self.job.emitter.phase(DRAINING)
        loaded = self.service.loaded
        if loaded is None:
            return
        await asyncio.to_thread(loaded.engine.wait_until_idle, ENDPOINT_DRAIN_SECONDS)
        loaded.engine.close()
        await asyncio.to_thread(self._engine.join, ENDPOINT_LAST_WORDS_SECONDS)

    def publish(self, ending: Ending) -> None:
        """Report the figures since the last report, and those of the whole run."""
        self._report_since(time.monotonic() - self._figures_at)
        took = self.backend.peak_usage()
        reasons = {
            "stopped": "stopped by request",
            "idle": f"idle for {self.spec.idle_stop_seconds or 0:g} s",
        }
        notes = {"ended": reasons.get(ending, ending), "peak_memory_bytes": took.how}
        notes |= {"device": took.device, "threads": str(num_threads())}
        notes |= self.backend.notes(self.spec)
        measured = self.service.figures.result_metrics()
        peak = float(took.peak_memory_bytes)
        work = Work((SERVING, DRAINING), measured["output_tokens"])
        self.job.emitter.result({**measured, "peak_memory_bytes": peak}, notes, work)
