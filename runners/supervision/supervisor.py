"""Runs one attempt to its end: ``python -S -E runners/supervision/supervisor.py ATTEMPT_DIR``.

It detaches from its parent, holds the attempt's lock while it runs, starts the job as its
child, writes the job's events with sequence numbers to the spool, and leaves ``exit.json``.
If it is killed, the job dies with it. Standard library only: it starts in some hundredths of
a second and does not depend on any other process of the host.
"""

import os
import select
import selectors
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # -S hides site-packages and this package
    sys.path.append(str(Path(__file__).resolve().parents[2]))

from runners.shared.log_text import last_line
from runners.shared.reasons import Reason
from runners.shared.spool import SpoolWriter
from runners.shared.timing import (
    EXPLAIN_KILL_SECONDS,
    LOCK_PROBE_SECONDS,
    OUTPUT_DRAIN_SECONDS,
    STOP_GRACE_SECONDS,
    scale_duration,
)
from runners.supervision import child, classification, output, procfs
from runners.supervision.classification import Ending, classify, rank_of
from runners.supervision.output import (
    MAX_LINE_BYTES,
    CappedLog,
    EventRefusedError,
    LastLines,
    LogEvents,
    parse_line,
)
from runners.supervision.procfs import InterferenceWatch, TreeSampler

STARTED = 0
STAY = "--stay"
RUNS_AGAIN = os.EX_TEMPFAIL  # of the program that says who ended the job: it is no end
EXIT_INTERNAL = 70
EXIT_ALREADY_SUPERVISED = 75
EXIT_ALREADY_ENDED = 76

TICK_SECONDS = scale_duration(1.0, least=0.2)
STOPPING_TICK_SECONDS = 0.05
READ_BYTES = 256 * 1024
GATHER_SECONDS = 0.1  # output arrives line by line: reads are batched
FLOOD_BYTES = (
    64 * 1024
)  # per second; above it pipes are read at once so as not to block the writer
MAX_REFUSALS_TOLD = 20
LOADING = "Loading libraries"


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


