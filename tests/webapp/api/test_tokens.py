"""Access tokens: made, scoped, bound to a team, expired, revoked; and idempotency keys."""

import json
import re
from datetime import timedelta

import pytest
from django.db import DatabaseError
from django.test import Client

from tests.webapp.conftest import client_of
from webapp.accounts.models import AccessToken, Membership, Role, StoredReply
from webapp.accounts.tokens import MOST_TOKENS, token_find, token_make, token_revoke
from webapp.api.requests import replies_forget_old
from webapp.audit.models import Event
from webapp.core import clock
from webapp.core.problems import Problem
from webapp.jobs.models import Job
from webapp.plans.models import Plan

pytestmark = pytest.mark.django_db(databases="__all__")
PLAN = {
    "goal": "serve",
    "model": "demo",
    "hardware": {"device": "rtx-4090"},
    "workload": {"input_tokens": 100, "output_tokens": 20, "concurrency": 2},
}


def bearer(user, team, scope: str, **options) -> Client:
    _, text = token_make(team=team, by=user, name=f"{scope} token", scope=scope, **options)
    return Client(headers={"Authorization": f"Bearer {text}"})


def send(client: Client, path: str, body: dict, key: str = "", method: str = "post"):
    headers = {"Idempotency-Key": key} if key else {}
    return getattr(client, method)(
        f"/api/v1{path}", json.dumps(body), content_type="application/json", headers=headers
    )


def test_a_token_is_shown_once_and_only_its_digest_is_stored(alice, team):
    browser = client_of(alice)
    posted = {"name": "laptop", "scope": "launch", "days": "30"}
    answer = browser.post("/settings/tokens/save/", posted)
    page = browser.get(answer["Location"]).content.decode()
    text = re.search(r"slp_[\w-]{40,}", page)[0]
    stored = AccessToken.objects.get()
    assert token_find(text) == stored
    assert text not in json.dumps([str(value) for value in vars(stored).values()])
    assert text not in browser.get(answer["Location"]).content.decode()
    assert Event.objects.get(kind="token.created").actor == "alice"
    assert (stored.expires_at - stored.created_at).days == 30
    mine = browser.get("/settings/tokens/").content.decode()
    assert f"<code>{text[:9]}…</code>" in mine
    browser.post(f"/settings/tokens/{stored.pk}/revoke/")
    assert token_find(text) is None
    assert Event.objects.get(kind="token.revoked").subject == stored.pk


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"name": ""}, "1 to 60 letters"),
        ({"name": "a\x00b"}, "not valid"),
        ({"scope": "root"}, "read, plan, launch, admin"),
        ({"days": 0}, "up to 366"),
        ({"days": 400}, "up to 366"),
        ({"days": float("nan")}, "up to 366"),
        ({"scope": "admin"}, "needs the role Operator, and yours is Practitioner"),
        ({"is_service": True}, "needs the role Admin"),
    ],
)
def test_what_a_token_may_not_be_is_refused_in_words(alice, team, changes, words):
    with pytest.raises(Problem, match=re.escape(words)):
        token_make(team=team, by=alice, **({"name": "x", "scope": "plan"} | changes))
    assert not AccessToken.objects.exists()


def test_each_scope_does_its_part_and_the_next_is_refused_by_name(alice, team, host):
    clients = {scope: bearer(alice, team, scope) for scope in ("read", "plan", "launch")}
    made = send(clients["plan"], "/plans", PLAN)
    assert made.status_code == 201, made.content
    plan = f"/plans/{made.json()['id']}"
    found = {
        scope: [
            client.get(f"/api/v1{plan}").status_code,
            send(client, f"{plan}/clone", {}).status_code,
            send(client, f"{plan}/launch", {}).status_code,
        ]
        for scope, client in clients.items()
    }
    assert found == {"read": [200, 403, 403], "plan": [200, 201, 403], "launch": [200, 201, 409]}
    refused = send(clients["read"], "/plans", PLAN)
    assert refused.json()["code"] == "scope_too_low"
    assert "needs the scope plan" in refused.json()["detail"]


def test_a_token_is_of_one_team_though_its_owner_is_of_two(alice, team, other_team, charlie):
    Membership.objects.create(user=alice, team=other_team, role="admin")
    foreign = Plan.objects.create(team=other_team, owner=charlie, name="theirs", draft={})
    token = bearer(alice, team, "launch")
    assert client_of(alice).get(f"/api/v1/plans/{foreign.pk}").status_code == 200
    assert token.get(f"/api/v1/plans/{foreign.pk}").status_code == 404
    assert token.get("/api/v1/plans").json()["items"] == []
    assert send(token, f"/plans/{foreign.pk}/clone", {}).status_code == 404


