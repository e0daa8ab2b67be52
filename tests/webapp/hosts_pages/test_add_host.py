"""Adding a host: the wizard's pages, a second host of one machine, the address others reach."""

import re
import time
from datetime import timedelta

import pytest
from django.template.loader import render_to_string
from django.urls import reverse
from django.utils.html import strip_tags

from runners.shared.addresses import own_addresses
from runners.shared.messages import EnrollRequest
from tests.webapp.conftest import client_of, make_beat, make_facts, make_job, make_microbench
from tests.webapp.jobs.gangs import make_gang, make_hosts, members
from tests.webapp.machines import GPU, host_of
from webapp.accounts.models import Membership, Role
from webapp.agents.heartbeats import host_beat
from webapp.audit.models import Event
from webapp.core.clock import now
from webapp.core.display import NBSP
from webapp.core.problems import InvalidProblem
from webapp.hosts.addresses import address_choose
from webapp.hosts.health import checklist
from webapp.hosts.models import Distinction, EnrolmentToken, Host
from webapp.hosts.services import checks_update, host_enroll
from webapp.jobs.models import Job
from webapp.jobs.services import job_submit

# Adding a host: form, command, check-list.


pytestmark = pytest.mark.django_db(databases="__all__")
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


def test_the_check_page_shows_the_command_of_a_token_whose_digest_alone_is_stored(as_olga, added):
    page = as_olga.get("/hosts/add/").content.decode()
    assert all(f'name="{name}"' in page for name in FORM)
    page = as_olga.get(added[0]).content.decode()
    assert "python -m runners enroll --server http://testserver --token" in page
    token = EnrolmentToken.objects.get()
    assert (token.name, token.pool) == ("Node A", "lab")
    assert token.labels == {"gpu": "4090", "room": "b12"}
    assert added[1] not in str(EnrolmentToken.objects.values().get())
    assert "no-store" in as_olga.get(added[0])["Cache-Control"]
    response = as_olga.get(added[0], headers={"HX-Request": "true"})
    assert b"<html" not in response.content
    assert b'data-region="checks"' in response.content


def test_the_command_names_an_address_that_another_machine_can_reach(as_olga, added, settings):
    """A browser at the end of `ssh -L 9000:127.0.0.1:8000` asks for a loopback name."""
    own = own_addresses()[0]
    for allowed, asked, server, is_local in [
        ([], "127.0.0.1:8000", "http://127.0.0.1:8000", True),
        ([own], "localhost:9000", f"http://{own}:8000", False),
        (["slipway.lan"], "slipway.lan:8000", "http://slipway.lan:8000", False),
    ]:
        settings.ALLOWED_HOSTS = ["127.0.0.1", "localhost", *allowed]
        page = as_olga.get(added[0], SERVER_PORT="8000", headers={"Host": asked}).content.decode()
        assert f"enroll --server {server} --token" in page, asked
        assert ("Only this machine reaches" in page) == is_local, asked


def test_the_token_is_shown_only_in_the_session_that_made_it(added, team):
    olga = EnrolmentToken.objects.get().created_by
    page = client_of(olga).get(added[0]).content.decode()
    assert added[1] not in page
    assert "shown only in the session that made it" in page


def test_bad_input_is_refused_beside_its_field(as_olga):
    for field, value, words in [
        ("name", "", "required"),
        ("pool", "My Pool!", "lower-case letters, digits and hyphens"),
        ("labels", "just-a-word", "is not key=value"),
        (
            "labels",
            "usd_per_kwh=free",
            "usd_per_kwh=free is not a valid price. Write dollars from 0 to",
        ),
        ("labels", "usd_per_hour=-2", "usd_per_hour=-2 is not a valid price"),
        ("labels", " ".join(f"k{i}=v" for i in range(20)), "the limit is 12"),
    ]:
        response = as_olga.post("/hosts/add/", {**FORM, field: value})
        assert response.status_code == 422, field
        assert words in response.content.decode(), field
        assert not EnrolmentToken.objects.exists(), field


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
    assert "Create a new token" in page


