"""Who may open what: every address of the product against every kind of person.

The list of addresses comes from the URL conf; one without a rule here fails.
"""

import copy
from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import pytest
from django.db import transaction
from django.test import Client
from django.urls import URLPattern, URLResolver, get_resolver

from tests.plugins.extent import sample
from tests.webapp.api.operations import paths
from tests.webapp.conftest import client_of
from webapp.accounts.initial_passwords import initial_password_mark
from webapp.accounts.models import Membership
from webapp.accounts.services import SESSION_KEY

pytestmark = pytest.mark.django_db(databases="__all__")

OPEN, HOST, MEMBER, PRACTITIONER, OWNER, OPERATOR, ADMIN, SELF = range(8)


class Rule(NamedTuple):
    """What an address asks of whoever opens it; ``is_object``: another team gets 404."""

    method: str
    needs: int
    is_object: bool = False


PAGE, OBJECT = Rule("get", MEMBER), Rule("get", MEMBER, is_object=True)
ACT = Rule("post", PRACTITIONER, is_object=True)
OWN = Rule("post", OWNER, is_object=True)
OPERATE = Rule("post", OPERATOR, is_object=True)
REPORT = Rule("post", HOST)
ATTEMPT = "api/v1/attempts/<attempt_id>"
COPY = "api/v1/copies/<copy_id>"
JOB = "jobs/<slug:job_id>"
PLAN = "plans/<str:plan_id>"
RULES = {
    "login/": Rule("get", OPEN),
    "logout/": Rule("post", OPEN),
    "theme/": Rule("post", OPEN),
    "team/": Rule("post", MEMBER, is_object=True),
    "settings/secrets/": Rule("get", PRACTITIONER),
    "settings/secrets/save/": Rule("post", OPERATOR),
    "settings/secrets/<slug:secret_id>/delete/": OPERATE,
    "settings/tokens/": PAGE,
    "settings/tokens/save/": Rule("post", MEMBER),
    "settings/tokens/<slug:access_id>/revoke/": Rule("post", SELF, is_object=True),
    "settings/sessions/": PAGE,
    "settings/sessions/end/": Rule("post", MEMBER),
    "settings/password/": PAGE,
    "password/forgotten/": Rule("get", OPEN),
    "password/new/<slug:uid>/<slug:token>/": Rule("get", OPEN),
    "audit/": Rule("get", ADMIN),
    "audit/export/": Rule("get", ADMIN),
    "": PAGE,
    "search/": PAGE,
    "plans/": PAGE,
    "plans/new/": Rule("get", PRACTITIONER),
    "plans/paste/": Rule("post", PRACTITIONER),
    "plans/by-name/": Rule("post", PRACTITIONER),
    "deployments/": PAGE,
    "deployments/keys/": PAGE,
    "deployments/keys/make/": Rule("post", PRACTITIONER),
    "deployments/keys/<slug:serving_key_id>/revoke/": OWN,
    "deployments/keys/<slug:serving_key_id>/rotate/": Rule("post", SELF, is_object=True),
    "deployments/usage/": PAGE,
    "deployments/usage.csv": PAGE,
    "deployments/<slug:deployment_id>/": OBJECT,
    "deployments/<slug:deployment_id>/playground/": Rule("get", PRACTITIONER, is_object=True),
    "deployments/<slug:deployment_id>/playground/key/": ACT,
    "deployments/<slug:deployment_id>/wake/": ACT,
    "deployments/<slug:deployment_id>/sleep/": OWN,
    "deployments/<slug:deployment_id>/change/": OWN,
    "deployments/<slug:deployment_id>/draft/roll-out/": OWN,
    "deployments/<slug:deployment_id>/draft/discard/": OWN,
    "deployments/<slug:deployment_id>/delete/": OWN,
    "servers/": PAGE,
    "servers/save/": Rule("post", OPERATOR),
    "servers/<slug:server_id>/": OBJECT,
    "servers/<slug:server_id>/change/": OPERATE,
    "servers/<slug:server_id>/remove/": OPERATE,
    "hosts/<slug:slug>/observe/": OPERATE,
    "observed-jobs/<slug:observed_id>/": OBJECT,
    "observed-jobs/<slug:observed_id>/remove/": OPERATE,
    "plans/<str:plan_id>/tune/": Rule("get", PRACTITIONER, is_object=True),
    "tunings/": PAGE,
    "tunings/<slug:tuning_id>/": OBJECT,
    "tunings/<slug:tuning_id>/stop/": OWN,
    "tunings/<slug:tuning_id>/delete/": OWN,
    "workflows/": PAGE,
    "workflows/<slug:workflow_id>/": OBJECT,
    "workflows/<slug:workflow_id>/stop/": OWN,
    "workflows/<slug:workflow_id>/resume/": OWN,
    "workflows/<slug:workflow_id>/delete/": OWN,
    "approvals/": PAGE,
    "approvals/<slug:request_id>/approve/": ACT,
    "approvals/<slug:request_id>/deny/": ACT,
    "approvals/<slug:request_id>/withdraw/": Rule("post", SELF, is_object=True),
    "plans/template/classification/": Rule("post", PRACTITIONER),
    f"{PLAN}/": OBJECT,
    f"{PLAN}/exports/<slug:key>/": OBJECT,
    f"{PLAN}/<slug:tab>/": OBJECT,
    f"{PLAN}/edit/<slug:step>/": Rule("get", PRACTITIONER, is_object=True),
    f"{PLAN}/offers/": OBJECT,
    f"{PLAN}/verdict/": OBJECT,
    f"{PLAN}/suggestion/": ACT,
    f"{PLAN}/launch/": ACT,
    f"{PLAN}/compute/": ACT,
    f"{PLAN}/clone/": ACT,
    f"{PLAN}/delete/": ACT,
    "limits/": PAGE,
    "choices/models/": PAGE,
    "choices/devices/": PAGE,
    f"{PLAN}/upload/": ACT,
    "data/": PAGE,
    "data/upload/": Rule("post", PRACTITIONER),
    "data/<slug:dataset_id>/delete/": ACT,
    "models/": PAGE,
    "models/new/": Rule("get", PRACTITIONER),
    "models/code/": PAGE,
    "models/code/save/": Rule("post", ADMIN),
    "models/code/<slug:code_id>/delete/": Rule("post", ADMIN, is_object=True),
    "models/<slug:model_id>/evaluate/": ACT,
    "models/<slug:model_id>/publish/": ACT,
    "models/<slug:model_id>/rename/": ACT,
    "models/<slug:model_id>/delete/": ACT,
    "models/<path:model_id>/": OBJECT,
    "techniques/": PAGE,
    "techniques/<str:key>/": PAGE,
    "jobs/": PAGE,
    f"{JOB}/": OBJECT,
    f"{JOB}/playground/": Rule("get", PRACTITIONER, is_object=True),
    f"{JOB}/playground/answer/": ACT,
    f"{JOB}/metrics/": OBJECT,
    f"{JOB}/logs/": OBJECT,
    f"{JOB}/logs/download/": OBJECT,
    f"{JOB}/events/": OBJECT,
    f"{JOB}/config/": OBJECT,
    f"{JOB}/artefacts/": OBJECT,
    f"{JOB}/artefacts/<str:name>/download/": OBJECT,
    f"{JOB}/figures.<slug:form>": OBJECT,
    f"{JOB}/post-mortem/": OBJECT,
    f"{JOB}/post-mortem/changes/": OBJECT,
    f"{JOB}/replan/": ACT,
    f"{JOB}/abandon/": Rule("get", OWNER, is_object=True),
    f"{JOB}/stop/": OWN,
    f"{JOB}/clone/": ACT,
    f"{JOB}/resume/": ACT,
    f"{JOB}/run-again/": Rule("get", PRACTITIONER, is_object=True),
    f"{JOB}/measurements/<int:measurement_id>/decide/": OPERATE,
    f"{JOB}/files/delete/": OWN,
    f"{JOB}/delete/": OWN,
    "compare/": OBJECT,
    "queue/": PAGE,
    "queue/limits/": PAGE,
    "queue/<slug:pool_id>/": OBJECT,
    "queue/<slug:pool_id>/up/": OPERATE,
    "queue/<slug:pool_id>/down/": OPERATE,
    "queue/<slug:pool_id>/priority/": OPERATE,
    "hosts/": PAGE,
    "hosts/add/": Rule("get", OPERATOR),
    "hosts/virtual/new/": Rule("get", OPERATOR),
    "hosts/add/<slug:token_id>/": Rule("get", OPERATOR, is_object=True),
    "hosts/add/<slug:token_id>/revoke/": OPERATE,
    "hosts/<slug:slug>/": OBJECT,
    "hosts/<slug:slug>/drain/": OPERATE,
    "hosts/<slug:slug>/undrain/": OPERATE,
    "hosts/<slug:slug>/prove/": OPERATE,
    "jobs/<slug:job_id>/proof/": OBJECT,
    "hosts/<slug:slug>/revoke/": OPERATE,
    "hosts/<slug:slug>/maintenance/": OPERATE,
    "hosts/<slug:slug>/retire/": OPERATE,
    "hosts/<slug:slug>/devices/<slug:device_id>/cordon/": OPERATE,
    "hosts/<slug:slug>/devices/<slug:device_id>/uncordon/": OPERATE,
    "hosts/<slug:slug>/environments/<slug:name>/build/": OPERATE,
    "hosts/<slug:slug>/models/pin/": OPERATE,
    "hosts/<slug:slug>/models/unpin/": OPERATE,
    "hosts/<slug:slug>/models/delete/": OPERATE,
    "hosts/<slug:slug>/models/rule/": OPERATE,
    "hosts/<slug:slug>/copies/begin/": OPERATE,
    "hosts/<slug:slug>/copies/<slug:copy_id>/stop/": OPERATE,
    "hosts/<slug:slug>/environments/<slug:name>/remove/": OPERATE,
    "hosts/<slug:slug>/recheck/": OPERATE,
    "hosts/<slug:slug>/rotate/": OPERATE,
    "hosts/<slug:slug>/address/": OPERATE,
    "hosts/<slug:slug>/apart/": OPERATE,
    "hosts/<slug:slug>/labels/": OPERATE,
    "docs/": PAGE,
    "docs/<path:page>": PAGE,
    "api/v1/docs": PAGE,
    "api/v1/openapi.json": PAGE,
    "api/v1/hosts/enroll": Rule("post", OPEN),
    "api/v1/hosts/beat": REPORT,
    "api/v1/hosts/echo": REPORT,
    "api/v1/hosts/rotate": REPORT,
    f"{ATTEMPT}/claim": REPORT,
    f"{ATTEMPT}/events": REPORT,
    f"{ATTEMPT}/data/<dataset_id>": Rule("get", HOST),
    f"{ATTEMPT}/artefacts/<name>/<path:path>": Rule("get", HOST),
    f"{COPY}": Rule("get", HOST),
    f"{COPY}/files": Rule("put", HOST),
    f"{COPY}/files/<number>": Rule("put", HOST),
    f"{COPY}/files/<number>/taken": REPORT,
    f"{COPY}/hub/<org>/<name>/resolve/<commit>/<path:path>": Rule("get", HOST),
    f"{COPY}/end": REPORT,
    "healthz": Rule("get", OPEN),
    "readyz": Rule("get", OPEN),
}
API_ROOT = "api/v1/"  # an address only to build others from
QUERY = {
    "compare/": "?job=<slug:job_id>",
}


