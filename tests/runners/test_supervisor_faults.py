"""The supervisor when things go wrong: daemons, fork loops, kills, floods and a full disk."""

import os
import time

import pytest

from runners import launch
from runners.reasons import Reason
from runners.supervision import procfs, record
from tests.runners.programs import DAEMON, FOREVER, is_ready, stop
from tests.runners.tools import bodies, events_of, ids_of, wait_for

A1, _ = ids_of(__name__)


@pytest.mark.faults
def test_daemons_of_a_stopped_job_are_killed(attempts):
    folder = attempts.start(code=DAEMON + FOREVER)
    wait_for(lambda: is_ready(folder))
    assert len(procfs.marked(A1)) == 2
    stop(folder)

    attempts.wait(folder, seconds=5)

    assert procfs.marked(A1) == []


@pytest.mark.faults
def test_daemons_of_a_finished_job_are_killed_and_its_reason_kept(attempts):
    folder = attempts.run(code=DAEMON)

    assert folder.exit_record().reason is Reason.OK
    assert procfs.marked(A1) == []


@pytest.mark.faults
def test_a_loop_that_forks_during_the_stop_is_killed_whole(attempts):
    code = (
        "import os, signal, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "print('ready', flush=True)\n"
        "for _ in range(2000):\n"
        "    if os.fork() == 0:\n"
        "        os.setsid(); time.sleep(60); os._exit(0)\n"
        "    time.sleep(0.01)\n"
    )
    folder = attempts.start(code=code)
    wait_for(lambda: is_ready(folder))
    stop(folder)

    attempts.wait(folder)

    assert procfs.marked(A1) == []


@pytest.mark.faults
def test_five_launches_at_once_start_one_job(attempts, tmp_path):
    all_launched = tmp_path / "all-launched"
    waits = f"while not os.path.exists({str(all_launched)!r}): time.sleep(0.02)"
    folder = attempts.make(code=f"import os, time\nprint('ran', flush=True)\n{waits}")
    pids = []
    for _ in range(5):
        pid = os.fork()
        if pid == 0:
            os._exit(launch.start_supervisor(folder.path))
        pids.append(pid)

    outcomes = sorted(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids)
    all_launched.touch()
    attempts.wait(folder)

    assert outcomes == [0, 75, 75, 75, 75]
    assert (folder.path / "stdout.log").read_text() == "ran\n"
    assert len(bodies(folder, "started")) == 1


@pytest.mark.faults
def test_the_job_outlives_the_kill_of_its_launchers_group(attempts):
    folder = attempts.make(code="import time; time.sleep(1.5); print('alive')")
    pid = os.fork()
    if pid == 0:
        os.setsid()
        launch.start_supervisor(folder.path)
        os.killpg(0, 9)
    os.waitpid(pid, 0)

    attempts.wait(folder)

    assert folder.exit_record().reason is Reason.OK
    assert (folder.path / "stdout.log").read_text() == "alive\n"


@pytest.mark.faults
def test_the_job_dies_with_its_supervisor(attempts):
    folder = attempts.start(code=FOREVER)
    identity = record.read_json(folder.path / record.SUPERVISOR)

    os.kill(identity["pid"], 9)

    wait_for(
        lambda: not procfs.is_running(identity["child_pid"], identity["child_start_ticks"]), 3
    )
    assert not record.is_locked(folder.lock)


@pytest.mark.faults
def test_a_flood_of_output_neither_fills_the_disk_nor_stops_the_job(attempts):
    code = "import sys\nfor _ in range(1200): sys.stdout.buffer.write(b'x' * 65535 + b'\\n')\nprint('end')"
    started = time.monotonic()

    folder = attempts.run(code=code)

    kept = sum(path.stat().st_size for path in folder.path.glob("stdout*.log"))
    sent = sum(len(body["text"]) for body in bodies(folder, "log"))
    assert kept <= 12.1 * 2**20
    assert sent <= (time.monotonic() - started + 2) * 64 * 1024
    assert folder.exit_record().dropped_log_bytes > 60 * 2**20
    assert folder.exit_record().last_lines[-1] == "end"


@pytest.mark.faults
def test_the_end_is_recorded_on_a_full_disk(attempts, small_host_dir):
    attempts.host_dir = small_host_dir
    code = (
        "import os\n"
        "fd = os.open('filler', os.O_WRONLY | os.O_CREAT)\n"
        "try:\n"
        "    while True: os.write(fd, b'x' * 512)\n"
        "except OSError as error: print(error); raise SystemExit(1)\n"
    )

    folder = attempts.run(code=code)

    assert os.statvfs(folder.path).f_bavail < 20
    assert folder.exit_record().reason is Reason.DISK_FULL
    assert events_of(folder)[-1]["kind"] == "exited"