class Supervisor:
    """One attempt from its start to its exit record."""

    def __init__(self, folder: Path, launch: dict[str, Any]) -> None:
        self.folder = folder
        self.launch = launch
        self.spool = SpoolWriter(folder / child.SPOOL)
        self.sampler = TreeSampler()
        self.watch = InterferenceWatch()
        self.last_lines = LastLines()
        self.started_at_ms: int | None = None
        self._first_started_at_ms: int | None = None  # of an attempt that a scheduler runs again
        self.stop_reason: Reason | None = None
        self.exit_status: int | None = None
        self.peak_rss_bytes = 0
        self._kill_at: float | None = None
        self._is_terminated = False
        self._logs = {name: CappedLog(folder, name) for name in ("stdout", "stderr")}
        secrets = output.values_in(folder / child.SECRETS)
        self._maskers = {name: output.Masker(secrets) for name in (*self._logs, "events")}
        self._log_events = {name: LogEvents() for name in self._logs}
        self._event_line = b""
        self._refusals = 0
        self._oom_kills = procfs.oom_kills()
        self._began_at = time.monotonic()
        self._child: child.Child | None = None
        self._selector = selectors.DefaultSelector()
        self._woken, self._wake = os.pipe()
        self._signals = select.poll()
        self._signals.register(self._woken, select.POLLIN)
        self._read_bytes = deque([0, 0], maxlen=2)  # in the previous and the current second

    # Start

    def start(self) -> bool:
        """Start the job; on failure write the exit record and return False."""
        child.reserve_exit_slot(self.folder)
        (self.folder / child.REQUEUED).unlink(missing_ok=True)
        self._watch_signals()
        self._check_stop_order()
        if self.stop_reason is not None:
            self._write_end(Ending(None, None, "", self.stop_reason))
            return False
        child.become_subreaper()
        try:
            self._child = child.start(
                self.launch["attempt_id"],
                self.launch["argv"],
                self.launch["env"] | self._inherited(),
                self.folder,
                self.launch.get("memory_limit_bytes"),
            )
        except OSError as error:
            self.last_lines.feed(f"{self.launch['argv'][0]}: {error.strerror}\n".encode())
            self._write_end(Ending(None, None, "", is_exec_failure=True))
            return False
        self._announce(self._child)
        return True

    def _inherited(self) -> dict[str, str]:
        """Return the scheduler's environment variables that the job inherits, such as its GPUs."""
        names = self.launch.get("inherit", ())
        return {name: os.environ[name] for name in names if name in os.environ}

    def _announce(self, started: child.Child) -> None:
        self.started_at_ms = _now_ms()
        me, job = procfs.read_process(os.getpid()), procfs.read_process(started.process.pid)
        before = child.read_json(self.folder / child.SUPERVISOR) or {}
        self._first_started_at_ms = before.get("first_started_at_ms", self.started_at_ms)
        identity = {
            "first_started_at_ms": self._first_started_at_ms,
            "pid": os.getpid(),
            "start_ticks": me.start_ticks if me else 0,
            "child_pid": started.process.pid,
            "child_start_ticks": job.start_ticks if job else 0,
            "boot_id": procfs.boot_id(),
        }
        child.write_json(self.folder / child.SUPERVISOR, identity)
        self.spool.append(
            "started",
            {
                "pid": started.process.pid,
                "boot_id": identity["boot_id"],
                "argv": self.launch["argv"],
            },
        )
        self.spool.append("phase", {"name": LOADING})  # until the job reports its first phase
        self._log(f"process {started.process.pid} has started: it loads its libraries first")
        for name, fd in started.pipes._asdict().items():
            os.set_blocking(fd, False)
            self._selector.register(fd, selectors.EVENT_READ, name)

    def _watch_signals(self) -> None:
        for end in (self._woken, self._wake):
            os.set_blocking(end, False)
        self._selector.register(self._woken, selectors.EVENT_READ, "wake")
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, self._on_sigterm)
        for ignored in (signal.SIGINT, signal.SIGHUP):
            signal.signal(ignored, signal.SIG_IGN)

    def _on_sigterm(self, *_: object) -> None:
        self._is_terminated = True

    # The loop

    def run(self) -> None:
        """Supervise the job until its whole process tree has ended, and write the exit record."""
        next_tick = time.monotonic()
        while self.exit_status is None:
            if time.monotonic() >= next_tick:
                self._tick()
                next_tick = time.monotonic() + TICK_SECONDS
            wait = next_tick - time.monotonic() if self._kill_at is None else STOPPING_TICK_SECONDS
            has_read = self._read(max(wait, 0.0))
            self._reap()
            if has_read and self.exit_status is None:
                self._gather()
            if self._is_terminated:
                self._is_terminated = False
                self._check_stop_order()
                if self.stop_reason is None:  # not from the agent: a shutdown or another user
                    self._begin_stop(Reason.KILLED_EXTERNALLY, STOP_GRACE_SECONDS)
            if self._kill_at is not None and time.monotonic() >= self._kill_at:
                child.kill_tree(self._reap, child.FIRST_PAUSE_SECONDS)
        child.kill_tree(self._reap, child.FIRST_PAUSE_SECONDS)
        self._drain()
        ending = self._ending(self.exit_status)
        if self._is_requeued() or self._is_run_again(ending):
            self.spool.close()
        else:
            self._write_end(ending)

    def _tick(self) -> None:
        self._read_bytes.append(0)
        tree = procfs.sampled_descendants(os.getpid())
        if tree:
            values = self.sampler.sample(tree)
            self.watch.update(values["cpu_utilization"])
            self.spool.append("metric", {"source": "host", "values": values, "step": None})
        for name, events in self._log_events.items():
            self._send_logs(name, events.flush())
        self.spool.sync()
        self._check_stop_order()
        limit = self.launch.get("max_duration_seconds")
        ran_ms = _now_ms() - (self._first_started_at_ms or _now_ms())
        if limit is not None and self.stop_reason is None and ran_ms > limit * 1000:
            self._log(f"the limit of {limit:g} s is reached")
            self._begin_stop(Reason.MAX_DURATION, STOP_GRACE_SECONDS)

    def _read(self, timeout_s: float) -> bool:
        """Read the pipes and handle their data; return False when there was none."""
        ready = self._selector.select(timeout_s)
        for key, _ in ready:
            try:
                data = os.read(key.fd, READ_BYTES)
            except BlockingIOError:
                continue
            self._read_bytes[-1] += len(data)
            if not data:
                self._selector.unregister(key.fd)
                os.close(key.fd)
            elif key.data == "events":
                self._take_events(data)
            elif key.data in self._logs:
                self._take_output(key.data, self._maskers[key.data].feed(data))
        return any(key.data != "wake" for key, _ in ready)

    def _gather(self) -> None:
        """Pause so that output accumulates before the next read; a signal ends the pause."""
        if self._kill_at is None and sum(self._read_bytes) < FLOOD_BYTES:
            self._signals.poll(GATHER_SECONDS * 1000)

    def _take_output(self, stream: str, data: bytes) -> None:
        self._logs[stream].write(data)
        self.last_lines.feed(data, stream)
        self._send_logs(stream, self._log_events[stream].feed(data))

    def _take_events(self, data: bytes) -> None:
        *lines, self._event_line = (self._event_line + data).split(b"\n")
        if len(self._event_line) > MAX_LINE_BYTES:
            lines, self._event_line = [*lines, self._event_line], b""
        for line in filter(None, lines):
            try:
                kind, body = parse_line(self._maskers["events"].mask(line))
            except EventRefusedError as refusal:
                self._refusals += 1
                if self._refusals <= MAX_REFUSALS_TOLD:
                    self._log(f"an event of the job was refused: {refusal}")
                continue
            if kind == "endpoint":
                with suppress(OSError):  # a full disk: the gateway cannot reach the endpoint
                    child.write_json(self.folder / child.ENDPOINT, body)
            self.spool.append(kind, body)

    def _send_logs(self, stream: str, texts: Iterator[str]) -> None:
        for text in texts:
            self.spool.append("log", {"stream": stream, "text": self._masked(text)})

    def _masked(self, text: str) -> str:
        """Mask values again: without the control sequences within it, a value is whole."""
        return self._maskers["events"].mask(text.encode()).decode(errors="replace")

    def _log(self, text: str) -> None:
        self.spool.append("log", {"stream": "supervisor", "text": f"{text}\n"})

    # The end

    def _is_requeued(self) -> bool:
        """Return whether a scheduler runs the attempt again, and nobody ordered its stop."""
        is_ordered = self.stop_reason not in (None, Reason.KILLED_EXTERNALLY)
        return (self.folder / child.REQUEUED).exists() and not is_ordered

    def _check_stop_order(self) -> None:
        if self.stop_reason is None and (order := child.read_json(self.folder / child.STOP)):
            reason = str(order.get("reason"))
            known = reason in Reason.__members__.values()
            grace_seconds = float(order.get("grace_seconds", STOP_GRACE_SECONDS))
            self._begin_stop(Reason(reason) if known else Reason.STOPPED_BY_USER, grace_seconds)

    def _begin_stop(self, reason: Reason, grace_seconds: float) -> None:
        self.stop_reason = reason
        self._kill_at = time.monotonic() + grace_seconds
        for process in procfs.descendants(os.getpid()):
            procfs.send_signal(process.pid, process.start_ticks, signal.SIGTERM)

    def _reap(self) -> None:
        while ended := child.wait_any():
            pid, status, peak_bytes = ended
            if self._child and pid == self._child.process.pid:
                self.exit_status = status
                self.peak_rss_bytes = peak_bytes
                self._child.process.returncode = os.waitstatus_to_exitcode(status)

    def _drain(self) -> None:
        """Read the output that the job wrote before it ended."""
        deadline = time.monotonic() + OUTPUT_DRAIN_SECONDS
        while time.monotonic() < deadline and self._read(0.0):
            pass
        for name, events in self._log_events.items():
            self._take_output(name, self._maskers[name].flush())
            self._send_logs(name, events.flush(is_end=True))

    def _is_run_again(self, ending: Ending) -> bool:
        """Return whether the scheduler that ended the job from outside will run it again."""
        if classify(ending) is not Reason.KILLED_EXTERNALLY:
            return False
        if not self.launch.get("may_run_again"):
            child.remove_secrets(self.folder)  # whoever ended it may kill this too, and soon
        return self._ask_who_ended_it() == RUNS_AGAIN

    def _ask_who_ended_it(self) -> int | None:
        """Add what the launcher's ``explain_kill`` program prints to log and last lines.

        Returns:
            The program's exit status, or None if there is none.
        """
        if not (argv := self.launch.get("explain_kill")):
            return None
        try:
            done = subprocess.run(
                argv,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=EXPLAIN_KILL_SECONDS,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            self._log(f"who ended it is not known: {error}")
            return None
        if done.returncode not in (0, RUNS_AGAIN):
            why = last_line(done.stderr) or f"exit status {done.returncode}"
            self._log(f"who ended it is not known: {why}")
        if said := done.stdout.strip():
            self._log(said)
            self.last_lines.feed(f"\n{said}\n".encode())
        return done.returncode

    def _ending(self, status: int) -> Ending:
        code = os.waitstatus_to_exitcode(status)
        return Ending(
            exit_code=code if code >= 0 else None,
            signal_number=-code if code < 0 else None,
            last_text=self.last_lines.text,
            longer_text=self.last_lines.longer_text,
            stop_reason=self.stop_reason,
            has_oom_kill=procfs.oom_kills() > self._oom_kills,
        )

    def _write_end(self, ending: Ending) -> None:
        """Delete the secrets, then write the exit record and the ``exited`` event."""
        child.remove_secrets(self.folder)
        for log in self._logs.values():
            log.close()
        left_out = sum(events.left_out_bytes for events in self._log_events.values())
        peak = max(self.peak_rss_bytes, self.sampler.peak_rss_bytes)
        written = child.write_exit_record(
            self.folder,
            {
                "exit_code": ending.exit_code,
                "signal": ending.signal_number,
                "reason": classify(ending),
                "rank": None if ending.exit_code == 0 else rank_of(ending.longer_text),
                "by": "supervisor",
                "started_at_ms": self.started_at_ms,
                "ended_at_ms": _now_ms(),
                "last_lines": [self._masked(line) for line in self.last_lines.lines()],
                "dropped_log_bytes": left_out,
                "dropped_events": self.spool.dropped_events,
                "peak_rss_bytes": peak or None,
                "conditions": classification.read(self.folder, self._began_at)
                | self.watch.conditions(),
            },
        )
        self.spool.append("exited", written)
        self.spool.close()

    def abandon(self, error: Exception) -> None:
        """Kill the job and record an internal error as its end."""
        child.kill_tree(self._reap, child.FIRST_PAUSE_SECONDS)
        self.last_lines.feed(
            f"\nthe supervisor failed: {type(error).__name__}: {error}\n".encode()
        )
        self._write_end(Ending(None, None, "", Reason.INTERNAL))


def supervise(folder: Path, report_to: int) -> None:
    """Run the attempt under its lock; write the start's outcome as one byte to ``report_to``."""
    try:
        with child.locked(folder / child.LOCK, LOCK_PROBE_SECONDS):
            if (folder / child.EXIT_RECORD).exists():
                os.write(report_to, bytes([EXIT_ALREADY_ENDED]))
                return
            launch = child.read_json(folder / child.LAUNCH)
            if launch is None:
                sys.exit(f"{folder / child.LAUNCH} is missing or damaged")
            supervisor = Supervisor(folder, launch)
            try:
                is_running = supervisor.start()
                os.write(report_to, bytes([STARTED]))
                os.close(report_to)
                if is_running:
                    supervisor.run()
            except Exception as error:
                supervisor.abandon(error)
                raise
    except child.LockedError:
        os.write(report_to, bytes([EXIT_ALREADY_SUPERVISED]))


def main() -> int:
    """Detach, supervise, and return to the launcher whether a supervisor runs.

    With ``--stay`` it does not detach: a scheduler started it and waits for its exit.
    """
    folder = Path(sys.argv[1]).resolve()
    listen_to, report_to = os.pipe()
    is_staying = STAY in sys.argv[2:]
    if not is_staying and os.fork():
        os.close(report_to)
        outcome = os.read(listen_to, 1)
        return outcome[0] if outcome else EXIT_INTERNAL
    if not is_staying:
        os.close(listen_to)
        os.setsid()
    os.umask(0o077)
    os.chdir("/")
    child.redirect_output(folder / "supervisor.log")
    supervise(folder, report_to)
    return 0


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        sys.exit(main())
