"""Adding a host: form, command, check-list."""

import re
import time
from datetime import timedelta

import pytest

from runners.messages import EnrollRequest
from tests.webapp.conftest import client_of, make_beat, make_facts, make_microbench
from webapp.core.clock import now
from webapp.hosts.checks import checklist
from webapp.hosts.heartbeats import host_beat
from webapp.hosts.models import EnrolmentToken, Host
from webapp.hosts.services import checks_update, host_enroll

pytestmark = pytest.mark.django_db(databases=["default", "metrics"])
FORM = {"name": "Node A", "pool": "lab", "labels": "gpu=4090 room=b12"}


@pytest.fixture
def as_olga(olga):
    return client_of(olga)


@pytest.fixture
def added(as_olga):
    """The address of the check page of a fresh token, and the token's text."""
    where = as_olga.post("/hosts/add/", FORM)["Location"]
    page = as_olga.get(where).content.decode()
    return where, re.search(r"--token (\S+)", page)[1]


def enroll_with(text, **facts) -> Host:
    request = EnrollRequest(
        token=text, facts=make_facts(**facts), sent_at_ms=int(time.time() * 1000)
    )
    return Host.objects.get(pk=host_enroll(request).host_id)


def looks(host) -> dict[str, str]:
    return {check.name: check.look for check in checklist(None, host)}


def test_the_form_asks_for_name_pool_and_labels(as_olga):
    page = as_olga.get("/hosts/add/").content.decode()
    assert all(f'name="{name}"' in page for name in FORM)


def test_the_command_names_this_server_and_a_token(as_olga, added):
    page = as_olga.get(added[0]).content.decode()
    assert "python -m runners enroll --server http://testserver --token" in page


def test_the_token_carries_what_the_form_said(added):
    token = EnrolmentToken.objects.get()
    assert (token.name, token.pool) == ("Node A", "lab")
    assert token.labels == {"gpu": "4090", "room": "b12"}


def test_only_the_tokens_digest_is_stored(added):
    assert added[1] not in str(EnrolmentToken.objects.values().get())


def test_the_token_is_shown_only_in_the_session_that_made_it(added, team):
    olga = EnrolmentToken.objects.get().created_by
    page = client_of(olga).get(added[0]).content.decode()
    assert added[1] not in page
    assert "shown only in the session that made it" in page


def test_the_check_page_is_never_cached(as_olga, added):
    assert "no-store" in as_olga.get(added[0])["Cache-Control"]


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("name", "", "required"),
        ("pool", "My Pool!", "lower-case letters, digits and hyphens"),
        ("labels", "just-a-word", "is not key=value"),
        ("labels", "usd_per_kwh=free", "usd_per_kwh=free is no price; write dollars from 0 to"),
        ("labels", "usd_per_hour=-2", "usd_per_hour=-2 is no price"),
        ("labels", " ".join(f"k{i}=v" for i in range(20)), "at most 12"),
    ],
)
def test_bad_input_is_refused_beside_its_field(as_olga, field, value, words):
    response = as_olga.post("/hosts/add/", {**FORM, field: value})
    assert response.status_code == 422
    assert words in response.content.decode()
    assert not EnrolmentToken.objects.exists()


def test_before_the_first_contact_every_line_waits():
    checks = checklist(None, None)
    assert [check.look for check in checks] == ["now"] + ["wait"] * 8


def test_an_enrolled_host_ticks_identity_and_waits_for_its_agent(added):
    found = looks(enroll_with(added[1]))
    assert found["Identity"] == "good"
    assert found["Contacted"] == "now"


def test_after_beats_and_benchmark_every_line_is_ticked(added):
    host = enroll_with(added[1], packages={"torch": "2.13.0"})
    host_beat(host=host, beat=make_beat(microbench=make_microbench()))
    host.refresh_from_db()
    assert set(looks(host).values()) == {"good"}


def test_a_missing_torch_comes_with_the_command_that_mends_it(added):
    check = checklist(None, enroll_with(added[1]))[5]
    assert (check.name, check.look) == ("torch", "bad")
    assert check.command.startswith("pip install")


def test_a_full_disk_says_what_a_job_needs(added):
    check = checklist(None, enroll_with(added[1], disk_free_bytes=5_000_000))[6]
    assert check.look == "bad"
    assert "at least 1 GiB" in check.fix


def test_a_clock_that_is_off_says_by_how_much(added):
    host = enroll_with(added[1])
    host.clock_offset_ms = -9000
    check = checklist(None, host)[2]
    assert (check.look, check.words) == ("bad", "9000 ms behind this server's")


