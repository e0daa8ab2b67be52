"""Databases that are locked or refuse, full disks, reports out of order, other versions."""

import os
import random
import sqlite3
import subprocess
import threading
import time
from contextlib import closing, suppress

import pytest

from runners.host import inventory
from tests.plugins.extent import first
from tests.stack import StackError, wait_for
from tests.system.faults.site import Site

pytestmark = [pytest.mark.faults, pytest.mark.slow]
OK = ("succeeded", 1, 1)
LOCK_SECONDS = 2.0
DISK_BYTES = 1_200 * 2**20


def outcome(view) -> tuple[str, int, int]:
    (attempt,) = view["attempts"]
    return view["state"], attempt["num_started"], attempt["num_exited"]


@pytest.mark.parametrize("name", ["slipway", "metrics"])
def test_events_wait_while_the_database_is_locked_and_pages_do_not(site, name):
    job = site.running("ada", steps=40)
    seconds = []
    path = site.folder / f"{name}.sqlite3"
    with closing(sqlite3.connect(path, isolation_level=None, timeout=20)) as locker:
        locker.execute("BEGIN EXCLUSIVE")
        until = time.monotonic() + LOCK_SECONDS
        while time.monotonic() < until:
            seconds.append(site.page_seconds("/login/"))
            time.sleep(0.2)
        locker.execute("ROLLBACK")

    assert outcome(site.wait(job)) == OK
    assert sorted(seconds)[len(seconds) // 2] < 1.0


def test_a_submit_that_the_database_refuses_leaves_nothing(site):
    site.desk.sql(
        statement="CREATE TRIGGER refuse BEFORE UPDATE OF state ON jobs_job WHEN NEW.state = 'queued'"
        " BEGIN SELECT RAISE(ABORT, 'the disk is broken'); END"
    )
    site.mending.append(lambda: site.desk.sql(statement="DROP TRIGGER IF EXISTS refuse"))
    counts = "SELECT (SELECT COUNT(*) FROM jobs_attempt), (SELECT COUNT(*) FROM jobs_command)"
    before = site.desk.sql(statement=counts)
    with pytest.raises(StackError, match="the disk is broken"):
        site.submit("ada", steps=2)
    site.desk.sql(statement="DROP TRIGGER refuse")

    assert site.desk.sql(statement=counts) == before


def test_a_server_killed_in_the_midst_of_its_writes_is_whole_afterwards(site):
    jobs = [site.running(host, steps=60) for host in ("ada", "bea", "cleo")]
    for _ in range(2):
        site.kill("web", "control", "ticker")
        site.restart("web", "control", "ticker")

    assert [outcome(site.wait(job)) for job in jobs] == [OK] * 3
    integrity = site.desk.sql(statement="PRAGMA integrity_check")
    assert integrity == [["ok"]]


def test_one_idempotency_key_makes_one_job_however_often_it_is_sent(site):
    made = site.desk.submit_at_once(slug="ada", key="once", times=5)
    site.jobs.append(made[0])

    assert len(set(made)) == 1
    assert outcome(site.wait(made[0])) == OK


EVENTS = [
    ("started", {"pid": 1, "boot_id": "b", "argv": []}),
    ("phase", {"name": "Rehearsing"}),
    ("metric", {"source": "job", "values": {"loss": 1.0}}),
    ("log", {"stream": "stdout", "text": "one\n"}),
    ("metric", {"source": "job", "values": {"loss": 0.5}}),
    ("progress", {"done": 1, "total": 1, "unit": "steps"}),
    ("exited", {"exit_code": 0, "signal": None, "reason": "ok", "by": "supervisor",
                "started_at_ms": 1, "ended_at_ms": 2}),
]  # fmt: skip


def numbered_events() -> list[dict[str, object]]:
    """Return the events of a whole life, as of now."""
    t_ms = time.time_ns() // 10**6
    return [
        {"seq": seq, "t_ms": t_ms + seq, "kind": kind, "body": body}
        for seq, (kind, body) in enumerate(EVENTS, start=1)
    ]


@pytest.mark.parametrize("seeds", first([(0, 1, 2), (3, 4, 5)]), ids=str)
def test_reports_in_any_order_and_number_end_in_the_same_state(site, seeds):
    site.freeze(*site.agents(*site.hosts))
    jobs = [site.submit(host) for host in site.hosts]
    for host, job, seed in zip(site.hosts, jobs, seeds, strict=True):
        report_by_hand(site, host, job, random.Random(seed))  # noqa: S311 (a test, not a secret)

    assert [outcome(site.view(job)) for job in jobs] == [OK] * 3


def report_by_hand(site: Site, host: str, job: str, chance: random.Random) -> None:
    """Claim a job for its host and tell its whole life in any order, until all is stored."""
    attempt = site.attempt_of_silent(host, job)
    path, fence = f"/attempts/{attempt['id']}", attempt["fence"]
    claim = {"fence": fence, "claim_id": "by hand", "boot_id": "b"}
    assert site.call(host, f"{path}/claim", claim).status_code == 200
    numbered, acked = numbered_events(), 0
    while acked < len(numbered):
        some = chance.sample(numbered, chance.randint(1, len(numbered)))
        body = {"attempt_id": attempt["id"], "fence": fence, "events": some}
        acked = site.call(host, f"{path}/events", body).json()["acked_seq"]


def test_reports_that_come_in_parallel_are_stored_once(site):
    site.freeze(*site.agents("bea"))
    job = site.submit("bea")
    attempt = site.attempt_of_silent("bea", job)
    path, fence = f"/attempts/{attempt['id']}", attempt["fence"]
    site.call("bea", f"{path}/claim", {"fence": fence, "claim_id": "c", "boot_id": "b"})
    numbered = numbered_events()
    body = {"attempt_id": attempt["id"], "fence": fence, "events": numbered}
    threads = [
        threading.Thread(target=site.call, args=("bea", f"{path}/events", body)) for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert outcome(site.view(job)) == OK
    assert site.attempt(job)["duplicates"] == 5 * len(EVENTS)


def beat() -> dict[str, object]:
    return {
        "boot_id": "b", "sent_at_ms": time.time_ns() // 10**6, "agent_version": "0",
        "cpu_utilization": 0.0, "memory_available_bytes": 2**30, "disk_free_bytes": 2**34,
    }  # fmt: skip


BEATS = {
    "older": ({}, {200}),
    "newer": ({"of_a_later_version": 1}, {200, 422}),
    "damaged": ({"attempts": [{"seq": 1}]}, {422}),
}


def test_agents_of_other_versions_are_answered_in_words(site):
    site.freeze(*site.agents("ada"))
    for name, (change, statuses) in BEATS.items():
        answer = site.call("ada", "/hosts/beat", {**beat(), **change})

        assert answer.status_code in statuses, name
        assert answer.status_code == 200 or answer.json()["detail"]


def test_an_agent_of_another_protocol_is_not_enrolled(site):
    for version in (0, 2):
        request = {
            "token": site.desk.token(name="other"), "protocol_version": version, "sent_at_ms": 1,
            "facts": inventory.host_facts(site.folder).model_dump(mode="json"),
        }  # fmt: skip
        answer = site.call("ada", "/hosts/enroll", request)

        assert (answer.status_code, answer.json()["code"]) == (422, "version_incompatible")


# Full disks


def test_a_host_without_room_starts_nothing_and_says_why(site):
    config = site.hosts["cleo"] / "config.json"
    site.mending += [lambda: site.kill_tree("cleo"), config.unlink]
    config.write_text('{"min_free_bytes": 1000000000000000}')
    site.kill_tree("cleo")
    site.begin("cleo")
    site.wait_for_contact("cleo", "live")
    ended = site.wait(site.submit("cleo", steps=2))

    assert (ended["state"], ended["reason"]) in {
        ("error", "disk_full"), ("error", "preflight_failed"),
    }  # fmt: skip


def test_a_disk_that_fills_up_costs_figures_and_never_the_end(site: Site, tmp_path):
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    before = dict(site.hosts)
    site.mending += [
        lambda: subprocess.run(["umount", "-l", str(tmp_path)], check=True),
        lambda: site.hosts.pop("dora"),
        lambda: site.kill_tree("dora"),
    ]
    (tmp_path / "host").mkdir()
    (tmp_path / "host" / "config.json").write_text('{"min_free_bytes": 1000000}')
    site.enrol("dora", tmp_path / "host")
    site.wait_for_contact("dora", "live")
    job = site.running("dora", steps=60, log_bytes_per_step=4096)
    fill(tmp_path / "filler")
    ended = site.wait(job)

    assert before.keys() < site.hosts.keys()
    assert ended["state"] in {"succeeded", "error"}
    assert outcome(ended)[1:] == (1, 1)


def fill(path) -> None:
    """Take every free byte of a disk."""
    with path.open("wb", buffering=0) as file, suppress(OSError):
        free = os.statvfs(path.parent)
        os.posix_fallocate(file.fileno(), 0, free.f_bavail * free.f_frsize - 2**20)
        file.seek(0, os.SEEK_END)
        while file.write(b"x" * 4096):
            pass
    assert os.statvfs(path.parent).f_bavail < 8


def test_whatever_was_done_the_figures_of_a_job_are_whole(site):
    job = site.submit("ada", steps=20)
    ended = site.wait(job)
    wait_for(lambda: site.attempt(job)["acked_seq"] > 60, "its points")

    assert outcome(ended) == OK