def addresses(patterns: list, prefix: str = "") -> Iterator[str]:
    for pattern in patterns:
        route = prefix + str(pattern.pattern)
        if isinstance(pattern, URLResolver) and not route.startswith("admin/"):
            yield from addresses(pattern.url_patterns, route)
        elif isinstance(pattern, URLPattern):
            yield route


def test_every_address_has_a_rule_and_every_rule_an_address():
    found = set(addresses(get_resolver().url_patterns)) - {API_ROOT}
    operations = {f"api/v1{path}".replace("{", "<").replace("}", ">") for path in paths()}
    assert found - operations == set(RULES)


def test_the_root_of_the_api_is_nothing(olga):
    assert client_of(olga).get(f"/{API_ROOT}").status_code == 404


def call(client: Client, route: str, things: dict[str, str]) -> int:
    """Return the status; a redirect to the login page counts as 401."""
    path = route + QUERY.get(route, "")
    for argument, value in things.items():
        path = path.replace(argument, value) if argument.startswith("<") else path
    rule = RULES[route]
    method = getattr(client, rule.method)
    sent = {"data": {"team": things["team"]}} if route == "team/" else {}
    answer = method(f"/{path}", **sent)
    if answer.status_code == 302 and answer.headers["Location"].startswith("/login/"):
        return 200 if route == "logout/" else 401
    return answer.status_code


