"""Launching from every goal and model: what runs, what is refused and how, what is kept."""

import pytest

from planner.specs.workload import OffloadSpec
from runners.jobspec import BenchmarkSpec, CompressSpec, GenerateSpec, TrainSpec
from tests.webapp.conftest import client_of
from tests.webapp.plans.conftest import SOURCES
from webapp.hosts.models import Host
from webapp.jobs.models import Job
from webapp.modelhub.models import TeamModel
from webapp.modelhub.shapes import demo_config
from webapp.plans import launching
from webapp.plans.errors import DraftProblem
from webapp.plans.launching import launch_note, launch_of, plan_launch
from webapp.plans.planning import current_answer, is_outdated, plan_compute, plan_keep
from webapp.wizard.drafts import GOALS

pytestmark = pytest.mark.django_db(databases="__all__")
RUNS = {  # goal -> where its model may come from, which program runs
    "serve": (set(SOURCES), BenchmarkSpec),
    "generate": (set(SOURCES), GenerateSpec),
    "finetune": ({"folder", "team"}, TrainSpec),
    "pretrain": ({"demo"}, TrainSpec),
    "compress": ({"folder", "team"}, CompressSpec),
}


@pytest.mark.parametrize("goal", GOALS)
def test_each_goal_runs_its_program_on_the_models_that_it_can(plan_of, alice, goal):
    sources, program = RUNS[goal]
    client, num_jobs = client_of(alice), 0
    for source in SOURCES:
        made = plan_of(goal, source)

        note = launch_note(made)
        assert bool(note["can"]) == (source in sources), source
        assert note["text"].endswith("."), source

        if source in sources:
            assert isinstance(launch_of(made).spec, program), source
        else:
            with pytest.raises(DraftProblem) as caught:
                launch_of(made)
            assert caught.value.field == "source", source

        page = client.post(f"/plans/{made.pk}/launch/", {"go": "launch"}, follow=True)
        num_jobs += source in sources
        leads_to = "/jobs/" if source in sources else "/plans/"
        assert page.status_code == 200, source
        assert Job.objects.count() == num_jobs, source
        assert page.redirect_chain[-1][0].startswith(leads_to), source


@pytest.mark.parametrize("goal", GOALS)
def test_a_launched_job_has_every_page_and_figures_with_interval_and_unit(plan_of, alice, goal):
    made = plan_of(goal, "demo" if goal == "pretrain" else "team")
    prediction = launch_of(made).prediction
    assert prediction
    for name, figure in prediction.items():
        assert figure["unit"] in {"bytes", "seconds", "tokens_per_second", "share"}, name
        assert figure["low"] <= figure["value"] <= figure["high"], name

    job, client = plan_launch(plan=made, by=alice), client_of(alice)
    tabs = ["", "metrics/", "logs/", "events/", "config/", "artefacts/"]
    assert {client.get(f"/jobs/{job.pk}/{tab}").status_code for tab in tabs} == {200}


def test_what_is_only_planned_is_refused_with_what_runs(plan_of):
    for goal, field, value, words in [
        ("compress", "method", "autoround", "AutoRound is planned but does not run yet"),
        ("finetune", "method", "pretrain", "Choose “full”, “LoRA”, .* “QFT” or"),
    ]:
        made = plan_of(goal, "team")
        made.draft["workload"][goal][field] = value
        with pytest.raises(DraftProblem, match=words) as caught:
            launch_of(made)
        assert caught.value.field == field, goal


def test_a_pinned_width_is_the_one_that_runs(plan_of):
    for dtype in ("fp32", "bf16", "fp16", "int8", "int4"):
        made = plan_of("generate", "team")
        made.draft["pins"] = {"weight_dtype": dtype}
        assert launch_of(made).spec.weight_dtype == dtype, dtype


def test_a_run_with_a_budget_has_a_longest_duration_and_one_of_unknown_length_none(plan_of):
    for minutes, limit in ((2.0, 120 * 3 + 900), (0.1, 6 * 3 + 900), (60.0, 3600 * 3 + 900)):
        made = plan_of("pretrain", "demo")
        made.draft["workload"]["pretrain"]["time_budget_minutes"] = minutes
        assert launch_of(made).max_duration_seconds == pytest.approx(limit), minutes
    assert launch_of(plan_of("compress", "team")).max_duration_seconds is None


