"""A saved plan stays as it is: editing makes a draft, saving the draft makes the next version."""

import re

import pytest
from django.urls import get_resolver

from runners.plans.document import read_stored
from runners.plans.launch import Launch
from tests.webapp.conftest import client_of
from webapp.jobs.models import Job
from webapp.plans.models import Plan, PlanState
from webapp.plans.planning import plan_again, plan_compute, plan_keep
from webapp.plans.saving import (
    PlanChangedError,
    changes_between,
    draft_of,
    draft_write,
    versions_of,
)
from webapp.tunings.models import Tuning
from webapp.wizard.drafts import goal_change

pytestmark = pytest.mark.django_db(databases="__all__")
CONTENT = ("draft", "request", "answer", "name", "computed_at", "saved_at", "version", "series")


@pytest.fixture
def kept(demo_plan) -> Plan:
    """A plan that nobody named, saved."""
    demo_plan.name, demo_plan.is_named = "", False
    demo_plan.save()
    plan_compute(demo_plan)
    return plan_keep(demo_plan, by="alice")


def row(plan: Plan) -> dict:
    return Plan.objects.filter(pk=plan.pk).values(*CONTENT).get()


def workload(client, plan: Plan, **changes) -> dict:
    """What a browser sends from a draft's workload, with changes."""
    page = client.get(f"/plans/{plan.pk}/edit/workload/").context
    known = {field.html_name: field.value() for field in page["form"]}
    known = {
        name: value for name, value in known.items() if value is not None and value is not False
    }
    return known | {"seen": page["seen"], "page": page["page"]} | changes


def edited(client, plan: Plan, **changes) -> Plan:
    """The draft of a saved plan, with another workload."""
    location = client.get(f"/plans/{plan.pk}/edit/workload/")["Location"]
    draft = Plan.objects.get(pk=re.findall(r"/plans/(\w+)/", location)[0])
    client.post(f"/plans/{draft.pk}/edit/workload/", workload(client, draft, **changes))
    draft.refresh_from_db()
    return draft


def plan_addresses() -> list[str]:
    """Every address of the site that is about one plan and is no page of the API."""
    routes = (str(one.pattern) for one in get_resolver().url_patterns)
    nested = [one for one in get_resolver().url_patterns if hasattr(one, "url_patterns")]
    routes = [str(two.pattern) for one in nested for two in one.url_patterns] + list(routes)
    return sorted({route for route in routes if route.startswith("plans/<str:plan_id>/")})


def test_the_autosave_of_a_saved_plan_changes_only_a_draft(alice, kept):
    client, before = client_of(alice), row(kept)
    draft = edited(client, kept, sequence_length="64")
    assert row(kept) == before
    assert draft.base == kept
    assert draft.draft["workload"]["sequence_length"] == 64


def test_an_autosave_from_a_page_that_was_opened_before_the_saving_goes_to_a_draft(
    alice, demo_plan
):
    client = client_of(alice)
    form = workload(client, demo_plan, sequence_length="64")
    plan_keep(demo_plan, "Mine", by="alice")
    before = row(demo_plan)

    answer = client.post(f"/plans/{demo_plan.pk}/verdict/?step=workload", form)

    draft = Plan.objects.get(state=PlanState.DRAFT)
    assert row(demo_plan) == before
    assert answer["HX-Redirect"] == f"/plans/{draft.pk}/edit/workload/"
    assert draft.draft["workload"]["sequence_length"] == 64


def test_no_address_of_a_plan_writes_over_a_saved_one(alice, kept):
    client, before = client_of(alice), row(kept)
    addresses = plan_addresses()
    assert len(addresses) >= 10
    steps = ("goal", "model", "workload", "hardware", "review")
    posted = {"go": "keep", "name": "Another", "suggestion": "0", "sequence_length": "64"}

    for route in addresses:
        if "delete" in route:
            continue
        for step in steps if "<slug:step>" in route else ("limits",):
            path = re.sub(r"<slug:\w+>", step, route.replace("<str:plan_id>", kept.pk))
            client.get(f"/{path}")
            client.post(f"/{path}?step=workload", posted)
            client.post(f"/{path}?step=goal", posted | {"goal": "serve", "objective": "cost"})

        assert row(kept) == before, route


