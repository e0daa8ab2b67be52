"""Two hosts train one model whose ranks may wait four minutes; their link is cut for most of one.

A training that is patient loses the time and nothing else: no rank, no step, no attempt, although
the server gave the host up for silent in between. It runs nightly: ``test_three_hosts`` cuts the
same link for a shorter time in every run.
"""

import re
import time

import pytest

from tests.system.namespaces.lab import MARKS
from tests.system.namespaces.site import training

pytestmark = [*MARKS, pytest.mark.soak]
HOSTS = ["north", "south"]
CUT_SECONDS = 44.0  # the server calls a host unreachable after 36
PATIENCE_SECONDS = 240
# A connection tries again after twice as long each time, from 0.2 s: after 25 s, 51 s and 102 s.
# The training has time for all of these, and five steps.
BUDGET_SECONDS = 90


@pytest.fixture(scope="module")
def apart(site, lab):
    """The job, its last step before the cut, and what the server held of it while it lasted."""
    policy = {"rank_timeout_seconds": PATIENCE_SECONDS}
    job = site.launch(training(time_budget_seconds=BUDGET_SECONDS, parallel=policy))
    site.wait_for_steps("south", 2)
    lab.cut("south")
    before = site.steps("south")
    time.sleep(CUT_SECONDS)
    found = site.ask(job) | {"step": site.steps("south")}
    lab.heal("south")
    return job, before, found


@pytest.fixture(scope="module")
def ended(site, apart):
    """The job once it has used its time, and both hosts have told their ends."""
    job, before, _ = apart
    site.wait_for_steps("south", before + 5)
    return site.wait_for(job, state="succeeded", held=0)


def test_the_silence_of_a_host_does_not_end_its_job(apart):
    _, before, during = apart

    assert (during["state"], during["ends"]) == ("running", 0)
    assert during["contact"] == {"north": "live", "south": "unreachable"}
    assert during["step"] - before <= 1  # the one that was under way


def test_after_the_cut_the_same_ranks_make_further_steps(apart, ended):
    _, before, _ = apart

    assert ended["attempts"] == 1
    assert ended["members"] == {"north": "ok", "south": "ok"}
    assert ended["progress"] >= before + 5
    assert "resumed" not in ended["result"]["notes"]


def test_the_loss_goes_on_as_if_nothing_had_been(site, ended):
    text = site.output("north")
    steps = {int(step): float(loss) for step, loss in re.findall(r"step (\d+) +loss (\S+)", text)}

    assert sorted(steps) == list(steps)  # none was made twice
    assert steps[max(steps)] < steps[min(steps)]
    assert (ended["ends"], site.marked_processes()) == (1, [])
