"""The supervisor with real jobs: what it records, stops and survives."""

import json
import os
import signal
import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from runners.launchers import launch
from runners.shared.config import HostDir
from runners.shared.messages import EndpointBody
from runners.shared.reasons import Reason
from runners.supervision import child, procfs, supervisor
from tests.runners.programs import DAEMON, FOREVER, SAY, STUBBORN, is_ready, stop
from tests.runners.tools import Attempts, bodies, events_of, ids_of, wait_for

# The supervisor with real jobs: what it records, ships, stops and leaves behind.

A1, A2 = ids_of(__name__)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Iterator[Attempts]:
    """Attempts that several tests look at, without changing them."""
    host_dir = HostDir(tmp_path_factory.mktemp("shared") / "host")
    host_dir.make()
    found = Attempts(host_dir, A1)
    yield found
    found.clean_up()


@pytest.fixture(scope="module")
def done(made):
    """A job that said one word and ended."""
    return made.run(f"done-{A1}", code="print('done')")


@pytest.fixture(scope="module")
def talked(made):
    """A job that wrote on both streams and said events, good ones and a bad one."""
    code = SAY + (
        "import sys\nprint('out', flush=True)\nprint('err', file=sys.stderr, flush=True)\n"
        "say('exited')\nsay('phase', name='evaluate')\n"
        "for n in range(200): say('metric', values={'loss': n}, step=n)\n"
        "for port in (8000, 8001): say('endpoint', host='127.0.0.1', port=port, model='m')\n"
        "say('result', measured={'perplexity': 12.5})\nos._exit(0)"
    )
    return made.run(f"talked-{A1}", code=code)


@pytest.fixture(scope="module")
def living(made):
    """A job that does not end."""
    return made.start(f"living-{A1}", code=FOREVER)


def test_a_job_that_ends_well_is_recorded_as_ok_between_started_and_exited(done):
    ended = done.exit_record()
    assert (ended.exit_code, ended.reason, ended.by) == (0, Reason.OK, "supervisor")
    assert ended.last_lines == ("done",)
    assert ended.started_at_ms <= ended.ended_at_ms
    events = events_of(done)
    assert events[0]["kind"] == "started"
    assert events[-1]["kind"] == "exited"
    assert events[-1]["body"] == json.loads((done.path / "exit.json").read_text())
    assert [event["seq"] for event in events] == list(range(1, len(events) + 1))


def test_what_a_job_says_is_numbered_in_its_order_refused_or_kept_to_its_last_breath(talked):
    steps = [body["step"] for body in bodies(talked, "metric") if body["source"] == "job"]
    assert steps == list(range(200))
    assert bodies(talked, "result") == [{"measured": {"perplexity": 12.5}, "notes": {}}]

    said = [body["text"] for body in bodies(talked, "log") if body["stream"] == "supervisor"]
    assert "a job sends no 'exited' events" in said[1]
    assert bodies(talked, "phase")[1:] == [{"name": "evaluate"}]
    assert talked.endpoint() == EndpointBody.model_validate(bodies(talked, "endpoint")[-1])
    assert talked.endpoint().port == 8001

    kinds = [event["kind"] for event in events_of(talked)][:3]
    first = bodies(talked, "log")[0]
    assert kinds == ["started", "phase", "log"]
    assert bodies(talked, "phase")[0] == {"name": supervisor.LOADING}
    assert (first["stream"], "has started" in first["text"]) == ("supervisor", True)

    said = {(body["stream"], body["text"]) for body in bodies(talked, "log")}
    assert {each for each in said if each[0] != "supervisor"} == {
        ("stdout", "out\n"), ("stderr", "err\n"),
    }  # fmt: skip
    assert (talked.path / "stderr.log").read_text() == "err\n"


