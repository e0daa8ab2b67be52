"""Each law and each promise finds one planted violation, and nothing where all is well."""

import os
import subprocess
import sys
import time
from datetime import timedelta

import pytest
from django.db import connection

from runners.shared.spool import SpoolWriter
from runners.supervision import procfs
from tests.stack import wait_for
from tests.system.faults import laws, watch
from tests.webapp.conftest import (  # fixtures
    EXIT_OK,
    STARTED,
    alice,
    attempt,
    batch_of,
    draft,
    enrolled,
    host,
    job,
    team,
)
from tests.webapp.metrics.conftest import append
from webapp.agents.ingest import events_accept
from webapp.audit.models import Event
from webapp.core.clock import now
from webapp.hosts.models import Device
from webapp.jobs.models import Allocation, Attempt, AttemptEvent, Command, Job
from webapp.metrics import store

FIXTURES = (alice, attempt, draft, enrolled, host, job, team)
db = pytest.mark.django_db(databases=["default", "metrics"])
LOG = ("log", {"stream": "stdout", "text": "a"})
POINT = ("metric", {"source": "job", "values": {"loss": 1.0}})
OLD = now() - timedelta(days=1)


@pytest.fixture
def ended(attempt) -> Attempt:
    """An attempt that reported, and ended well."""
    events = batch_of(attempt, ("started", STARTED), LOG, POINT, ("exited", EXIT_OK))
    events_accept(host=attempt.host, batch=events)
    return Attempt.objects.get(pk=attempt.pk)


@db
def test_a_life_as_it_should_be_breaks_no_law(ended):
    assert laws.broken_laws() == {}


def lose_an_event(attempt: Attempt) -> None:
    AttemptEvent.objects.filter(attempt=attempt, seq=2).delete()


def double_a_point(attempt: Attempt) -> None:
    append(attempt.pk, [store.Point(2, 1, "gpu", {"loss": 1.0})])


def keep_a_point_beyond(attempt: Attempt) -> None:
    append(attempt.pk, [store.Point(9, 1, "job", {"loss": 1.0})])


def claim_twice(attempt: Attempt) -> None:
    for number in (2, 3):
        Attempt.objects.create(job=attempt.job, number=number, host=attempt.host, fence="f",
                               claimed_at=now(), claim_id=str(number))  # fmt: skip


def hold_a_device_twice(attempt: Attempt) -> None:
    with connection.cursor() as cursor:  # what the law guards is first made possible
        cursor.execute("DROP INDEX one_holder_per_device")
    for device in Device.objects.filter(host=attempt.host)[:1]:
        for _ in range(2):
            Allocation.objects.create(device=device, attempt=attempt, taken_at=now())


def keep_a_device(attempt: Attempt) -> None:
    Allocation.objects.filter(attempt=attempt).update(released_at=None)


def hold_on(attempt: Attempt) -> None:
    Job.objects.filter(pk=attempt.job_id).update(state="running")


def leave_the_end(attempt: Attempt) -> None:
    moved = {"from_state": "succeeded", "to_state": "running"}
    Event.objects.create(at=now(), team_id="t", kind="job.state", subject="s", actor="a", **moved)


def forget_the_event(attempt: Attempt) -> None:
    Job.objects.filter(pk=attempt.job_id).update(state="failed", reason="signal")


def skip_a_state(attempt: Attempt) -> None:
    events = Event.objects.filter(kind="job.state", to_state="starting")
    events.update(to_state="stopping")


def say_no_reason(attempt: Attempt) -> None:
    Job.objects.filter(pk=attempt.job_id).update(state="failed", reason="")


def leave_it_waiting(attempt: Attempt) -> None:
    command = Command.objects.create(host=attempt.host, kind="stop", next_at=now())
    Command.objects.filter(pk=command.pk).update(created_at=OLD)


def blame_silence(attempt: Attempt) -> None:
    Attempt.objects.filter(pk=attempt.pk).update(exit_record={})
    Job.objects.filter(pk=attempt.job_id).update(state="error", reason="internal")


@db
@pytest.mark.parametrize(
    ("plant", "law"),
    [
        (lose_an_event, "I1"),
        (double_a_point, "I1"),
        (keep_a_point_beyond, "I1"),
        (claim_twice, "I2"),
        (hold_a_device_twice, "I3"),
        (keep_a_device, "I4"),
        (hold_on, "I4"),
        (leave_the_end, "I5"),
        (forget_the_event, "I6"),
        (skip_a_state, "I6"),
        (say_no_reason, "I7"),
        (leave_it_waiting, "I8"),
        (blame_silence, "I9"),
    ],
)
def test_each_law_finds_what_breaks_it(ended, plant, law):
    plant(ended)

    found = laws.broken_laws()

    assert law in {name[:2] for name in found}
    assert all(len(rows) <= 2 for rows in found.values())