# Names


def test_a_job_is_called_as_its_plan(plan_of, alice):
    for name, expected in (
        ("First light", "First light"),
        ("  padded  ", "padded"),
        ("   ", "Pre-train Slipway demo on Box"),
        ("x" * 500, "x" * 120),
        ("<b>bold</b>", "<b>bold</b>"),
    ):
        made = plan_of("pretrain", "demo")
        made.name = ""
        job = plan_launch(plan=made, by=alice, name=name)
        assert (job.name, made.name) == (expected, expected)


def test_a_hostile_plan_name_is_text_everywhere(plan_of, alice):
    client = client_of(alice)
    for name in ("<img src=x>", "{{ 7 }}", "'\"", "%s", "a" * 120):
        made = plan_of("pretrain", "demo")
        job = plan_launch(plan=made, by=alice, name=name)
        for path in (f"/plans/{made.pk}/", "/plans/", f"/jobs/{job.pk}/", "/jobs/", "/"):
            response = client.get(path)
            assert response.status_code == 200, (name, path)
            assert "<img src=x>" not in response.content.decode(), (name, path)


def test_a_folder_with_a_long_name_can_be_launched(plan_of, alice):
    made = plan_of("generate", "folder")
    made.draft["model"]["path"] = "x" * 400
    assert len(plan_launch(plan=made, by=alice).model_name) <= 120


# What changed since


def test_a_fresh_plan_or_a_hosts_news_is_not_outdated_nor_computed_again(demo_plan):
    plan_compute(demo_plan)
    at = demo_plan.computed_at
    assert not is_outdated(demo_plan)
    Host.objects.update(last_seen_at=None)
    assert not is_outdated(demo_plan)
    current_answer(demo_plan)
    assert demo_plan.computed_at == at


@pytest.mark.parametrize(
    "change",
    [
        lambda plan: plan.draft["goal"].update(objective="memory"),
        lambda plan: plan.draft["workload"]["compress"].update(method="autoround"),
        lambda plan: plan.draft["pins"].update(weight_dtype="fp32"),
        lambda _plan: TeamModel.objects.update(config={**demo_config(), "vocab_size": 8192}),
        lambda _plan: TeamModel.objects.all().delete(),
        lambda _plan: Host.objects.update(microbench={}),
        lambda plan: plan.draft["hardware"].update(choice="catalog"),
    ],
    ids=["objective", "method", "pin", "config", "model gone", "not measured", "hardware"],
)
def test_whatever_would_be_asked_otherwise_today_makes_a_plan_outdated(plan_of, change):
    made = plan_of("compress", "team")
    plan_compute(made)
    change(made)
    assert is_outdated(made)


def test_a_draft_that_cannot_be_asked_keeps_no_old_answer(demo_plan):
    plan_compute(demo_plan)
    Host.objects.all().delete()

    with pytest.raises(DraftProblem):
        plan_compute(demo_plan)
    demo_plan.refresh_from_db()
    assert (demo_plan.answer, demo_plan.computed_at) == ({}, None)


def test_a_kept_plan_is_called_as_asked_or_as_before_or_by_itself(plan_of):
    itself = "Pre-train Slipway demo on Box"
    for given, before, expected in (("new", "old", "new"), ("", "old", "old"), ("", "", itself)):
        made = plan_of("pretrain", "demo")
        made.name = before
        assert plan_keep(made, given).name == expected, (given, before)


def test_what_leaves_the_device_is_planned_and_no_endpoint(plan_of, monkeypatch):
    made = plan_of("serve", "catalog")
    answer = current_answer(made)
    offload = OffloadSpec(weights_cpu=0.5, kv_disk=0.25)
    strategy = answer.plans[0].strategy.model_copy(update={"offload": offload})
    best = answer.plans[0].model_copy(update={"strategy": strategy})
    moved = answer.model_copy(update={"plans": (best,)})
    monkeypatch.setattr(launching, "verdict_answer", lambda _: moved)

    with pytest.raises(DraftProblem) as caught:
        launch_of(made)

    assert "weights in host memory, cache on disk" in caught.value.sentence
    assert "Choose fewer bits" in caught.value.sentence
    assert caught.value.field == "weight_dtype"