def test_memory_and_processor_time_are_sampled_from_the_whole_tree(attempts):
    code = (
        "import resource, subprocess, sys, time\n"
        'hold = \'x = bytearray(150 * 2**20); t = __import__("time"); e = t.time() + 2.6\\n'
        "while t.time() < e: pass'\n"
        "began = time.monotonic()\n"
        "subprocess.run([sys.executable, '-c', hold])\n"
        "used = resource.getrusage(resource.RUSAGE_CHILDREN)\n"
        "print((used.ru_utime + used.ru_stime) / (time.monotonic() - began))"
    )
    folder = attempts.run(code=code)
    cores = float((folder.path / "stdout.log").read_text())  # that it had of this machine
    points = [body["values"] for body in bodies(folder, "metric") if body["source"] == "host"]
    assert max(point["rss_bytes"] for point in points) > 150 * 2**20
    assert max(point["cpu_utilization"] for point in points) > cores / 2
    assert folder.exit_record().peak_rss_bytes > 150 * 2**20


def test_a_failed_a_killed_and_a_missing_program_leave_their_code_and_last_words(attempts):
    missing = ("/no/such/python: No such file or directory",)
    for number, (launch_changes, code, signal_number, reason, words) in enumerate([
        ({"code": "raise SystemExit('no such tokenizer')"}, 1, None, Reason.EXIT_NONZERO,
         ("no such tokenizer",)),
        ({"code": "import os; os.kill(os.getpid(), 11)"}, None, 11, Reason.SIGNAL, ()),
        ({"argv": ["/no/such/python"]}, None, None, Reason.ENGINE_START_FAILED, missing),
    ]):  # fmt: skip
        ended = attempts.run(f"ends-{number}-{A1}", **launch_changes).exit_record()
        found = (ended.exit_code, ended.signal, ended.reason, ended.last_lines)
        assert found == (code, signal_number, reason, words)


def test_a_job_gets_the_marker_the_given_environment_and_nothing_else_and_goes_first(attempts):
    """No input, no other descriptor; the kernel takes it before its supervisor."""
    code = (
        "import json, os, sys\n"
        "words, fds = sys.stdin.read(), len(os.listdir('/proc/self/fd'))\n"
        "score = int(open('/proc/self/oom_score_adj').read())\n"
        "print(json.dumps([dict(os.environ), words, fds, score]))"
    )

    folder = attempts.run(code=code, env={"PATH": "/usr/bin", "OMP_NUM_THREADS": "2"})

    seen, words, fds, score = json.loads((folder.path / "stdout.log").read_text())
    event_fd = seen.pop("SLIPWAY_EVENT_FD")
    seen.pop("LC_CTYPE", None)  # Python itself adds it in the C locale
    assert seen == {"PATH": "/usr/bin", "OMP_NUM_THREADS": "2", "SLIPWAY_ATTEMPT": A1}
    assert int(event_fd) > 2
    # stdin, stdout, stderr, the event pipe, and the listing itself
    assert (words, fds) == ("", 5)
    assert score == 500


def test_the_files_of_an_attempt_are_closed_to_others(done):
    for name in ("stdout.log", "exit.json", "supervisor.json", "launch.json"):
        assert stat.S_IMODE((done.path / name).stat().st_mode) == 0o600
    assert stat.S_IMODE(done.path.stat().st_mode) == 0o700


def test_the_supervisor_says_who_it_is_and_is_small(living):
    identity = child.read_json(living.path / child.SUPERVISOR)
    assert procfs.is_running(identity["pid"], identity["start_ticks"])
    assert procfs.read_process(identity["child_pid"]).parent == identity["pid"]
    assert identity["boot_id"] == procfs.boot_id()
    assert procfs.read_process(identity["pid"]).rss_bytes < 30 * 2**20
    assert sys.executable in bodies(living, "started")[0]["argv"]


def test_a_second_launch_is_refused_while_the_first_lives_and_after_its_end(living, done):
    assert launch.start_supervisor(living.path) == supervisor.EXIT_ALREADY_SUPERVISED
    assert launch.start_supervisor(done.path) == supervisor.EXIT_ALREADY_ENDED
    assert (done.path / "stdout.log").read_text() == "done\n"


def test_a_stop_kills_a_stubborn_job_after_its_grace(attempts):
    folder = attempts.start(code=STUBBORN)
    wait_for(lambda: is_ready(folder))
    stop(folder)
    attempts.wait(folder, seconds=5)
    assert folder.exit_record().reason is Reason.STOPPED_BY_USER
    assert folder.exit_record().signal == 9