def test_a_token_permits_no_more_than_its_owners_role_does_now(alice, team, host):
    token = bearer(alice, team, "launch")
    Membership.objects.filter(user=alice).update(role=Role.VIEWER)
    answer = send(token, "/plans", PLAN)
    assert (answer.status_code, token.get("/api/v1/jobs").status_code) == (403, 200)
    Membership.objects.filter(user=alice).delete()
    assert token.get("/api/v1/jobs").json()["items"] == []


def test_what_is_no_valid_token_opens_nothing(alice, team, monkeypatch):
    client = bearer(alice, team, "read", days=1)
    assert client.get("/api/v1/jobs").status_code == 200
    assert AccessToken.objects.get().last_used_at is not None
    later = clock.now() + timedelta(days=2)
    monkeypatch.setattr("webapp.accounts.tokens.now", lambda: later)
    answer = client.get("/api/v1/jobs")
    assert (answer.status_code, answer.json()["code"]) == (401, "token_expired")
    assert answer["WWW-Authenticate"] == "Bearer"
    assert "“read token” expired at" in answer.json()["detail"]
    AccessToken.objects.update(revoked_at=clock.now())
    assert client.get("/api/v1/jobs").json()["code"] == "unknown_token"
    AccessToken.objects.update(revoked_at=None)
    monkeypatch.undo()
    alice.is_active = False
    alice.save()
    assert client.get("/api/v1/jobs").status_code == 401
    for text in ("slp_", "slp_unknown", "nonsense", "slt_a host's"):
        other = Client(headers={"Authorization": f"Bearer {text}"})
        assert other.get("/api/v1/jobs").status_code == 401, text


def test_the_schema_is_read_with_a_token_or_a_session_and_only_a_browser_is_redirected(
    alice, team
):
    for client in (bearer(alice, team, "read"), client_of(alice)):
        document = client.get("/api/v1/openapi.json").json()
        assert "/api/v1/plans" in document["paths"]
    unknown = Client(headers={"Authorization": "Bearer slp_unknown"})
    for client, code in ((Client(), "not_authenticated"), (unknown, "unknown_token")):
        answer = client.get("/api/v1/openapi.json", headers={"Accept": "*/*"})
        assert (answer.status_code, answer.json()["code"]) == (401, code)
    wrong = Client(headers={"Authorization": "Bearer wrong"}).get("/api/v1/jobs").json()
    assert "Send an access token, which starts with slp_" in wrong["detail"]
    browser = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
    answer = Client().get("/api/v1/openapi.json", headers=browser)
    assert answer["Location"] == "/login/?next=/api/v1/openapi.json"
    assert bearer(alice, team, "read").get("/api/v1/docs").status_code == 302


def test_a_service_has_its_own_account_that_ends_with_its_token(team, alice):
    ada = type(alice).objects.create_user("ada")
    Membership.objects.create(user=ada, team=team, role="admin")
    token, text = token_make(team=team, by=ada, name="CI", scope="launch", is_service=True)
    assert (token.user.get_username(), token.user.has_usable_password()) == ("service-ci", False)
    client = Client(headers={"Authorization": f"Bearer {text}"})
    assert send(client, "/plans", PLAN).status_code == 201
    page = client_of(ada).get("/settings/tokens/").content.decode()
    assert "service, made by ada" in page
    assert "service-ci" not in client_of(alice).get("/settings/tokens/").content.decode()
    assert client_of(alice).post(f"/settings/tokens/{token.pk}/revoke/").status_code == 403
    token_revoke(token=token, by=ada)
    token.user.refresh_from_db()
    assert not token.user.is_active
    assert client.get("/api/v1/jobs").status_code == 401


def test_a_token_revokes_itself_and_others_with_the_scope_admin_only(olga, team):
    others = [token_make(team=team, by=olga, name="other", scope="read")[0] for _ in range(2)]
    own, text = token_make(team=team, by=olga, name="own", scope="launch")
    client = Client(headers={"Authorization": f"Bearer {text}"})
    refused = client.delete(f"/api/v1/tokens/{others[0].pk}")
    assert (refused.status_code, refused.json()["code"]) == (403, "scope_too_low")
    assert client.delete(f"/api/v1/tokens/{own.pk}").status_code == 204
    admin = token_make(team=team, by=olga, name="admin", scope="admin")[1]
    client = Client(headers={"Authorization": f"Bearer {admin}"})
    assert client.delete(f"/api/v1/tokens/{others[0].pk}").status_code == 204
    left = AccessToken.objects.filter(revoked_at=None).values_list("name", flat=True)
    assert sorted(left) == ["admin", "other"]


