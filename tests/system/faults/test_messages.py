"""Doorbells and claims that come twice, late, damaged, forged or from somebody else."""

import subprocess
import time

import pytest

from tests.stack import wait_for
from tests.system.faults.site import Site

pytestmark = [pytest.mark.faults, pytest.mark.slow]
ONCE = ("succeeded", 1, 1, 1)
EXIT_BUSY = 75


def told(view) -> tuple[str, int, int, int]:
    """Return a job's state, and how many attempts, starts and exits it had."""
    attempts = view["attempts"]
    started = sum(each["num_started"] for each in attempts)
    return view["state"], len(attempts), started, sum(each["num_exited"] for each in attempts)


def queue_of(site: Site, host: str) -> str:
    return f"host:{site.desk.host(slug=host)['id']}:jobs"


def wait_for_refusal(site: Site, host: str, code: str) -> None:
    words = f"a doorbell was refused: {code}"
    wait_for(lambda: words in site.log(host), f"{words}\n{site.tail(host)}", every_s=0.05)


def test_a_start_that_is_rung_three_times_starts_one_process(site):
    site.freeze(*site.agents("ada"))
    job = site.submit("ada", steps=5)
    site.desk.ring_again(job=job, times=3)
    site.thaw()

    assert told(site.wait(job)) == ONCE


def test_the_same_message_delivered_again_is_refused(site):
    site.freeze(*site.workers("ada"))
    job = site.submit("ada", steps=5)
    site.desk.ring_again(job=job, times=3)  # a frozen worker may have taken the first already
    with site.broker() as broker:
        for message in broker.lrange(queue_of(site, "ada"), 0, -1):
            broker.lpush(queue_of(site, "ada"), message)
    site.thaw()

    wait_for_refusal(site, "ada", "replayed")
    assert told(site.wait(job)) == ONCE


def test_a_message_that_a_killed_worker_held_comes_again_and_changes_nothing(site):
    main, *pool = site.workers("ada")
    unacked = f"host:{site.desk.host(slug='ada')['id']}:unacked"
    site.freeze(*pool)
    job = site.submit("ada", steps=5)
    with site.broker() as broker:
        wait_for(lambda: broker.hlen(unacked), "a message in the worker's hands", every_s=0.02)
        subprocess.run(["kill", "-9", str(main), *map(str, pool)], check=True)
        wait_for(lambda: broker.hlen(unacked) == 0, "its delivery to the next worker")

    assert told(site.wait(job)) == ONCE


def test_a_start_that_comes_after_the_stop_starts_nothing(site):
    site.freeze(*site.agents("ada"))
    job = site.submit("ada", steps=5)
    assert site.desk.stop(job=job) == "stopped"
    site.desk.ring_again(job=job, times=2)
    site.thaw()
    after = site.submit("ada", steps=1)

    assert site.wait(after)["state"] == "succeeded"
    assert told(site.view(job)) == ("stopped", 1, 0, 0)
    assert not (site.attempt_folder(job).path / "supervisor.json").exists()


def test_a_claim_that_comes_too_late_or_from_another_host_is_refused(site):
    site.freeze(*site.agents("ada", "cleo"))
    stopped, given = site.submit("cleo", steps=5), site.submit("ada", steps=2)
    attempts = [site.attempt_of_silent("cleo", stopped), site.attempt_of_silent("ada", given)]
    site.desk.stop(job=stopped)

    answers = [
        site.call(
            host,
            f"/attempts/{attempt['id']}/claim",
            {"fence": attempt["fence"], "claim_id": "x", "boot_id": "b"},
        )
        for host, attempt in zip(("cleo", "bea"), attempts, strict=True)
    ]
    site.thaw()

    assert [answer.status_code for answer in answers] == [409, 409]
    assert told(site.wait(given)) == ONCE


def test_nobody_reports_for_another_host_or_with_another_fence(site):
    job, _ = site.halted("ada", steps=60)
    attempt = site.attempt(job)
    exited = {"seq": attempt["acked_seq"] + 1, "t_ms": 1, "kind": "exited", "body": {}}
    report = {"attempt_id": attempt["id"], "fence": attempt["fence"], "events": [exited]}
    path = f"/attempts/{attempt['id']}/events"

    foreign = site.call("bea", path, report)
    unfenced = site.call("ada", path, {**report, "fence": "0" * 32})

    assert {foreign.status_code, unfenced.status_code} == {409}
    assert site.view(job)["state"] == "running"


def test_junk_in_its_queue_costs_a_host_a_worker_and_no_job(site):
    job = site.running("ada", steps=40)
    before = site.workers("ada")[0]
    with site.broker() as broker:
        broker.lpush(queue_of(site, "ada"), "junk")

    wait_for(lambda: site.workers("ada")[:1] not in ([], [before]), "another worker", every_s=0.05)
    assert told(site.wait(job)) == ONCE


def test_a_doorbell_out_of_its_time_or_changed_or_of_another_host_is_refused(site):
    for age_seconds in (1000.0, -1000.0):
        body, mac = site.desk.signed(slug="ada", age_seconds=age_seconds)
        site.desk.publish(slug="ada", body=body, mac=mac)
    body, mac = site.desk.signed(slug="bea")
    site.desk.publish(slug="bea", body=body.replace("ping", "stop"), mac=mac)
    body, mac = site.desk.signed(slug="ada")
    site.desk.publish(slug="cleo", body=body, mac=mac)

    for host, code in (
        ("ada", "expired"), ("ada", "from_the_future"), ("bea", "bad_mac"), ("cleo", "bad_mac"),
    ):  # fmt: skip
        wait_for_refusal(site, host, code)


def test_a_second_agent_on_one_folder_gives_up_and_disturbs_nothing(site):
    job = site.running("ada", steps=40)
    second = subprocess.run(
        site.commands["ada"], env=site.environment, capture_output=True, check=False, timeout=60
    )

    assert second.returncode == EXIT_BUSY
    assert told(site.wait(job)) == ONCE


def test_a_worker_that_was_frozen_goes_on_where_it_was(site):
    site.freeze(*site.workers("ada"))
    job = site.submit("ada", steps=3)  # the agent's own beats carry it
    ended = site.wait(job)
    site.thaw()
    time.sleep(0.5)  # what waited for the worker is delivered now

    assert told(ended) == ONCE
    assert told(site.view(job)) == ONCE