def test_a_stop_before_the_start_runs_nothing(attempts):
    folder = attempts.make(code="open('ran', 'w')")
    stop(folder)
    launch.start_supervisor(folder.path)
    attempts.wait(folder)
    assert folder.exit_record().reason is Reason.STOPPED_BY_USER
    assert not (folder.path / "ran").exists()
    assert [event["kind"] for event in events_of(folder)] == ["exited"]


def test_a_stop_ends_a_willing_job_at_once_and_its_reason_is_kept(attempts):
    for reason in (Reason.STOPPED_BY_USER, Reason.SUPERSEDED):
        folder = attempts.start(f"{reason.value.replace('_', '-')}-{A1}", code=FOREVER)
        stop(folder, reason=reason.value, grace_seconds=30)
        attempts.wait(folder, seconds=5)
        assert (folder.exit_record().reason, folder.exit_record().signal) == (reason, 15)


def test_a_job_can_save_its_work_during_the_grace(attempts):
    code = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (print('saved', flush=True), sys.exit(0)))\n"
        "print('ready', flush=True)\nwhile True: time.sleep(0.05)"
    )
    folder = attempts.start(code=code)
    wait_for(lambda: is_ready(folder))
    stop(folder, grace_seconds=10)
    attempts.wait(folder, seconds=5)
    assert folder.exit_record().last_lines == ("ready", "saved")


def test_a_job_that_takes_too_long_is_ended(attempts):
    folder = attempts.run(code=FOREVER, max_duration_seconds=0.5)
    assert folder.exit_record().reason is Reason.MAX_DURATION


def test_a_stop_is_obeyed_at_once_when_the_supervisor_is_told(attempts):
    folder = attempts.start(code=FOREVER)
    identity = child.read_json(folder.path / child.SUPERVISOR)
    stop(folder, grace_seconds=30)
    procfs.send_signal(identity["pid"], identity["start_ticks"], signal.SIGTERM)
    attempts.wait(folder, seconds=3)
    ended = folder.exit_record()
    assert ended.reason is Reason.STOPPED_BY_USER
    assert ended.ended_at_ms - ended.started_at_ms < 1000


def test_a_supervisor_that_a_stranger_terminates_ends_its_job_and_says_so(attempts):
    for at, (asked, last, logged) in enumerate(
        [
            (
                "echo Slurm ended job 7 as PREEMPTED",
                ("Slurm ended job 7 as PREEMPTED",),
                "Slurm ended",
            ),
            ("echo no such job >&2; exit 1", (), "who ended it is not known: no such job\n"),
        ]
    ):
        folder = attempts.make(f"{attempts.first_id}-{at}", code=FOREVER)
        secrets = folder.path / child.SECRETS
        secrets.mkdir()
        program = f"test -e {secrets} && exit 3; {asked}"  # deleted before anybody is asked
        document = child.read_json(folder.path / child.LAUNCH)
        document["explain_kill"] = ["/bin/sh", "-c", program]
        child.write_json(folder.path / child.LAUNCH, document)
        assert launch.start_supervisor(folder.path) == supervisor.STARTED
        os.kill(child.read_json(folder.path / child.SUPERVISOR)["pid"], signal.SIGTERM)
        attempts.wait(folder)
        record = folder.exit_record()
        assert record.reason is Reason.KILLED_EXTERNALLY
        assert record.last_lines[-1:] == last
        assert any(body["text"].startswith(logged) for body in bodies(folder, "log")), logged


def test_an_attempt_that_a_scheduler_runs_again_goes_on_in_its_folder(attempts):
    again = (
        "import pathlib, time\nfirst = pathlib.Path('first')\nif first.exists(): print('again')\n"
        "else: first.touch(); pathlib.Path('requeued.json').write_text('{}'); time.sleep(600)"
    )
    folder = attempts.start(code=again)
    wait_for((folder.path / child.REQUEUED).exists)
    os.kill(child.read_json(folder.path / child.SUPERVISOR)["pid"], signal.SIGTERM)
    wait_for(lambda: not child.is_locked(folder.lock))
    assert folder.exit_record() is None
    assert launch.start_supervisor(folder.path) == supervisor.STARTED
    attempts.wait(folder)
    assert folder.exit_record().reason is Reason.OK
    kinds = [event["kind"] for event in events_of(folder)]
    assert (kinds.count("started"), kinds.count("exited"), kinds[-1]) == (2, 1, "exited")


