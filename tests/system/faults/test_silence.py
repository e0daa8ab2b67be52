"""Hosts that fall silent, come back late, with another clock, after a reboot, or locked out."""

import os
import signal
import subprocess
from contextlib import contextmanager
from itertools import pairwise

import pytest

from runners.supervision import procfs
from tests.plugins.extent import first
from tests.stack import ROOT, wait_for
from tests.system.faults.site import ENDLESS, Site, is_alive

pytestmark = [pytest.mark.faults, pytest.mark.slow]
STRAIGHT = ["queued", "preflight", "starting", "running", "succeeded"]
SHIFTED = """
import time
_time, _time_ns = time.time, time.time_ns
time.time = lambda: _time() + {seconds}
time.time_ns = lambda: _time_ns() + {seconds} * 10**9
"""


def can_mount() -> bool:
    done = subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False)
    return done.returncode == 0


@contextmanager
def silent(site: Site, until: str, *hosts: str):
    """Freeze hosts' agents until the server calls their contact ``until``."""
    site.freeze(*site.agents(*hosts))
    for host in hosts:
        site.wait_for_contact(host, until)
    yield
    site.thaw()
    for host in hosts:
        site.wait_for_contact(host, "live")


def test_a_short_silence_changes_nothing_for_the_job(site):
    job, _ = site.halted("ada", steps=60)
    with silent(site, "degraded", "ada"):
        assert site.view(job)["state"] == "running"

    assert site.wait(job)["states"] == STRAIGHT


def test_unreachable_hosts_keep_their_jobs_while_the_server_restarts(site):
    """One still runs when the silence is over; the other ended in it, which is told then."""
    longer, _ = site.halted("ada", steps=80)
    ended, pids = site.halted("bea", steps=20)
    with silent(site, "unreachable", "ada", "bea"):
        site.thaw(*pids)
        record = site.attempt_folder(ended).exit_record
        wait_for(record, "the end of the job on its host", every_s=0.05)
        site.restart("web", "control", "ticker")
        assert [site.view(job)["state"] for job in (longer, ended)] == ["running"] * 2

    assert [site.wait(job)["states"] for job in (longer, ended)] == [STRAIGHT] * 2


def test_silence_and_return_are_announced_once_each_and_jobs_wait_for_the_host(site):
    """One was launched before the silence and not claimed; bea's own comes in the midst of it."""
    wait_for(lambda: site.desk.host(slug="bea")["announced"] == "live", "a known contact")
    before = len(site.desk.contacts_of(slug="bea"))
    site.freeze(*site.agents("ada"))
    unclaimed = site.submit("ada", steps=3)
    with silent(site, "unreachable", "bea"):
        wait_for(
            lambda: site.desk.host(slug="bea")["announced"] == "unreachable", "the news of it"
        )
        later = site.submit("bea", steps=2)
        assert site.view(later)["state"] == "queued"
        site.wait_for_contact("ada", "unreachable")
        assert site.view(unclaimed)["state"] == "preflight"
    wait_for(lambda: site.desk.host(slug="bea")["announced"] == "live", "the news of its return")

    told = site.desk.contacts_of(slug="bea")[before:]
    assert all(one != other for one, other in pairwise(told))
    assert [each for each in dict.fromkeys(told) if each != "degraded"] == ["unreachable", "live"]
    assert [site.wait(job)["states"] for job in (unclaimed, later)] == [STRAIGHT] * 2


def test_a_job_sent_elsewhere_by_a_person_ends_on_the_host_that_returns(site):
    first = site.running("ada", steps=ENDLESS)
    with silent(site, "unreachable", "ada"):
        assert site.desk.abandon(job=first) == "stopped"
        second = site.wait(site.submit("bea", steps=20))
    wait_for(lambda: site.attempt(first)["num_exited"], "the exit of the first")

    assert second["state"] == "succeeded"
    assert site.view(first)["states"][-1] == "stopped"
    assert site.attempt(first)["exit"]["reason"] == "lost_and_abandoned_by_user"


def wait_for_ping(site: Site, host: str) -> None:
    """Wait until a doorbell of the host was accepted."""
    pings = site.hosts[host] / "last_ping"
    at = pings.stat().st_mtime if pings.exists() else 0.0
    wait_for(lambda: pings.exists() and pings.stat().st_mtime != at, "an accepted doorbell")


@pytest.mark.parametrize("seconds", first([600, -300]))
def test_a_host_whose_clock_is_off_works_and_hears_its_doorbells(site, tmp_path, seconds):
    (tmp_path / "sitecustomize.py").write_text(SHIFTED.format(seconds=seconds))
    site.own["cleo"] = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    site.mending += [lambda: site.kill_tree("cleo"), lambda: site.own.pop("cleo")]
    site.kill_tree("cleo")
    site.restart("cleo")
    wait_for(lambda: abs(site.desk.host(slug="cleo")["clock_offset_ms"] - seconds * 1000) < 60_000,
             "the offset of its clock")  # fmt: skip
    for _ in range(2):  # the first is its start's, what was rung before comes in between
        wait_for_ping(site, "cleo")
    before = site.log("cleo")
    job = site.submit("cleo", steps=5)

    assert site.wait(job)["states"] == STRAIGHT
    wait_for_ping(site, "cleo")
    assert "was refused" not in site.log("cleo")[len(before) :]


@pytest.mark.skipif(not can_mount(), reason="needs a mount namespace for another boot_id")
def test_after_a_reboot_the_job_is_over_and_the_host_takes_the_next(site, tmp_path):
    job = site.running("bea", steps=ENDLESS)
    plain = site.commands["bea"]
    site.kill_tree("bea")
    os.kill(site.identity(job)["pid"], signal.SIGKILL)  # nobody is left to write an end
    procfs.sweep(site.attempt(job)["id"])
    (tmp_path / "boot_id").write_text("11111111-2222-3333-4444-555555555555\n")
    rebooted = f'mount --bind {tmp_path}/boot_id {procfs.BOOT_ID} && exec "$@"'
    site.commands["bea"] = ["unshare", "-m", "sh", "-c", rebooted, "sh", *plain]
    site.mending += [lambda: site.kill_tree("bea"), lambda: site.commands.update(bea=plain)]
    site.begin("bea")

    ended = site.wait(job)
    assert (ended["state"], ended["reason"]) == ("error", "host_rebooted")
    assert site.wait(site.submit("bea", steps=2))["state"] == "succeeded"


def test_a_host_locked_out_goes_on_and_tells_all_when_it_is_let_in_again(site):
    job, halted = site.halted("cleo", steps=80)
    pid = site.identity(job)["child_pid"]
    site.desk.revoke(slug="cleo")
    site.wait_for_contact("cleo", "unreachable")
    assert (is_alive(pid), site.view(job)["state"]) == (True, "running")
    site.thaw(*halted)
    refused = site.call("cleo", "/hosts/beat", {})

    site.kill_tree("cleo")
    site.enrol("cleo", site.hosts["cleo"])
    assert refused.status_code in {401, 422}
    assert site.wait(job)["states"] == STRAIGHT
