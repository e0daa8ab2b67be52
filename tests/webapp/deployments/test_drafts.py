"""Drafts of a deployment's change: kept, shown against what runs, rolled out, discarded."""

import pytest

from runners.plans.launch import Launch
from tests.webapp.conftest import client_of
from tests.webapp.deployments.test_deployments import answer, plan, small  # noqa: F401 (fixtures)
from tests.webapp.plans.conftest import demo_plan, serve_plan, trained  # noqa: F401
from webapp.core.clock import now
from webapp.core.display import DASH
from webapp.core.problems import ConflictProblem, InvalidProblem, NotFoundProblem
from webapp.deployments.drafts import (
    differences,
    draft_discard,
    draft_keep,
    draft_roll_out,
    loads_expected,
)
from webapp.deployments.models import Deployment, DeploymentDraft, Replica
from webapp.deployments.services import deployment_change, deployment_delete, deployment_wake
from webapp.plans.models import Plan
from webapp.plans.planning import plan_compute, stored_answer
from webapp.plans.saving import draft_begun_from

pytestmark = pytest.mark.django_db(databases="__all__")
CHANGES = (  # field, value, the label of what the draft shows, now, with the draft
    ("max_replicas", 3, "Replicas", "1", "1 to 3"),
    ("idle_seconds", None, "Sleeps when idle", "after 1 min", DASH),
    ("is_kept_awake", True, "Sleeps when idle", "after 1 min", "kept awake"),
    ("warm_hours", "mon-fri  08:00-18:00", "Hours kept awake", DASH, "mon-fri 08:00-18:00"),
    ("aliases", ["gpt-4o"], "Also answers to", DASH, "gpt-4o"),
    ("launch", Launch(priority="low"), "Priority", "normal", "low"),
    ("is_paused", True, "Paused", "no", "yes"),
)


def version(row: Deployment, by, **work) -> Plan:
    """Return a draft of a plan that differs in its work."""
    draft = draft_begun_from(row.plan, by)
    draft.draft["workload"] |= work
    draft.save()
    plan_compute(draft)
    return draft


def stored(row: Deployment) -> dict:
    return Deployment.objects.filter(pk=row.pk).values().get()


def test_a_draft_shows_what_it_changes_and_nothing_counts_before_it_is_rolled_out(small, alice):  # noqa: F811
    before = stored(small)
    for name, value, *expected in CHANGES:
        draft_keep(deployment=small, by=alice, **{name: value})
        assert list(differences(small)[0]) == expected, name
        assert stored(small) == before, name
    draft_discard(deployment=small, by=alice)
    with pytest.raises(NotFoundProblem):
        draft_discard(deployment=small, by=alice)
    for name, value, *_ in CHANGES:
        draft_keep(deployment=small, by=alice, **{name: value})
        changed = draft_roll_out(deployment=small, by=alice)
        assert stored(small) != before, name
        assert not differences(changed), name
        before = stored(small)
    assert not DeploymentDraft.objects.exists()


def test_a_draft_of_another_plan_shows_memory_limits_and_load_and_replaces_what_runs(small, alice):  # noqa: F811
    old = deployment_wake(small)
    answer(old)
    Deployment.objects.update(loads=[10.0, 20.0, 30.0])
    small.refresh_from_db()
    draft_keep(deployment=small, by=alice, plan=version(small, alice, concurrency=2))
    assert Replica.objects.count() == 1
    rows = {each.label: each[1:] for each in differences(small)}
    assert rows["Requests at once, each replica"] == ("4", "2")
    assert rows["Plan"][1].endswith("version 2")
    assert {"Memory of each device", "Load"} <= rows.keys()
    assert "modelled, by the bytes of the weights" in rows["Load"][1]
    draft = DeploymentDraft.objects.get()
    with pytest.raises(ConflictProblem, match="was changed"):
        draft_roll_out(deployment=small, by=alice, seen_at=now())
    draft_roll_out(deployment=small, by=alice, seen_at=draft.saved_at)
    new = Replica.objects.exclude(pk=old.pk).get()
    assert (new.plan, new.revision) == (draft.plan, 1)
    draft_keep(deployment=small, by=alice, plan=old.plan)  # back
    small.refresh_from_db()
    assert {each.label: each[1:] for each in differences(small)}["Plan"][1].endswith("version 1")
    draft_roll_out(deployment=small, by=alice)
    small.refresh_from_db()
    assert small.plan == old.plan


