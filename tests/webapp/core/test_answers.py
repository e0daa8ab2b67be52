"""What every answer holds or refuses: policies, compression, large bodies, stale forms."""

import gzip
import json
import re
from itertools import product
from operator import itemgetter

import pytest
from asgiref.sync import async_to_sync
from django.contrib import admin
from django.contrib.messages import get_messages
from django.contrib.messages.middleware import MessageMiddleware
from django.contrib.sessions.middleware import SessionMiddleware
from django.http import HttpResponse, StreamingHttpResponse
from django.test import AsyncClient, Client, RequestFactory
from django.urls import get_resolver, reverse

from tests.plugins.extent import sample
from tests.webapp.accounts.test_matrix import RULES, addresses
from tests.webapp.accounts.test_roles import filled
from tests.webapp.api.conftest import HostClient
from tests.webapp.api.test_agents_api import knock
from tests.webapp.conftest import client_of
from webapp import asgi
from webapp.accounts.models import Membership, Quota, Role, Secret, Team
from webapp.accounts.secrets import secrets_open
from webapp.core.bodies import ANONYMOUS_BYTES, DEFAULT_BYTES, limit_at
from webapp.core.middleware import (
    CompressionMiddleware,
    ProblemMiddleware,
    uncompressed,
)
from webapp.core.problems import ConflictProblem, ForbiddenProblem, NotFoundProblem
from webapp.hosts.models import Host, Pool
from webapp.jobs.models import Job
from webapp.operations.admin import FreshAdmin, ReadOnlyAdmin

# The policies for browsers are on every answer: pages, errors, files, the API, streams, beats.


pytestmark = pytest.mark.django_db(databases="__all__")
ADMINISTRATION = [f"admin/{route}" for route in addresses(admin.site.get_urls())]
METHODS = ("get", "post", "put", "delete", "options")


def assert_guarded(response) -> None:
    policy = response.headers["Content-Security-Policy"]
    assert "unsafe" not in policy
    assert "default-src 'self'" in policy
    assert "object-src 'none'" in policy
    assert re.fullmatch(r"'self'( 'nonce-[\w+/=-]+')?", scripts_of(policy))
    assert_permits_nothing(response.headers["Permissions-Policy"])


def assert_permits_nothing(policy: str) -> None:
    """No power of a browser is left to a page but copying to the clipboard."""
    rules = dict(rule.split("=") for rule in policy.split(", "))
    assert rules.pop("clipboard-write") == "(self)"
    assert set(rules.values()) == {"()"}
    assert {"camera", "microphone", "geolocation", "payment", "usb"} < set(rules)


def scripts_of(policy: str) -> str:
    """Return where scripts may come from."""
    found = re.search(r"script-src ([^;]+)", policy)
    assert found is not None
    return found[1].strip()


def test_every_address_answers_with_the_policy(olga):
    for client in (Client(), client_of(olga)):
        for route, method in sample(product(RULES, METHODS), kind=itemgetter(0)):
            assert_guarded(getattr(client, method)(filled(route)))


def test_the_administration_answers_with_the_policy(admin_client):
    for route in sample(sorted(set(addresses(admin.site.get_urls())))):
        path = "/admin/" + re.sub(r"<[^>]+>|\(\?P.*", "1", route)
        assert_guarded(admin_client.get(path))


def test_a_page_that_is_missing_or_refused_has_it(alice, credential):
    client, checking = client_of(alice), Client(enforce_csrf_checks=True)
    checking.force_login(alice)
    for status, answer in (
        (404, client.get("/nowhere/")),
        (403, client.get("/audit/")),
        (403, checking.post("/team/")),
        (400, client.post("/team/", {f"field{n}": "1" for n in range(1100)})),
        (413, HostClient(credential).post("/hosts/echo?num_bytes=99999999", "")),
        (400, Client().get("/", headers={"Host": "elsewhere.example"})),
    ):
        assert answer.status_code == status
        assert_guarded(answer)


