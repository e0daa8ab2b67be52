"""Worker processes of a test run, forked after everything was imported and collected once.

Their memory is shared with the parent until they write to it, so six of them cost little more
than two. The parent runs no test and starts no thread; it hands out units (lists of positions in
``session.items``) and passes every report on to pytest's own hooks.
"""

import contextlib
import ctypes
import gc
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing import Pipe, connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from _pytest.runner import CallInfo

from tests.plugins import database, preloaded, snapshots
from tests.plugins.run_folder import FOLDER

_PR_SET_PDEATHSIG = 1
STOPPING_SECONDS = 30.0  # for a worker's fixtures to be torn down when a run is broken off
SILENT_PLUGINS = ("terminalreporter", "lfplugin", "stepwiseplugin", "durations-kept")
Sent = tuple[Any, ...]
Take = Callable[[str], list[int] | None]  # the next unit of a lane, None once all are taken


def run(session: pytest.Session, num_workers: Mapping[str, int], take: Take) -> None:
    """Run all units with so many workers for each lane; raise what pytest's own loop would."""
    prepare(session)
    found: list[Worker] = []
    has_jobs = any(item.get_closest_marker("jobs") for item in session.items)
    with preloaded.serving(FOLDER) if has_jobs else contextlib.nullcontext():
        try:
            for lane, count in num_workers.items():
                for number in range(count):
                    found.append(Worker.fork(session, lane, number + 1, found))
            _listen(session, found, take)
        finally:
            stop(found)


def prepare(session: pytest.Session) -> None:
    """Do once, before the forks, what every worker would otherwise do for itself."""
    database.make_template(session)
    gc.collect()
    gc.freeze()
    sys.stdout.flush()
    sys.stderr.flush()


@dataclass(eq=False)
class Worker:
    """The parent's side of one forked process."""

    name: str
    lane: str
    number: int
    pid: int
    pipe: "connection.Connection[Any, Any]"
    running: str = ""  # the test that it is at
    gateway: SimpleNamespace = field(init=False)
    workerinfo: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        """Describe it as pytest's terminal expects of a worker."""
        self.gateway = SimpleNamespace(id=self.name)
        system = {"sysplatform": sys.platform, "executable": sys.executable}
        self.workerinfo = {"id": self.name, "version_info": sys.version_info, **system}

    @classmethod
    def fork(
        cls,
        session: pytest.Session,
        lane: str,
        number: int,
        others: list["Worker"],
    ) -> "Worker":
        """Start a worker of a lane."""
        name = f"{lane}{number}"
        ours, theirs = Pipe()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            ours.close()
            for other in others:
                other.pipe.close()
            _be_worker(session, theirs, name, parent)  # does not return
        theirs.close()
        return cls(name, lane, number, pid, ours)


def _listen(session: pytest.Session, found: list[Worker], take: Take) -> None:
    """Answer workers until all have ended; a worker that dies fails its test and is replaced."""
    living = list(found)
    while living:
        by_pipe = {worker.pipe: worker for worker in living}
        for pipe in connection.wait(list(by_pipe), timeout=1.0):
            worker = by_pipe[pipe]
            try:
                has_ended = _answer(session, worker, worker.pipe.recv(), take)
            except (EOFError, ConnectionResetError):
                has_ended = True
                _report_crash(session, worker)
                following = Worker.fork(session, worker.lane, worker.number + 10, living)
                living.append(following)
                found.append(following)
            if has_ended:
                living.remove(worker)
                worker.pipe.close()
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)


def _answer(session: pytest.Session, worker: Worker, sent: Sent, take: Take) -> bool:
    """Act on one message of a worker; return whether it was its last."""
    kind, *rest = sent
    hook = session.config.hook
    if kind == "next":
        worker.pipe.send(take(worker.lane))
    elif kind == "start":
        worker.running = rest[0]
    elif kind == "report":
        report = hook.pytest_report_from_serializable(config=session.config, data=rest[0])
        report.node = worker
        hook.pytest_runtest_logreport(report=report)
    elif kind == "snapshots":
        snapshots.add(session.config, rest[0])
    elif kind == "warning":
        message, when, nodeid, location = rest
        hook.pytest_warning_recorded.call_historic(
            kwargs={
                "warning_message": message,
                "when": when,
                "nodeid": nodeid,
                "location": location,
            }
        )
    return bool(kind == "end")


def _report_crash(session: pytest.Session, worker: Worker) -> None:
    _, status = os.waitpid(worker.pid, 0)
    words = f"worker {worker.name} ended with status {os.waitstatus_to_exitcode(status)}"
    report = pytest.TestReport(
        worker.running or worker.name, (worker.running, None, worker.running), {}, "failed",
        f"{words} while this test ran", "call", (),
    )  # fmt: skip
    report.node = worker
    session.config.hook.pytest_runtest_logreport(report=report)


def stop(found: list[Worker]) -> None:
    """Wait for workers that have ended; ask the others to end, and kill those that do not."""
    living = [worker for worker in found if not _is_over(worker)]
    for worker in living:
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker.pid, signal.SIGTERM)
    deadline = time.monotonic() + STOPPING_SECONDS
    while living and time.monotonic() < deadline:
        living = [worker for worker in living if not _is_over(worker)]
        time.sleep(0.05)
    for worker in living:
        os.kill(worker.pid, signal.SIGKILL)
        os.waitpid(worker.pid, 0)