def test_an_agent_that_fell_silent_is_told_to_start_again(added):
    host = enroll_with(added[1])
    host.last_seen_at = now() - timedelta(minutes=5)
    check = checklist(None, host)[0]
    assert (check.look, check.command) == ("bad", "python -m runners work")


def test_a_ready_host_leads_to_the_demo(as_olga, added):
    host = enroll_with(added[1])
    host_beat(host=host, beat=make_beat(microbench=make_microbench()))
    page = as_olga.get(added[0]).content.decode()
    assert "Ready. Run the demo job" in page
    assert f"host={host.pk}" in page


def test_a_used_token_shows_no_command_any_more(as_olga, added):
    enroll_with(added[1])
    assert "--token" not in as_olga.get(added[0]).content.decode()


def test_an_expired_token_says_when_and_leads_to_a_new_one(as_olga, added):
    EnrolmentToken.objects.update(expires_at=now() - timedelta(minutes=1))
    page = as_olga.get(added[0]).content.decode()
    assert "was not used" in page
    assert "Make a new one" in page


def test_a_revoked_token_enrols_nobody(as_olga, added):
    as_olga.post(f"{added[0]}revoke/")
    assert EnrolmentToken.objects.get().revoked_at is not None
    assert "was revoked" in as_olga.get(added[0]).content.decode()


def test_live_updates_ask_only_for_the_regions(as_olga, added):
    response = as_olga.get(added[0], headers={"HX-Request": "true"})
    assert b"<html" not in response.content
    assert b'data-region="checks"' in response.content


@pytest.mark.parametrize("role", ["viewer", "practitioner"])
def test_only_operators_add_hosts(alice, added, role):
    alice.memberships.update(role=role)
    client = client_of(alice)
    assert client.get("/hosts/add/").status_code == 403
    assert client.post("/hosts/add/", FORM).status_code == 403
    assert client.get(added[0]).status_code == 403
    assert client.post(f"{added[0]}revoke/").status_code == 403


def test_another_teams_token_does_not_exist(charlie, added):
    charlie.memberships.update(role="operator")
    assert client_of(charlie).get(added[0]).status_code == 404


# The ways to install


@pytest.mark.parametrize(
    ("way", "parts"),
    [
        ("pip", ["python -m runners enroll", "&amp;&amp; python -m runners work"]),
        ("pipx", ["pipx install", "slipway-host enroll", "slipway-host work"]),
        ("systemd", ["python -m runners unit", "systemctl --user enable --now"]),
        ("slurm", ["--slurm --partition gpu", "python -m runners work"]),
    ],
)
def test_each_way_is_one_command_with_the_token(as_olga, added, way, parts):
    where, token = added
    page = as_olga.get(f"{where}?way={way}").content.decode()
    command = re.search(r'<code id="enroll-command">(.*?)</code>', page, re.DOTALL)[1]
    assert all(part in command for part in [*parts, f"--token {token}"])
    assert f'href="?way={way}" aria-current="page"' in page


def test_a_way_that_does_not_exist_shows_the_first(as_olga, added):
    page = as_olga.get(f"{added[0]}?way=nonsense").content.decode()
    assert 'href="?way=pip" aria-current="page"' in page


# What a host says, judged

H100 = {"index": 0, "uuid": "GPU-1", "name": "NVIDIA H100 80GB HBM3", "memory_bytes": 80 * 2**30}
WITH_GPU = {"gpus": [H100], "driver_version": "570.86", "cuda_version": "12.8"}


def check_of(host, name):
    return next(check for check in checklist(None, host) if check.name == name)


def test_a_torch_that_is_newer_than_the_driver_comes_with_the_build_that_fits(added):
    facts = {**WITH_GPU, "packages": {"torch": "2.13.0+cu130"}, "torch_cuda_version": "13.0"}
    check = check_of(enroll_with(added[1], **facts), "torch")
    assert (check.look, check.words) == (
        "bad",
        "2.13.0+cu130, built for CUDA 13.0; this driver runs up to 12.8",
    )
    assert "torch==2.13.0 --index-url https://download.pytorch.org/whl/cu128" in check.command


def test_a_torch_of_an_older_minor_version_fits(added):
    facts = {**WITH_GPU, "packages": {"torch": "2.9.0"}, "torch_cuda_version": "12.6"}
    assert check_of(enroll_with(added[1], **facts), "torch").look == "good"


def test_a_torch_for_processors_leaves_gpus_idle(added):
    check = check_of(enroll_with(added[1], **WITH_GPU, packages={"torch": "2.13.0+cpu"}), "torch")
    assert (check.look, check.fix) == (
        "bad",
        "The GPUs would stay idle. Install the build for their driver:",
    )