LET_IN, LOGIN, REFUSED, NOT_THERE = "let in", "asked to log in", "refused", "not there"
WORDS = {401: LOGIN, 403: REFUSED, 404: NOT_THERE}


def outcome(client: Client, route: str, things: dict[str, str]) -> str:
    """Return how an address received someone; whatever it changed is rolled back."""
    with transaction.atomic():
        status = call(client, route, things)
        transaction.set_rollback(True)
    assert status not in {405, 500}, f"{route} answered {status}"
    return WORDS.get(status, LET_IN)


def expected(rule: Rule) -> dict[str, str]:
    """Return how an address with this rule receives each person."""
    if rule.needs in {OPEN, HOST}:
        people = ("nobody", "charlie", "vera", "bob", "alice", "olga")
        return dict.fromkeys(people, LET_IN if rule.needs == OPEN else LOGIN)
    held = {"vera": MEMBER, "bob": PRACTITIONER, "alice": OWNER, "olga": OPERATOR}
    team = {name: LET_IN if role >= rule.needs else REFUSED for name, role in held.items()}
    if rule.needs == SELF:  # alice's own, and an admin's
        team = {name: LET_IN if name == "alice" else REFUSED for name in held}
    stranger = NOT_THERE if rule.is_object else LET_IN
    return {"nobody": LOGIN, "charlie": stranger, **team}