# Promises about processes and files


def marked_process(code: str, marker: str, *arguments: str) -> subprocess.Popen[bytes]:
    environment = {**os.environ, procfs.MARKER: marker}
    command = [sys.executable, "-S", "-c", code, *arguments]
    return subprocess.Popen(command, env=environment, start_new_session=True)


def test_two_trees_of_one_attempt_are_noticed(tmp_path):
    marker = f"doubled-{os.getpid()}"
    (tmp_path / "supervisor.py").write_text(
        "import os, subprocess, sys, time\n"
        f"os.environ['{procfs.MARKER}'] = '{marker}'\n"
        "for _ in range(2):\n"
        "    subprocess.Popen(['sleep', '30'], start_new_session=True)\n"
        "time.sleep(30)\n"
    )
    parent = subprocess.Popen([sys.executable, "-S", str(tmp_path / "supervisor.py")])
    trees = watch.TreeWatcher()
    wait_for(lambda: len(procfs.processes_of_attempt(marker)) == 2, "both", every_s=0.02)
    trees.sample()
    trees.sample()
    procfs.sweep(marker)
    parent.kill()
    parent.wait()

    assert trees.doubled == [marker]


def test_one_tree_is_no_news():
    marker = f"single-{os.getpid()}"
    process = marked_process("import time; time.sleep(30)", marker)
    trees = watch.TreeWatcher()
    wait_for(lambda: procfs.processes_of_attempt(marker), "the process", every_s=0.02)
    trees.sample()
    trees.sample()
    process.kill()
    process.wait()

    assert (trees.doubled, marker in trees.alive) == ([], True)


@pytest.mark.parametrize(("stored", "behind"), [(0, {}), (5, {})])
def test_a_spool_that_still_holds_what_is_missing_is_well(tmp_path, stored, behind):
    SpoolWriter_of(tmp_path, first_seq=1)

    assert watch.spools_behind(tmp_path, {"a1": stored}) == behind


def test_a_spool_that_let_go_too_early_is_noticed(tmp_path):
    SpoolWriter_of(tmp_path, first_seq=7)

    assert watch.spools_behind(tmp_path, {"a1": 5}) == {"a1": (7, 5)}


def SpoolWriter_of(attempts_dir, first_seq: int) -> None:  # noqa: N802 (a spool, made)
    folder = attempts_dir / "a1" / "spool"
    folder.mkdir(parents=True)
    (folder / f"{first_seq:012d}.jsonl").touch()
    SpoolWriter(folder).close()


def test_a_secret_in_a_log_is_found_once_it_is_written(tmp_path):
    secrets = watch.SecretWatcher({"canary": "tweet-tweet"})
    log = tmp_path / "web.log"
    log.write_text("nothing yet\n")
    before = secrets.find([tmp_path], frozenset())
    with log.open("a") as file:
        file.write("so there: tweet-tweet\n")

    assert (before, secrets.find([tmp_path], frozenset())) == ([], [f"canary in {log}"])


def test_a_secret_in_a_command_line_or_in_a_jobs_environment_is_found():
    secrets = watch.SecretWatcher({"canary": "tweet-tweet"})
    process = marked_process("import time; time.sleep(30)", "m", "tweet-tweet")
    wait_for(lambda: secrets.in_processes({process.pid}), "it", every_s=0.02)
    found = secrets.in_processes({process.pid})
    process.kill()
    process.wait()

    assert found == [f"canary in argv of {process.pid}"]


def test_a_dead_child_that_nobody_collected_is_noticed():
    child = subprocess.Popen(["true"])
    wait_for(lambda: watch.zombies_below({os.getpid()}), "a zombie", every_s=0.02)
    found = watch.zombies_below({os.getpid()})
    child.wait()

    assert child.pid in found


def test_an_open_file_more_is_counted(tmp_path):
    before = watch.descriptors(os.getpid())
    with (tmp_path / "one").open("w"):
        time.sleep(0)
        assert watch.descriptors(os.getpid()) == before + 1


def test_a_worker_that_outlived_its_agent_is_found():
    setting = f"SLIPWAY_HOST_DIR=/of/test/{os.getpid()}"
    name, _, value = setting.partition("=")
    left = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(60)", "runners.host.app"],
        env=os.environ | {name: value},
    )
    wait_for(lambda: watch.workers({setting}) == {left.pid}, "the worker left behind")
    left.kill()
    left.wait()
    assert watch.workers({setting}) == set()


def test_a_user_of_redis_that_collects_connections_is_found():
    assert watch.crowds(["h_one"] * 4 + ["slipway"] * 17) == {"slipway": 17}