def test_a_page_that_breaks_has_it(alice, monkeypatch):
    def broken(*_args, **_named):
        raise RuntimeError("broken on purpose")

    monkeypatch.setattr("webapp.pages.home.render", broken)
    client = client_of(alice)
    client.raise_request_exception = False
    answer = client.get("/")
    assert answer.status_code == 500
    assert b"broken on purpose" not in answer.content
    assert_guarded(answer)


def test_a_redirect_to_tls_and_files_of_the_site_have_it(settings, client):
    settings.SERVESTATIC_AUTOREFRESH = settings.SERVESTATIC_USE_FINDERS = True
    answer = Client().get("/static/js/live.js")
    assert answer.status_code == 200
    assert_guarded(answer)
    settings.SECURE_SSL_REDIRECT = True
    answer = client.get("/")
    assert answer.status_code == 301
    assert_guarded(answer)


def test_files_come_over_asgi_whole(settings):
    settings.SERVESTATIC_AUTOREFRESH = settings.SERVESTATIC_USE_FINDERS = True

    async def read() -> bytes:
        answer = await AsyncClient().get("/static/js/live.js")
        return b"".join([part async for part in answer.streaming_content])

    assert async_to_sync(read)() == (settings.BASE_DIR / "static/js/live.js").read_bytes()


def test_beats_answer_with_a_policy_that_lets_in_nothing():
    for answer in (knock(b"{}"), knock(b"no json")):
        assert answer.headers[b"content-security-policy"].startswith(b"default-src 'none'")
        assert answer.headers[b"x-content-type-options"] == b"nosniff"
        assert_permits_nothing(answer.headers[b"permissions-policy"].decode())


# Which answers are compressed: pages and JSON, but no stream and nothing that shows a secret.


TEXT = b"the same words again and again. " * 200


def answered(response: HttpResponse, **headers: str) -> HttpResponse:
    request = RequestFactory().get("/", headers={"Accept-Encoding": "gzip, br"} | headers)
    return CompressionMiddleware(lambda _request: response)(request)


def test_a_page_is_compressed_says_that_it_varies_and_is_padded_at_random():
    found = answered(HttpResponse(TEXT))
    assert found["Content-Encoding"] == "gzip"
    assert "Accept-Encoding" in found["Vary"]
    assert gzip.decompress(found.content) == TEXT
    assert int(found["Content-Length"]) == len(found.content) < len(TEXT) / 5
    lengths = {len(answered(HttpResponse(TEXT)).content) for _ in range(50)}
    assert len(lengths) > 10


def test_what_another_site_asked_for_or_who_takes_no_gzip_gets_plain_text():
    for accepted in ["", "identity", "br", "gzip;q=0", "xgzip"]:
        assert answered(HttpResponse(TEXT), **{"Accept-Encoding": accepted}).content == TEXT
    for site in ["cross-site", "same-site"]:
        assert answered(HttpResponse(TEXT), **{"Sec-Fetch-Site": site}).content == TEXT, site
    for site in ["same-origin", "none"]:
        found = answered(HttpResponse(TEXT), **{"Sec-Fetch-Site": site})
        assert found["Content-Encoding"] == "gzip", site


def test_a_stream_and_an_answer_that_shows_a_secret_are_left_alone():
    stream = StreamingHttpResponse(iter([b"data: 1\n\n" * 100]), content_type="text/event-stream")
    found = answered(stream)
    assert found is stream
    assert "Content-Encoding" not in found
    assert answered(uncompressed(HttpResponse(TEXT))).content == TEXT


@pytest.mark.django_db(databases="__all__")
def test_the_page_with_an_enrolment_command_is_not_compressed(olga):
    client = client_of(olga)
    client.post("/hosts/add/", {"name": "box", "pool": "default"})
    asked = {"Accept-Encoding": "gzip"}
    page = client.post(
        "/hosts/add/", {"name": "box 2", "pool": "default"}, follow=True, headers=asked
    )
    assert b"slt_" in page.content
    assert "Content-Encoding" not in page.headers
    assert client.get("/hosts/", headers=asked)["Content-Encoding"] == "gzip"


