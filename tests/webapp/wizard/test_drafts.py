"""Drafts: presets, defaults, suggestions, pins, shortened workloads, summaries, the stepper."""

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.catalog.devices import devices_of_every_size, get_device, list_devices
from planner.specs.workload import Strategy
from runners.plans.document import DEFAULT_DEVICE, DEFAULT_MODEL, GOALS, HardwareChoice, of_goal
from runners.plans.methods import COMPRESSIONS
from runners.plans.pins import PINS, POOLS
from runners.plans.workloads import WORKLOADS
from tests.webapp.conftest import client_of
from webapp.accounts.models import Team
from webapp.core.display import TIMES
from webapp.hosts.models import Host
from webapp.jobs.models import Job, JobState
from webapp.modelhub.models import TeamModel, demo_config
from webapp.plans.models import Plan
from webapp.plans.places import Names
from webapp.wizard import steps as pages
from webapp.wizard.combobox import device_choices, model_choices
from webapp.wizard.drafts import (
    MODEL_PRESETS,
    SLUGS,
    STEPS,
    Options,
    demo_document,
    fit_context,
    goal_change,
    neighbours,
    pins_form,
    serve_document,
    step_form,
    stored_draft,
    suggestion_apply,
    summaries,
)
from webapp.wizard.forms import Choice
from webapp.wizard.workload_forms import workload_form

pytestmark = pytest.mark.django_db


@pytest.fixture
def team_model(team, host) -> TeamModel:
    return TeamModel.objects.create(
        team=team,
        name="demo of today",
        source="job",
        config=demo_config(),
        host=host,
        attempt_id="01H" + "A" * 23,
        artefact_name="model",
    )


def test_a_newcomer_starts_from_training_the_demo_model_here(walk, host):
    draft = walk().plan.draft
    assert draft["goal"] == "pretrain"
    assert draft["model"]["source"] == "demo"
    assert draft["workload"]["time_budget_seconds"] == 120
    assert draft["hardware"]["host"] == host.pk


def test_after_a_finished_job_a_plan_starts_from_serving(walk, job):
    Job.objects.filter(pk=job.pk).update(state=JobState.SUCCEEDED)
    draft = walk().plan.draft
    assert draft["goal"] == "serve"
    assert draft["model"]["catalog_id"] == "meta-llama/Llama-3.1-8B"


def test_without_a_host_a_plan_starts_from_catalog_hardware(alice):
    client_of(alice).get("/plans/new/")
    assert Plan.objects.get().document.hardware.is_catalog


def test_the_demo_and_the_quantize_preset_open_with_their_model_and_host(
    walk, team_model, host, charlie
):
    assert walk("?preset=demo").first_step == "review"

    draft = walk(f"?preset=quantize&model={team_model.pk}").plan.draft
    assert draft["goal"] == "compress"
    assert draft["model"]["team_model"] == team_model.pk
    assert draft["hardware"]["host"] == host.pk

    response = client_of(charlie).get(f"/plans/new/?preset=quantize&model={team_model.pk}")
    assert response.status_code == 404

    for preset, goal in [("benchmark", "serve"), ("endpoint", "serve"), ("generate", "generate")]:
        found = walk(f"?preset={preset}&model={team_model.pk}")
        assert found.first_step == "review", (preset, goal)
        assert found.plan.draft["goal"] == goal, (preset, goal)
        assert found.plan.draft["model"]["team_model"] == team_model.pk, (preset, goal)


def test_a_short_model_is_tuned_and_asked_no_more_tokens_than_it_has_positions(walk, team_model):
    team_model.config = {**team_model.config, "max_position_embeddings": 256}
    team_model.save()
    found = walk(f"?preset=tune&model={team_model.pk}")
    assert found.first_step == "workload"
    assert found.plan.draft["goal"] == "finetune"
    assert found.plan.draft["model"]["team_model"] == team_model.pk
    assert found.plan.draft["workload"]["sequence_length"] == 256

    team_model.config = {**team_model.config, "max_position_embeddings": 256}
    team_model.save()
    asked = walk(f"?preset=generate&model={team_model.pk}").plan.draft["workload"]
    assert (asked["input_tokens"], asked["output_tokens"]) == (192, 64)


