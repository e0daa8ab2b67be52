"""Three hosts train a pipeline that may shrink: one is cut off, the others take its layers.

Then two of them train one model; their link is cut for a moment, then for longer than is allowed.
What happens is one story on one product, told by the fixtures in turn; each test looks at one
moment of it.
"""

import re
import time

import pytest

from runners.jobspec.train import LayoutOptions
from tests.runners.jobs.tiny import TINY
from tests.system.namespaces.lab import MARKS
from tests.system.namespaces.site import training

pytestmark = MARKS
HOSTS = ["north", "south", "west"]
PIPELINE_SECONDS = 12  # of training: beyond its first checkpoint, on a busy machine too
CUT_SECONDS = 5.0


@pytest.fixture(scope="module")
def shrunk(site, lab):
    """A job on three hosts, ended, while the third host is still cut off."""
    policy = {"on_lost_rank": "shrink", "min_hosts": 2}
    model = TINY.model_copy(update={"num_hidden_layers": 4})
    stages = LayoutOptions(pipeline_parallel_size=3, pipeline_layers=(1, 2, 1))
    job = site.launch(
        training(time_budget_seconds=PIPELINE_SECONDS, model=model, layout=stages, parallel=policy)
    )
    site.wait_for_steps("west", 0)
    site.wait_for_checkpoint()
    lab.cut("west")
    return job, site.wait_for(job, state="succeeded")


@pytest.fixture(scope="module")
def healed(site, lab, shrunk):
    """The same job once the third host has told its part."""
    lab.heal("west")
    return site.wait_for(shrunk[0], held=0) | {"processes": site.marked_processes()}


@pytest.fixture(scope="module")
def running(site, healed):
    """A training on the first two hosts that has made steps and stops when a rank is lost."""
    job = site.launch(training(time_budget_seconds=900), num_hosts=2)
    for name in ("north", "south"):
        site.wait_for_steps(name, 2)
    return job, site.wait_for(job, state="running")


@pytest.fixture(scope="module")
def after_a_short_cut(site, lab, running):
    """The server cannot hear one host, nor can the other: for a few seconds."""
    job, _ = running
    lab.cut("south")
    before = site.steps("south")
    time.sleep(CUT_SECONDS)
    while_cut = site.glance(job) | {"steps": site.steps("south") - before}
    lab.heal("south")
    site.wait_for_steps("south", before + 3)
    return while_cut, site.ask(job) | {"output": site.output("north")}


@pytest.fixture(scope="module")
def after_a_long_cut(site, lab, running, after_a_short_cut):
    """The other rank has waited for as long as the job allows."""
    lab.cut("south")
    found = site.wait_for(running[0], state="failed")
    pages = {tab: site.page(f"/jobs/{running[0]}/{tab}/") for tab in ("post-mortem", "abandon")}
    return found | {"pages": pages}


@pytest.fixture(scope="module")
def after_healing(site, lab, running, after_a_long_cut):
    """The silent host is back and has told everything."""
    lab.heal("south")
    return site.wait_for(running[0], held=0) | {"processes": site.marked_processes()}


@pytest.fixture(scope="module")
def after_a_kill(site, after_healing):
    """A last training, of which one host's rank is killed; its page once both have told."""
    job = site.launch(training(time_budget_seconds=900), num_hosts=2)
    for name in ("north", "south"):
        site.wait_for_steps(name, 0)
    site.kill_a_rank("south")
    site.wait_for(job, state="error", held=0)
    return site.page(f"/jobs/{job}/post-mortem/")


def test_the_others_go_on_from_the_last_checkpoint(shrunk):
    notes = shrunk[1]["result"]["notes"]

    assert notes["resumed"].startswith("from the checkpoint at step")
    assert notes["ranks"] == "2, laid out as pipeline_parallel_size 2"


def test_they_are_the_same_attempt(shrunk):
    assert shrunk[1]["attempts"] == 1


def test_the_lost_host_tells_its_end_when_it_is_back(healed):
    assert healed["members"]["west"] in {"rank_lost", "peer_ended"}


def test_the_job_has_ended_exactly_once_and_well(healed):
    assert (healed["state"], healed["ends"]) == ("succeeded", 1)
    assert healed["processes"] == []


def test_both_hosts_run_one_training(running):
    _, found = running

    assert found["members"] == {"north": "", "south": ""}
    assert found["held"] == 2


def test_a_cut_shorter_than_the_ranks_patience_costs_only_time(after_a_short_cut):
    while_cut, healed = after_a_short_cut

    assert (while_cut["state"], healed["state"], healed["ends"]) == ("running", "running", 0)
    assert while_cut["steps"] <= 1  # the one that was under way
    assert healed["attempts"] == 1


def test_after_a_short_cut_the_loss_goes_on_as_if_nothing_had_been(after_a_short_cut):
    text = after_a_short_cut[1]["output"]
    steps = {int(step): float(loss) for step, loss in re.findall(r"step (\d+) +loss (\S+)", text)}

    assert sorted(steps) == list(steps)  # none was made twice
    assert steps[max(steps)] < steps[min(steps)]


def test_a_longer_cut_ends_the_job_by_what_the_living_rank_reports(after_a_long_cut):
    assert after_a_long_cut["reason"] == "rank_lost"
    assert after_a_long_cut["members"] == {"north": "rank_lost", "south": ""}


def test_the_end_names_the_host_that_reported_it(after_a_long_cut):
    assert "It ended first on north, host 1 of 2." in after_a_long_cut["sentences"]


def test_the_silent_host_keeps_its_device(after_a_long_cut):
    assert after_a_long_cut["held"] == 1


def test_once_it_is_back_its_own_end_is_told_and_its_device_is_free(after_healing):
    assert after_healing["members"]["south"] in {"rank_lost", "peer_ended"}


def test_the_job_has_ended_exactly_once(after_healing):
    found = after_healing

    assert (found["state"], found["ends"], found["attempts"]) == ("failed", 1, 1)


def test_no_process_of_it_is_left(after_healing):
    assert after_healing["processes"] == []


def test_the_post_mortem_names_the_host_that_never_told_its_end(after_a_long_cut):
    page = after_a_long_cut["pages"]["post-mortem"]

    assert re.search(r"Ended first on north, rank [01], \d\d:\d\d:\d\d\.", page)
    assert "No end was reported by south (no heartbeat for " in page
    assert "This host may be the cause: the other hosts only lost their connection to it." in page


def test_the_page_to_give_it_up_names_the_silent_host_and_what_it_holds(after_a_long_cut):
    page = after_a_long_cut["pages"]["abandon"]

    assert "Free what south holds?" in page
    assert "Counts as free: its processor of south." in page


@pytest.mark.soak
def test_a_killed_rank_is_named_with_its_host_its_time_and_its_signal(after_a_kill):
    assert re.search(r"Ended first on south, rank [01], \d\d:\d\d:\d\d\.", after_a_kill)
    assert "Ended by signal 9 (SIGKILL)" in after_a_kill


@pytest.mark.soak
def test_each_hosts_last_lines_are_on_the_page(after_a_kill):
    for name in ("north", "south"):
        part = after_a_kill.split(f'aria-label="Last lines of {name}"')[1].split("</section>")[0]
        assert re.search(r"step \d+", part)
    assert "Error report of torchrun" in after_a_kill
