"""A job that really runs out of memory: one real product, one real allocator that says no.

The host lets a job take 1.2 GiB. The job was planned with two sequences at once and runs with
many times that: what it was refused, and which term grew, stands on its post-mortem page.
"""

import json
import re
from collections.abc import Iterator

import pytest

from tests.stack import HOST_SLUG, Stack

pytestmark = [pytest.mark.faults, pytest.mark.slow]

LIMIT_BYTES = 1_288_490_188
LAUNCH = """
from webapp.accounts.models import Team
from webapp.hosts.models import Host
from webapp.jobs.launching import launchable_of
from webapp.plans.planning import plan_compute
from webapp.jobs.services import job_create, job_submit
from webapp.wizard.drafts import draft_begin
from django.contrib.auth.models import User
alice, team = User.objects.get(username="alice"), Team.objects.order_by("created_at").first()
plan = draft_begin(team=team, owner=alice, preset="demo", model=None)
plan_compute(plan)
launch = launchable_of(plan)
spec = launch.spec.model_copy(update={"micro_batch_size": 160})
job = job_create(team=team, owner=alice, host=launch.host, spec=spec, name="Too many at once",
                 model_name="demo", plan=plan, estimate=launch.best.model_dump(mode="json"),
                 prediction=launch.prediction)
print(job_submit(job=job, by="alice").pk)
"""


@pytest.fixture(scope="module")
def starved(tmp_path_factory) -> Iterator[tuple[Stack, str]]:
    """A product whose host caps its jobs, and the job that met the cap."""
    folder = tmp_path_factory.mktemp("starved")
    (folder / "host").mkdir(mode=0o700)
    (folder / "host" / "config.json").write_text(json.dumps({"job_memory_bytes": LIMIT_BYTES}))
    with Stack(folder, demo_seconds=20) as stack:
        job_id = stack.run("manage.py", "shell", "-v", "0", "-c", LAUNCH).split()[-1]
        stack.client("alice").wait_for_state(job_id, "failed", timeout_s=600)
        yield stack, job_id


@pytest.fixture(scope="module")
def page(starved) -> str:
    stack, job_id = starved
    text = stack.client("alice").get(f"/jobs/{job_id}/post-mortem/")
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", text).replace("&#x27;", "'"))


def test_the_host_is_said_to_have_run_out_of_main_memory(page):
    assert "The host ran out of main memory" in page


def test_torchs_own_refusal_stands_among_the_last_lines(page):
    assert re.search(
        r"DefaultCPUAllocator: can't allocate memory: you tried to allocate \d+", page
    )


def test_the_term_that_grew_is_named(page):
    assert re.search(r"Activations measured [\d.]+ [MG]iB against [\d.]+ MiB predicted", page)


def test_what_was_held_is_told_term_by_term(page):
    assert re.search(r"Weights 12\.\d MiB 12\.\d MiB", page)


def test_the_rest_of_the_machine_did_not_notice(starved):
    stack, _ = starved

    assert all(process.poll() is None for process in stack.processes.values())
    assert "Ready" in stack.client("alice").get(f"/hosts/{HOST_SLUG}/")