def test_a_revoked_token_enrols_nobody(as_olga, added):
    as_olga.post(f"{added[0]}revoke/")
    assert EnrolmentToken.objects.get().revoked_at is not None
    assert "was revoked" in as_olga.get(added[0]).content.decode()


def test_only_operators_of_the_team_add_hosts(alice, added, charlie):
    for role in ["viewer", "practitioner"]:
        alice.memberships.update(role=role)
        client = client_of(alice)
        assert client.get("/hosts/add/").status_code == 403, role
        assert client.post("/hosts/add/", FORM).status_code == 403, role
        assert client.get(added[0]).status_code == 403, role
        assert client.post(f"{added[0]}revoke/").status_code == 403, role
    charlie.memberships.update(role="operator")
    assert client_of(charlie).get(added[0]).status_code == 404


# The ways to install


def test_each_way_is_one_command_with_the_token(as_olga, added):
    for way, parts in [
        ("pip", ["python -m runners enroll", "&amp;&amp; python -m runners work"]),
        ("pipx", ["pipx install", "slipway-host enroll", "slipway-host work"]),
        ("systemd", ["python -m runners unit", "systemctl --user enable --now"]),
        ("slurm", ["--slurm --partition gpu", "python -m runners work"]),
    ]:
        where, token = added
        page = as_olga.get(f"{where}?way={way}").content.decode()
        command = re.search(r'<code id="enroll-command">(.*?)</code>', page, re.DOTALL)[1]
        assert all(part in command for part in [*parts, f"--token {token}"]), way
        assert f'href="?way={way}" aria-current="page"' in page, way
        assert (f'href="/docs/{way}"' in page) == (way in {"slurm", "kubernetes", "ray"}), way
    page = as_olga.get(added[0]).content.decode()
    assert 'href="?way=pip" aria-current="page"' in page


# What a host says, judged

H100 = {"index": 0, "uuid": "GPU-1", "name": "NVIDIA H100 80GB HBM3", "memory_bytes": 80 * 2**30}
WITH_GPU = {"gpus": [H100], "driver_version": "570.86", "cuda_version": "12.8"}


def check_of(host, name):
    return next(check for check in checklist(None, host) if check.name == name)


def test_each_line_says_what_is_wrong_and_how_it_is_mended(added):
    host = enroll_with(added[1])

    def line(name: str, **facts):
        host.facts = make_facts(**facts).model_dump(mode="json")
        return check_of(host, name)

    torch = line("torch")
    assert torch.look == "bad"
    assert torch.command.startswith("pip install")

    newer = {"packages": {"torch": "2.13.0+cu130"}, "torch_cuda_version": "13.0"}
    torch = line("torch", **WITH_GPU, **newer)
    words = "2.13.0+cu130, built for CUDA 13.0; this driver runs up to 12.8"
    assert (torch.look, torch.words) == ("bad", words)
    assert "torch==2.13.0 --index-url https://download.pytorch.org/whl/cu128" in torch.command

    older = {"packages": {"torch": "2.9.0"}, "torch_cuda_version": "12.6"}
    assert line("torch", **WITH_GPU, **older).look == "good"

    torch = line("torch", **WITH_GPU, packages={"torch": "2.13.0+cpu"})
    fix = "Jobs would not use the GPUs. Install the build for their driver:"
    assert (torch.look, torch.fix) == ("bad", fix)

    driver = line("Driver", driver_problem="Driver Not Loaded")
    assert (driver.look, driver.words) == ("bad", "Driver Not Loaded")
    assert "nvidia-smi" in driver.command

    gpus = [{**H100, "index": index, "uuid": f"GPU-{index}"} for index in range(2)]
    links = [["X", "NV18"], ["NV18", "X"]]
    assert line("GPUs", gpus=gpus, topology=links).words.endswith("NV18 between them")

    host.facts = make_facts(disk_free_bytes=5_000_000).model_dump(mode="json")
    disk = checklist(None, host)[6]
    assert disk.look == "bad"
    assert "at least 1 GiB" in disk.fix


