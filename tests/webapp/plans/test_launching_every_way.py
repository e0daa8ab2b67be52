"""Launching from every goal and model: what runs, what is refused and how, what is kept."""

import itertools

import pytest

from planner.specs.strategy import OffloadSpec
from runners.jobspec import BenchmarkSpec, CompressSpec, FolderModel, GenerateSpec, TrainSpec
from runners.jobspec.training_memory import USUAL_LEARNING_RATES
from tests.webapp.conftest import client_of
from tests.webapp.plans.conftest import with_model
from webapp.hosts.models import Host
from webapp.jobs.models import Job
from webapp.modelhub.demo import demo_config
from webapp.modelhub.models import TeamModel
from webapp.plans import launching
from webapp.plans.errors import DraftProblem
from webapp.plans.launch_notes import launch_note
from webapp.plans.launching import launch_of, plan_launch
from webapp.plans.models import Plan
from webapp.plans.planning import current_answer, is_outdated, plan_compute, plan_keep
from webapp.plans.training import train_spec
from webapp.wizard.defaults import GOALS

pytestmark = pytest.mark.django_db(databases="__all__")
SMALL = {"source": "catalog", "catalog_id": "HuggingFaceTB/SmolLM2-135M"}
SOURCES = {
    "demo": {"source": "demo"},
    "catalog": SMALL,
    "config": {"source": "config", "config": demo_config()},
    "folder": {"source": "folder", "path": "tiny", "folder_config": demo_config()},
    "team": {"source": "team"},
}
RUNS = {  # goal -> where its model may come from, which program runs
    "serve": (set(SOURCES), BenchmarkSpec),
    "generate": (set(SOURCES), GenerateSpec),
    "finetune": ({"folder", "team"}, TrainSpec),
    "pretrain": ({"demo"}, TrainSpec),
    "compress": ({"folder", "team"}, CompressSpec),
}
EVERY = list(itertools.product(GOALS, SOURCES))


@pytest.fixture
def plan(demo_plan, trained):
    """Return the demo's plan with another goal and model; fine-tuning as this release runs it."""

    def make(goal: str, source: str) -> Plan:
        with_model(demo_plan, trained, goal)
        chosen = SOURCES[source] | ({"team_model": trained.pk} if source == "team" else {})
        demo_plan.draft["model"] = {"catalog_id": SMALL["catalog_id"], **chosen}
        demo_plan.draft["workload"]["finetune"] |= {"method": "full", "sequence_length": 256}
        demo_plan.draft["workload"]["serve"] |= {"input_tokens": 128, "output_tokens": 64}
        demo_plan.draft["workload"]["generate"] |= {"input_tokens": 128, "output_tokens": 64}
        demo_plan.save()
        return demo_plan

    return make


@pytest.mark.parametrize(("goal", "source"), EVERY)
def test_each_goal_runs_its_program_on_the_models_that_it_can(plan, goal, source):
    sources, program = RUNS[goal]
    made = plan(goal, source)

    if source in sources:
        assert isinstance(launch_of(made).spec, program)
    else:
        with pytest.raises(DraftProblem) as caught:
            launch_of(made)
        assert caught.value.field == "source"


@pytest.mark.parametrize(("goal", "source"), EVERY)
def test_the_review_says_before_what_launching_would_do(plan, goal, source):
    note = launch_note(plan(goal, source))

    assert bool(note["can"]) == (source in RUNS[goal][0])
    assert note["text"].endswith(".")


@pytest.mark.parametrize(("goal", "source"), EVERY)
def test_the_button_leads_to_a_job_or_back_with_the_reason(plan, alice, goal, source):
    made = plan(goal, source)
    client = client_of(alice)

    page = client.post(f"/plans/{made.pk}/launch/", {"go": "launch"}, follow=True)

    assert page.status_code == 200
    assert Job.objects.count() == (source in RUNS[goal][0])
    assert page.redirect_chain[-1][0].startswith("/jobs/" if Job.objects.exists() else "/plans/")


@pytest.mark.parametrize("goal", GOALS)
def test_a_launched_job_has_every_page(plan, alice, goal):
    job = plan_launch(plan=plan(goal, "demo" if goal == "pretrain" else "team"), by=alice)
    client = client_of(alice)

    tabs = ["", "metrics/", "logs/", "events/", "config/", "artefacts/"]

    assert {client.get(f"/jobs/{job.pk}/{tab}").status_code for tab in tabs} == {200}