def test_an_untouched_draft_is_used_again_and_a_touched_one_left_alone(walk):
    assert walk().plan_id == walk().plan_id
    first = walk()
    first.press("workload", global_batch_size=4)
    assert walk().plan_id != first.plan_id


@pytest.mark.parametrize("preset", sorted(MODEL_PRESETS))
def test_a_preset_about_a_model_opens_at_the_goal_without_one(alice, host, preset):
    response = client_of(alice).get(f"/plans/new/?preset={preset}")
    plan = Plan.objects.get(owner=alice)
    assert response["Location"] == f"/plans/{plan.pk}/edit/goal/"


# Drafts as data: defaults, suggestions, pins, shortened workloads, summaries, the stepper


def options_of(team: Team, *hosts: Host) -> Options:
    """Return options that are known and not read from the database."""
    found = Options(team)
    vars(found).update(hosts=hosts, pools=(), team_models=(), datasets=())
    return found


NOBODY = options_of(Team(name="Nobody"))


def document_of(goal="serve", **workload):
    document = of_goal(serve_document(None), goal)
    document.workload = document.workload.with_values(**workload)
    return document


def plan_of(document=None) -> Plan:
    return Plan(team=Team(name="Nobody"), draft=stored_draft(document or document_of()))


# Defaults


def test_defaults_are_in_their_catalogs_and_pass_their_own_form():
    assert DEFAULT_MODEL in {key for _, group in model_choices() for key, _ in group}
    assert get_device(DEFAULT_DEVICE).memory_bytes > 0
    serve_document(None).workload.concurrency = 999
    assert serve_document(None).workload.concurrency == 16

    for goal in GOALS:
        shown = {each.name: each.value() for each in workload_form(goal)}
        for name, field in workload_form(goal).fields.items():  # a browser sends a listed one
            if isinstance(field, Choice):
                assert field.prepare_value(shown[name]) in dict(field.choices), name
        form = workload_form(
            goal,
            data={
                name: value
                for name, value in shown.items()
                if value is not None and value is not False
            },
        )
        assert form.is_valid(), form.errors
        assert form.part == WORKLOADS[goal](), goal

    chosen = [key for _, group in device_choices() for key, _ in group]
    assert sorted(chosen) == sorted(device.id for device in devices_of_every_size())


def test_the_demos_length_follows_the_environment(monkeypatch):
    for seconds, minutes in [("120", 2.0), ("40", 40 / 60), ("6", 0.1)]:
        monkeypatch.setenv("SLIPWAY_DEMO_SECONDS", seconds)
        workload = demo_document(None).workload
        assert workload.time_budget_seconds == float(seconds)
        shown = workload_form("pretrain", workload)["time_budget_seconds"].value()
        assert shown == pytest.approx(minutes, abs=0.005), seconds


def test_every_compression_and_every_step_of_every_goal_has_its_words():
    wrong = [
        method
        for method in COMPRESSIONS
        if not summaries(document_of("compress", method=method), Names("", ""))["workload"]
    ]
    assert not wrong, wrong

    for goal in GOALS:
        said = summaries(document_of(goal), Names("", ""))
        assert set(said) == set(SLUGS), goal
        assert all(said[slug] for slug in SLUGS if slug != "review"), goal


# Suggestions


def test_a_suggestion_touches_its_draft_and_no_other_goals_workload():
    for goal in GOALS:
        plan = plan_of(document_of(concurrency=3))
        goal_change(plan, goal)
        before = copy.deepcopy(plan.wizard.get("others"))
        suggestion_apply(plan, {"workload": {"input_tokens": 7, "global_batch_size": 7}})
        assert plan.wizard.get("others") == before, goal

    plan = plan_of()
    suggestion_apply(plan, {"pins": {"weight_dtype": "int4"}})
    assert plan.wizard["is_touched"]
    assert plan.draft["pins"] == {"weight_dtype": "int4"}