def test_the_number_of_tokens_has_its_limit(alice, team, monkeypatch):
    monkeypatch.setattr("webapp.accounts.tokens.MOST_TOKENS", 2)
    for name in ("a", "b"):
        token_make(team=team, by=alice, name=name, scope="read")
    with pytest.raises(Problem, match="has 2 valid tokens"):
        token_make(team=team, by=alice, name="c", scope="read")
    token_revoke(token=AccessToken.objects.first(), by=alice)
    token_make(team=team, by=alice, name="c", scope="read")
    assert MOST_TOKENS > 2


def test_every_answer_has_a_request_id_of_its_own(alice, team):
    client = bearer(alice, team, "read")
    ids = {
        client.get(f"/api/v1{path}")["X-Request-Id"] for path in ("/jobs", "/plans", "/plans/x")
    }
    assert len(ids) == 3


def test_a_key_repeats_the_reply_and_nothing_happens_twice(alice, team, host, monkeypatch):
    client = bearer(alice, team, "plan")
    first = send(client, "/plans", PLAN, key="k1")
    again = send(client, "/plans", PLAN, key="k1")
    assert (again.status_code, again.json()) == (201, first.json())
    assert (first.get("Idempotency-Replayed"), again["Idempotency-Replayed"]) == (None, "true")
    assert Plan.objects.count() == 1
    assert first.json()["id"] not in StoredReply.objects.get().sealed
    other = send(client, "/plans", PLAN | {"goal": "generate", "workload": None}, key="k1")
    assert (other.status_code, other.json()["code"]) == (422, "key_reused")
    refused = send(client, "/plans", PLAN | {"model": "no such model"}, key="k2")
    mended = send(client, "/plans", PLAN, key="k2")
    assert (refused.status_code, mended.status_code) == (422, 201)
    StoredReply.objects.filter(key="k2").update(sealed="v2:of another key")
    assert send(client, "/plans", PLAN, key="k2").json()["code"] == "reply_lost"
    StoredReply.objects.filter(key="k2").update(status=None, sealed="")
    waits = send(client, "/plans", PLAN, key="k2")
    assert (waits.status_code, waits["Retry-After"]) == (409, "1")
    assert send(bearer(alice, team, "plan"), "/plans", PLAN, key="k1").status_code == 201
    assert Plan.objects.count() == 3
    assert send(client, "/plans", PLAN, key="x" * 65).status_code == 422
    later = clock.now() + timedelta(hours=25)
    monkeypatch.setattr("webapp.api.requests.now", lambda: later)
    assert replies_forget_old() == 3


def test_a_write_whose_reply_cannot_be_stored_is_not_done_again(alice, team, monkeypatch):
    save = StoredReply.save

    def inserts_only(row, *, update_fields=None, **options):
        if update_fields:
            raise DatabaseError("disk I/O error")
        save(row, **options)

    client = bearer(alice, team, "plan")
    monkeypatch.setattr(StoredReply, "save", inserts_only)
    first = send(client, "/plans", PLAN, key="k1")
    again = send(client, "/plans", PLAN, key="k1")
    assert (first.status_code, first.json()["id"]) == (201, Plan.objects.get().pk)
    assert (again.status_code, again.json()["code"]) == (409, "reply_lost")
    assert Plan.objects.count() == 1


def test_a_launch_is_repeated_only_by_its_key(alice, team, host):
    client = bearer(alice, team, "launch")
    body = PLAN | {"goal": "pretrain", "workload": None, "hardware": {"host": host.slug}}
    plan = send(client, "/plans", body).json()
    assert plan["launch"]["can"], plan["launch"]
    path = f"/plans/{plan['id']}/launch"
    first = send(client, path, {"name": "run"}, key="launch-1")
    again = send(client, path, {"name": "run"}, key="launch-1")
    assert first.status_code == 201, first.content
    assert first.json() == again.json()
    assert Job.objects.count() == 1
    send(client, path, {"name": "run"}, key="launch-2")
    assert Job.objects.count() == 2
