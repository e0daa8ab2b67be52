"""Clients' keys: rotated without a break, and what their owners are told."""

import asyncio
from dataclasses import replace
from datetime import timedelta

import pytest
from django.core.exceptions import PermissionDenied
from django.urls import reverse

from runners.jobspec.serve import key_hash
from tests.webapp.conftest import client_of
from tests.webapp.gateway.test_gateway import KEY
from webapp.accounts.models import Membership
from webapp.audit.models import Event
from webapp.core.clock import now
from webapp.core.problems import ConflictProblem
from webapp.deployments import alarms, keys, usage
from webapp.deployments.keys import KeyOptions, Rotation, key_make, key_revoke, key_rotate
from webapp.deployments.models import Deployment, EarlierSecret, KeyAlarm, ServingKey, Usage
from webapp.gateway import routes
from webapp.gateway.routes import Routes, Snapshot, load_snapshot
from webapp.pages.home import attention_for
from webapp.plans.models import Plan

pytestmark = pytest.mark.django_db(databases="__all__")


def opens(*texts: str) -> list[str]:
    """Return the id of the key that each text opens, "" where it opens none."""
    found = load_snapshot({}).keys
    return [found[key_hash(each)].id if key_hash(each) in found else "" for each in texts]


def test_a_rotated_key_opens_by_both_secrets_until_the_overlap_ends(team, alice, monkeypatch):
    key, first = key_make(team=team, by=alice, options=KeyOptions(name="laptop", tokens_per_day=9))
    _, second = key_rotate(key=key, by=alice, rotation=Rotation())
    assert opens(first, second) == [key.pk, key.pk]
    earlier, found = EarlierSecret.objects.get(), load_snapshot({}).keys
    assert found[key_hash(first)].tokens_per_day == 9
    # A gateway keeps its snapshot while the database does not answer: the end is in it.
    assert found[key_hash(first)].expires_at == earlier.valid_until
    assert found[key_hash(second)].expires_at is None
    for seconds in (-60, 60):
        ends = earlier.valid_until + timedelta(seconds=seconds)
        ServingKey.objects.update(expires_at=ends)
        found = load_snapshot({}).keys
        assert found[key_hash(first)].expires_at == min(ends, earlier.valid_until)
        assert found[key_hash(second)].expires_at == ends
    ServingKey.objects.update(expires_at=None)
    _, third = key_rotate(key=key, by=alice, rotation=Rotation(overlap_hours=1))
    assert opens(first, second, third) == [key.pk] * 3
    later = now() + timedelta(hours=1, seconds=1)
    with monkeypatch.context() as patch:
        for module in (routes, keys):
            patch.setattr(module, "now", lambda: later)
        assert opens(first, second, third) == ["", "", key.pk]
    _, fourth = key_rotate(key=key, by=alice, rotation=Rotation(overlap_hours=0))
    assert opens(first, second, third, fourth) == ["", "", "", key.pk]
    assert not EarlierSecret.objects.exists()
    key_rotate(key=key, by=alice, rotation=Rotation())
    key_revoke(key=key, by=alice)
    assert opens(fourth) == [""]
    with pytest.raises(ConflictProblem):
        key_rotate(key=key, by=alice, rotation=Rotation())
    stored = [*EarlierSecret.objects.values_list("digest", flat=True), *Event.objects.all()]
    assert not any(text in str(vars(each) if isinstance(each, Event) else each)
                   for each in stored for text in (first, second, third, fourth))  # fmt: skip


def test_a_new_secret_is_shown_to_its_owner_once(team, alice, bob, olga):
    key, first = key_make(team=team, by=alice, options=KeyOptions(name="laptop"))
    url = f"/deployments/keys/{key.pk}/rotate/"
    assert client_of(olga).post(url, {"overlap_hours": "24"}).status_code == 403
    refused = client_of(bob).post(f"/api/v1/serving-keys/{key.pk}/rotate", {}, "application/json")
    assert "can rotate this" in refused.json()["detail"]
    client = client_of(alice)
    for role, expires_at, is_offered in (
        ("practitioner", None, True),
        ("practitioner", now() + timedelta(days=1), True),
        ("practitioner", now() - timedelta(days=1), False),
        ("viewer", None, False),
    ):
        Membership.objects.filter(user=alice).update(role=role)
        ServingKey.objects.update(expires_at=expires_at)
        assert (url in client.get("/deployments/keys/").content.decode()) == is_offered, role
    Membership.objects.filter(user=alice).update(role="practitioner")
    ServingKey.objects.update(expires_at=None)
    client.post(url, {"overlap_hours": "1e9"})
    assert ServingKey.objects.get().digest == key_hash(first)
    html = client.post(url, {"overlap_hours": "2"}, follow=True).content.decode()
    shown = html.partition('<code id="new-key">')[2].partition("<")[0]
    assert ServingKey.objects.get().digest == key_hash(shown)
    assert "the one before opens until" in html
    assert shown not in client.get(f"/deployments/keys/?new={key.pk}").content.decode()
    told = client.post(
        f"/api/v1/serving-keys/{key.pk}/rotate", {}, content_type="application/json"
    ).json()
    assert opens(first, shown, told["key"]) == [key.pk] * 3
    assert told["earlier_until"] > told["rotated_at"]


