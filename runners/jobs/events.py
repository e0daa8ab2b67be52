"""Emits a job's events as JSON lines without blocking it, and its progress over phases."""

import copy
import json
import math
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from runners.jobs.energy import EnergyMeter, Work
from runners.shared.kinds import EventKind
from runners.shared.messages import (
    MAX_POINT_VALUES,
    ArtefactBody,
    EndpointBody,
    MetricPoint,
    PhaseBody,
    ProgressBody,
    ResultBody,
)

EVENT_FD_VARIABLE = "SLIPWAY_EVENT_FD"
STDOUT_FD = 1
QUEUE_LINES = 10_000
DROPPABLE_ABOVE = 8_000  # above it metrics and progress are dropped
CLOSE_TIMEOUT_SECONDS = 10.0


class Emitter:
    """Typed, thread-safe sender of job events.

    ``owns_fd``: its writer closes ``fd``, and nothing else does: a number that is closed while the
    writer has lines left may soon be another file's.
    """

    def __init__(self, fd: int, *, owns_fd: bool = False) -> None:
        self.fd = fd
        self._owns_fd = owns_fd
        self._lines: queue.Queue[bytes | None] = queue.Queue(QUEUE_LINES)
        self._closed_pipe = threading.Event()
        self._writer = threading.Thread(target=self._write_lines, name="events", daemon=True)
        self._writer.start()
        self.dropped = 0
        self.meter: EnergyMeter | None = None  # the job's energy meter, if active
        self.tracker: Emitter | None = None  # to which metrics and results go as well
        self.before_close: Callable[[], None] | None = None
        self.notes: dict[str, str] = {}  # that every result of this process has

    @classmethod
    def from_environment(cls) -> "Emitter":
        """Return an emitter on the supervisor's pipe, or on stdout when run by hand.

        Of several ranks on a host only the first emits; torchrun, its parent, has the pipe.
        """
        fd = int(os.environ.get(EVENT_FD_VARIABLE, STDOUT_FD))
        if "TORCHELASTIC_RUN_ID" not in os.environ or fd == STDOUT_FD:
            return cls(fd)
        is_first = os.environ.get("LOCAL_RANK") == "0"
        path = f"/proc/{os.getppid()}/fd/{fd}" if is_first else os.devnull
        return cls(os.open(path, os.O_WRONLY | os.O_CLOEXEC))

    def log(self, line: str) -> None:
        """Write one log line."""
        if self.fd != STDOUT_FD:
            sys.stdout.write(f"{line}\n")
            sys.stdout.flush()

    def phase(self, name: str, *, begins_anew: bool = False) -> None:
        """Report the start of a named phase; ``begins_anew``: without the progress so far."""
        if self.meter is not None:
            self.meter.begin(name)
        self._send("phase", PhaseBody(name=name, begins_anew=begins_anew))

    def progress(
        self, done: float, total: float, unit: str, eta_seconds: float | None = None
    ) -> None:
        """Report the progress and the estimated remaining seconds."""
        eta = None if eta_seconds is None or not math.isfinite(eta_seconds) else eta_seconds
        eta = None if eta is None else max(0.0, eta)
        self._send(
            "progress",
            ProgressBody(done=min(done, total), total=total, unit=unit, eta_seconds=eta),
        )

    def metric(
        self, values: Mapping[str, float], *, step: int | None = None, source: str = "job"
    ) -> None:
        """Send the finite values of one instant; JSON has no NaN or infinity."""
        finite = [(name, float(one)) for name, one in values.items() if math.isfinite(one)]
        for first in range(0, len(finite), MAX_POINT_VALUES):
            part = dict(finite[first : first + MAX_POINT_VALUES])
            self._send("metric", MetricPoint(source=source, values=part, step=step))

    def result(
        self, measured: Mapping[str, float], notes: Mapping[str, str], work: Work | None = None
    ) -> None:
        """Send the final figures and the energy used; ValueError if one is not finite."""
        bad = [name for name, value in measured.items() if not math.isfinite(value)]
        if bad:
            msg = f"result figures are not finite: {', '.join(bad)}"
            raise ValueError(msg)
        drawn, how = self.meter.figures(work) if self.meter is not None else ({}, {})
        self._send(
            "result",
            ResultBody(measured={**measured, **drawn}, notes={**self.notes, **notes, **how}),
        )

    def artefact(self, body: ArtefactBody) -> None:
        """Announce a complete folder of the attempt's output."""
        self._send("artefact", body)

    def endpoint(self, body: EndpointBody) -> None:
        """Announce the address of a ready endpoint."""
        self._send("endpoint", body)

    def close(self, timeout_seconds: float = CLOSE_TIMEOUT_SECONDS) -> None:
        """Write the queued events; give up after ``timeout_seconds``."""
        if self.before_close is not None:
            self.before_close()
        try:
            self._lines.put(None, timeout=timeout_seconds)
        except queue.Full:
            return
        self._writer.join(timeout_seconds)

    def _send(self, kind: EventKind, body: BaseModel) -> None:
        if self.tracker is not None and kind in {"metric", "result"}:
            self.tracker._send(kind, body)  # noqa: SLF001 - of this very class
        if self._closed_pipe.is_set():
            return
        droppable = kind in ("metric", "progress")
        if droppable and self._lines.qsize() > DROPPABLE_ABOVE:
            self.dropped += 1
            return
        try:
            # Most phases go on with the progress so far, and do not say so.
            content = body.model_dump(mode="json", exclude_defaults=kind == "phase")
            self._lines.put(_line(kind, content), timeout=1.0)
        except queue.Full:
            self.dropped += 1

    def _write_lines(self) -> None:
        while (line := self._lines.get()) is not None:
            if self._closed_pipe.is_set():
                continue
            try:
                _write_all(self.fd, line)
            except OSError:  # the reader has closed the pipe: the job continues
                self._closed_pipe.set()
        if self._owns_fd:
            os.close(self.fd)


def read_events(path: Path) -> list[dict[str, Any]]:
    """Return the events in a file that a manually run job wrote."""
    return [json.loads(line) for line in path.read_text().splitlines() if line]


def _line(kind: str, body: dict[str, Any]) -> bytes:
    return json.dumps({"kind": kind, "body": body}, separators=(",", ":")).encode() + b"\n"


def _write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


# Combines the unequal phases of a job into one monotonic progress figure.


WHOLE = 100.0


class Stages:
    """Phases of a job by name and expected share of its time; shares need not sum to one."""

    def __init__(self, emitter: Emitter, shares: Mapping[str, float]) -> None:
        total = sum(shares.values())
        self._emitter = emitter
        self._shares = {name: share / total for name, share in shares.items()}
        self._began = time.monotonic()
        self._current = ""
        self._before = 0.0

    def via(self, emitter: Emitter) -> "Stages":
        """Return a view of the same progress with a forked process's emitter."""
        view = copy.copy(self)
        view._emitter = emitter  # noqa: SLF001 - a copy of this very class
        return view

    def begin(self, name: str) -> None:
        """Begin the named phase; all earlier phases count as done."""
        names = list(self._shares)
        index = names.index(name)
        self._before = sum(self._shares[each] for each in names[:index])
        self._current = name
        self._emitter.phase(name)
        self._emit(self._before)

    def advance(self, fraction: float) -> None:
        """Report the completed fraction of the current phase."""
        self._emit(self._before + self._shares[self._current] * min(1.0, fraction))

    def _emit(self, done: float) -> None:
        elapsed = time.monotonic() - self._began
        eta = elapsed * (1.0 - done) / done if done > 0.0 else None
        self._emitter.progress(WHOLE * done, WHOLE, "percent", eta)
