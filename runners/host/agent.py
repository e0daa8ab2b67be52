"""The host agent: it sends heartbeats, carries out the replies and manages the attempts.

All its state is on disk. It may be killed at any moment: supervisors and jobs run on
without it, and the next agent resumes from the files.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import psutil

from runners.environments.builder import Keeper
from runners.host import enrolment, inventory
from runners.host.bench import MicrobenchRunner, command_for
from runners.host.companions import TunnelSupervisor
from runners.host.enrolment import EpochMemory
from runners.host.files import JobFiles
from runners.host.hub_cache import HubCache
from runners.host.model_copies import ModelCopies
from runners.host.observed_jobs import ObservedJobs
from runners.host.reconcile import Reconciler, Render
from runners.host.shipping import (
    RedisStream,
    RefusedError,
    RepeatingThread,
    ServerClient,
    ServerError,
    Shipping,
    Uploads,
    measure_network,
)
from runners.host.wake import WakeListener
from runners.launchers import launch
from runners.launchers.attempts import Verdict
from runners.shared.config import Credential, HostConfigError, HostDir
from runners.shared.facts import Microbench, NetworkMeasurement
from runners.shared.messages import Beat, BeatReply
from runners.shared.timing import (
    LIVE_BEAT_SECONDS,
    LOCK_PROBE_SECONDS,
    REFUSED_BEAT_SECONDS,
    scale_duration,
)
from runners.supervision import child, procfs

FACTS_SECONDS = 600.0  # period of the inventory report, which includes GPU error counts
POLL_SECONDS = scale_duration(0.5, least=0.1)

log = logging.getLogger(__name__)


class Companion(Protocol):
    """A child process that runs as long as the agent, such as the doorbell's Celery worker."""

    def keep_running(self) -> None:
        """Start the process, or restart it if it died."""

    def stop(self) -> None:
        """Stop the process."""


class AlreadyRunningError(Exception):
    """Another agent already runs on this host's folder."""