# Bodies larger than their address takes are refused before anything reads them.


MEBIBYTE = 1024**2
PART_BYTES = limit_at("PUT", "/api/v1/attempts/a/artefacts/m/f")
UPLOAD_BYTES = limit_at("POST", "/api/v1/data")
COOKIE = (b"cookie", b"sessionid=invented")
BEARER = (b"authorization", b"Bearer invented")


FEW_PARTS = ANONYMOUS_BYTES // MEBIBYTE + 8  # more than a stranger may send


def send_body(path: str, *headers, method="POST", num_parts=600, announced=None):
    """Send parts of a mebibyte each; return the answer and how many parts were read."""
    sent, read, read_before = [], 0, []
    length = [(b"content-length", str(announced).encode())] if announced else []
    scope = {
        "type": "http", "method": method, "path": path, "raw_path": path.encode(),
        "query_string": b"", "root_path": "", "scheme": "http", "http_version": "1.1",
        "headers": [(b"host", b"localhost"), *headers, *length],
        "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80),
    }  # fmt: skip

    async def receive():
        nonlocal read
        read += 1
        return {"type": "http.request", "body": bytes(MEBIBYTE), "more_body": read < num_parts}

    async def send(message):
        sent.append(message)
        read_before.append(read)

    async_to_sync(asgi.application)(scope, receive, send)
    headers = dict(sent[0]["headers"])
    assert (headers[b"x-content-type-options"], headers[b"connection"]) == (b"nosniff", b"close")
    assert read == num_parts  # closed before, a proxy would lose the answer and send 502
    assert [each.get("more_body") for each in sent[1:]] == [True, None]
    return sent[0]["status"], sent[1]["body"], read_before[1]