def test_a_suggested_field_is_taken_over_or_given_back():
    for goal, workload, name, value in [
        ("serve", {"concurrency": 4}, "concurrency", 4),
        ("serve", {"input_tokens": 512}, "input_tokens", 512),
        ("serve", {"concurrency": None}, "concurrency", 16),
        ("finetune", {"method": "qlora"}, "method", "qlora"),
        ("pretrain", {"global_batch_size": 1, "method": "pretrain"}, "global_batch_size", 1),
        ("generate", {"batch_size": 1}, "batch_size", 1),
    ]:
        plan = plan_of(document_of(goal))
        assert suggestion_apply(plan, {"workload": workload}) == [], (goal, workload)
        assert plan.draft["workload"][name] == value, (goal, workload)

    for changes, left in [
        ({"workload": {"method": "lora"}}, ["method lora"]),
        ({"engine": "vllm"}, ["engine vllm"]),
        ({"cluster": {"device": "a-card-of-tomorrow"}}, ["device a-card-of-tomorrow"]),
        ({"workload": {"method": "lora"}, "engine": "x"}, ["method lora", "engine x"]),
        ({}, []),
    ]:
        assert suggestion_apply(plan_of(document_of("pretrain")), changes) == left, changes


def test_suggested_hardware_becomes_catalog_hardware():
    for cluster, count in [
        ({"device": "h100-sxm5-80gb"}, (1, 1)),
        ({"device": "h100-sxm5-80gb", "devices_per_node": 8}, (8, 1)),
        ({"device": {"id": "rtx-4090"}, "devices_per_node": 2, "nodes": 3}, (2, 3)),
        ({"device": "gb200-nvl72", "devices_per_node": 4, "nvlink_domain_devices": 72}, (4, 1)),
    ]:
        document = document_of()
        document.hardware.host = "1"
        plan = plan_of(document)

        assert suggestion_apply(plan, {"cluster": cluster}) == [], cluster
        hardware = plan.document.hardware
        assert hardware.is_catalog, cluster
        assert (hardware.devices_per_node, hardware.nodes) == count, cluster
        assert hardware.nvlink_domain_devices == cluster.get("nvlink_domain_devices")


def test_what_came_with_the_weights_leaves_with_them():
    for old, new, kept in [
        ({}, {"weight_dtype": "int4"}, {"weight_dtype": "int4"}),
        (
            {"weight_dtype": "int4", "quantization": "awq"},
            {"weight_dtype": "int4", "tensor_parallel_size": 2},
            {"weight_dtype": "int4", "quantization": "awq", "tensor_parallel_size": 2},
        ),
        (
            {"weight_dtype": "int4", "quantization": "awq"},
            {"weight_dtype": "bf16"},
            {"weight_dtype": "bf16"},
        ),
    ]:
        document = document_of()
        document.pins = Strategy(**old)
        posted = {f"pin-{name}": str(value) for name, value in new.items()}
        form = pins_form(document, posted)
        assert form.is_valid(), form.errors
        assert form.chosen == Strategy(**kept), (old, new)


def test_a_goal_is_asked_for_the_pins_that_change_its_plan_and_shows_what_is_pinned():
    for goal, unused in [
        ("serve", {"micro_batch_size", "activation_recomputation"}),
        ("generate", {"activation_recomputation", *POOLS}),
        ("finetune", {"kv_cache_dtype", *POOLS}),
        ("pretrain", {"kv_cache_dtype", *POOLS}),
        ("compress", set(PINS) - {"weight_dtype"}),
    ]:
        document = document_of(goal)
        assert set(PINS) - set(pins_form(document).fields) == unused, goal
        document.pins = Strategy(**{name: 2 for name in unused if name == "tensor_parallel_size"})
        assert set(document.pins.stated) <= set(pins_form(document).fields), goal


