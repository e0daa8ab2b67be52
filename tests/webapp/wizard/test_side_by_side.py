"""The template of two jobs: one classifier under DDP and under ZeRO, side by side."""

import re

import pytest

from planner.specs.workload import Strategy
from runners.jobspec.base import DEMO_ENCODER
from runners.plans.document import ModelChoice, of_goal
from tests.webapp.conftest import client_of, enrol, make_beat, make_facts, make_microbench
from webapp.accounts.models import Role
from webapp.agents.heartbeats import host_beat
from webapp.jobs.launching import launch_note, launchable_of
from webapp.jobs.models import Job
from webapp.plans.models import Plan
from webapp.wizard.drafts import stored_draft
from webapp.wizard.steps import launch_both, ready_hosts, template_document

pytestmark = pytest.mark.django_db
URL = "/plans/template/classification/"


def press(user, host, **changes):
    return client_of(user).post(URL, {"host": host.pk, "zero_stage": "2", **changes})


def jobs_of(response):
    ids = re.findall(r"job=(\w+)", response["Location"])
    return [Job.objects.get(pk=each) for each in ids]


def gpu(index, name="NVIDIA L4"):
    return {"index": index, "uuid": f"GPU-{index}", "name": name, "memory_bytes": 24 * 1024**3}


def test_one_press_queues_both_and_leads_to_their_comparison(alice, host):
    response = press(alice, host)

    assert response["Location"].startswith("/compare/?job=")
    ddp, zero = jobs_of(response)
    assert (ddp.name, zero.name) == ("Classifier, DDP", "Classifier, ZeRO-2")
    assert ddp.state in {"queued", "preflight"}
    assert zero.state == "queued"  # behind the first, on the one device of the processor
    assert ddp.plan_id != zero.plan_id
    assert (ddp.devices_per_host, ddp.processes_per_host) == (1, 2)
    assert ddp.is_shared_out


def test_the_two_documents_differ_in_the_layout_alone_and_zero_takes_less_memory(alice, host):
    jobs = jobs_of(press(alice, host))

    ddp, zero = (job.spec for job in jobs)
    assert {name for name in ddp if ddp[name] != zero[name]} == {"layout"}
    assert ddp["layout"] is None
    assert (zero["layout"]["data_parallel_size"], zero["layout"]["zero_stage"]) == (2, 2)
    assert ddp["objective"] == "classification"
    assert ddp["parallel"]["processes_per_host"] == 2
    assert ddp["gradient_accumulation_steps"] == 4
    assert ddp["model"]["config"] == DEMO_ENCODER
    ddp, zero = (job.prediction for job in jobs)
    assert {"tokens_per_second", "step_seconds", "peak_memory_bytes"} <= ddp.keys()
    assert zero["peak_memory_bytes"]["value"] < ddp["peak_memory_bytes"]["value"]


def test_the_same_button_pressed_twice_launches_once(alice, host):
    first, again = (jobs_of(press(alice, host, key="once")) for _ in range(2))
    assert [job.pk for job in first] == [job.pk for job in again]
    assert Job.objects.count() == 2


def test_two_gpus_take_a_rank_each_and_one_is_too_few(team, alice):
    found, _ = enrol(team, name="single")
    facts = make_facts(gpus=[gpu(0)])
    host_beat(host=found, beat=make_beat(facts=facts, microbench=make_microbench()))
    assert ready_hosts(team) == ()

    found, _ = enrol(team, name="pair")
    facts = make_facts(gpus=[gpu(0), gpu(1)])
    host_beat(host=found, beat=make_beat(facts=facts, microbench=make_microbench()))
    found.refresh_from_db()
    ddp, _ = launch_both(team=team, by=alice, host=found, zero_stage=3)
    assert (ddp.devices_per_host, ddp.processes_per_host) == (2, 1)


def test_what_cannot_be_is_said_and_nothing_is_queued(alice, host):
    for changes, said in [
        ({"host": "none"}, "two ranks"),
        ({"zero_stage": "4"}, "it can be 1, 2 or 3"),
    ]:
        response = client_of(alice).post(
            URL, {"host": host.pk, "zero_stage": "2", **changes}, follow=True
        )
        assert said in response.content.decode(), changes
        assert not Job.objects.exists(), changes


def test_a_viewer_may_not_press_it(team, alice, host):
    alice.memberships.update(role=Role.VIEWER)
    assert press(alice, host).status_code == 403
    assert not Job.objects.exists()


def test_the_wizards_first_step_offers_it_with_the_ready_hosts(walk, host):
    page = walk("?preset=serve").page("goal").content.decode()
    assert "Text classification, DDP against ZeRO" in page
    assert f'<option value="{host.pk}">' in page
    assert "Launch both and compare" in page


@pytest.fixture
def plan(team, alice, host):
    draft = stored_draft(template_document(host, 1))
    return Plan.objects.create(team=team, owner=alice, draft=draft)


def test_its_plan_says_in_words_what_happens_and_that_an_encoder_is_not_served(plan):
    note = launch_note(plan)
    assert note["can"] == "yes"
    assert "labels of texts" in note["text"]
    assert "random" not in note["text"]

    plan.document, plan.answer = of_goal(plan.document, "serve"), {}
    assert "trained and predicts no text" in launch_note(plan)["text"]


@pytest.mark.parametrize(
    ("model", "method", "said"),
    [
        ({"source": "demo"}, "classification", "needs an encoder"),
        ({"source": "config", "config": dict(DEMO_ENCODER)}, "lora", "predicts no text"),
    ],
)
def test_a_head_and_its_model_belong_together(plan, model, method, said):
    document = plan.document
    document.model = ModelChoice(**model)
    document.workload.method = method
    document.pins = Strategy()  # the template's ZeRO does not go with LoRA either
    plan.document = document
    assert said in launch_note(plan)["text"]


def test_stage_0_of_zero_is_asked_for_and_no_gap(plan):
    plan.draft["pins"]["zero_stage"] = 0
    launch = launchable_of(plan)
    assert launch.best.strategy.zero_stage == 0
    assert launch.spec.layout is None