def test_a_saved_plan_refuses_a_write_by_whoever_holds_it_as_a_draft(kept):
    stale = Plan.objects.get(pk=kept.pk)
    stale.state = PlanState.DRAFT
    stale.draft = {}

    with pytest.raises(PlanChangedError, match="was saved as a plan"):
        draft_write(stale)

    assert row(kept)["draft"]


def test_saving_the_draft_makes_the_next_version_and_leaves_the_first(alice, kept):
    client, before = client_of(alice), row(kept)
    draft = edited(client, kept, sequence_length="64")

    answer = client.post(f"/plans/{draft.pk}/launch/", {"go": "keep"}, follow=True)

    draft.refresh_from_db()
    assert (draft.series, draft.version, draft.state) == (kept.series, 2, PlanState.COMPUTED)
    assert row(kept) == before
    assert "Version 2 of the plan is saved" in answer.content.decode()


def test_or_a_plan_of_its_own(alice, kept):
    client = client_of(alice)
    draft = edited(client, kept, sequence_length="64")

    client.post(f"/plans/{draft.pk}/launch/", {"go": "keep", "save_as": "new"})

    draft.refresh_from_db()
    assert (draft.series, draft.version) == (draft.pk, 1)
    assert Plan.objects.get(pk=kept.pk).is_latest


def test_an_untouched_draft_is_used_again_is_not_in_the_list_and_makes_no_version(alice, kept):
    client = client_of(alice)
    first = client.get(f"/plans/{kept.pk}/edit/goal/")["Location"]
    assert client.get(f"/plans/{kept.pk}/edit/goal/")["Location"] == first
    assert [plan for plan, *_ in client.get("/plans/").context["rows"]] == [kept]

    client.get(f"/plans/{kept.pk}/edit/goal/")
    draft = Plan.objects.get(base=kept)
    answer = client.post(f"/plans/{draft.pk}/launch/", {"go": "keep"})
    assert answer["Location"] == f"/plans/{kept.pk}/"
    assert versions_of(kept)[0].plan == kept


def test_two_people_each_get_a_version(alice, bob, kept):
    drafts = [edited(client_of(one), kept, sequence_length="64") for one in (alice, bob)]

    for draft, by in zip(drafts, ("alice", "bob"), strict=True):
        plan_keep(draft, by=by)

    found = [(one.plan.version, one.plan.saved_by) for one in versions_of(kept)]
    assert found == [(3, "bob"), (2, "alice"), (1, "alice")]
    assert Plan.objects.filter(series=kept.series, is_latest=True).get().version == 3


def test_the_review_says_that_a_newer_version_was_saved_meanwhile(alice, bob, kept):
    mine = edited(client_of(alice), kept, sequence_length="64")
    plan_keep(edited(client_of(bob), kept, sequence_length="32"), by="bob")
    text = client_of(alice).get(f"/plans/{mine.pk}/edit/review/").content.decode()
    assert "Version 2 was saved by bob since this draft was begun" in text


def test_the_title_follows_the_content_of_a_plan_that_nobody_named(alice, kept):
    client = client_of(alice)
    client.get(f"/plans/{kept.pk}/edit/goal/")
    draft = Plan.objects.get(base=kept)
    assert kept.name == draft.name == "Pre-train Slipway demo on Box"

    client.post(
        f"/plans/{draft.pk}/edit/goal/", {"goal": "serve", "objective": "cost", "slo": "none"}
    )

    draft.refresh_from_db()
    assert draft.name == "Serve Slipway demo on Box"
    plan_keep(draft, by="alice")
    assert Plan.objects.get(pk=kept.pk).name == "Pre-train Slipway demo on Box"
    assert draft.name == "Serve Slipway demo on Box"


def test_a_name_that_a_person_gave_stays(alice, kept):
    client = client_of(alice)
    draft = edited(client, kept, sequence_length="64")
    review = client.get(f"/plans/{draft.pk}/edit/review/").context["title"]
    client.post(
        f"/plans/{draft.pk}/launch/", {"go": "keep", "name": "My plan", "proposed": review}
    )
    second = Plan.objects.get(base=kept)

    third = draft_of(second, alice)
    goal_change(third, "serve")
    plan_compute(third)

    assert third.name == "My plan"


