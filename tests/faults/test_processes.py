"""Supervisors, jobs and what jobs leave behind: killed, doubled, deaf, or damaged on disk."""

import os
import signal
import subprocess
import sys
import time

import pytest

from runners.attempts import attempt_folders
from runners.spool import segments
from runners.supervision import procfs, record
from tests.faults.site import Site, is_alive
from tests.stack import wait_for

pytestmark = [pytest.mark.faults, pytest.mark.slow]


def ending(view) -> tuple[str, str, int]:
    """Return how a job ended and how many exits were stored."""
    return view["state"], view["reason"], sum(each["num_exited"] for each in view["attempts"])


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ({}, ("succeeded", "ok", 1)),
        ({"ending": "exit_code"}, ("failed", "exit_nonzero", 1)),
        ({"ending": "signal"}, ("failed", "signal", 1)),
        ({"ending": "signal", "signal_number": 9}, ("error", "killed_externally", 1)),
        ({"ending": "oom_gpu"}, ("failed", "oom_gpu", 1)),
        ({"ending": "missing_model"}, ("failed", "model_or_data_missing", 1)),
    ],
    ids=lambda one: one[1] if isinstance(one, tuple) else "",
)
def test_each_way_to_end_has_its_reason(site, spec, expected):
    assert ending(site.wait(site.submit("ada", steps=2, **spec))) == expected


def test_a_training_process_that_is_killed_ends_its_job(site):
    job = site.running("ada", steps=600)
    os.kill(site.identity(job)["child_pid"], signal.SIGKILL)

    assert ending(site.wait(job)) == ("error", "killed_externally", 1)


def test_a_job_that_takes_too_long_is_ended(site):
    job = str(
        site.desk.submit(slug="ada", spec={"steps": 600, "ignores_stop": True}, max_duration=1.0)
    )
    site.jobs.append(job)

    assert ending(site.wait(job)) == ("failed", "max_duration", 1)


def test_nothing_outlives_a_killed_supervisor(site):
    job = site.running("ada", steps=600, daemons=2)
    attempt = site.attempt(job)["id"]
    assert len(procfs.marked(attempt)) == 3
    os.kill(site.identity(job)["pid"], signal.SIGKILL)

    assert ending(site.wait(job)) == ("error", "supervisor_lost", 1)
    assert procfs.marked(attempt) == []


def test_a_supervisor_killed_before_it_started_the_job_is_told_as_such(site):
    job, killed = "", False
    for _ in range(5):  # a race: the supervisor has a twentieth of a second until its job runs
        job = site.submit("ada", steps=600)
        killed = kill_at_birth(site, job)
        if killed:
            break
        site.desk.stop(job=job)
        site.wait(job)

    assert killed
    assert ending(site.wait(job)) == ("error", "never_started", 1)


def kill_at_birth(site: Site, job: str) -> bool:
    """Kill an attempt's launcher and supervisor; True if the job had not been started."""
    attempt, path = site.attempt(job)["id"], site.attempt_folder(job).path
    old = pids() - set(supervisors(pids(), attempt))
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline:
        if not supervisors(pids() - old, attempt):
            continue
        for pid in (found := supervisors(pids() - old, attempt)):
            os.kill(pid, signal.SIGSTOP)
        found = supervisors(pids() - old, attempt)  # one may have forked before it froze
        has_started = (path / record.SUPERVISOR).exists() or bool(procfs.marked(attempt))
        for pid in found:
            os.kill(pid, signal.SIGCONT if has_started else signal.SIGKILL)
        return not has_started
    return False


def pids() -> set[int]:
    return {int(entry.name) for entry in procfs.PROC.iterdir() if entry.name.isdigit()}


def supervisors(among: set[int], attempt: str) -> list[int]:
    return [pid for pid in among if is_supervisor(pid, attempt)]


def is_supervisor(pid: int, attempt: str) -> bool:
    try:
        words = (procfs.PROC / str(pid) / "cmdline").read_bytes()
    except OSError:
        return False
    return b"supervisor.py" in words and attempt.encode() in words


def test_a_job_that_ends_while_its_agent_is_away_succeeded(site):
    job = site.running("ada", steps=20)
    site.kill_tree("ada")
    wait_for(site.attempt_folder(job).exit_record, "the end of the job", every_s=0.05)
    site.begin("ada")

    assert ending(site.wait(job)) == ("succeeded", "ok", 1)