def _is_over(worker: Worker) -> bool:
    try:
        return os.waitpid(worker.pid, os.WNOHANG)[0] != 0
    except ChildProcessError:
        return True


# The worker's own side


def _be_worker(
    session: pytest.Session,
    pipe: "connection.Connection[Any, Any]",
    name: str,
    parent: int,
) -> None:
    """Run units until none is left, then end without the parent's own clean-up."""
    status = 1
    try:
        _leave_parent(parent)
        _separate(session.config, name)
        _Loop(session, pipe, name).run()
        status = 0
    except KeyboardInterrupt:
        pass  # the parent stops the run
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(status)


def _leave_parent(parent: int) -> None:
    """Be a group of its own, which dies with the parent, and which SIGTERM ends in order."""
    os.setpgrp()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    signal.signal(signal.SIGTERM, _end_worker)
    os.register_at_fork(after_in_child=_forget_handler)
    _renew_thread_pool()


def _renew_thread_pool() -> None:
    """Make torch's thread pool anew, which no fork takes along.

    Two threads of a model's loader that both come first find none: "Invalid thread pool".
    """
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(torch.get_num_threads())


def _end_worker(*_: object) -> None:
    raise KeyboardInterrupt  # SystemExit would be taken for the test's own failure


def _forget_handler() -> None:
    """Let SIGTERM end what a test forks as it ends any other process."""
    if signal.getsignal(signal.SIGTERM) is _end_worker:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _separate(config: pytest.Config, name: str) -> None:
    """Give this process what may not be shared: captured output, folders, databases, settings."""
    capture = config.pluginmanager.getplugin("capturemanager")
    if capture is not None:
        capture.stop_global_capturing()
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1):
        os.dup2(nowhere, descriptor)
    os.close(nowhere)
    if capture is not None:
        capture.start_global_capturing()
    for plugin in SILENT_PLUGINS:
        config.pluginmanager.unregister(name=plugin)
    config.workerinput = {"workerid": name}  # type: ignore[attr-defined]  # pytest-django's suffix
    config._tmp_path_factory._given_basetemp = FOLDER / name  # type: ignore[attr-defined]
    config._tmp_path_factory._basetemp = None  # type: ignore[attr-defined]
    _move_settings(FOLDER / "data", FOLDER / f"data-{name}")
    database.take_copy(config, name)


def _move_settings(shared: Path, own: Path) -> None:
    """Let Django's settings name a data folder of this process."""
    from django.conf import settings

    own.mkdir(mode=0o700)
    os.environ["SLIPWAY_DATA_DIR"] = str(own)
    for key in dir(settings):
        value = getattr(settings, key)
        if isinstance(value, Path) and (value == shared or shared in value.parents):
            setattr(settings, key, own / value.relative_to(shared))
        elif isinstance(value, str) and key.isupper() and str(shared) in value:
            setattr(settings, key, value.replace(str(shared), str(own)))


class _Pause(pytest.Item):
    """Stands for the next test while no unit is known, so that shared fixtures stay."""

    def runtest(self) -> None:
        """Never run."""


class _Loop:
    """Asks for units, runs their tests, and tells the parent every report."""

    def __init__(
        self, session: pytest.Session, pipe: "connection.Connection[Any, Any]", name: str
    ) -> None:
        self.session = session
        self.pipe = pipe
        self.name = name
        self.pause = _Pause.from_parent(session, name=f"pause of {name}")
        self.last: pytest.Item | None = None
        session.config.pluginmanager.register(self, "forked-worker")

    def run(self) -> None:
        """Run units until there is none."""
        try:
            for unit in self._units():
                for position, number in enumerate(unit):
                    following = unit[position + 1 : position + 2]
                    self._run_one(
                        number, self.session.items[following[0]] if following else self.pause
                    )
        finally:
            self._tear_down()
        if used := snapshots.of_worker(self.session.config, self.name):
            self.pipe.send(("snapshots", used))
        self.pipe.send(("end",))

    def _units(self) -> Iterator[list[int]]:
        while True:
            self.pipe.send(("next",))
            unit = self.pipe.recv()
            if unit is None:
                return
            yield unit

    def _run_one(self, number: int, following: pytest.Item) -> None:
        self.last = item = self.session.items[number]
        self.pipe.send(("start", item.nodeid))
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)

    def _tear_down(self) -> None:
        """Tear down what is left; what fails there is a failure of the last test."""
        if self.last is None:
            return
        state = self.session._setupstate
        call = CallInfo.from_call(lambda: state.teardown_exact(None), when="teardown")
        if call.excinfo is not None:
            self.pytest_runtest_logreport(pytest.TestReport.from_item_and_call(self.last, call))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Pass a report on."""
        config = self.session.config
        data = config.hook.pytest_report_to_serializable(config=config, report=report)
        self.pipe.send(("report", data))

    def pytest_warning_recorded(
        self,
        warning_message: warnings.WarningMessage,
        when: str,
        nodeid: str,
        location: tuple[str, int, str] | None,
    ) -> None:
        """Pass a warning on, without what it may refer to."""
        plain = warnings.WarningMessage(
            str(warning_message.message), UserWarning, warning_message.filename,
            warning_message.lineno,
        )  # fmt: skip
        self.pipe.send(("warning", plain, when, nodeid, location))