def test_the_proposed_name_is_nobodys(alice, kept):
    client = client_of(alice)
    draft = edited(client, kept, sequence_length="64")
    proposed = client.get(f"/plans/{draft.pk}/edit/review/").context["title"]

    client.post(
        f"/plans/{draft.pk}/launch/", {"go": "keep", "name": proposed, "proposed": proposed}
    )

    assert Plan.objects.get(pk=draft.pk).is_named is False


def test_a_job_keeps_the_version_that_it_ran(alice, kept):
    client = client_of(alice)
    client.post(f"/plans/{kept.pk}/launch/", {"go": "launch"})
    draft = edited(client, kept, sequence_length="64")
    client.post(f"/plans/{draft.pk}/launch/", {"go": "launch"})

    second, first = Job.objects.order_by("-created_at")
    assert (first.plan, second.plan) == (kept, draft)
    text = client.get(f"/jobs/{first.pk}/").content.decode()
    assert f'<a href="/plans/{kept.pk}/">' in text
    assert ", version 1</a>" in text
    assert ", version 2</a>" in client.get(f"/jobs/{second.pk}/").content.decode()


def test_a_launch_of_a_saved_plan_under_another_name_names_the_job_alone(alice, kept):
    before = row(kept)
    client_of(alice).post(f"/plans/{kept.pk}/launch/", {"go": "launch", "name": "Second try"})
    assert (Job.objects.get().name, Job.objects.get().plan) == ("Second try", kept)
    assert row(kept) == before


def test_the_plans_page_lists_its_versions_with_what_changed(alice, kept):
    client = client_of(alice)
    plan_keep(edited(client, kept, sequence_length="64"), by="alice")

    text = client.get(f"/plans/{kept.pk}/history/").content.decode()

    old = kept.draft["workload"]["sequence_length"]
    assert re.search(rf'Sequence length: <span class="quiet">{old}</span> → 64', text)
    assert "This is version 1" in text


def test_planning_again_makes_a_version_only_where_the_host_was_measured_anew(alice, kept, host):
    assert plan_again(kept, alice) == kept
    assert Plan.objects.count() == 1

    before = row(kept)
    host.microbench["devices"][0]["memory_bandwidth_bytes_per_second"] *= 2
    host.save()
    again = plan_again(kept, alice)
    assert (again.series, again.version) == (kept.series, 2)
    assert row(kept) == before
    assert "newer measurements" in versions_of(kept)[0].words


def test_saving_what_the_review_did_not_show_is_refused(alice, kept):
    client = client_of(alice)
    draft = edited(client, kept, sequence_length="64")
    seen = draft.revision
    client.post(f"/plans/{draft.pk}/edit/workload/", workload(client, draft, sequence_length="32"))

    answer = client.post(
        f"/plans/{draft.pk}/launch/", {"go": "launch", "revision": seen}, follow=True
    )

    assert "changed by you, in another window" in answer.content.decode()
    assert not Job.objects.exists()


def test_a_suggestion_on_a_saved_plan_changes_a_draft(alice, serve_plan):
    serve_plan.draft["model"]["source"] = "catalog"
    plan_compute(serve_plan)
    saved = plan_keep(serve_plan, "Too large", by="alice")
    assert saved.answer["suggestions"]
    before = row(saved)

    client_of(alice).post(f"/plans/{saved.pk}/suggestion/", {"suggestion": "0"})

    assert row(saved) == before
    assert Plan.objects.get(base=saved).revision == 1


def test_a_clone_of_a_plan_is_a_draft_of_its_own(alice, bob, kept):
    answer = client_of(bob).post(f"/plans/{kept.pk}/clone/")

    copy = Plan.objects.get(owner=bob)
    assert answer["Location"] == f"/plans/{copy.pk}/edit/review/"
    assert (copy.base, copy.draft, copy.state) == (None, kept.draft, PlanState.DRAFT)
    plan_keep(copy)
    assert (copy.series, copy.version) == (copy.pk, 1)


