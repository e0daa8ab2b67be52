"""A drill ends as asked, as a real process, and takes no torch with it."""

import os
import signal
import time

import psutil
import pytest

from runners.jobs import drill
from runners.jobspec import DrillSpec
from runners.shared.reasons import Reason
from runners.supervision.classification import Ending, classify
from tests.system.jobs.harness import Host, wait_until

QUICK = {"steps": 2, "step_seconds": 0.01}


@pytest.fixture
def host(tmp_path) -> Host:
    return Host(tmp_path / "host")


def ending_of(host: Host, **changes) -> tuple[int, Reason]:
    """Return the exit status of a drill and what a supervisor would call it."""
    done = host.run("d1", DrillSpec(**{**QUICK, **changes}))
    code = done.returncode
    ended = Ending(code if code >= 0 else None, -code if code < 0 else None, done.stderr)
    return code, classify(ended)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, (0, Reason.OK)),
        ({"ending": "exit_code", "exit_code": 9}, (9, Reason.EXIT_NONZERO)),
        ({"ending": "signal"}, (-signal.SIGSEGV, Reason.SIGNAL)),
        ({"ending": "signal", "signal_number": 9}, (-signal.SIGKILL, Reason.KILLED_EXTERNALLY)),
        ({"ending": "oom_gpu"}, (1, Reason.OOM_GPU)),
        ({"ending": "missing_model"}, (3, Reason.MODEL_OR_DATA_MISSING)),
    ],
    ids=str,
)
def test_a_drill_ends_as_asked(host, changes, expected):
    assert ending_of(host, **changes) == expected


def test_a_drill_reports_its_steps_its_figures_and_its_result(host):
    done = host.run("d1", DrillSpec(steps=3, step_seconds=0.0))

    assert done.metric("loss") == [1.0, 0.5, pytest.approx(1 / 3)]
    assert [body["done"] for body in done.bodies("progress")] == [1, 2, 3]
    assert done.measured == {"steps": 3.0}


def test_a_stopped_drill_ends_by_the_signal_before_its_steps_are_done(host):
    folder = host.attempt("d1", DrillSpec(steps=600, step_seconds=0.1))
    process = host.start(folder)
    wait_for_step(folder, process)
    process.send_signal(signal.SIGTERM)

    assert process.wait(10) == -signal.SIGTERM


def test_a_drill_that_ignores_stop_goes_on(host):
    folder = host.attempt("d1", DrillSpec(steps=20, step_seconds=0.05, ignores_stop=True))
    process = host.start(folder)
    wait_for_step(folder, process)
    process.send_signal(signal.SIGTERM)

    assert host.finish(folder, process).returncode == 0


def test_a_drill_imports_no_torch(host):
    folder = host.attempt("d1", DrillSpec(steps=600, step_seconds=0.1, memory_bytes=2**20))
    process = host.start(folder)
    wait_for_step(folder, process)
    mapped = {entry.path for entry in psutil.Process(process.pid).memory_maps()}
    process.kill()

    host.finish(folder, process)
    assert not [path for path in mapped if "torch" in path]


def test_asked_to_it_leaves_daemons_that_hear_no_term(host, monkeypatch):
    marker = f"drill-{os.getpid()}"
    monkeypatch.setenv("SLIPWAY_ATTEMPT", marker)
    process = host.start(host.attempt("d1", DrillSpec(**QUICK, daemons=2)))
    with process.stderr:  # the daemons hold the other end
        process.wait(20)
    left = daemons_of(marker)
    for daemon in left:
        daemon.terminate()
    _, alive = psutil.wait_procs(left, timeout=0.5)
    for daemon in left:
        daemon.kill()

    assert len(alive) == 2


def test_output_is_as_much_as_asked(host, capfdbinary):
    host.run("d1", DrillSpec(steps=2, step_seconds=0.0, log_bytes_per_step=1280))

    assert capfdbinary.readouterr().out.count(b"x") == 2 * 10 * 127


def wait_for_step(folder, process) -> None:
    wait_until(folder, "events.jsonl", process)
    deadline = time.monotonic() + 600
    while b"metric" not in (folder / "events.jsonl").read_bytes():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def daemons_of(marker: str) -> list[psutil.Process]:
    """Return the daemons that drills of a marker left behind."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        is_daemon = drill.DAEMON in (process.info["cmdline"] or [])
        if is_daemon and process.environ().get("SLIPWAY_ATTEMPT") == marker:
            found.append(process)
    return found