def test_a_host_that_is_off_silent_or_locked_out_says_so(added):
    host = enroll_with(added[1])
    assert checklist(None, host)[5].name == "torch"
    host.clock_offset_ms = -9000
    clock = checklist(None, host)[2]
    assert (clock.look, clock.words) == ("bad", "9000 ms behind this server's")
    for offset_ms, words in [
        (-1_795_898_571_135, "56 years behind"), (31_557_600_000, "1 year ahead of"),
        (125_000, "2 min 5 s ahead of"), (-90_061_000, "1 d 1 h behind"), (-40, "40 ms behind"),
    ]:  # fmt: skip
        host.clock_offset_ms = offset_ms
        assert checklist(None, host)[2].words == f"{words} this server's", offset_ms
    host.last_seen_at = now() - timedelta(minutes=5)
    contact = checklist(None, host)[0]
    assert (contact.look, contact.command) == ("bad", "python -m runners work")
    host.last_beat = {"problems": ["the micro-benchmark failed: out of memory"]}
    benchmark = check_of(host, "20-second benchmark")
    assert (benchmark.look, benchmark.words) == ("bad", "out of memory")
    host.facts["scheduler"] = {"kind": "slurm"}
    assert check_of(host, "GPUs").words == "those of the nodes that the scheduler gives a job"
    host.credential_hash = ""
    assert check_of(host, "Identity").look == "bad"


def test_what_slurm_did_not_say_leaves_no_gap_and_is_said_with_its_cause():
    down = {"name": "old", "is_up": False, "nodes": 1, "time_limit": "infinite"}
    scheduler = {"kind": "slurm", "partitions": [down], "unread": ["accounts: no accounting"]}
    facts = make_facts().model_dump(mode="json") | {"scheduler": scheduler}
    page = render_to_string("hosts/_facts.html", {"facts": facts})
    assert "<strong>old</strong> (down): 1 node, limit infinite" in page
    assert "accounts: no accounting" in page


def test_jobs_that_somebody_else_gave_to_the_scheduler_stand_on_the_page():
    job = {"job_id": "7", "name": "pretrain", "user": "alice", "state": "RUNNING", "devices": 16,
           "nodes": "n[1-2]", "elapsed_seconds": 600, "time_limit_seconds": 5400}  # fmt: skip
    scheduler = {"kind": "slurm", "other_jobs": [job], "num_other_jobs": 2}
    facts = make_facts().model_dump(mode="json") | {"scheduler": scheduler}
    shown = render_to_string("hosts/_others.html", {"facts": facts}).replace("<", " <")
    page = " ".join(strip_tags(shown).split())
    assert "7 pretrain of alice RUNNING n[1-2] 16 10 min of at most 1 h 30 min" in page
    for words in ("2 in all, with each task of an array; 1 line shown", "never ends them"):
        assert words in page


def test_a_schedulers_nodes_and_times_are_in_the_sites_units():
    nodes = {"name": "gpu", "is_up": True, "nodes": 2, "cpus_per_node": "96", "time_limit": ""}
    for told, shown in (("524288", "512 GiB"), ("512000+", "500 GiB and more"), ("?", "? MiB")):
        scheduler = {"kind": "ray", "time_limit_minutes": 1440, "max_jobs": 4,
                     "partitions": [nodes | {"memory_mib": told}]}  # fmt: skip
        facts = make_facts().model_dump(mode="json") | {"scheduler": scheduler}
        page = strip_tags(render_to_string("hosts/_facts.html", {"facts": facts})).replace(
            NBSP, " "
        )
        assert f"2 nodes of 96 CPUs and {shown}" in page
        assert "for at most 1 d each" in page


def test_the_queue_is_judged_by_what_came_back(added):
    host = enroll_with(added[1])
    for found, look, words in (
        ({"has_redis": True}, "wait", "a signed ping"),
        ({"has_redis": True, "queue": {"seconds": 0.0123}}, "good", "12 ms, signed"),
        ({"has_redis": True, "queue": {"problem": "no answer within 3 s"}}, "bad", "no answer"),
        ({"has_redis": False}, "good", "everything goes over HTTP"),
        ({"redis_refusal": "No right to make users."}, "good", "not used: No right"),
    ):
        host.checks = found
        check = check_of(host, "Queue round trip")
        assert check.look == look, found
        assert words in check.words, found