@pytest.mark.parametrize("goal", GOALS)
def test_what_a_job_is_expected_to_measure_has_interval_and_unit(plan, goal):
    launch = launch_of(plan(goal, "demo" if goal == "pretrain" else "team"))

    assert launch.prediction
    for figure in launch.prediction.values():
        assert figure["unit"] in {"bytes", "seconds", "tokens_per_second", "share"}
        assert figure["low"] <= figure["value"] <= figure["high"]


@pytest.mark.parametrize(
    ("goal", "field", "value", "words"),
    [
        ("compress", "method", "autoround", "AutoRound is planned but does not run yet"),
        ("finetune", "method", "pretrain", "Choose “full”, “LoRA”, .* “QFT” or"),
    ],
)
def test_what_is_only_planned_is_refused_with_what_runs(plan, goal, field, value, words):
    made = plan(goal, "team")
    made.draft["workload"][goal][field] = value

    with pytest.raises(DraftProblem, match=words) as caught:
        launch_of(made)
    assert caught.value.field == field


@pytest.mark.parametrize("optimizer", ["adamw", "adamw_8bit", "adafactor", "lion", "sgd"])
def test_each_optimizer_reaches_the_host_with_its_usual_rate(plan, optimizer):
    made = plan("finetune", "team")
    made.draft["workload"]["finetune"]["optimizer"] = optimizer

    spec = launch_of(made).spec

    assert (spec.optimizer, spec.learning_rate) == (optimizer, USUAL_LEARNING_RATES[optimizer])


@pytest.mark.parametrize("method", ["lomo", "adalomo", "qft"])
def test_a_fused_method_is_an_optimizer_of_the_job(plan, method):
    made = plan("finetune", "team")
    made.draft["workload"]["finetune"] |= {"method": method, "global_batch_size": 1}

    assert launch_of(made).spec.optimizer == method


def test_what_waits_elsewhere_and_is_computed_again_reaches_the_host(plan):
    made = plan("finetune", "team")
    asked = {"activation_offload": "disk", "optimizer_offload": "disk", "optimizer": "adamw"}
    made.draft["workload"]["finetune"] |= asked
    made.draft["pins"] = {"activation_recomputation": "full"}

    spec = launch_of(made).spec

    assert asked.items() <= spec.model_dump().items()
    assert spec.activation_recomputation == "full"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"method": "alphatuning"}, ("alphatuning", 4)),
        ({"method": "full", "rounding": "8"}, ("qat", 8)),
    ],
)
def test_integers_reach_the_host(plan, fields, expected):
    made = plan("finetune", "team")
    made.draft["workload"]["finetune"] |= fields

    found = launch_of(made).spec.quantized

    assert (found.method, found.bits) == expected


@pytest.mark.parametrize(("planned", "where"), [("nvme", "disk"), ("none", "none")])
def test_moments_that_the_plan_has_on_disk_wait_there(plan, planned, where):
    made = plan("finetune", "team")
    best = launch_of(made).best
    offload = OffloadSpec(optimizer=planned)
    placed = best.strategy.model_copy(update={"offload": offload})

    spec = train_spec(
        made.draft, FolderModel(path="m"), best.model_copy(update={"strategy": placed})
    )

    assert spec.optimizer_offload == where


@pytest.mark.parametrize(("asked", "computes"), [("auto", {"fp32", "bf16"}), ("fp8", {"fp8"})])
def test_products_in_8_bit_floats_are_taken_only_when_they_are_chosen(plan, asked, computes):
    made = plan("pretrain", "demo")
    made.draft["workload"]["pretrain"] |= {"products": asked}

    launch = launch_of(made)

    assert launch.spec.compute_dtype in computes
    assert launch.best.strategy.compute_dtype == launch.spec.compute_dtype
    said = [each for each in launch.best.warnings if "products in fp8 are emulated" in each]
    assert len(said) == (asked == "fp8")


