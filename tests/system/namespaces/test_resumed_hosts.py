"""A training on two hosts is stopped and resumed on both, and then on one without the other.

The host that is lost is the first, whose first rank leads: the other one keeps the checkpoint too.
"""

import re

import pytest

from runners.jobspec.train import LayoutOptions
from tests.system.namespaces.lab import MARKS
from tests.system.namespaces.site import training

pytestmark = MARKS
HOSTS = ["north", "south"]


@pytest.fixture(scope="module")
def stopped(site):
    """A training whose states are divided between two hosts, stopped by a person."""
    layout = LayoutOptions(data_parallel_size=2, zero_stage=1)
    job = site.launch(training(time_budget_seconds=900, layout=layout))
    for name in HOSTS:
        site.wait_for_steps(name, 2)
    return site.stop_job(job)


@pytest.fixture(scope="module")
def again(site, stopped):
    """The job that resumes it on both hosts, stopped too."""
    job = site.resume(stopped)
    for name in HOSTS:
        site.wait_for_steps(name, resumed_at(site, "north") + 2)
    return site.stop_job(job), resumed_at(site, "north"), resumed_at(site, "south")


@pytest.fixture(scope="module")
def alone(site, lab, again):
    """The job that goes on on the second host, while the first is cut off."""
    lab.cut("north")
    site.wait_for_silence(again[0], "north")
    job = site.resume(again[0], num_hosts=1)
    site.wait_for_steps("south", resumed_at(site, "south") + 2)
    found = site.ask(job) | {"at": resumed_at(site, "south")}
    lab.heal("north")
    return found


def resumed_at(site, host):
    """Return the step at which the newest job goes on on a host, once it has said so."""

    def ask():
        said = re.search(r"resumed from the checkpoint at step (\d+)", site.output(host))
        return int(said[1]) if said else None

    return site.wait_until(ask, f"a resumed training on {host}")


def test_both_hosts_go_on_from_the_step_of_the_stop(stopped, again):
    _, north, south = again
    assert north == south > 2


def test_without_the_first_host_the_second_goes_on(again, alone):
    assert alone["at"] > again[1]
    assert alone["members"] == {"south": ""}