def test_an_agent_that_is_killed_again_and_again_adopts_its_job(site):
    job = site.running("ada", steps=120)
    for _ in range(3):
        site.kill_tree("ada")
        site.begin("ada")
        time.sleep(1.0)  # until it is somewhere in the midst of adopting

    assert ending(site.wait(job)) == ("succeeded", "ok", 1)


@pytest.mark.parametrize("delay_seconds", [0.0, 0.15, 0.3, 0.6])
def test_a_stop_right_after_the_start_leaves_nothing(site, delay_seconds):
    job = site.submit("ada", steps=600)
    time.sleep(delay_seconds)
    site.desk.stop(job=job)

    state, reason, _ = ending(site.wait(job))
    assert (state, reason) == ("stopped", "stopped_by_user")


def test_a_stop_reaches_the_job_while_the_broker_is_away(site):
    job = site.running("ada", steps=600)
    site.kill("redis")
    site.desk.stop(job=job)

    assert ending(site.wait(job)) == ("stopped", "stopped_by_user", 1)


def test_daemons_and_a_deaf_job_are_gone_after_the_stop(site):
    job = site.running("ada", steps=600, daemons=3, ignores_stop=True)
    site.desk.stop(job=job)

    assert ending(site.wait(job)) == ("stopped", "stopped_by_user", 1)
    assert procfs.marked(site.attempt(job)["id"]) == []


def test_a_job_that_forks_when_it_is_told_to_stop_is_killed_whole(site):
    job = site.running("ada", steps=600, forks_per_second=100)
    site.desk.stop(job=job)

    assert ending(site.wait(job)) == ("stopped", "stopped_by_user", 1)
    assert procfs.marked(site.attempt(job)["id"]) == []


def test_a_stranger_with_the_supervisors_number_is_left_alone(site):
    job = site.running("ada", steps=600)
    identity, folder = site.identity(job), site.attempt_folder(job)
    site.kill_tree("ada")
    os.kill(identity["pid"], signal.SIGKILL)
    stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    record.write_json(folder.path / record.SUPERVISOR, identity | {"pid": stranger.pid})
    site.begin("ada")

    ended = ending(site.wait(job))
    is_spared = stranger.poll() is None
    stranger.kill()
    stranger.wait()
    assert (ended, is_spared) == (("error", "supervisor_lost", 1), True)


@pytest.mark.parametrize("damage", ["zeros", "half"])
@pytest.mark.parametrize(("file", "is_kept"), [("spec.json", False), ("exit.json", True)])
def test_one_damaged_file_costs_at_most_its_own_attempt(site, file, is_kept, damage):
    job = site.running("ada", steps=10)
    folder = site.attempt_folder(job)
    site.kill_tree("ada")
    wait_for(folder.exit_record, "the end of the job", every_s=0.05)
    size = (folder.path / file).stat().st_size
    (folder.path / file).write_bytes(
        b"\0" * size if damage == "zeros" else (folder.path / file).read_bytes()[: size // 2]
    )
    site.begin("ada")

    assert site.wait(job)["state"] == ("succeeded" if is_kept else "error")
    assert site.wait(site.submit("ada", steps=2))["state"] == "succeeded"


def test_a_torn_last_line_of_the_spool_costs_no_number(site):
    job = site.running("ada", steps=600)
    folder, identity = site.attempt_folder(job), site.identity(job)
    site.kill_tree("ada")
    os.kill(identity["pid"], signal.SIGKILL)
    wait_for(lambda: not is_alive(identity["child_pid"]), "the end of the job")
    with segments(folder.spool)[-1].open("ab") as spool:
        spool.write(b'{"seq":99999,"t_ms":1,"kind":"met')
    site.begin("ada")

    assert ending(site.wait(job)) == ("error", "supervisor_lost", 1)


def test_a_flood_of_output_holds_up_neither_its_job_nor_others(site):
    flood = site.submit("ada", steps=12, log_bytes_per_step=8 * 2**20)
    calm = site.submit("bea", steps=20)

    assert ending(site.wait(calm)) == ("succeeded", "ok", 1)
    assert ending(site.wait(flood)) == ("succeeded", "ok", 1)
    assert site.attempt(flood)["exit"]["dropped_log_bytes"] > 50 * 2**20
    assert (
        sum(path.stat().st_size for path in site.attempt_folder(flood).path.glob("stdout*"))
        < 13 * 2**20
    )


def test_no_attempt_of_any_case_before_is_left_on_a_host(site):
    for host in site.hosts.values():
        alive = [one for one in attempt_folders(host / "attempts") if record.is_locked(one.lock)]
        assert alive == []