# Check again


def test_checking_again_has_the_host_say_anew_what_it_is_and_tries_the_queue(as_olga, added):
    host = enroll_with(added[1])
    token = EnrolmentToken.objects.get()
    answer = as_olga.post(f"/hosts/{host.slug}/recheck/", {"token": token.pk})
    assert answer["Location"] == added[0]
    assert host_beat(host=host, beat=make_beat()).recheck
    assert not host_beat(host=host, beat=make_beat(facts=make_facts())).recheck
    answer = as_olga.post(f"/hosts/{host.slug}/recheck/", {"token": "someone-elses"})
    assert answer["Location"] == f"/hosts/{host.slug}/"
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
        "webapp.hosts.services.publish_all", lambda messages: found.extend(messages) or True
    )
    return found


def num_checks(told, topic: str) -> int:
    return sum(1 for where, event, _ in told if (where, event) == (topic, "host.check"))


def test_enrolment_and_the_first_beats_tell_the_page_that_shows_the_token(added, told, team):
    host = enroll_with(added[1])
    assert num_checks(told, f"hosts:{team.pk}") == 1
    assert num_checks(told, f"host:{host.pk}") == 1
    told.clear()
    host_beat(host=host, beat=make_beat(facts=make_facts()))
    host_beat(host=host, beat=make_beat(microbench=make_microbench()))
    assert num_checks(told, f"host:{host.pk}") == 2


def test_an_ordinary_beat_of_a_ready_host_tells_nothing(host, told):
    host_beat(host=host, beat=make_beat())
    assert num_checks(told, f"host:{host.pk}") == 0


# Hosts on one machine: what their pages say of it, and an operator's word against it.


@pytest.fixture
def ours(team) -> Host:
    return host_of(team, "ours")


@pytest.fixture
def theirs(other_team) -> Host:
    return host_of(other_team, "theirs", user_id=1002)


def page(user, host: Host) -> str:
    return client_of(user).get(f"/hosts/{host.slug}/").content.decode()


def say(user, host: Host, other: Host, word: str = "apart") -> str:
    sent = {"other": other.pk, "word": word}
    answer = client_of(user).post(f"/hosts/{host.slug}/apart/", sent, follow=True)
    return answer.content.decode()


def test_a_host_alone_on_its_machine_says_nothing_and_ones_own_other_is_named(olga, ours, team):
    assert "On the same machine" not in page(olga, ours)
    host_of(team, "beside")
    shown = page(olga, ours)
    assert '<a href="/hosts/beside/">beside</a>' in shown
    assert "Both agents run as user 1001, so that jobs of both run side by side" in shown
    other = host_of(team, "elsewhere", machine_id="b" * 64)
    assert "No such host matches the machine of ours" in say(olga, ours, other)
    assert Distinction.objects.count() == 0
    host = host_of(team, "container", machine_id=None)
    assert "jobs of other hosts on the machine are not detected" in page(olga, host)


def test_another_teams_host_is_told_of_without_its_name_to_operators_of_the_machine(
    olga, ours, theirs, alice
):
    shown = page(olga, ours)
    assert "A host of another team" in shown
    assert "runs as user 1002, this one&#x27;s as 1001: one job at a time" in shown
    assert "theirs" not in shown
    say(alice, ours, theirs)
    assert Distinction.objects.count() == 0
    assert "Another machine…" not in page(alice, ours)
    host_beat(host=theirs, beat=make_beat(boot_id="boot-2"))
    assert "they name different boots, as copies of one disk image do" in page(olga, ours)


def test_gpus_that_both_see_are_named_and_other_gpus_let_both_run(olga, team):
    host_of(team, "one", gpus=[GPU])
    host_of(team, "two", gpus=[GPU | {"index": 2}], user_id=1002)
    three = host_of(team, "three", gpus=[GPU | {"uuid": "GPU-two"}], user_id=1003)
    assert "it has the same gpu 0" in page(olga, Host.objects.get(name="one")).lower()
    assert "has other GPUs, so that neither waits for the other" in page(olga, three)