def test_an_attempt_whose_scheduler_says_that_it_runs_it_again_keeps_its_secrets(attempts):
    folder = attempts.make(
        code="import pathlib, time; pathlib.Path('first').exists() or time.sleep(600)"
    )
    document = child.read_json(folder.path / child.LAUNCH)
    asked = f"touch {folder.path}/first; echo requeued; exit {supervisor.RUNS_AGAIN}"
    told = {"explain_kill": ["/bin/sh", "-c", asked], "may_run_again": True}
    child.write_json(folder.path / child.LAUNCH, document | told)
    (folder.path / child.SECRETS).mkdir()
    assert launch.start_supervisor(folder.path) == supervisor.STARTED
    os.kill(child.read_json(folder.path / child.SUPERVISOR)["pid"], signal.SIGTERM)
    wait_for(lambda: not child.is_locked(folder.lock))
    assert (folder.exit_record(), (folder.path / child.SECRETS).exists()) == (None, True)
    assert launch.start_supervisor(folder.path) == supervisor.STARTED
    attempts.wait(folder)
    assert folder.exit_record().reason is Reason.OK
    logged = "".join(body["text"] for body in bodies(folder, "log"))
    assert "requeued\n" in logged
    assert "not known" not in logged


def test_the_limit_of_an_attempt_that_is_run_again_counts_from_its_first_start(attempts):
    folder = attempts.make(code=FOREVER, max_duration_seconds=50.0)
    assert launch.start_supervisor(folder.path) == supervisor.STARTED
    first = child.read_json(folder.path / child.SUPERVISOR)
    os.kill(first["pid"], signal.SIGKILL)  # its node is lost
    wait_for(lambda: not child.is_locked(folder.lock))
    long_ago = {"first_started_at_ms": first["first_started_at_ms"] - 50_000}
    child.write_json(folder.path / child.SUPERVISOR, first | long_ago)
    assert launch.start_supervisor(folder.path) == supervisor.STARTED
    attempts.wait(folder)
    assert folder.exit_record().reason is Reason.MAX_DURATION


def test_a_requeued_attempt_that_is_stopped_ends_as_stopped(attempts):
    folder = attempts.start(code=FOREVER)
    child.write_json(folder.path / child.REQUEUED, {})
    stop(folder)
    attempts.wait(folder)
    assert folder.exit_record().reason is Reason.STOPPED_BY_USER


def test_a_closed_terminal_does_not_end_the_supervisor(attempts):
    folder = attempts.start(code="import time; time.sleep(0.5)")
    for number in (signal.SIGINT, signal.SIGHUP):
        os.kill(child.read_json(folder.path / child.SUPERVISOR)["pid"], number)
    attempts.wait(folder)
    assert folder.exit_record().reason is Reason.OK


def test_a_folder_without_launch_data_is_an_internal_fault(attempts):
    folder = attempts.make()
    (folder.path / child.LAUNCH).write_bytes(b"{")
    assert launch.start_supervisor(folder.path) == supervisor.EXIT_INTERNAL
    assert "is missing or damaged" in (folder.path / "supervisor.log").read_text()


def test_an_endless_event_is_refused_and_a_flood_of_damaged_ones_not_told_line_by_line(attempts):
    code = SAY + (
        "fd = int(os.environ['SLIPWAY_EVENT_FD'])\n"
        "for _ in range(40): os.write(fd, b'x' * 65536)\n"
        "os.write(fd, b'\\n')\nsay('phase', name='after')\n"
        "for _ in range(500): os.write(fd, b'no\\n')"
    )
    folder = attempts.run(code=code)
    assert bodies(folder, "phase")[1:] == [{"name": "after"}]
    told = [body for body in bodies(folder, "log") if body["stream"] == "supervisor"]
    assert len(told) == 1 + supervisor.MAX_REFUSALS_TOLD  # and that it has started


