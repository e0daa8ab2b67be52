"""Supervisors, jobs and what jobs leave behind: killed, doubled, deaf, or damaged on disk."""

import itertools
import os
import signal
import subprocess
import sys
import time

import pytest

from runners.launchers.attempts import attempt_folders
from runners.shared.spool import segments
from runners.supervision import child, procfs
from tests.plugins.extent import first
from tests.stack import wait_for
from tests.system.faults.site import ENDLESS, Site, is_alive

pytestmark = [pytest.mark.faults, pytest.mark.slow]


def ending(view) -> tuple[str, str, int]:
    """Return how a job ended and how many exits were stored."""
    return view["state"], view["reason"], sum(each["num_exited"] for each in view["attempts"])


ENDS = {
    "ok": ({}, ("succeeded", "ok", 1)),
    "exit code": ({"ending": "exit_code"}, ("failed", "exit_nonzero", 1)),
    "signal": ({"ending": "signal"}, ("failed", "signal", 1)),
    "kill": ({"ending": "signal", "signal_number": 9}, ("error", "killed_externally", 1)),
    "memory": ({"ending": "oom_gpu"}, ("failed", "oom_gpu", 1)),
    "no model": ({"ending": "missing_model"}, ("failed", "model_or_data_missing", 1)),
}


def test_each_way_to_end_has_its_reason(site):
    hosts = itertools.cycle(site.hosts)
    jobs = {name: site.submit(next(hosts), steps=2, **spec) for name, (spec, _) in ENDS.items()}

    found = {name: ending(site.wait(job)) for name, job in jobs.items()}
    assert found == {name: expected for name, (_, expected) in ENDS.items()}


def test_a_killed_job_or_supervisor_ends_the_job_and_leaves_no_process(site):
    killed, lost = (
        site.running("ada", steps=ENDLESS),
        site.running("bea", steps=ENDLESS, daemons=2),
    )
    attempt = site.attempt(lost)["id"]
    assert len(procfs.processes_of_attempt(attempt)) == 3
    os.kill(site.identity(killed)["child_pid"], signal.SIGKILL)
    os.kill(site.identity(lost)["pid"], signal.SIGKILL)

    assert ending(site.wait(killed)) == ("error", "killed_externally", 1)
    assert ending(site.wait(lost)) == ("error", "supervisor_lost", 1)
    assert procfs.processes_of_attempt(attempt) == []


def test_a_supervisor_killed_before_it_started_the_job_is_told_as_such(site):
    job, killed = "", False
    for _ in range(5):  # a race: the supervisor has a twentieth of a second until its job runs
        job = site.submit("ada", steps=ENDLESS)
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
        has_started = (path / child.SUPERVISOR).exists() or bool(
            procfs.processes_of_attempt(attempt)
        )
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
    job = site.running("ada", steps=40)
    site.kill_tree("ada")
    wait_for(site.attempt_folder(job).exit_record, "the end of the job", every_s=0.05)
    site.begin("ada")

    assert ending(site.wait(job)) == ("succeeded", "ok", 1)


def test_an_agent_that_is_killed_again_and_again_adopts_its_job(site):
    job = site.running("ada", steps=80)
    for _ in range(2):
        site.kill_tree("ada")
        site.begin("ada")
        time.sleep(1.0)  # until it is somewhere in the midst of adopting

    assert ending(site.wait(job)) == ("succeeded", "ok", 1)


def test_a_stop_right_after_the_start_leaves_nothing(site):
    jobs = []
    for host, delay_seconds in zip(("ada", "bea", "cleo"), (0.0, 0.2, 0.5), strict=True):
        jobs.append(site.submit(host, steps=ENDLESS))
        time.sleep(delay_seconds)
        site.desk.stop(job=jobs[-1])

    ended = [ending(site.wait(job))[:2] for job in jobs]
    assert ended == [("stopped", "stopped_by_user")] * 3


def test_a_stop_reaches_the_job_while_the_broker_is_away(site):
    job = site.running("ada", steps=ENDLESS)
    site.kill("redis")
    site.desk.stop(job=job)

    assert ending(site.wait(job)) == ("stopped", "stopped_by_user", 1)


def test_whatever_a_job_does_it_is_gone_whole_after_its_stop_or_its_longest_duration(site):
    deaf = site.running("ada", steps=ENDLESS, daemons=3, ignores_stop=True)
    forking = site.running("bea", steps=ENDLESS, forks_per_second=100)
    spec = {"steps": 600, "ignores_stop": True}
    long = str(site.desk.submit(slug="cleo", spec=spec, max_duration=1.0))
    site.jobs.append(long)
    for job in (deaf, forking):
        site.desk.stop(job=job)

    for job in (deaf, forking):
        assert ending(site.wait(job)) == ("stopped", "stopped_by_user", 1)
        assert procfs.processes_of_attempt(site.attempt(job)["id"]) == []
    assert ending(site.wait(long)) == ("failed", "max_duration", 1)


def test_a_strangers_number_and_a_torn_line_of_the_spool_change_nothing_of_a_lost_end(site):
    """A stranger has ada's supervisor's number, and is left alone; bea's spool is cut short."""
    jobs = {host: site.running(host, steps=ENDLESS) for host in ("ada", "bea")}
    identity = {host: site.identity(job) for host, job in jobs.items()}
    folder = {host: site.attempt_folder(job) for host, job in jobs.items()}
    for host in jobs:
        site.kill_tree(host)
        os.kill(identity[host]["pid"], signal.SIGKILL)
    stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    child.write_json(
        folder["ada"].path / child.SUPERVISOR, identity["ada"] | {"pid": stranger.pid}
    )
    wait_for(lambda: not is_alive(identity["bea"]["child_pid"]), "the end of the job")
    with segments(folder["bea"].spool)[-1].open("ab") as spool:
        spool.write(b'{"seq":99999,"t_ms":1,"kind":"met')
    for host in jobs:
        site.begin(host)

    ended = [ending(site.wait(job)) for job in jobs.values()]
    is_spared = stranger.poll() is None
    stranger.kill()
    stranger.wait()
    assert (ended, is_spared) == ([("error", "supervisor_lost", 1)] * 2, True)


DAMAGES = [
    ("spec.json", False, "zeros"),
    ("exit.json", True, "half"),
    ("spec.json", False, "half"),
    ("exit.json", True, "zeros"),
]


@pytest.mark.parametrize(("file", "is_kept", "damage"), first(DAMAGES, 2))
def test_one_damaged_file_costs_at_most_its_own_attempt(site, file, is_kept, damage):
    job = site.running("ada", steps=40)
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


def test_a_flood_of_output_holds_up_neither_its_job_nor_others(site):
    flood = site.submit("ada", steps=9, log_bytes_per_step=8 * 2**20)
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
        alive = [one for one in attempt_folders(host / "attempts") if child.is_locked(one.lock)]
        assert alive == []
