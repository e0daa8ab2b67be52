"""Drafts as data: defaults, suggestions, pins, shortened workloads, summaries, the stepper."""

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.catalog.devices import get_device, list_devices
from tests.webapp.conftest import client_of
from webapp.accounts.models import Team
from webapp.core.units import TIMES
from webapp.hosts.models import Host
from webapp.plans.models import Plan
from webapp.wizard import pages
from webapp.wizard.drafts import (
    DEFAULT_DEVICE,
    DEFAULT_MODEL,
    GOALS,
    WORKLOADS,
    demo_draft,
    demo_minutes,
    serve_draft,
    suggestion_apply,
)
from webapp.wizard.forms import device_choices, model_ids
from webapp.wizard.steps import (
    SLUGS,
    STEPS,
    Options,
    _merged_pins,
    fit_context,
    neighbours,
    step_form,
    summaries,
)
from webapp.wizard.workload_forms import COMPRESSIONS, WORKLOAD_FORMS


def options_of(team: Team, *hosts: Host) -> Options:
    """Return options that are known and not read from the database."""
    found = Options(team)
    vars(found).update(hosts=hosts, pools=(), team_models=(), datasets=())
    return found


NOBODY = options_of(Team(name="Nobody"))


def draft_of(goal="serve") -> dict:
    draft = serve_draft(None)
    draft["goal"]["goal"] = goal
    return draft


# Defaults


@pytest.mark.parametrize("goal", GOALS)
def test_the_defaults_of_every_goal_pass_their_own_form(goal):
    form = WORKLOAD_FORMS[goal](data=WORKLOADS[goal])

    assert form.is_valid(), form.errors
    assert form.cleaned_data == WORKLOADS[goal]


def test_the_default_model_and_device_are_in_their_catalogs():
    assert DEFAULT_MODEL in model_ids()
    assert get_device(DEFAULT_DEVICE).memory_bytes > 0


def test_drafts_do_not_share_their_workloads():
    draft = serve_draft(None)
    draft["workload"]["serve"]["concurrency"] = 999

    assert serve_draft(None)["workload"]["serve"]["concurrency"] == 16


@pytest.mark.parametrize(("seconds", "minutes"), [("120", 2.0), ("40", 40 / 60), ("6", 0.1)])
def test_the_demos_length_follows_the_environment(monkeypatch, seconds, minutes):
    monkeypatch.setenv("SLIPWAY_DEMO_SECONDS", seconds)

    assert demo_minutes() == pytest.approx(minutes, abs=0.005)  # as the form shows it
    assert demo_draft(None)["workload"]["pretrain"]["time_budget_minutes"] == demo_minutes()


def test_every_device_of_the_catalog_can_be_chosen_once():
    chosen = [key for _, group in device_choices() for key, _ in group]

    assert sorted(chosen) == sorted(device.id for device in list_devices())


@pytest.mark.parametrize("method", [method for method, _ in COMPRESSIONS])
def test_every_compression_has_its_words(method):
    draft = draft_of("compress")
    draft["workload"]["compress"]["method"] = method

    assert summaries(draft, NOBODY)["workload"]


@pytest.mark.parametrize("goal", GOALS)
def test_every_step_is_summarised_for_every_goal(goal):
    said = summaries(draft_of(goal), NOBODY)

    assert set(said) == set(SLUGS)
    assert all(said[slug] for slug in SLUGS if slug != "review")


# Suggestions


@pytest.mark.parametrize("goal", GOALS)
def test_a_suggestion_touches_no_other_goals_workload(goal):
    draft = draft_of(goal)
    others = {name: value for name, value in draft["workload"].items() if name != goal}
    before = copy.deepcopy(others)

    suggestion_apply(draft, {"workload": {"input_tokens": 7, "global_batch_size": 7}})

    assert others == before


@pytest.mark.parametrize(
    ("goal", "workload", "name", "value"),
    [
        ("serve", {"concurrency": 4}, "concurrency", 4),
        ("serve", {"input_tokens": 512}, "input_tokens", 512),
        ("serve", {"concurrency": None}, "concurrency", 16),
        ("finetune", {"method": "qlora"}, "method", "qlora"),
        ("pretrain", {"global_batch_size": 1, "method": "pretrain"}, "global_batch_size", 1),
        ("generate", {"batch_size": 1}, "batch_size", 1),
    ],
)
def test_a_suggested_field_is_taken_over(goal, workload, name, value):
    draft = draft_of(goal)

    assert suggestion_apply(draft, {"workload": workload}) == []
    assert draft["workload"][goal][name] == value


@pytest.mark.parametrize(
    ("changes", "left"),
    [
        ({"workload": {"method": "lora"}}, ["method lora"]),
        ({"engine": "vllm"}, ["engine vllm"]),
        ({"cluster": {"device": "a-card-of-tomorrow"}}, ["device a-card-of-tomorrow"]),
        ({"workload": {"method": "lora"}, "engine": "x"}, ["method lora", "engine x"]),
        ({}, []),
    ],
)
def test_what_has_no_place_in_the_draft_is_given_back(changes, left):
    assert suggestion_apply(draft_of("pretrain"), changes) == left