def test_a_services_key_is_the_teams_and_outlasts_who_made_it(team, alice, olga):
    """Operators alone make, see and rotate it; a person's key ends with their membership."""
    sent = {"name": "crawler", "is_service": True}
    url = "/api/v1/serving-keys"
    refused = client_of(alice).post(url, sent, "application/json")
    assert (refused.status_code, "Only operators" in refused.json()["detail"]) == (403, True)
    made = client_of(olga).post(url, sent, "application/json").json()
    own = client_of(olga).post(url, {"name": "laptop"}, "application/json").json()
    assert (made["is_service"], made["owner"], own["owner"]) == (True, "", "olga")
    page = client_of(olga).get("/deployments/keys/").content.decode()
    assert ("· a service" in page, "· olga" in page) == (True, True)
    assert client_of(alice).get(url).json()["items"] == []
    form = {"name": "nightly", "hold_seconds": "120", "is_service": "on"}
    for each, status in ((alice, 403), (olga, 302)):
        assert client_of(each).post(reverse("serving-key-save"), form).status_code == status
    assert ServingKey.objects.get(name="nightly").holder == "a service"
    plan = Plan.objects.create(team=team, owner=alice)
    small = Deployment.objects.create(team=team, owner=alice, name="small", plan=plan)
    for each in (made, own):
        Usage.objects.create(
            key_id=each["id"], deployment=small, day=now().date(), requests=1, prompt_tokens=9
        )
    usage_page = client_of(olga).get("/deployments/usage/").content.decode()
    assert ("services, no person" in usage_page, ">olga<" in usage_page) == (True, True)
    Membership.objects.filter(user=olga).delete()
    assert opens(made["key"], own["key"]) == [made["id"], ""]
    Membership.objects.filter(user=alice).update(role="operator")
    renewed = client_of(alice).post(f"{url}/{made['id']}/rotate", {}, "application/json").json()
    assert opens(made["key"], renewed["key"]) == [made["id"]] * 2
    assert client_of(alice).delete(f"{url}/{made['id']}").status_code == 204
    assert opens(renewed["key"]) == [""]
    with pytest.raises(PermissionDenied):
        key_make(team=team, by=olga, options=KeyOptions(name="other", is_service=True))


@pytest.fixture
def used(team, alice):
    """A key with limits, and a function that sets the tokens that it has used today."""
    plan = Plan.objects.create(team=team, owner=alice)
    small = Deployment.objects.create(team=team, owner=alice, name="small", plan=plan)
    limits = KeyOptions(name="laptop", tokens_per_day=1000, tokens_per_month=2000)
    key, _ = key_make(team=team, by=alice, options=limits)

    def use(tokens: int) -> None:
        Usage.objects.update_or_create(
            key=key, deployment=small, day=usage.now().date(), defaults={"prompt_tokens": tokens}
        )

    return key, use


def test_an_alarm_is_raised_once_for_each_share_and_period(used, monkeypatch):
    key, use = used
    later = now().replace(day=20)
    for days, tokens, expected in (
        (0, 799, set()),
        (0, 800, {("day", 80)}),
        (0, 999, set()),
        (0, 1200, {("day", 100)}),
        (1, 500, {("month", 80)}),
        (1, 1300, {("day", 80), ("day", 100), ("month", 100)}),
        (20, 1999, {("day", 80), ("day", 100), ("month", 80)}),  # of the next month
    ):
        instant = later + timedelta(days=days)
        for module in (usage, alarms):
            monkeypatch.setattr(module, "now", lambda instant=instant: instant)
        use(tokens)
        before = set(KeyAlarm.objects.values_list("pk", flat=True))
        assert alarms.alarms_raise() == len(expected), (days, tokens)
        new = KeyAlarm.objects.exclude(pk__in=before)
        assert {("month" if len(each.period) == 7 else "day", each.percent) for each in new} == (
            expected
        ), (days, tokens)
        assert alarms.alarms_raise() == 0
    told = Event.objects.filter(kind="serving_key.alarm", subject=key.pk)
    assert told.count() == KeyAlarm.objects.count()


def test_an_alarm_is_told_to_the_owner_and_operators_while_it_matters(
    used, alice, bob, olga, charlie
):
    key, use = used
    for tokens, title in (
        (900, "The key laptop has used 80 % of a limit"),
        (1000, "The key laptop is answered 429 until its limit begins anew"),
    ):
        use(tokens)
        alarms.alarms_raise()
        for person, expected in ((alice, [title]), (olga, [title]), (bob, []), (charlie, [])):
            assert [each.title for each in attention_for(person)] == expected, person
    assert f"{tokens:,} of the 1,000 tokens" in attention_for(alice)[0].text
    (told,) = client_of(alice).get("/api/v1/serving-keys").json()["items"]
    assert (told["tokens_today"], told["tokens_this_month"]) == (1000, 1000)
    assert [each["percent"] for each in told["alarms"]] == [100, 80]
    html = client_of(alice).get("/deployments/keys/").content.decode()
    assert "100 % reached" in html
    key_revoke(key=key, by=alice)
    assert attention_for(alice) == []


@pytest.mark.asyncio
async def test_an_open_answer_ends_with_its_key_and_not_with_one_of_its_secrets():
    found, key = Routes(), replace(KEY, id="k")
    found._loop = asyncio.get_running_loop()
    found._publish(Snapshot({"old": key, "new": key}))
    waiting = asyncio.ensure_future(found.key_gone("k"))
    for snapshot, is_gone in ((Snapshot({"new": key}), False), (Snapshot(), True)):
        found._publish(snapshot)
        await asyncio.wait((waiting,), timeout=0.05)
        assert waiting.done() == is_gone