@pytest.mark.parametrize("way", ["eager", "flash", "auto"])
def test_kernels_that_were_chosen_reach_plan_and_host(plan, way):
    made = plan("finetune", "team")
    made.draft["workload"]["finetune"] |= {"attention": way, "training_step": "compiled"}

    launch = launch_of(made)

    assert (launch.spec.attention, launch.spec.compiled) == (way, True)
    assert launch.best.strategy.attention == ("eager" if way == "eager" else "flash")


def test_growing_lengths_reach_the_host_with_the_plans_tokens(plan):
    made = plan("pretrain", "demo")
    asked = {"lengths": "grow", "million_tokens": 0.2, "time_budget_minutes": None}
    made.draft["workload"]["pretrain"] |= asked | {"sequence_length": 64, "on_spike": "skip"}

    spec = launch_of(made).spec

    assert spec.length_schedule == ((8, 0.25), (16, 0.25), (32, 0.25), (64, 0.25))
    assert spec.on_spike == "skip"


@pytest.mark.parametrize(("said", "waits"), [("never", None), ("2", 2), ("", None), ("3", 3)])
def test_validations_without_gain_end_a_training_if_asked(plan, said, waits):
    made = plan("pretrain", "demo")
    made.draft["workload"]["pretrain"] |= {"early_stop": said}

    assert launch_of(made).spec.early_stop_validations == waits


@pytest.mark.parametrize("goal", ["pretrain", "finetune"])
def test_how_checkpoints_are_written_and_which_weights_stay_is_a_choice(plan, goal):
    made = plan(goal, "demo" if goal == "pretrain" else "team")
    usual = launch_of(made).spec
    asked = {"checkpoint_writing": "in_step", "exported_weights": "last"}
    made.draft["workload"][goal] |= asked
    other = launch_of(made).spec

    assert (usual.checkpoint_writing, usual.keep_best) == ("auto", True)
    assert (other.checkpoint_writing, other.keep_best) == ("in_step", False)
    for name in asked:  # an older draft has neither
        del made.draft["workload"][goal][name]
    assert launch_of(made).spec == usual


@pytest.mark.parametrize("goal", ["pretrain", "finetune"])
def test_text_samples_reach_the_host_with_their_prompts(plan, goal):
    made = plan(goal, "demo" if goal == "pretrain" else "team")
    assert launch_of(made).spec.text_samples is None
    made.draft["workload"][goal] |= {"text_samples": "20", "sample_prompts": "Once\n\nTwice"}
    asked = launch_of(made).spec.text_samples
    made.draft["workload"][goal] |= {"sample_prompts": ""}

    assert (asked.every_steps, asked.prompts) == (20, ("Once", "Twice"))
    assert launch_of(made).spec.text_samples.prompts == ()


def test_moments_that_are_not_adamws_stay(plan):
    made = plan("finetune", "team")
    made.draft["workload"]["finetune"] |= {"optimizer": "lion", "optimizer_offload": "disk"}

    with pytest.raises(DraftProblem, match="the optimizer is lion; choose adamw"):
        launch_of(made)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16", "int8", "int4"])
def test_a_pinned_width_is_the_one_that_runs(plan, dtype):
    made = plan("generate", "team")
    made.draft["pins"] = {"weight_dtype": dtype}

    assert launch_of(made).spec.weight_dtype == dtype


@pytest.mark.parametrize(
    ("million", "sequence", "batch", "steps"),
    [(0.2048, 256, 8, 100), (0.001, 256, 8, 1), (1.0, 256, 1, 3906), (10.0, 128, 4, 19_531)],
)
def test_tokens_become_steps(plan, million, sequence, batch, steps):
    made = plan("pretrain", "demo")
    made.draft["workload"]["pretrain"] |= {
        "million_tokens": million,
        "time_budget_minutes": None,
        "sequence_length": sequence,
        "global_batch_size": batch,
    }

    assert launch_of(made).spec.max_steps == steps


@pytest.mark.parametrize("batch", [1, 2, 3, 7, 8, 12])
def test_a_step_never_trains_on_more_than_its_batch(plan, batch):
    made = plan("pretrain", "demo")
    made.draft["workload"]["pretrain"]["global_batch_size"] = batch

    spec = launch_of(made).spec

    assert spec.micro_batch_size * spec.gradient_accumulation_steps <= batch


