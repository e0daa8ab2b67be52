"""Redis killed, frozen, emptied, cut short or absent; two of everything that reads it."""

import os
import threading
import time

import httpx
import pytest

from tests.stack import wait_for
from tests.system.faults.site import Site

pytestmark = [pytest.mark.faults, pytest.mark.slow]
OK = ("succeeded", 1, 1)


def outcome(view) -> tuple[str, int, int]:
    (attempt,) = view["attempts"]
    return view["state"], attempt["num_started"], attempt["num_exited"]


def test_three_kills_in_a_row_disturb_no_job(site):
    job = site.running("ada", steps=40)
    for _ in range(3):
        site.kill("redis")
        time.sleep(0.1)
        site.restart("redis")

    assert outcome(site.wait(job)) == OK
    assert outcome(site.wait(site.submit("bea", steps=2))) == OK


def test_jobs_start_and_end_without_any_broker(site):
    running = site.running("ada", steps=40)
    site.kill("redis")
    started = site.submit("bea", steps=5)

    assert [outcome(site.wait(job)) for job in (running, started)] == [OK] * 2


def test_a_frozen_broker_holds_up_neither_jobs_nor_pages(site):
    job = site.running("ada", steps=40)
    site.freeze(site.processes["redis"].pid)
    seconds = [site.page_seconds("/login/") for _ in range(5)]
    time.sleep(2.0)
    site.thaw()

    assert outcome(site.wait(job)) == OK
    assert sorted(seconds)[2] < 1.0


def test_a_broker_that_is_emptied_or_lost_its_last_writes_loses_nothing(site):
    jobs = [site.running(host, steps=60) for host in ("ada", "bea")]
    with site.broker() as broker:
        for _ in range(2):
            broker.flushall()
            time.sleep(0.3)
    jobs.append(site.submit("cleo", steps=20))
    site.kill("redis")
    for log in (site.folder / "redis" / "appendonlydir").glob("*.incr.aof"):
        os.truncate(log, max(0, log.stat().st_size - 60_000))
    site.restart("redis")

    assert [outcome(site.wait(job)) for job in jobs] == [OK] * 3


def test_a_control_worker_killed_again_and_again_stores_each_event_once(site):
    jobs = [site.running(host, steps=60) for host in ("ada", "bea", "cleo")]
    for pause in (0.05, 0.6):
        site.restart("control")
        time.sleep(pause + 1.0)  # long enough to have begun, each time somewhere else

    assert [outcome(site.wait(job)) for job in jobs] == [OK] * 3


def test_two_control_workers_and_two_tickers_do_everything_once(site):
    for name in ("control", "ticker"):
        site.commands[f"second {name}"] = site.commands[name]
        site.begin(f"second {name}")
    site.mending.append(lambda: site.kill("second control", "second ticker"))
    wait_for(lambda: site.is_alive("second ticker") and site.is_alive("second control"), "both")
    jobs = [site.submit(host, steps=8) for host in ("ada", "bea", "cleo") for _ in range(2)]

    assert [outcome(site.wait(job)) for job in jobs] == [OK] * 6


def frames(site: Site, topic: str, last_id: str, wanted: bytes) -> bytes:
    """Follow the live stream as a browser that comes back does, until ``wanted`` comes."""
    ticket = site.desk.ticket(topics=[topic])
    headers, got = {"Live-Ticket": ticket, "Last-Event-ID": last_id}, b""
    with httpx.stream("GET", f"{site.base_url}/live/", headers=headers, timeout=20) as stream:
        for chunk in stream.iter_bytes():
            got += chunk
            if wanted in got:
                return got
    return got


def test_viewers_are_told_to_load_anew_and_see_the_end_after_the_broker_came_back(site):
    """The first one's place is gone with what the broker held, before it is killed."""
    job = site.running("ada", steps=100)
    with site.broker() as broker:
        broker.flushall()
    resynced = frames(site, f"job:{job}", "1-1", b"event: resync")
    site.restart("redis")
    got: list[bytes] = []
    viewer = threading.Thread(
        target=lambda: got.append(frames(site, f"job:{job}", "", b'"succeeded"'))
    )
    viewer.start()
    ended = site.wait(job)
    viewer.join(30)

    assert b"event: resync" in resynced
    assert outcome(ended) == OK
    assert b'"state":"succeeded"' in got[0]
