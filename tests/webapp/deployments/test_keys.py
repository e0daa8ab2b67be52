"""Clients' keys: rotated without a break, and what their owners are told."""

import asyncio
from dataclasses import replace
from datetime import timedelta

import pytest

from runners.jobspec.serve import key_hash
from tests.webapp.conftest import client_of
from tests.webapp.gateway.test_gateway import KEY
from webapp.audit.models import Event
from webapp.core.clock import now
from webapp.core.problems import ConflictProblem
from webapp.deployments import keys
from webapp.deployments.keys import KeyOptions, Rotation, key_make, key_revoke, key_rotate
from webapp.deployments.models import EarlierSecret, ServingKey
from webapp.gateway import routes
from webapp.gateway.routes import Routes, Snapshot, load_snapshot

pytestmark = pytest.mark.django_db(databases="__all__")


def opens(*texts: str) -> list[str]:
    """Return the id of the key that each text opens, "" where it opens none."""
    found = load_snapshot({}).keys
    return [found[key_hash(each)].id if key_hash(each) in found else "" for each in texts]


def test_a_rotated_key_opens_by_both_secrets_until_the_overlap_ends(team, alice, monkeypatch):
    key, first = key_make(team=team, by=alice, options=KeyOptions(name="laptop", tokens_per_day=9))
    _, second = key_rotate(key=key, by=alice, rotation=Rotation())
    assert opens(first, second) == [key.pk, key.pk]
    assert load_snapshot({}).keys[key_hash(first)].tokens_per_day == 9
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


def test_a_new_secret_is_shown_to_its_owner_once(team, alice, olga):
    key, first = key_make(team=team, by=alice, options=KeyOptions(name="laptop"))
    url = f"/deployments/keys/{key.pk}/rotate/"
    assert client_of(olga).post(url, {"overlap_hours": "24"}).status_code == 403
    client = client_of(alice)
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