@pytest.mark.parametrize(
    ("minutes", "limit"), [(2.0, 120 * 3 + 900), (0.1, 6 * 3 + 900), (60.0, 3600 * 3 + 900)]
)
def test_a_run_with_a_budget_has_a_longest_duration(plan, minutes, limit):
    made = plan("pretrain", "demo")
    made.draft["workload"]["pretrain"]["time_budget_minutes"] = minutes

    assert launch_of(made).max_duration_seconds == pytest.approx(limit)


def test_a_run_of_unknown_length_has_none(plan):
    assert launch_of(plan("compress", "team")).max_duration_seconds is None


# Names


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("First light", "First light"),
        ("  padded  ", "padded"),
        ("   ", "Pre-train Slipway demo on Box"),
        ("x" * 500, "x" * 120),
        ("<b>bold</b>", "<b>bold</b>"),
    ],
)
def test_a_job_is_called_as_its_plan(demo_plan, alice, name, expected):
    demo_plan.name = ""

    job = plan_launch(plan=demo_plan, by=alice, name=name)

    assert (job.name, demo_plan.name) == (expected, expected)


@pytest.mark.parametrize("name", ["<img src=x>", "{{ 7 }}", "'\"", "%s", "a" * 120])
def test_a_hostile_plan_name_is_text_everywhere(demo_plan, alice, name):
    job = plan_launch(plan=demo_plan, by=alice, name=name)
    client = client_of(alice)

    for path in (f"/plans/{demo_plan.pk}/", "/plans/", f"/jobs/{job.pk}/", "/jobs/", "/"):
        response = client.get(path)
        assert response.status_code == 200
        assert "<img src=x>" not in response.content.decode()


def test_a_folder_with_a_long_name_can_be_launched(plan, alice):
    made = plan("generate", "folder")
    made.draft["model"]["path"] = "x" * 400

    assert len(plan_launch(plan=made, by=alice).model_name) <= 120


# What changed since


def test_a_fresh_plan_is_not_outdated(demo_plan):
    plan_compute(demo_plan)

    assert not is_outdated(demo_plan)


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
def test_whatever_would_be_asked_otherwise_today_makes_a_plan_outdated(plan, change):
    made = plan("compress", "team")
    plan_compute(made)

    change(made)

    assert is_outdated(made)


def test_a_hosts_new_name_is_no_new_question(demo_plan):
    plan_compute(demo_plan)
    Host.objects.update(last_seen_at=None)

    assert not is_outdated(demo_plan)


def test_a_stored_answer_is_not_computed_again(demo_plan):
    plan_compute(demo_plan)
    at = demo_plan.computed_at

    current_answer(demo_plan)

    assert demo_plan.computed_at == at


def test_a_draft_that_cannot_be_asked_keeps_no_old_answer(demo_plan):
    plan_compute(demo_plan)
    Host.objects.all().delete()

    with pytest.raises(DraftProblem):
        plan_compute(demo_plan)
    demo_plan.refresh_from_db()
    assert (demo_plan.answer, demo_plan.computed_at) == ({}, None)


@pytest.mark.parametrize(
    ("given", "before", "expected"),
    [("new", "old", "new"), ("", "old", "old"), ("", "", "Pre-train Slipway demo on Box")],
)
def test_a_kept_plan_is_called_as_asked_or_as_before_or_by_itself(
    demo_plan, given, before, expected
):
    demo_plan.name = before

    assert plan_keep(demo_plan, given).name == expected


def test_what_leaves_the_device_is_planned_and_no_endpoint(plan, monkeypatch):
    made = plan("serve", "catalog")
    answer = current_answer(made)
    offload = OffloadSpec(weights_cpu=0.5, kv_disk=0.25)
    strategy = answer.plans[0].strategy.model_copy(update={"offload": offload})
    best = answer.plans[0].model_copy(update={"strategy": strategy})
    moved = answer.model_copy(update={"plans": (best,)})
    monkeypatch.setattr(launching, "current_answer", lambda _: moved)

    with pytest.raises(DraftProblem) as caught:
        launch_of(made)

    assert "weights in host memory, cache on disk" in caught.value.sentence
    assert "Choose fewer bits" in caught.value.sentence
    assert caught.value.field == "weight_dtype"
