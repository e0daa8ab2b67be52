"""Run a validation: its stages as processes, their limits, its command line."""

import argparse
import contextlib
import os
import platform
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from pydantic import ValidationError

from runners.jobspec.compress import STAGES, StageName
from runners.jobspec.engines import ENGINE_PACKAGES
from runners.prove import reaper
from runners.prove.reaper import LOCK, WORK
from runners.prove.report import (
    HARDWARE,
    MAX_RECORDS,
    RECORD,
    TITLES,
    Check,
    Expectations,
    Figure,
    Hardware,
    Record,
    Report,
    Stage,
    StageState,
    Verdict,
    number_text,
    render,
)
from runners.shared.config import DEFAULT_HOST_DIR, Credential, HostConfigError, HostDir
from runners.shared.log_text import last_line
from runners.supervision.child import LockedError, is_locked, locked

# ---------------------------------------------------------------------------
# Runs the stages of a validation, each in its own process, and keeps the report as it grows.
# ---------------------------------------------------------------------------


# One stage's process, seen from the validation: its records as they come, and how it ended.


MAX_LINE_BYTES = 1024**2  # no record is as long
READ_BYTES = 2**16
TICK_SECONDS = 0.5
KILL_SECONDS = 5.0  # later, what a driver still holds is left to the reaper
REMOVAL_SECONDS = 60.0  # of the scratch folder, after the end of the tree


class StageProcess:
    """A stage that runs under its reaper: when it ends or is stopped, so does its whole tree.

    ``scratch`` is the folder that the reaper removes at the end. ``seconds`` limits the stage.
    """

    def __init__(self, argv: Sequence[str], scratch: Path, seconds: float) -> None:
        self._seconds = seconds
        self._deadline = time.monotonic() + seconds
        self._killed_at: float | None = None
        self._stopped_by: signal.Signals | None = None
        self._bad_line: str | None = None
        self._last = ""
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed in __exit__
        self._reaper = subprocess.Popen(
            [sys.executable, "-S", "-E", reaper.__file__, str(scratch), *argv],
            stdin=subprocess.PIPE,  # it closes if this process dies, however it dies
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,  # the terminal's Ctrl-C reaches the validation's command alone
        )

    def __enter__(self) -> "StageProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self._kill()
        self._wait()
        for each in (self._reaper.stdin, self._reaper.stdout, self._errors):
            if each is not None:
                each.close()

    def stop(self, by: signal.Signals) -> None:
        """End the stage for this signal; may be called from a signal's handler."""
        self._stopped_by = by
        self._kill()

    def records(self) -> Iterator[Record]:
        """Yield records until the whole tree has ended; it is killed at the deadline."""
        for line in self._lines():
            try:
                record = RECORD.validate_json(line)
            except ValidationError:
                self._bad_line = last_line(line)
                continue
            self._last = record.name
            yield record

    def _lines(self) -> Iterator[bytes]:
        pipe = self._reaper.stdout
        if pipe is None:
            return
        poller = select.poll()
        poller.register(pipe, select.POLLIN)
        rest = b""
        while self._killed_at is None or time.monotonic() <= self._killed_at + KILL_SECONDS:
            if poller.poll(1000 * self._tick()):
                data = os.read(pipe.fileno(), READ_BYTES)
                if not data:
                    break
                *lines, rest = (rest + data).split(b"\n")
                yield from lines
                if len(rest) > MAX_LINE_BYTES:
                    yield rest
                    rest = b""
            elif self._reaper.poll() is not None:  # killed: a process of the tree has the pipe
                break
            if self._killed_at is None and time.monotonic() >= self._deadline:
                self._kill()
        if rest:
            yield rest

    def _tick(self) -> float:
        return min(TICK_SECONDS, max(0.0, self._deadline - time.monotonic()) or TICK_SECONDS)

    def _kill(self) -> None:
        self._killed_at = self._killed_at or time.monotonic()
        self._reaper.send_signal(signal.SIGTERM)

    def _wait(self) -> int | None:
        """Return the code with which the stage ended, or None if its tree cannot be ended."""
        if self._reaper.returncode is not None:
            return self._reaper.returncode
        seconds = REMOVAL_SECONDS
        if self._killed_at is not None:
            seconds = max(0.0, self._killed_at + KILL_SECONDS - time.monotonic())
        try:
            code = self._reaper.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        if code == -signal.SIGKILL:  # perhaps the reaper itself was killed
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._reaper.pid, signal.SIGKILL)
        return code

    def end(self) -> tuple[StageState, str | None]:
        """Return the stage's state and, if it was cut or failed, why."""
        code = self._wait()
        self._errors.seek(0)
        words = last_line(self._errors.read())
        last = f"; the last that it said is: {self._last}" if self._last else ""
        if code is None:
            words = f"Not all of its processes have ended. {words}"
        if self._stopped_by is not None and code != 0:
            stop = f"the validation was stopped by {self._stopped_by.name}"
            return "cut", f"{stop}{last}. {words}".strip()
        if self._killed_at is not None or code is None:
            return "cut", f"it was killed after {self._seconds:.0f} s{last}. {words}".strip()
        if code < 0:
            name = signal.Signals(-code).name if -code in set(signal.Signals) else str(-code)
            return "failed", f"its process died by {name}. {words}"
        if code:
            return "failed", f"its process ended with code {code}. {words}"
        if self._bad_line is not None:
            return "failed", f"it printed an invalid record: {self._bad_line}"
        return "done", None