def test_a_driver_that_does_not_answer_says_why_and_where_to_look(added):
    check = check_of(enroll_with(added[1], driver_problem="Driver Not Loaded"), "Driver")
    assert (check.look, check.words) == ("bad", "Driver Not Loaded")
    assert "nvidia-smi" in check.command


def test_gpus_are_told_with_the_links_between_them(added):
    gpus = [{**H100, "index": index, "uuid": f"GPU-{index}"} for index in range(2)]
    host = enroll_with(added[1], gpus=gpus, topology=[["X", "NV18"], ["NV18", "X"]])
    assert check_of(host, "GPUs").words.endswith("NV18 between them")


def test_a_login_node_leaves_the_gpus_to_its_nodes(added):
    host = enroll_with(added[1])
    host.facts["scheduler"] = {"kind": "slurm"}
    assert check_of(host, "GPUs").words == "those of the nodes that Slurm gives a job"


@pytest.mark.parametrize(
    ("found", "look", "words"),
    [
        ({"has_redis": True}, "wait", "a signed ping"),
        ({"has_redis": True, "queue": {"seconds": 0.0123}}, "good", "12 ms, signed"),
        ({"has_redis": True, "queue": {"problem": "no answer within 3 s"}}, "bad", "no answer"),
        ({"has_redis": False}, "good", "everything goes over HTTP"),
        ({"redis_refusal": "No right to make users."}, "good", "not used: No right"),
    ],
)
def test_the_queue_is_judged_by_what_came_back(added, found, look, words):
    host = enroll_with(added[1])
    host.checks = found
    check = check_of(host, "Queue round trip")
    assert check.look == look
    assert words in check.words


def test_a_benchmark_that_failed_says_why(added):
    host = enroll_with(added[1])
    host.last_beat = {"problems": ["the micro-benchmark failed: out of memory"]}
    check = check_of(host, "20-second benchmark")
    assert (check.look, check.words) == ("bad", "out of memory")


def test_a_host_that_is_locked_out_is_told_to_enrol_again(added):
    host = enroll_with(added[1])
    host.credential_hash = ""
    assert check_of(host, "Identity").look == "bad"


# Check again


def test_checking_again_has_the_host_say_anew_what_it_is(as_olga, added):
    host = enroll_with(added[1])
    token = EnrolmentToken.objects.get()

    answer = as_olga.post(f"/hosts/{host.slug}/recheck/", {"token": token.pk})

    assert answer["Location"] == added[0]
    assert host_beat(host=host, beat=make_beat()).recheck
    assert not host_beat(host=host, beat=make_beat(facts=make_facts())).recheck


def test_checking_again_from_the_hosts_page_leads_back_there(as_olga, added):
    host = enroll_with(added[1])
    answer = as_olga.post(f"/hosts/{host.slug}/recheck/", {"token": "someone-elses"})
    assert answer["Location"] == f"/hosts/{host.slug}/"


def test_checking_again_tries_the_queue_again(as_olga, added):
    host = enroll_with(added[1])
    checks_update(host.pk, queue={"problem": "no answer"}, has_redis=True)

    as_olga.post(f"/hosts/{host.slug}/recheck/")

    host.refresh_from_db()
    assert "queue" not in host.checks
    assert host.checks["has_redis"]


def test_a_failed_line_has_a_button_and_a_good_one_none(as_olga, added):
    enroll_with(added[1])
    page = as_olga.get(added[0]).content.decode()
    assert page.count("Check again") == 1  # torch is missing, all else is well or waits


# Ticks come by themselves


@pytest.fixture
def told(monkeypatch):
    """What open pages were told, by topic."""
    found = []
    monkeypatch.setattr(
        "webapp.live.publish.publish_all", lambda messages: found.extend(messages) or True
    )
    return found


def num_checks(told, topic: str) -> int:
    return sum(1 for where, event, _ in told if (where, event) == (topic, "host.check"))


def test_enrolment_tells_the_page_that_shows_the_token(added, told, team):
    host = enroll_with(added[1])
    assert num_checks(told, f"hosts:{team.pk}") == 1
    assert num_checks(told, f"host:{host.pk}") == 1


def test_beats_of_a_host_that_checks_in_tell_its_page(added, told):
    host = enroll_with(added[1])
    told.clear()
    host_beat(host=host, beat=make_beat(facts=make_facts()))
    host_beat(host=host, beat=make_beat(microbench=make_microbench()))
    assert num_checks(told, f"host:{host.pk}") == 2


def test_an_ordinary_beat_of_a_ready_host_tells_nothing(host, told):
    host_beat(host=host, beat=make_beat())
    assert num_checks(told, f"host:{host.pk}") == 0