# Workloads that fit the model


@given(st.integers(1, 200_000), st.integers(1, 200_000), st.integers(2, 131_072))
def test_a_shortened_conversation_fits_and_keeps_both_parts(prompt, answer, context):
    asked = document_of(input_tokens=prompt, output_tokens=answer).workload

    values = fit_context(asked, context)

    assert values.input_tokens + values.output_tokens <= context or prompt + answer <= context
    assert min(values.input_tokens, values.output_tokens) >= 1


@given(st.integers(8, 131_072), st.integers(8, 131_072))
def test_training_reads_no_more_at_once_than_the_model(sequence, context):
    asked = document_of("pretrain", sequence_length=sequence).workload
    assert fit_context(asked, context).sequence_length == min(sequence, context)


def test_what_fits_is_left_alone_and_fitting_twice_changes_nothing_more():
    asked = document_of().workload
    assert fit_context(asked, 131_072) == document_of().workload

    shorter = fit_context(asked, 256)
    assert shorter != asked
    assert fit_context(shorter, 256) == shorter


# Steps


def test_every_step_knows_its_neighbours_and_all_but_the_last_have_a_form():
    for at in range(len(SLUGS)):
        before, after = neighbours(SLUGS[at])
        assert before == (STEPS[at - 1] if at else None), at
        assert after == (STEPS[at + 1] if at < len(SLUGS) - 1 else None), at

    for slug, has_form in [(slug, slug != "review") for slug in SLUGS]:
        assert (step_form(slug, document_of(), NOBODY) is not None) == has_form, slug


@pytest.mark.django_db
def test_steps_before_the_current_one_are_done(alice, team, host):
    for slug in SLUGS:
        plan = Plan.objects.create(
            team=team, owner=alice, draft=stored_draft(serve_document(host))
        )
        steps = client_of(alice).get(f"/plans/{plan.pk}/edit/{slug}/").context["steps"]
        at = SLUGS.index(slug)
        assert [step["is_done"] for step in steps] == [
            index < at for index in range(len(SLUGS))
        ], slug
        assert [step["is_current"] for step in steps].index(True) == at, slug


# Hardware


def test_every_price_of_the_catalog_has_its_source():
    wrong = [
        device
        for device in list_devices()
        if device.price_usd_per_hour and not device.price_source
    ]
    assert not wrong, wrong


@pytest.mark.django_db
def test_a_host_is_offered_with_what_it_has_or_never_reported(host):
    choice = pages._host_choice(host)
    assert choice.more.startswith("CPU only · 2 cores · 16.0")
    assert choice.more.endswith("GB/s measured")
    host.facts, host.microbench = {}, {}
    assert pages._host_choice(host).more == "CPU only"


@pytest.mark.django_db
def test_a_host_with_cards_is_offered_by_their_number_and_name(host):
    card = {"index": 0, "uuid": "u", "name": "NVIDIA GeForce RTX 4090", "memory_bytes": 24 * 2**30}
    host.facts["gpus"] = [card, card | {"index": 1}]
    choice = pages._host_choice(host)
    assert choice.cells == ("24", "24")
    assert choice.more.startswith(f"2 {TIMES} RTX 4090")


@pytest.mark.django_db
@pytest.mark.parametrize("goal", ["pretrain", "finetune"])
def test_attention_by_blocks_is_offered_where_the_host_has_a_gpu_or_a_draft_has_it(host, goal):
    document, options = document_of(goal), options_of(host.team, host)
    document.hardware = HardwareChoice(host=host.pk)

    def offered():
        form = step_form("workload", document, options)
        return "flex" in dict(form.fields["attention"].choices)

    assert not offered()
    host.facts["gpus"] = [{"index": 0}]
    assert offered()
    host.facts["gpus"] = []
    document.workload.attention = "flex"
    assert offered()
    document.workload.attention, document.hardware = "auto", HardwareChoice()
    assert offered()