def test_every_address_receives_each_person_as_its_rule_says(people, things):
    cookies = {who: copy.deepcopy(client.cookies) for who, client in people.items()}
    wrong = {}
    pairs = product(RULES.items(), people.items())
    for (route, rule), (who, client) in sample(pairs, kind=lambda pair: pair[0][0]):
        client.cookies = copy.deepcopy(cookies[who])  # whatever an address took or set
        got, wanted = outcome(client, route, things), expected(rule)[who]
        if got != wanted:
            wrong[route, who] = (got, wanted)
    assert not wrong, wrong


def test_an_initial_password_opens_no_page_and_no_call_but_the_page_that_replaces_it(olga, things):
    initial_password_mark(olga)
    client = client_of(olga)
    for route, rule in RULES.items():
        if rule.needs in {OPEN, HOST} or route == "settings/password/":
            continue
        path = route
        for argument, value in things.items():
            path = path.replace(argument, value) if argument.startswith("<") else path
        answer = getattr(client, rule.method)(f"/{path}")
        if route.startswith("api/"):
            assert (answer.status_code, answer.json()["code"]) == (403, "initial_password"), route
            assert "/settings/password/" in answer.json()["detail"]
        else:
            assert answer.get("Location") == "/settings/password/", route
    assert client.get("/settings/password/").status_code == 200
    assert client.get("/admin/").headers["Location"] == "/settings/password/"
    assert client.get("/healthz").status_code == 200
    assert client.post("/logout/").headers["Location"] == "/login/"


def test_a_person_of_two_teams_is_judged_by_the_team_of_the_thing(vera, other_team, job):
    Membership.objects.create(user=vera, team=other_team, role="admin")
    client = client_of(vera)
    session = client.session
    session[SESSION_KEY] = other_team.pk
    session.save()
    assert client.post(f"/jobs/{job.pk}/stop/").status_code == 403
    assert client.post(f"/hosts/{job.host.slug}/drain/").status_code == 403


def test_changes_need_a_csrf_token_and_a_team(alice, job, django_user_model, team):
    client = Client(enforce_csrf_checks=True)
    client.force_login(alice)
    assert client.post(f"/jobs/{job.pk}/stop/").status_code == 403
    stranger = django_user_model.objects.create_user("stranger")
    assert client_of(stranger).get("/plans/new/").status_code == 403
