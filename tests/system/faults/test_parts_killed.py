"""Kill each part of the product while jobs are in every phase: each ends once, as it would have.

Three hosts, four drills, one kill -9: one drill has just been launched, one runs, one is being
stopped, and one waits for its turn behind the one that runs. The suite kills agents, the whole
server, and everything; single parts of the server are killed in ``test_broker`` and
``test_storage`` there, and here every night.
"""

import time

import pytest

from tests.plugins.extent import first
from tests.system.faults.site import ENDLESS, SERVER, Site

pytestmark = [pytest.mark.faults, pytest.mark.slow]
DOWN_SECONDS = 1.0
HOSTS = ("ada", "bea", "cleo")
STRAIGHT = ["queued", "preflight", "starting", "running", "succeeded"]
PARTS = {
    "everything": (*SERVER, *HOSTS),
    "server": SERVER,
    "agents": HOSTS,
    "web": ("web",),
    "control": ("control",),
    "ticker": ("ticker",),
    "redis": ("redis",),
}
PHASES = {
    "launched": STRAIGHT,
    "running": STRAIGHT,
    "stopping": ["queued", "preflight", "starting", "running", "stopping", "stopped"],
    "queued": STRAIGHT,
}


@pytest.fixture(scope="module", params=first(PARTS, 3))
def struck(request, sites):
    """Kill a part in the midst of everything, start it again, and return how the jobs ended."""
    site: Site = sites.current()
    site.begin_case()
    jobs = {"running": site.running("ada", steps=30), "queued": site.submit("ada", steps=3)}
    jobs["stopping"] = site.running("bea", steps=ENDLESS, ignores_stop=True)
    site.desk.stop(job=jobs["stopping"])
    jobs["launched"] = site.submit("cleo", steps=10)
    site.kill(*PARTS[request.param])
    time.sleep(DOWN_SECONDS)
    site.restart(*PARTS[request.param])
    ended = {phase: site.wait(job) for phase, job in jobs.items()}
    return ended, sites.check(site)


@pytest.mark.parametrize("phase", PHASES)
def test_the_job_goes_straight_through_its_states(struck, phase):
    ended, _ = struck

    assert ended[phase]["states"] == PHASES[phase]


@pytest.mark.parametrize("phase", PHASES)
def test_the_job_is_started_once_and_ended_once(struck, phase):
    ended, _ = struck
    (attempt,) = ended[phase]["attempts"]

    assert (attempt["num_started"], attempt["num_exited"]) == (1, 1)


def test_no_promise_is_broken(struck):
    _, broken = struck

    assert broken == {}