def test_no_more_is_read_than_an_address_takes(alice, credential):
    """A session without a person, such as that of the log-in page, is a stranger's too."""
    session = (b"cookie", f"a=b; sessionid={client_of(alice).session.session_key}".encode())
    bearer = (b"authorization", f"Bearer {credential}".encode())
    visitor = Client()
    visitor.get("/login/")
    strange = (b"cookie", f"sessionid={visitor.session.session_key}".encode())
    for path, headers, method, limit in [
        ("/login/", [], "POST", ANONYMOUS_BYTES),
        ("/login/", [session], "POST", DEFAULT_BYTES),
        ("/data/upload/", [], "POST", ANONYMOUS_BYTES),
        ("/data/upload/", [COOKIE], "POST", ANONYMOUS_BYTES),
        ("/data/upload/", [strange], "POST", ANONYMOUS_BYTES),
        ("/data/upload/", [session], "POST", UPLOAD_BYTES),
        ("/plans/x/upload/", [session], "POST", UPLOAD_BYTES),
        ("/api/v1/data", [session], "POST", UPLOAD_BYTES),
        ("/jobs/x/stop/", [session], "POST", DEFAULT_BYTES),
        ("/api/v1/hosts/enroll", [], "POST", ANONYMOUS_BYTES),
        ("/api/v1/attempts/a/events", [bearer], "POST", DEFAULT_BYTES),
        ("/api/v1/attempts/a/artefacts/m/f", [bearer], "PUT", PART_BYTES),
        ("/api/v1/attempts/a/artefacts/m/f", [BEARER], "PUT", ANONYMOUS_BYTES),
        ("/no/such/page/", [], "GET", ANONYMOUS_BYTES),
    ]:
        status, body, read = send_body(path, *headers, method=method)
        refusal = 401 if BEARER in headers else 413  # a host keeps its data for the first
        assert (status, read) == (refusal, limit // MEBIBYTE + 1), path
        assert str(limit) in body.decode(), path
    status, body, read = send_body("/api/v1/hosts/beat", BEARER)
    assert (status, read) == (401, 0)
    assert json.loads(body)["code"] == "unknown_credential"
    status, body, read = send_body("/api/v1/hosts/enroll", announced=599 * MEBIBYTE)
    assert (status, read) == (413, 0)
    assert json.loads(body)["code"] == "too_large"


def test_no_address_reads_on_what_nobody_may_send_it(alice):
    """Every address of the site and its administration, read ones too, by length and in pieces."""
    session = (b"cookie", f"sessionid={client_of(alice).session.session_key}".encode())
    routes = {*addresses(get_resolver().url_patterns), *ADMINISTRATION, "live/", "api/v1/docs"}
    assert len(routes) > 150
    for route in sorted(routes):
        path = f"/{re.sub('<[^>]*>', '1', route)}"
        method = "PUT" if "/artefacts/" in path and path.startswith("/api/") else "POST"
        for headers, announced in [([], ANONYMOUS_BYTES + 1), ([session], UPLOAD_BYTES + 1)]:
            status, _, read = send_body(
                path, *headers, method=method, num_parts=FEW_PARTS, announced=announced
            )
            assert (status, read) == (413, 0), (path, headers)
        if route == "live/":  # a stream takes no body: its connection is closed (test_stream.py)
            continue
        status, _, read = send_body(path, method=method, num_parts=FEW_PARTS)
        assert status in {401, 413} if read else status >= 400, path
        assert read <= ANONYMOUS_BYTES // MEBIBYTE + 1, path


# What a person sees of a refusal that a page did not expect.


@pytest.fixture
def answer(rf, alice):
    """Answer an exception that a view raised."""

    def give(exception: Exception, referer: str = ""):
        request = rf.post("/jobs/1/stop/", headers={"Referer": referer})
        request.user = alice
        for middleware in (SessionMiddleware, MessageMiddleware):
            middleware(lambda _: HttpResponse()).process_request(request)
        response = ProblemMiddleware(lambda _: HttpResponse()).process_exception(
            request, exception
        )
        return response, [str(message) for message in get_messages(request)]

    return give


def test_a_conflict_leads_back_with_its_sentence_and_home_without_a_page(answer):
    response, said = answer(ConflictProblem("busy", "Not now."), "http://testserver/jobs/1/")
    assert (response.status_code, response.url) == (302, "http://testserver/jobs/1/")
    assert said == ["Not now."]
    for referer in ["", "http://elsewhere.example/", "http://testserver/jobs/1/stop/"]:
        assert answer(ConflictProblem("busy", "Not now."), referer)[0].url == "/", referer


def test_what_is_not_there_or_not_allowed_has_its_own_page_and_no_fault_is_hidden(answer):
    for problem, status in [(NotFoundProblem, 404), (ForbiddenProblem, 403)]:
        assert answer(problem("x", "No."))[0].status_code == status, problem
    assert answer(RuntimeError("bug"))[0] is None


# Two people on one object: the later form is refused with who changed it, on every such form.


@pytest.fixture
def otto(team, django_user_model):
    """A second operator of the team."""
    user = django_user_model.objects.create_user("otto", password="x")
    Membership.objects.create(user=user, team=team, role=Role.OPERATOR)
    return user


def seen_in(text: str, action: str) -> str:
    """The mark that the form of an address carries."""
    form = text.split(f'action="{action}')[1] if action else text.rsplit("<form", maxsplit=1)[-1]
    return re.search(r'name="seen" value="([^"]*)"', form)[1]


def page(user, path: str) -> str:
    return client_of(user).get(path).content.decode()


def test_labels(host, olga, otto):
    path, action = f"/hosts/{host.slug}/", f"/hosts/{host.slug}/labels/"
    seen = seen_in(page(olga, path), action)
    client_of(otto).post(action, {"labels": "usd_per_hour=2", "seen": seen})
    answer = client_of(olga).post(action, {"labels": "room=b12", "seen": seen}, follow=True)
    text = answer.content.decode()
    assert "The labels of Box were changed by otto" in text
    assert "You had typed: room=b12" in text
    assert Host.objects.get(pk=host.pk).labels == {"usd_per_hour": "2"}


def test_labels_that_were_not_changed_are_taken(host, olga):
    action = f"/hosts/{host.slug}/labels/"
    seen = seen_in(page(olga, f"/hosts/{host.slug}/"), action)
    client_of(olga).post(action, {"labels": "room=b12", "seen": seen})
    assert Host.objects.get(pk=host.pk).labels == {"room": "b12"}


def test_the_address(host, olga, otto):
    host.facts["addresses"] = ["10.0.0.1", "10.0.0.2", "10.0.0.3"]
    host.save()
    action = f"/hosts/{host.slug}/address/"
    seen = seen_in(page(olga, f"/hosts/{host.slug}/"), action)
    client_of(otto).post(action, {"address": "10.0.0.2", "seen": seen})
    answer = client_of(olga).post(action, {"address": "10.0.0.3", "seen": seen}, follow=True)
    assert "was changed by otto" in answer.content.decode()
    assert Host.objects.get(pk=host.pk).address == "10.0.0.2"


def test_the_limits_of_a_team(team, olga, otto):
    seen = re.search(r'name="seen" value="([^"]*)"', page(olga, "/queue/limits/"))[1]
    values = {"max_devices": "8", "max_queued_per_user": "50", "share": "1", "seen": seen}
    client_of(otto).post("/queue/limits/", values)
    answer = client_of(olga).post("/queue/limits/", values | {"max_devices": "2"}, follow=True)
    assert "The limits of Alice&#x27;s team were changed by otto" in answer.content.decode()
    assert Quota.objects.get(team=team).max_devices == 8


def test_a_secret(team, olga, otto):
    seen = seen_in(page(olga, "/settings/secrets/"), "/settings/secrets/save/")
    values = {"name": "HF_TOKEN", "seen": seen}
    client_of(otto).post("/settings/secrets/save/", values | {"value": "of otto 1"})
    answer = client_of(olga).post(
        "/settings/secrets/save/", values | {"value": "of olga 1"}, follow=True
    )
    assert "HF_TOKEN was changed by otto" in answer.content.decode()
    assert secrets_open(team_id=team.pk, names=["HF_TOKEN"]) == {"HF_TOKEN": "of otto 1"}


def test_a_secret_that_was_stored_anew_is_not_forgotten_unseen(team, olga, otto):
    client_of(otto).post("/settings/secrets/save/", {"name": "HF_TOKEN", "value": "first one"})
    secret = Secret.objects.get()
    action = f"/settings/secrets/{secret.pk}/delete/"
    seen = seen_in(page(olga, "/settings/secrets/"), "")
    client_of(otto).post("/settings/secrets/save/", {"name": "HF_TOKEN", "value": "second one"})
    client_of(olga).post(action, {"seen": seen})
    assert Secret.objects.filter(pk=secret.pk).exists()


def test_a_cordon_keeps_its_first_reason(host, olga, otto):
    device = host.devices.get()
    action = f"/hosts/{host.slug}/devices/{device.pk}"
    client_of(otto).post(f"{action}/cordon/", {"reason": "ECC errors"})
    answer = client_of(olga).post(f"{action}/cordon/", {"reason": "mine"}, follow=True)
    assert "cordoned already, by otto: ECC errors" in answer.content.decode()
    device.refresh_from_db()
    assert device.cordon_reason == "ECC errors"


def test_another_cordon_is_not_lifted_unseen(host, olga, otto):
    device = host.devices.get()
    action = f"/hosts/{host.slug}/devices/{device.pk}"
    client_of(otto).post(f"{action}/cordon/", {"reason": "ECC errors"})
    seen = seen_in(page(olga, f"/hosts/{host.slug}/"), f"{action}/uncordon/")
    client_of(otto).post(f"{action}/uncordon/")
    client_of(otto).post(f"{action}/cordon/", {"reason": "fan is broken"})
    client_of(olga).post(f"{action}/uncordon/", {"seen": seen})
    device.refresh_from_db()
    assert device.cordon_reason == "fan is broken"


def test_the_priority_of_a_waiting_job(job, olga, otto):
    Job.objects.filter(pk=job.pk).update(state="queued", current_attempt=None)
    action = f"/queue/{job.pool_id}/priority/"
    seen = seen_in(page(olga, f"/queue/{job.pool_id}/"), action)
    client_of(otto).post(action, {"job": job.pk, "priority": "-1", "seen": seen})
    Job.objects.filter(pk=job.pk).update(state="queued")
    client_of(olga).post(action, {"job": job.pk, "priority": "1", "seen": seen})
    assert Job.objects.get(pk=job.pk).priority == -1


# Two people on one row of the administration: the later form is refused, with who and when.


OURS = [one for one in admin.site._registry.values() if type(one).__module__.startswith("webapp")]


@pytest.fixture
def root(admin_user):
    return client_of(admin_user)


@pytest.fixture
def ruth(django_user_model):
    """A second administrator."""
    return client_of(django_user_model.objects.create_superuser("ruth"))


def form_of(client, row) -> tuple[str, dict[str, str]]:
    """Return the address of a row's form and the fields that it shows."""
    options = row._meta
    path = reverse(f"admin:{options.app_label}_{options.model_name}_change", args=[row.pk])
    page = client.get(path)
    shown = page.context["adminform"].form
    fields = {name: shown[name].value() for name in shown.fields}
    fields |= {"seen": page.context["seen"]}
    for formset in page.context["inline_admin_formsets"]:
        fields |= {
            f"{formset.formset.prefix}-{name}": 0 for name in ("TOTAL_FORMS", "INITIAL_FORMS")
        }
    return path, {name: "" if value is None else value for name, value in fields.items()}


def test_the_later_of_two_forms_is_refused_and_the_one_that_shows_the_change_saved(
    root, ruth, team
):
    path, fields = form_of(root, team)
    assert ruth.post(path, fields | {"name": "By Ruth"}).status_code == 302
    answer = root.post(path, fields | {"name": "By root"})
    assert "changed by ruth on" in answer.content.decode()
    assert Team.objects.get(pk=team.pk).name == "By Ruth"
    path, fields = form_of(root, team)
    assert root.post(path, fields | {"name": "By root"}).status_code == 302
    assert Team.objects.get(pk=team.pk).name == "By root"


def test_a_change_by_the_site_itself_counts(root, team):
    row = Quota.objects.create(team=team, max_devices=2)
    path, fields = form_of(root, row)
    Quota.objects.filter(pk=row.pk).update(max_devices=3)
    answer = root.post(path, fields | {"max_devices": 4})
    assert "changed by somebody" in answer.content.decode()
    assert Quota.objects.get().max_devices == 3


def test_members_and_teams_of_a_row_count_but_logging_in_does_not(
    root, team, alice, other_team, bob
):
    path, fields = form_of(root, team)
    Membership.objects.filter(user=alice).update(role=Role.VIEWER)
    assert "It was changed" in root.post(path, fields).content.decode()
    pool = Pool.objects.create(name="Shared", slug="shared", team=team)
    path, fields = form_of(root, pool)
    pool.shared_with.add(other_team)
    assert "It was changed" in root.post(path, fields).content.decode()
    path, fields = form_of(root, bob)
    client_of(bob)
    answer = root.post(path, fields)
    assert "It was changed" not in answer.content.decode()


def test_whoever_can_change_a_row_is_asked_for_what_they_saw(rf, admin_user):
    request = rf.get("/")
    request.user = admin_user
    changing = [each for each in OURS if each.has_change_permission(request)]
    assert changing
    assert [type(one) for one in changing if not isinstance(one, FreshAdmin | ReadOnlyAdmin)] == []