@pytest.mark.parametrize(
    ("cluster", "count"),
    [
        ({"device": "h100-sxm5-80gb"}, (1, 1)),
        ({"device": "h100-sxm5-80gb", "devices_per_node": 8}, (8, 1)),
        ({"device": {"id": "rtx-4090"}, "devices_per_node": 2, "nodes": 3}, (2, 3)),
    ],
)
def test_suggested_hardware_becomes_catalog_hardware(cluster, count):
    draft = draft_of()
    draft["hardware"]["choice"] = "host:1"

    assert suggestion_apply(draft, {"cluster": cluster}) == []
    hardware = draft["hardware"]
    assert hardware["choice"] == "catalog"
    assert (hardware["devices_per_node"], hardware["nodes"]) == count


def test_a_suggestion_makes_a_draft_touched():
    draft = draft_of()

    suggestion_apply(draft, {"pins": {"weight_dtype": "int4"}})

    assert draft["is_touched"]
    assert draft["pins"] == {"weight_dtype": "int4"}


@pytest.mark.parametrize(
    ("old", "new", "kept"),
    [
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
    ],
)
def test_what_came_with_the_weights_leaves_with_them(old, new, kept):
    assert _merged_pins(old, new) == kept


# Workloads that fit the model


@given(st.integers(1, 200_000), st.integers(1, 200_000), st.integers(2, 131_072))
def test_a_shortened_conversation_fits_and_keeps_both_parts(prompt, answer, context):
    draft = draft_of()
    draft["workload"]["serve"] |= {"input_tokens": prompt, "output_tokens": answer}

    fit_context(draft, context)
    values = draft["workload"]["serve"]

    assert (
        values["input_tokens"] + values["output_tokens"] <= context or prompt + answer <= context
    )
    assert min(values["input_tokens"], values["output_tokens"]) >= 1


@given(st.integers(8, 131_072), st.integers(8, 131_072))
def test_training_reads_no_more_at_once_than_the_model(sequence, context):
    draft = draft_of("pretrain")
    draft["workload"]["pretrain"]["sequence_length"] = sequence

    fit_context(draft, context)

    assert draft["workload"]["pretrain"]["sequence_length"] == min(sequence, context)


def test_what_fits_is_left_alone():
    draft = draft_of()
    before = copy.deepcopy(draft)

    assert not fit_context(draft, 131_072)
    assert draft == before


def test_fitting_twice_changes_nothing_more():
    draft = draft_of()
    assert fit_context(draft, 256)

    assert not fit_context(draft, 256)


# Steps


@pytest.mark.parametrize("at", range(len(SLUGS)))
def test_every_step_knows_its_neighbours(at):
    before, after = neighbours(SLUGS[at])

    assert before == (STEPS[at - 1] if at else None)
    assert after == (STEPS[at + 1] if at < len(SLUGS) - 1 else None)


@pytest.mark.parametrize(("slug", "has_form"), [(slug, slug != "review") for slug in SLUGS])
def test_every_step_but_the_last_has_a_form(slug, has_form):
    assert (step_form(slug, draft_of(), NOBODY) is not None) == has_form


@pytest.mark.django_db
@pytest.mark.parametrize("slug", SLUGS)
def test_steps_before_the_current_one_are_done(alice, team, host, slug):
    plan = Plan.objects.create(team=team, owner=alice, draft=serve_draft(host))
    steps = client_of(alice).get(f"/plans/{plan.pk}/edit/{slug}/").context["steps"]

    at = SLUGS.index(slug)
    assert [step["is_done"] for step in steps] == [index < at for index in range(len(SLUGS))]
    assert [step["is_current"] for step in steps].index(True) == at


# Hardware


@pytest.mark.parametrize("device", [one for one in list_devices() if one.price_usd_per_hour])
def test_every_price_of_the_catalog_has_its_source(device):
    assert device.price_source


@pytest.mark.django_db
def test_a_host_is_offered_with_what_it_has(host):
    choice = pages._host_choice(host)

    assert choice.more.startswith("CPU only · 2 cores · 16.0")
    assert choice.more.endswith("GB/s measured")


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
    draft, options = draft_of(goal), options_of(host.team, host)
    draft["hardware"] |= {"choice": f"host:{host.pk}"}

    def offered():
        return "flex" in dict(step_form("workload", draft, options).fields["attention"].choices)

    assert not offered()
    host.facts["gpus"] = [{"index": 0}]
    assert offered()
    host.facts["gpus"] = []
    draft["workload"][goal]["attention"] = "flex"
    assert offered()
    draft["workload"][goal]["attention"], draft["hardware"]["choice"] = "auto", "catalog"
    assert offered()


@pytest.mark.django_db
def test_a_host_that_never_reported_is_offered_without_figures(host):
    host.facts, host.microbench = {}, {}

    assert pages._host_choice(host).more == "CPU only"