def test_a_gpu_that_another_team_claims_too_is_shown_with_who_waits_for_whom(
    olga, team, other_team
):
    first = host_of(team, "first", gpus=[GPU])
    other = host_of(other_team, "claims it", gpus=[GPU], machine_id="b" * 64)
    shown = page(olga, first)
    assert "claims it" not in shown
    assert "jobs here do not wait for jobs there" in shown
    assert "count as different machines" in say(olga, first, other)
    Distinction.objects.all().delete()
    host_of(other_team, "older", gpus=[GPU | {"uuid": "GPU-older"}], machine_id="b" * 64)
    later = host_of(team, "later", gpus=[GPU | {"uuid": "GPU-older"}])
    assert "jobs here wait for jobs there, but not the other way round" in page(olga, later)


@pytest.fixture
def waiting(ours, theirs, alice, charlie) -> Job:
    """Our job, which waits because theirs holds the machine."""
    job_submit(job=make_job(theirs.team, charlie, theirs), by="charlie")
    return job_submit(job=make_job(ours.team, alice, ours), by="alice")


def test_an_operators_word_starts_what_waited_and_both_histories_tell_it(
    waiting, olga, ours, theirs
):
    assert "count as different machines" in say(olga, ours, theirs)
    assert Job.objects.get(pk=waiting.pk).state == "preflight"
    told = Event.objects.filter(kind="host.told_apart").values_list("subject", "actor")
    assert set(told) == {(ours.pk, "olga"), (theirs.pk, "an operator of another team")}


def test_the_word_is_taken_back_by_the_team_that_gave_it(olga, ours, theirs, other_team):
    otto = Membership.objects.create(
        user=type(olga).objects.create_user("otto"), team=other_team, role=Role.OPERATOR
    ).user
    say(olga, ours, theirs)
    assert "an operator of another team said" in page(otto, theirs).lower()
    say(otto, theirs, ours, "same")
    assert Distinction.objects.count() == 1
    say(olga, ours, theirs, "same")
    assert Distinction.objects.count() == 0


# Which address of a host the others of a job use.


@pytest.fixture
def hosts(team):
    made = make_hosts(team, 2)
    facts = made[0].facts | {"addresses": ["10.0.0.1", "192.168.7.1"]}
    Host.objects.filter(pk=made[0].pk).update(facts=facts)
    made[0].refresh_from_db()
    return made


def choose(host: Host, user, address: str):
    url = reverse("host-address", args=[host.slug])
    return client_of(user).post(url, {"address": address}, follow=True).content.decode()


def test_an_operator_chooses_one_of_the_hosts_addresses_and_later_jobs_meet_there(
    hosts, olga, alice, team
):
    text = choose(hosts[0], olga, "192.168.7.1")
    assert "Later jobs reach Box 1 at 192.168.7.1." in text
    assert Event.objects.get(kind="host.address").actor == "olga"
    text = choose(hosts[0], olga, "192.168.7.1")
    assert '<option value="192.168.7.1" selected>' in text
    assert '<option value="10.0.0.1" >' in text
    choose(hosts[0], olga, "192.168.7.1")
    job = make_gang(team, alice, hosts)
    assert {member.address for member in members(job)} == {"10.0.0.2", "192.168.7.1"}


def test_an_address_that_the_host_does_not_have_is_refused(hosts, alice):
    for address in ["", "8.8.8.8", "--rdzv-id=x", "<script>"]:
        with pytest.raises(InvalidProblem, match=r"10\.0\.0\.1, 192\.168\.7\.1"):
            address_choose(host=hosts[0], address=address, by="olga")
    text = client_of(alice).get(f"/hosts/{hosts[0].slug}/").content.decode()
    assert "10.0.0.1, 192.168.7.1" in text
    assert 'name="address"' not in text


def test_a_host_lists_the_jobs_that_it_only_takes_part_in(hosts, alice, team):
    job = make_gang(team, alice, hosts)
    second = members(job)[1].host
    text = client_of(alice).get(f"/hosts/{second.slug}/").content.decode()
    assert f"/jobs/{job.pk}/" in text