COMMAND = (sys.executable, "-m", "runners.jobs.prove.recorder")
# Of a run's time, for each stage; what a stage leaves goes to the later ones.
SHARES: Mapping[StageName, float] = {
    "identity": 0.04,
    "rates": 0.16,
    "correctness": 0.16,
    "speed": 0.32,
    "jobs": 0.24,
    "distributed": 0.08,
}
GRACE_SECONDS = 10.0  # a stage ends by itself at its limit; later it is killed
SCRATCH = "scratch-"
LEAST_FREE_BYTES = 2 * 1024**3
PACKAGES = (
    "torch", "transformers", "accelerate", "torchao", "bitsandbytes", "peft", "triton", "numpy",
    "safetensors", "compressed-tensors", "gguf", "nvidia-ml-py", "amdsmi", *ENGINE_PACKAGES,
    "pydantic",
)  # fmt: skip
JSON_NAME, PAGE_NAME = "report.json", "report.html"
STOPS = (signal.SIGINT, signal.SIGTERM)
EXIT_BY_SIGNAL = 128  # shells add the signal's number
Say = Callable[[Stage, Record | None], None]


class FolderInUseError(Exception):
    """Another validation writes into the same folder."""


@dataclass
class ValidationRun:
    """One run: its options, the report so far, and the signal that stopped it, if any.

    ``folder`` receives report.json, report.html and the stages' scratch files, which are removed.
    """

    folder: Path
    stages: Sequence[StageName] = STAGES
    seconds: float = 600.0
    device: str = ""
    is_small: bool = False
    credential: Credential | None = None
    command: Sequence[str] = COMMAND
    say: Say = lambda _stage, _record: None
    report: Report = field(init=False)
    stopped_by: signal.Signals | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._began = time.monotonic()
        self._rates: list[Figure] = []
        self._hardware: Hardware | None = None
        self._process: StageProcess | None = None
        self.report = Report(
            began_at_ms=time.time_ns() // 1_000_000,
            hostname=socket.gethostname(),
            host_id=self.credential.host_id if self.credential else None,
            versions=versions(),
            device=platform.processor() or platform.machine(),
            stages=tuple(Stage(name=name) for name in STAGES if name in self.stages),
        )

    def run(self) -> Report:
        """Run every stage and return the signed report; it is on disk after each record.

        SIGINT and SIGTERM end the stage that runs, and no other starts. It must be called in the
        main thread.

        Raises:
            FolderInUseError: another validation writes into the folder.
        """
        with self._own_folder(), self._stoppable():
            self._save()
            for index, stage in enumerate(self.report.stages):
                if self.stopped_by is None:
                    self._run_stage(index, stage.name)
                else:
                    words = f"the validation was stopped by {self.stopped_by.name}"
                    self._put(index, stage.model_copy(update={"problem": words}))
            calibration = self._calibration()
            self._update(calibration=calibration)
            self._save()
        return self.report

    @contextlib.contextmanager
    def _own_folder(self) -> Iterator[None]:
        """Hold the folder's lock, and remove what a killed validation left in it."""
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(locked(self.folder / LOCK))
            except LockedError as error:
                raise FolderInUseError(
                    f"another validation writes into {self.folder}; wait for its end, or give "
                    "another --output"
                ) from error
            except OSError:
                old = []  # a file system without locks: a living process may own them
            else:
                old = list(self.folder.glob(f"{SCRATCH}*/{LOCK}"))
            for lock in old:
                if not is_locked(lock):
                    shutil.rmtree(lock.parent, ignore_errors=True)
            yield

    @contextlib.contextmanager
    def _stoppable(self) -> Iterator[None]:
        before = {number: signal.signal(number, self._stop) for number in STOPS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _stop(self, number: int, _frame: object) -> None:
        self.stopped_by = self.stopped_by or signal.Signals(number)
        if self._process is not None:
            self._process.stop(self.stopped_by)

    def _limit(self, index: int) -> float:
        """Return the seconds of a stage: its share of what is left to it and those after it."""
        left = self.seconds - (time.monotonic() - self._began)
        names = [stage.name for stage in self.report.stages[index:]]
        return max(5.0, left * SHARES[names[0]] / sum(SHARES[name] for name in names))

    def _run_stage(self, index: int, name: StageName) -> None:
        began, records, limit = time.monotonic(), list[Record](), self._limit(index)

        def put(state: StageState, problem: str | None = None) -> Stage:
            stage = Stage(
                name=name,
                state=state,
                seconds=time.monotonic() - began,
                records=tuple(records),
                problem=problem,
            )
            self._put(index, stage)
            return stage

        with self._scratch(put) as scratch:
            if scratch is None:
                return
            argv = self._argv(name, scratch / WORK, limit)
            with StageProcess(argv, scratch, limit + GRACE_SECONDS) as process:
                self._process = process
                if self.stopped_by is not None:  # while the process was started
                    process.stop(self.stopped_by)
                for each in process.records():
                    for completed in self._completed(name, each):
                        if len(records) < MAX_RECORDS:
                            records.append(completed)
                        self.say(put("cut"), completed)
                if name == "speed" and (expectations := self._expectations()):
                    for goal in expectations.goals([e for e in records if isinstance(e, Figure)]):
                        records.append(goal)
                        self.say(put("cut"), goal)
                self.say(put(*process.end()), None)

    @contextlib.contextmanager
    def _scratch(self, put: Callable[[StageState, str | None], Stage]) -> Iterator[Path | None]:
        """Yield a folder for a stage, or None if the disk has no room for one."""
        free = shutil.disk_usage(self.folder).free
        if free < LEAST_FREE_BYTES:
            stage = put(
                "failed",
                f"{self.folder} has {free / 1e9:.1f} GB free, and a stage needs "
                f"{LEAST_FREE_BYTES / 1e9:.1f} GB; free some space or give another --output",
            )
            self.say(stage, None)
            yield None
            return
        with tempfile.TemporaryDirectory(
            dir=self.folder, prefix=SCRATCH, ignore_cleanup_errors=True
        ) as scratch:
            (Path(scratch) / LOCK).touch()
            (Path(scratch) / WORK).mkdir()
            yield Path(scratch)

    def _argv(self, name: StageName, scratch: Path, limit: float) -> list[str]:
        return [
            *self.command, name, str(scratch), "--seconds", f"{limit:.0f}",
            *(["--device", self.device] if self.device else []),
            *(["--small"] if self.is_small else []),
        ]  # fmt: skip

    def _completed(self, name: StageName, record: Record) -> Iterator[Record]:
        """Yield a record with its prediction, and what it is checked against."""
        if isinstance(record, Figure) and record.name == HARDWARE:
            self._hardware = _hardware(record)
            self._update(device=self._hardware.name)
            if name != "identity":
                return
        if isinstance(record, Figure) and name == "rates":
            self._rates.append(record)
        expectations = self._expectations()
        if expectations is None:
            yield record
        else:
            yield from expectations.complete([record])

    def _expectations(self) -> Expectations | None:
        return Expectations(self._hardware, self._rates) if self._hardware else None

    def _calibration(self) -> object:
        expectations = self._expectations()
        if expectations is None:
            return None
        figures = [each for stage in self.report.stages for each in stage.figures]
        return expectations.calibration(figures, self.report.host_id or self.report.hostname)

    def _put(self, index: int, stage: Stage) -> None:
        stages = list(self.report.stages)
        stages[index] = stage
        self._update(stages=tuple(stages))
        self._save()

    def _update(self, **fields: object) -> None:
        seconds = time.monotonic() - self._began
        self.report = self.report.model_copy(update={**fields, "seconds": seconds})

    def _save(self) -> None:
        """Write the report as JSON and as a page, each atomically."""
        if self.credential is not None:
            self.report = self.report.signed(self.credential.command_key)
        for name, text in (
            (JSON_NAME, self.report.model_dump_json(indent=1)),
            (PAGE_NAME, render(self.report)),
        ):
            building = self.folder / f".{name}.building"
            building.write_text(text)
            building.replace(self.folder / name)


def _hardware(memory: Figure) -> Hardware:
    """Return the hardware of a stage's first figure."""
    kind = "cpu" if memory.device == "cpu" else "gpu"
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Hardware(memory.how, kind, int(memory.value), host)


def versions() -> dict[str, str]:
    """Return the versions of Python, the kernel and the packages that matter."""
    found = {
        "python": platform.python_version(),
        "kernel": platform.release(),
        "os": platform.platform(),
    }
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def problems(report: Report) -> list[str]:
    """Return what failed in words, stage by stage."""
    return [f"{stage.name}: {words}" for stage, words in report.failures()]


def exit_code(report: Report, stopped_by: signal.Signals | None = None) -> int:
    """Return 0 if everything passed, 1 if something failed, 3 if it is incomplete.

    After a stop it is 128 plus the signal's number: 130 for Ctrl-C, 143 for SIGTERM.
    """
    if stopped_by is not None:
        return EXIT_BY_SIGNAL + stopped_by
    return {"proven": 0, "failed": 1, "incomplete": 3}[report.verdict]


def as_line(record: Record) -> str:
    """Return a record as one line of a terminal."""
    if isinstance(record, Figure):
        predicted = record.prediction
        beside = f"  (predicted {number_text(predicted.value, record.unit)})" if predicted else ""
        return f"       {record.name}: {number_text(record.value, record.unit)}{beside}"
    if isinstance(record, Check):
        result = "ok  " if record.is_met else "goal" if record.is_goal else "FAIL"
        return f"{result}   {record.name}: {record.found}"
    return f"--     {record.name}: {record.why}"


# ---------------------------------------------------------------------------
# The command ``slipway-host prove``; it needs torch and pydantic, and no package of the site.
# ---------------------------------------------------------------------------


WORDS = "test on this machine everything that its jobs use, within minutes"
DEFAULT_MINUTES = 10.0
OUTCOMES: Mapping[Verdict, str] = {
    "proven": "passed",
    "failed": "failed",
    "incomplete": "incomplete: what ran is right, and not everything ran",
}
EXIT_USAGE = 2
LEAST_MINUTES, MOST_MINUTES = 0.1, 1440.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``prove``; the caller adds ``--dir``."""
    parser.add_argument(
        "--stages",
        type=_stages,
        default=STAGES,
        metavar="A,B",
        help=f"only these, of {', '.join(STAGES)}",
    )
    parser.add_argument(
        "--minutes", type=_minutes, default=DEFAULT_MINUTES, help="limit of the whole run"
    )
    parser.add_argument("--device", default="", help="cpu, cuda:0 ...; default: the first GPU")
    parser.add_argument("--small", action="store_true", help="the smallest sizes: only the code")
    parser.add_argument("--json", action="store_true", help="print the report, and nothing else")
    parser.add_argument(
        "--output", type=Path, help="folder of report.json and report.html; default: DIR/prove"
    )


def main(arguments: list[str]) -> int:
    """Run the command; return 0 if all passed, 1 if not, 3 if not everything ran.

    A stop by Ctrl-C returns 130, by SIGTERM 143.
    """
    parser = argparse.ArgumentParser(prog="slipway-host prove", description=WORDS)
    add_arguments(parser)
    parser.add_argument("--dir", type=Path, default=DEFAULT_HOST_DIR, help="host's folder")
    return run(parser.parse_args(arguments))


def run(options: argparse.Namespace) -> int:
    """Prove as the parsed options say."""
    folder = options.output or options.dir / "prove"
    credential, why_unsigned = _credential(options.dir)
    validation = ValidationRun(
        folder=folder,
        stages=options.stages,
        seconds=60 * options.minutes,
        device=options.device,
        is_small=options.small,
        credential=credential,
        say=_quiet if options.json else _say,
    )
    try:
        report = validation.run()
    except FolderInUseError as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_USAGE
    if options.json:
        sys.stdout.write(report.model_dump_json(indent=1) + "\n")
    else:
        print(f"\n{report.device}: {OUTCOMES[report.verdict]}")
        for words in problems(report):
            print(f"  {words}")
        print(f"The report: {folder / PAGE_NAME}, and as data {folder / JSON_NAME}")
        if why_unsigned:
            print(f"It is not signed: {why_unsigned}")
    return exit_code(report, validation.stopped_by)


def _credential(folder: Path) -> tuple[Credential | None, str]:
    """Return the credential that signs the report, or None and why there is none."""
    try:
        return HostDir(folder).credential(), ""
    except HostConfigError as error:
        return None, str(error)


def _say(stage: Stage, record: Record | None) -> None:
    if record is not None:
        print(as_line(record), flush=True)
        return
    problem = f": {stage.problem}" if stage.problem else ""
    print(f"== {TITLES[stage.name]}: {stage.state}, {stage.seconds:.0f} s{problem}", flush=True)


def _quiet(_stage: Stage, _record: Record | None) -> None:
    """Print nothing."""


def _stages(text: str) -> tuple[str, ...]:
    given = tuple(each.strip() for each in text.split(",") if each.strip())
    for name in given:
        if name not in STAGES:
            raise argparse.ArgumentTypeError(f"no stage {name!r}; there are {', '.join(STAGES)}")
    return given


def _minutes(text: str) -> float:
    try:
        minutes = float(text)
    except ValueError:
        minutes = 0.0
    if not LEAST_MINUTES <= minutes <= MOST_MINUTES:
        raise argparse.ArgumentTypeError(
            f"{text} is not between {LEAST_MINUTES} and {MOST_MINUTES:.0f} minutes"
        )
    return minutes