def test_the_load_of_a_version_is_measured_where_it_has_run_else_by_its_weights(small, alice):  # noqa: F811
    other = version(small, alice, concurrency=2)
    assert [str(each) for each in loads_expected(small, other)] == ["not loaded yet"] * 2
    small.loads = [10.0, 20.0]
    stored_part = other.answer["plans"][0]["memory"]["breakdown_bytes"]
    stored_part["weights"] *= 3
    present = small.plan
    assert stored_answer(present) is not None
    now_taken, then = loads_expected(small, other)
    assert (now_taken.seconds, then.seconds) == (15.0, 45.0)
    answer(deployment_wake(small))
    _, measured = loads_expected(small, present)
    assert measured.basis == "median of 1 load"


def test_what_cannot_be_rolled_out_is_refused_when_it_is_kept_or_later(small, alice):  # noqa: F811
    for fields, named in (
        ({}, "has these values already"),
        ({"idle_seconds": 60.0}, "has these values already"),
        ({"idle_seconds": 1.0}, "It is to sleep after 1 s"),
        ({"min_replicas": 2}, "at most 1"),
        ({"fallbacks": ["none"]}, "no other deployment"),
    ):
        with pytest.raises(InvalidProblem, match=named):
            draft_keep(deployment=small, by=alice, **fields)
    assert not DeploymentDraft.objects.exists()
    draft_keep(deployment=small, by=alice, max_replicas=2)
    deployment_change(deployment=small, by=alice, min_replicas=3, max_replicas=3)
    with pytest.raises(InvalidProblem, match="at most 2"):
        draft_roll_out(deployment=small, by=alice)
    draft_keep(deployment=small, by=alice, plan=version(small, alice, concurrency=2))
    draft = DeploymentDraft.objects.get()
    Plan.objects.filter(pk=draft.plan_id).update(deleted_at=now())
    with pytest.raises(ConflictProblem, match="is deleted"):
        draft_roll_out(deployment=small, by=alice)
    deployment_delete(deployment=small, by=alice)
    assert not DeploymentDraft.objects.exists()


def test_the_page_keeps_shows_rolls_out_and_discards_a_draft(small, alice):  # noqa: F811
    client, address = client_of(alice), f"/deployments/{small.pk}/"
    posted = {"plan": small.plan_id, "idle_minutes": "5", "min_replicas": "1", "max_replicas": "1"}
    page = client.post(f"{address}change/", posted | {"draft": "1"}, follow=True).content.decode()
    assert "after 1 min" in page
    assert "after 5 min" in page
    assert 'name="idle_minutes" value="5"' in page  # the form goes on from the draft
    small.refresh_from_db()
    assert small.idle_seconds == 60.0
    wrong = client.post(
        f"{address}draft/roll-out/", {"saved_at": "2026-01-01T00:00:00Z"}, follow=True
    )
    assert "Look at it again" in wrong.content.decode()
    seen = page.partition('name="saved_at" value="')[2].partition('"')[0]
    page = client.post(
        f"{address}draft/roll-out/", {"saved_at": seen}, follow=True
    ).content.decode()
    small.refresh_from_db()
    assert (small.idle_seconds, "Draft of a change" in page) == (300.0, False)
    client.post(f"{address}change/", posted | {"idle_minutes": "7", "draft": "1"})
    page = client.post(f"{address}draft/discard/", follow=True).content.decode()
    assert "Draft of a change" not in page
    draft_keep(deployment=small, by=alice, launch=Launch(priority="low"))
    client.post(f"{address}change/", posted | {"idle_minutes": "9"})  # takes the draft along
    small.refresh_from_db()
    assert (small.launch_options["priority"], small.idle_seconds) == ("low", 540.0)
    assert not DeploymentDraft.objects.exists()