@pytest.mark.slow
def test_a_job_may_close_everything_and_still_be_supervised(attempts):
    code = "import os, time\nfor fd in range(64):\n  try: os.close(fd)\n  except OSError: pass\ntime.sleep(1.2)"
    folder = attempts.run(code=code)
    assert folder.exit_record().reason is Reason.OK


@pytest.mark.slow
def test_the_supervisor_leaks_no_descriptor_and_keeps_no_zombie(attempts):
    code = "import subprocess\nfor _ in range(30): subprocess.run(['true'])\n" + FOREVER
    folder = attempts.start(code="print('ready', flush=True)\n" + code)
    pid = child.read_json(folder.path / child.SUPERVISOR)["pid"]
    wait_for(lambda: is_ready(folder))
    descriptors = Path(f"/proc/{pid}/fd")
    before = len(list(descriptors.iterdir()))
    time.sleep(1.5)
    assert len(list(descriptors.iterdir())) == before
    assert [
        each for each in procfs.all_processes() if each.parent == pid and not each.is_alive
    ] == []


@pytest.mark.slow
def test_an_idle_supervisor_costs_next_to_nothing(living):
    pid = child.read_json(living.path / child.SUPERVISOR)["pid"]
    before = procfs.read_process(pid).cpu_ticks
    time.sleep(3)
    spent = procfs.read_process(pid).cpu_ticks - before
    assert spent / procfs.CLOCK_TICKS_PER_SECOND / 3 < 0.05


# The supervisor when things go wrong: daemons, fork loops, kills, floods and a full disk.


@pytest.mark.faults
def test_daemons_of_a_stopped_job_are_killed(attempts):
    folder = attempts.start(code=DAEMON + FOREVER)
    wait_for(lambda: is_ready(folder))
    assert len(procfs.processes_of_attempt(A1)) == 2
    stop(folder)
    attempts.wait(folder, seconds=5)
    assert procfs.processes_of_attempt(A1) == []


@pytest.mark.faults
def test_daemons_of_a_finished_job_are_killed_and_its_reason_kept(attempts):
    folder = attempts.run(code=DAEMON)
    assert folder.exit_record().reason is Reason.OK
    assert procfs.processes_of_attempt(A1) == []


@pytest.mark.slow
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

    assert procfs.processes_of_attempt(A1) == []


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
    identity = child.read_json(folder.path / child.SUPERVISOR)
    os.kill(identity["pid"], 9)
    wait_for(
        lambda: not procfs.is_running(identity["child_pid"], identity["child_start_ticks"]), 3
    )
    assert not child.is_locked(folder.lock)


# A grandchild that leaves session and group, and writes its title over its environment.
TITLED = (
    "import ctypes, os, subprocess, sys, time\n"
    "if 'titled' in sys.argv:\n"
    "    text = open('/proc/self/stat').read().rpartition(')')[2].split()\n"
    "    start, end = int(text[47]), int(text[48])\n"  # env_start and env_end of proc(5)
    "    ctypes.memset(start, 0, end - start)\n"
    "    print('ready', flush=True)\n"
    "    time.sleep(120); sys.exit()\n"
    "code = sys.orig_argv[-1]\n"
    "subprocess.Popen([sys.executable, '-c', code, 'titled'], start_new_session=True)\n"
)


@pytest.mark.faults
def test_a_grandchild_that_hid_its_environment_ends_with_its_job_and_its_supervisor(attempts):
    for kills_supervisor in (False, True):
        folder = attempts.start(A2 if kills_supervisor else A1, code=TITLED + FOREVER)
        wait_for(lambda folder=folder: is_ready(folder))
        identity = child.read_json(folder.path / child.SUPERVISOR)
        (titled,) = [
            each
            for each in procfs.descendants(identity["child_pid"])
            if b"=" not in (procfs.PROC / str(each.pid) / "environ").read_bytes()
        ]
        assert procfs.is_marked(titled.pid)
        os.kill(identity["pid" if kills_supervisor else "child_pid"], 9)
        wait_for(lambda folder=folder: not child.is_locked(folder.lock), 5)
        if kills_supervisor:
            folder.settle(Reason.SUPERVISOR_LOST)
        assert not procfs.is_running(titled.pid, titled.start_ticks)


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