OLD_TRAINING = {
    "sequence_length": 64, "time_budget_minutes": None, "million_tokens": 0.5, "lengths": "grow",
    "rounding": "4", "early_stop": "never", "data_source": "mixed", "data_format": "",
    "mix_source_1": "host", "mix_path_1": "", "mix_weight_1": None, "mix_reference_1": 2.5,
    "mix_source_2": "file", "mix_path_2": "a.txt", "mix_weight_2": 2.0, "mix_reference_2": None,
    "mix_source_3": "", "mix_weights": "dynamic", "mix_every": 20,
}  # fmt: skip
OLD_DRAFT = {
    "preset": "serve", "is_touched": True,
    "goal": {"goal": "serve", "objective": "cost", "slo": "code", "percentile": "p99"},
    "model": {"source": "folder", "path": "m", "folder_config": {"a": 1}, "config": ""},
    "workload": {"serve": {"prefix_share_percent": 25}, "pretrain": OLD_TRAINING},
    "hardware": {"choice": "pool:P", "device": "h200", "memory_limit_gib": None},
    "pins": {"weight_dtype": "fp8", "prefill_devices": 1, "decode_devices": 3},
    "launch": {"job": "J", "job_name": "first", "priority": "-1", "retries": "2", "hours": "1.5",
               "secrets": ["A"], "engine": "vllm", "idle": "30", "reuse": "no", "adapters": False},
}  # fmt: skip


def test_the_trainer_of_stored_drafts_and_tunings_becomes_their_engine(team, alice):
    from importlib import import_module

    from django.apps import apps

    draft = {"goal": "finetune", "workload": {"method": "lora", "engine": "trl"}}
    plan = Plan.objects.create(team=team, owner=alice, draft=draft)
    other = Plan.objects.create(team=team, owner=alice, draft={"goal": "serve"})
    tuning = Tuning.objects.create(
        team=team, owner=alice, name="t", plan=plan, document=draft,
        options={}, figure="step_seconds", candidates=[], trial={},
    )  # fmt: skip
    for app in ("plans.migrations.0003", "tunings.migrations.0002"):
        import_module(f"webapp.{app}_one_trainer").move_trainers(apps, None)
    for row in (plan, other, tuning):
        row.refresh_from_db()
    assert (plan.document.hardware.engine, plan.document.workload.method) == ("trl", "lora")
    assert other.draft == {"goal": "serve"}
    assert read_stored(tuning.document).hardware.engine == "trl"


def test_an_older_release_s_draft_becomes_a_document(team, alice):
    from importlib import import_module

    from django.apps import apps

    old = Plan.objects.create(team=team, owner=alice, draft=OLD_DRAFT)
    empty = Plan.objects.create(team=team, owner=alice, draft={"is_touched": False})
    import_module("webapp.plans.migrations.0002_documents").read_drafts(apps, None)
    old.refresh_from_db()
    empty.refresh_from_db()
    assert empty.readable_document is None

    found = old.document
    assert (found.objective, found.latency_target, found.percentile) == ("cost", "code", "p99")
    assert (found.model.path, found.model.config) == ("m", {"a": 1})
    assert (found.hardware.pool, found.hardware.device) == ("P", "h200")
    assert (found.pins.weight_dtype, found.pins.disaggregated.decode_devices) == ("fp8", 3)
    assert found.workload.prefix_share_ratio == 0.25
    assert found.launch == Launch(
        run="endpoint", max_duration_seconds=5400, max_retries=2, priority="low", secrets=["A"],
        engine="vllm", idle_stop_seconds=1800, prefix_caching=False,
    )  # fmt: skip
    assert (old.wizard["copied_job"], old.wizard["copied_name"]) == ("J", "first")
    goal_change(old, "pretrain")
    work = old.document.workload
    assert (work.sequence_length, work.time_budget_seconds, work.tokens) == (64, None, 500_000)
    assert (work.length_schedule, work.qat_bits, work.early_stop_validations) == ("grow", 4, None)
    assert [each.reference_loss for each in work.mixture] == [2.5, None]
    assert (work.mixture_weights, work.mixture_update_every_steps) == ("dynamic", 20)


def test_fields_that_the_goal_does_not_ask_are_no_change(alice, kept):
    draft = draft_of(kept, alice)
    draft.wizard["others"] = {"serve": {"concurrency": 99}}
    assert changes_between(kept, draft) == []
