"""Three hosts train a pipeline that may shrink: one is cut off, the others take its layers."""

import pytest

from runners.layout_options import LayoutOptions
from tests.namespaces.lab import MARKS
from tests.namespaces.site import training
from tests.runners.jobs.harness import TINY

pytestmark = MARKS
HOSTS = ["north", "south", "west"]


@pytest.fixture(scope="module")
def shrunk(site, lab):
    """The job, ended, while the third host is still cut off."""
    policy = {"on_lost_rank": "shrink", "min_hosts": 2}
    model = TINY.model_copy(update={"num_hidden_layers": 4})
    stages = LayoutOptions(pipeline_parallel_size=3, pipeline_layers=(1, 2, 1))
    job = site.launch(
        training(time_budget_seconds=40, model=model, layout=stages, parallel=policy)
    )
    site.wait_for_steps("west", 0)
    site.wait_for_checkpoint()
    lab.cut("west")
    return job, site.wait_for(job, state="succeeded")


@pytest.fixture(scope="module")
def healed(site, lab, shrunk):
    """The same job once the third host has told its part."""
    lab.heal("west")
    return site.wait_for(shrunk[0], held=0)


def test_the_others_go_on_from_the_last_checkpoint(shrunk):
    notes = shrunk[1]["result"]["notes"]

    assert notes["resumed"].startswith("from the checkpoint at step")
    assert notes["ranks"] == "2, laid out as pipeline_parallel_size 2"


def test_they_are_the_same_attempt(shrunk):
    assert shrunk[1]["attempts"] == 1


def test_the_lost_host_tells_its_end_when_it_is_back(healed):
    assert healed["members"]["west"] in {"rank_lost", "peer_ended"}


def test_the_job_has_ended_exactly_once_and_well(site, healed):
    assert (healed["state"], healed["ends"]) == ("succeeded", 1)
    assert site.marked_processes() == []