class Agent:
    """The main loop of one host: it reconciles attempts on disk with the server's orders."""

    def __init__(
        self,
        host_dir: HostDir,
        credential: Credential,
        *,
        render: Render = launch.render_argv,
        bench_command: Sequence[str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        host_dir.make()
        config = host_dir.config()
        self.client = ServerClient(credential.server, credential.credential)
        self.reconciler = Reconciler(
            host_dir, config, self.client, boot_id=procfs.boot_id(), render=render
        )
        self._epoch = EpochMemory(host_dir.path)
        self.environments = Keeper(host_dir)
        self.files = JobFiles(host_dir)
        self._files_loop = RepeatingThread("files", self.files.step)
        self.cache = HubCache(host_dir)
        self._cache_loop = RepeatingThread("cache", self.cache.step)
        self.copies = ModelCopies(host_dir, self.client, credential.credential)
        self._copies_loop = RepeatingThread("copies", self.copies.step)
        self.observed = ObservedJobs(config)
        self._observed_loop = RepeatingThread("observed", self.observed.step)
        self._credential = credential
        self._stream = _event_stream(host_dir, credential)
        self._companion: Companion | None = None
        self.tunnel = TunnelSupervisor(host_dir)
        self.shipping = Shipping(host_dir, self.client, self._stream)
        self._shipping_loop = RepeatingThread("shipping", self.shipping.step)
        self.uploads = Uploads(host_dir, self.client, config)
        self.bench = MicrobenchRunner(host_dir.path, bench_command or command_for(config))
        self._shares_with_jobs = config.scheduler is None  # the benchmark uses the jobs' CPU
        self._host_dir = host_dir
        self._beat_seconds = min(credential.beat_seconds, config.max_beat_seconds)
        self._clock = clock
        self._is_stopping = threading.Event()
        self._next_beat = 0.0
        self._is_first_beat = True
        self._facts_due_at = 0.0
        self._measured: Microbench | None = None
        self._wants_bench = False
        self._last_error = ""
        self._verdicts: dict[str, Verdict] = {}

    def stop(self) -> None:
        """Make ``run`` return soon; supervisors and jobs keep running."""
        self._is_stopping.set()

    def run(self, beside: Companion | None = None) -> None:
        """Run the loop until ``stop``, and keep a companion process running meanwhile.

        Raises:
            AlreadyRunningError: another agent serves this folder.
        """
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(child.locked(self._host_dir.agent_lock, LOCK_PROBE_SECONDS))
            except child.LockedError:
                raise AlreadyRunningError(
                    f"another agent serves {self._host_dir.path}; stop that one first"
                ) from None
            wake = WakeListener(self._host_dir.wake)
            stack.callback(wake.close)
            self._reap_attempts()
            loops = [
                self._shipping_loop,
                RepeatingThread("uploads", self.uploads.step),
                self._files_loop,
                self._cache_loop,
                self._copies_loop,
                self._observed_loop,
            ]
            for loop in loops:
                loop.start()
            self._companion = beside
            if beside:
                stack.callback(beside.stop)
            stack.callback(self.tunnel.stop)
            while not self._is_stopping.is_set():
                self.step()
                if self._companion:
                    self._companion.keep_running()
                self.tunnel.keep_running()
                if wake.wait(POLL_SECONDS):
                    self._next_beat = 0.0
            self.bench.cancel()
            self.environments.stop()
            self.copies.stop()
            for loop in loops:
                loop.stop()
            self.shipping.close()
            self.client.close()

    def step(self) -> None:
        """Check the attempts and send a heartbeat if one is due; log failures and continue."""
        try:
            self._reap_attempts()
            self._update_benchmark()
            if self._clock() >= self._next_beat:
                self._send_heartbeat()
        except Exception:  # such as a full disk or a removed folder: jobs keep running
            log.exception("the agent's round failed; it continues")
            self._next_beat = self._clock() + LIVE_BEAT_SECONDS

    def _reap_attempts(self) -> None:
        verdicts = self.reconciler.reap()
        if verdicts != self._verdicts:
            self._verdicts, self._next_beat = verdicts, 0.0

    def _update_benchmark(self) -> None:
        if self._is_busy() and self.bench.is_running:
            self.bench.cancel()
        elif self._wants_bench and not self._is_busy():
            self.bench.start()
        if measured := self.bench.poll():
            measured = measured.model_copy(update={"network": self._network()})
            self._measured, self._wants_bench, self._next_beat = measured, False, 0.0

    def _network(self) -> NetworkMeasurement | None:
        try:
            return measure_network(self.client)
        except ServerError as error:
            log.info("the route to the server was not measured: %s", error)
            return None

    def _is_busy(self) -> bool:
        return self._shares_with_jobs and any(
            each in (Verdict.CLAIMING, Verdict.RUNNING) for each in self._verdicts.values()
        )

    def _send_heartbeat(self) -> None:
        try:
            reply = self.client.beat(self._heartbeat())
        except ServerError as error:
            self._log_error(error)
            return
        reply, behind = self._epoch.without_unsafe_orders(reply)
        if self._last_error:
            log.info("%s answers again", self.client.server)
        self._last_error = ""
        self._next_beat = self._clock() + self._seconds_to_next_heartbeat(reply)
        self._is_first_beat, self._measured = False, None
        self.environments.mark_reported()
        self.files.mark_reported()
        self.cache.mark_reported()
        self.observed.mark_reported()
        if self._are_facts_due():
            self._facts_due_at = self._clock() + FACTS_SECONDS
        if reply.recheck:
            self._facts_due_at = self._next_beat = 0.0
            self.bench.retry()
        self._wants_bench = reply.run_microbench
        self.reconciler.problems.clear()
        self.shipping.record_acks(reply.acked)
        self.reconciler.apply(reply)
        if behind:
            self.reconciler.problems.append(behind)
        else:
            self.reconciler.retry_claims()
        if reply.wanted:  # ship the first events of new attempts at once
            self._shipping_loop.wake()
        self.tunnel.obey(reply.tunnels)
        self.environments.obey(reply.environments)
        if self.files.obey(reply.delete_files) or reply.forget:  # an attempt's end is stored
            self._files_loop.wake()
        if self.cache.obey(reply.cache):
            self._cache_loop.wake()
        if self.copies.obey(reply.copies):
            self._copies_loop.wake()
        if self.observed.obey(reply.observe):
            self._observed_loop.wake()
        if reply.rotate:
            self._rotate()

    def _heartbeat(self) -> Beat:
        with inventory.gpu_library() as library:
            gpus = tuple(inventory.gpu_loads(library)) if library else ()
        problems = [
            *(*self.reconciler.problems, *self.files.problems),
            *(*self.cache.problems, *self.copies.problems, self.bench.problem),
        ]
        return Beat(
            boot_id=self.reconciler.boot_id,
            sent_at_ms=time.time_ns() // 1_000_000,
            agent_version=inventory.AGENT_VERSION,
            cpu_utilization=psutil.cpu_percent() / 100,
            memory_available_bytes=psutil.virtual_memory().available,
            disk_free_bytes=psutil.disk_usage(str(self._host_dir.path)).free,
            gpus=gpus,
            attempts=self.reconciler.statuses(),
            problems=tuple(problem for problem in problems if problem),
            facts=inventory.host_facts(self._host_dir.path, self.reconciler.config)
            if self._are_facts_due()
            else None,
            microbench=self._measured,
            is_agent_start=self._is_first_beat,
            environments=self.environments.news(everything=self._are_facts_due()),
            files=self.files.news(everything=self._are_facts_due()),
            cache=self.cache.news(everything=self._are_facts_due()),
            epoch=self._epoch.seen,
            observed=self.observed.news(),
        )

    def _are_facts_due(self) -> bool:
        return self._clock() >= self._facts_due_at

    def _seconds_to_next_heartbeat(self, reply: BeatReply) -> float:
        is_awaited = bool(reply.wanted or reply.stop or reply.environments or self._verdicts)
        is_awaited = is_awaited or bool(reply.delete_files)
        is_awaited = is_awaited or bool(reply.cache and reply.cache.delete)
        return min(LIVE_BEAT_SECONDS, self._beat_seconds) if is_awaited else self._beat_seconds

    def _rotate(self) -> None:
        """Rotate the host's secrets on an operator's request; the server repeats a failed one."""
        try:
            self._adopt(enrolment.rotate(self._host_dir))
        except (ServerError, enrolment.RotationError) as error:
            log.warning("the secrets were not replaced: %s", error)

    def _adopt(self, credential: Credential) -> None:
        """Switch every connection to the secrets that are on disk now."""
        self._credential = credential
        self.client.use(credential.credential)
        self.copies.use(credential.credential)
        if self._stream and credential.shipper_url:
            self._stream.use(credential.shipper_url, self._host_dir.redis_ca())
        if self._companion:
            self._companion.stop()  # it reads its secret at start
            if credential.redis_url is None:
                self._companion = None  # Redis was removed: heartbeats carry everything
        self.tunnel.stop()  # it is started again with the new credential
        self._next_beat = 0.0

    def _has_newer_secrets(self) -> bool:
        """Adopt secrets that ``python -m runners rotate`` or ``enroll`` wrote; return if any."""
        with contextlib.suppress(HostConfigError):
            stored = self._host_dir.credential()
            if stored != self._credential and stored.host_id == self._credential.host_id:
                self._adopt(stored)
                return True
        return False

    def _log_error(self, error: ServerError) -> None:
        is_out = isinstance(error, RefusedError) and error.is_unauthorized
        if is_out and self._has_newer_secrets():
            return
        self._next_beat = self._clock() + (REFUSED_BEAT_SECONDS if is_out else LIVE_BEAT_SECONDS)
        hint = "; enrol this host again with a new token" if is_out else ""
        if str(error) != self._last_error:
            log.warning("%s%s", error, hint)
        self._last_error = str(error)


def _event_stream(host_dir: HostDir, credential: Credential) -> RedisStream | None:
    if credential.shipper_url is None:
        return None
    return RedisStream(credential.shipper_url, credential.host_id, host_dir.redis_ca())
