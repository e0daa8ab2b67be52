"""How a host enrols, of which kind, with which environments, and into which pool."""

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from django.db import connections

from runners.shared.facts import PartitionFacts, SchedulerFacts
from runners.shared.messages import EnrollRequest, EnvironmentState
from tests.webapp.conftest import GIB, claim, client_of, enrol, make_beat, make_facts, make_job
from webapp.agents.environments import environment_order, environments_of
from webapp.agents.heartbeats import host_beat
from webapp.audit.models import Event
from webapp.core.clock import now
from webapp.core.problems import (
    ConflictProblem,
    InvalidProblem,
    NotFoundProblem,
    UnauthorizedProblem,
)
from webapp.hosts.models import Device, EnrolmentToken, Host, HostState, Pool
from webapp.hosts.pools import devices_sync, pool_ensure
from webapp.hosts.services import (
    command_key,
    credential_revoke,
    device_words,
    digest,
    host_by_credential,
    host_enroll,
    host_set_state,
    token_create,
    token_revoke,
)
from webapp.jobs.gangs import run_checks
from webapp.jobs.models import Job, JobState
from webapp.jobs.services import job_submit
from webapp.jobs.waiting import closed_words, scheduler_words

# A one-time token becomes a host, once.


pytestmark = pytest.mark.django_db(databases="__all__")


def request_for(token: str, **changes) -> EnrollRequest:
    fields = {"token": token, "facts": make_facts(), "sent_at_ms": 0}
    return EnrollRequest(**{**fields, **changes})


@pytest.fixture
def token(team) -> str:
    return token_create(team=team, by=None, name="Box", pool="fast", labels={"rack": "3"})[1]


def test_a_new_host_takes_name_pool_and_labels_of_its_token(token):
    host = Host.objects.get(pk=host_enroll(request_for(token)).host_id)
    assert (host.name, host.pool.slug, host.labels) == ("Box", "fast", {"rack": "3"})
    assert host.state == "checking"  # before it is ready


def test_a_host_may_name_itself(token):
    assert host_enroll(request_for(token, name="Own name")).name == "Own name"


def test_two_hosts_of_one_name_get_two_slugs_and_any_name_gets_one(team):
    hosts = [enrol(team, name="Box")[0] for _ in range(3)]
    assert [host.slug for host in hosts] == ["box", "box-2", "box-3"]
    assert enrol(team, name="箱")[0].slug == "host"


def test_a_used_token_is_refused(token):
    host_enroll(request_for(token))
    with pytest.raises(UnauthorizedProblem, match="used"):
        host_enroll(request_for(token))


def test_an_unknown_expired_or_revoked_token_is_refused(token):
    row = EnrolmentToken.objects.get()
    with pytest.raises(UnauthorizedProblem):
        host_enroll(request_for("guess"))
    EnrolmentToken.objects.update(expires_at=now() - timedelta(seconds=1))
    with pytest.raises(UnauthorizedProblem):
        host_enroll(request_for(token))
    EnrolmentToken.objects.update(expires_at=row.expires_at)
    token_revoke(token=row)
    with pytest.raises(UnauthorizedProblem):
        host_enroll(request_for(token))


def test_another_protocol_version_is_refused_and_keeps_the_token(token):
    with pytest.raises(InvalidProblem, match="protocol 99"):
        host_enroll(request_for(token, protocol_version=99))
    assert EnrolmentToken.objects.get().used_at is None


@pytest.mark.django_db(transaction=True)
def test_of_a_hundred_hosts_racing_with_one_token_one_enrols(token):
    start = threading.Barrier(100)

    def race(number: int) -> bool:
        start.wait()
        try:
            host_enroll(request_for(token, name=f"Box {number}"))
        except UnauthorizedProblem:
            return False
        finally:
            connections.close_all()
        return True

    with ThreadPoolExecutor(100) as pool:
        won = list(pool.map(race, range(100)))
    assert won.count(True) == 1
    assert Host.objects.count() == 1


def test_enrolling_again_rotates_the_credential_and_the_doorbell_key(team, enrolled):
    host, old = enrolled
    _, text = token_create(team=team, by=None, name="Box")
    reply = host_enroll(request_for(text, host_id=host.pk))
    assert reply.host_id == host.pk
    assert host_by_credential(old) is None
    assert host_by_credential(reply.credential) == host
    host, _ = enrolled
    before = command_key(host)
    _, text = token_create(team=team, by=None, name="Box")
    assert host_enroll(request_for(text, host_id=host.pk)).command_key != before
    host, _ = enrolled
    assert command_key(host) not in str(Host.objects.values().get())


def test_another_teams_host_cannot_be_taken_over(other_team, enrolled):
    host, credential = enrolled
    _, text = token_create(team=other_team, by=None, name="Thief")
    assert host_enroll(request_for(text, host_id=host.pk)).host_id != host.pk
    assert host_by_credential(credential) == host


def test_a_revoked_host_is_locked_out_and_nobody_is_the_empty_credential(enrolled):
    host, credential = enrolled
    credential_revoke(host=host, by="olga")
    assert host_by_credential(credential) is None
    credential_revoke(host=enrolled[0], by="olga")
    assert host_by_credential("") is None


@pytest.mark.parametrize(("is_same", "expected"), [(True, "unix"), (False, None)])
def test_only_a_host_on_this_machine_is_told_of_a_socket(token, is_same, expected, settings):
    settings.REDIS_URL = "unix:///run/redis.sock"
    reply = host_enroll(request_for(token), is_same_machine=is_same)
    assert (reply.redis_url or "").split(":")[0] == (expected or "")


def test_a_host_on_another_machine_is_told_of_an_encrypted_redis_and_who_vouches_for_it(
    token, settings, tmp_path
):
    settings.HOST_REDIS_URL = "rediss://site:secret@redis.example.org:6380/0"
    settings.REDIS_CA = str(tmp_path / "ca.pem")
    (tmp_path / "ca.pem").write_text("-----BEGIN CERTIFICATE-----")
    reply = host_enroll(request_for(token))
    assert reply.redis_url == "rediss://redis.example.org:6380/0"
    assert reply.redis_ca_pem == "-----BEGIN CERTIFICATE-----"
    assert len(reply.redis_secret) >= 40


def test_a_host_is_never_told_the_sites_own_redis_user(token, settings):
    settings.REDIS_URL = "unix://slipway:secret@/run/redis.sock"
    reply = host_enroll(request_for(token), is_same_machine=True)
    assert reply.redis_url == "unix:///run/redis.sock"


def test_without_an_encrypted_redis_no_secret_of_it_leaves(token):
    reply = host_enroll(request_for(token))
    assert (reply.redis_url, reply.redis_secret, reply.redis_ca_pem) == (None, None, None)


def test_a_host_is_not_declared_ready_by_hand(enrolled):
    for state, words in [("checking", "measured"), ("retired", "enrol")]:
        host, _ = enrolled
        Host.objects.update(state=state)
        with pytest.raises(ConflictProblem, match=words):
            host_set_state(host=host, to=HostState.READY, by="olga")


def test_a_drained_host_takes_jobs_again(host):
    for state in (HostState.DRAINING, HostState.READY):
        host_set_state(host=host, to=state, by="olga")
    assert host.state == "ready"


def test_enrolment_and_states_are_recorded(enrolled):
    host, _ = enrolled
    host_set_state(host=host, to="maintenance", by="olga")
    events = Event.objects.filter(subject=host.pk).values_list("kind", "to_state", "actor")
    assert list(events) == [
        ("host.enrolled", "checking", "host:box"),
        ("host.state", "maintenance", "olga"),
    ]


# Enrolment tokens: once, for an hour, and never stored in plain text.


def test_only_the_digest_of_a_token_is_stored_and_it_lives_an_hour(team, olga):
    token, text = token_create(team=team, by=olga, name="Box")
    assert token.token_hash == digest(text)
    assert text not in str(EnrolmentToken.objects.values().get())
    token, _ = token_create(team=team, by=olga, name="Box")
    assert (token.expires_at - token.created_at).total_seconds() == pytest.approx(3600, abs=5)
    token, _ = token_create(team=team, by=olga, name="Box")
    assert [token_revoke(token=token), token_revoke(token=token)] == [True, False]
    texts = [token_create(team=team, by=None, name="Box")[1] for _ in range(40)]
    assert all(text.startswith("slt_") for text in texts)


# A host's named environments: what it says of them, what operators order, when orders end.


MAIN = EnvironmentState(name="main", stage="ready")


def tiny(**changes) -> EnvironmentState:
    said = {"name": "tiny", "stage": "absent", "purpose": "For tests.", "size_bytes": 5_000_000}
    return EnvironmentState(**{**said, **changes})


def heard(host, *said):
    """Beat with these environments and return the reply."""
    reply = host_beat(host=host, beat=make_beat(environments=said or None))
    host.refresh_from_db()
    return reply


@pytest.fixture
def telling(host):
    """A host that said what environments it knows."""
    heard(host, MAIN, tiny())
    return host


def order(host, action="build", name="tiny"):
    environment_order(host=host, name=name, action=action, by="olga")


def press(user, host, action, name="tiny") -> str:
    url = f"/hosts/{host.slug}/environments/{name}/{action}/"
    return client_of(user).post(url, follow=True).content.decode()


def test_what_another_version_wrote_down_is_passed_over(telling):
    telling.checks["environments"][1] = {"name": "<b>", "since": 1}
    telling.save()
    assert [row.state.name for row in environments_of(telling)] == ["main"]


def test_what_a_host_says_stays_until_it_says_something_else(telling):
    heard(telling)
    assert [row.state.name for row in environments_of(telling)] == ["main", "tiny"]
    assert "environments" not in telling.last_beat


def test_an_order_is_asked_with_each_beat_until_the_host_carried_it_out(telling):
    order(telling)
    (first,), (again,) = heard(telling).environments, heard(telling).environments
    building = heard(telling, MAIN, tiny(stage="building", done=1, total=6)).environments
    after = heard(telling, MAIN, tiny(stage="ready", order_id=first.order_id)).environments
    assert (first.name, first.action) == ("tiny", "build")
    assert again == first == building[0]
    assert after == ()


def test_an_order_that_failed_is_not_asked_again(telling):
    order(telling)
    order_id = heard(telling).environments[0].order_id
    reply = heard(telling, MAIN, tiny(stage="failed", words="no index", order_id=order_id))
    assert reply.environments == ()


def test_a_later_order_replaces_an_earlier_one_and_one_for_what_is_unknown_is_dropped(telling):
    order(telling, "build")
    order(telling, "remove")
    assert [each.action for each in heard(telling).environments] == ["remove"]
    order(telling)
    assert heard(telling, MAIN).environments == ()


def test_the_agents_own_environment_and_unknown_ones_are_refused_by_name(telling):
    with pytest.raises(InvalidProblem, match="The environment main cannot be rebuilt"):
        order(telling, "remove", "main")
    with pytest.raises(NotFoundProblem, match="has no environment nobody"):
        order(telling, "build", "nobody")


def test_an_operator_builds_from_the_page_and_the_event_stays(telling, olga):
    page = press(olga, telling, "build")
    assert "builds tiny after its next heartbeat" in page
    assert "Waiting for the host to build the environment." in page
    assert "Environment tiny: build requested" in page
    assert Event.objects.get(kind="host.environment_build").actor == "olga"


def test_a_build_shows_how_far_it_is(telling, alice):
    heard(telling, MAIN, tiny(stage="building", words="Fetching torch", done=2, total=8))
    page = client_of(alice).get(f"/hosts/{telling.slug}/").content.decode()
    assert "Fetching torch, step 2 of 8." in page
    assert 'rect width="25' in page


def test_only_operators_get_buttons_and_a_built_one_is_removed(telling, alice, olga):
    heard(telling, MAIN, tiny(stage="ready", size_bytes=122_000_000, num_packages=14))
    seen = client_of(alice).get(f"/hosts/{telling.slug}/").content.decode()
    page = press(olga, telling, "remove")
    assert "14 packages" in seen
    assert "environments/tiny/remove" not in seen
    assert "removes tiny after its next heartbeat" in page


# A host that hands its jobs to Slurm: its kind, its slots, and what its jobs wait for.


GPU = PartitionFacts(
    name="gpu", is_up=True, time_limit="2-00:00:00", nodes=3, cpus_per_node="64",
    memory_mib="515000", gres="gpu:a100:8",
)  # fmt: skip


def facts(max_jobs: int = 2):
    scheduler = SchedulerFacts(
        version="22.05.8",
        options={"partition": "gpu", "gres": "gpu:1"},
        time_limit_minutes=120,
        max_jobs=max_jobs,
        partitions=(GPU,),
    )
    return make_facts(scheduler=scheduler)


@pytest.fixture
def slurm_host(host) -> Host:
    host_beat(host=host, beat=make_beat(facts=facts(), is_agent_start=True))
    host.refresh_from_db()
    return host


def present(host: Host) -> list[tuple[str, int]]:
    return [(one.kind, one.index) for one in host.devices.filter(is_present=True)]


def test_a_host_whose_facts_name_a_scheduler_has_a_slot_for_each_job(slurm_host):
    assert slurm_host.kind == "slurm"
    assert closed_words(slurm_host, Job(num_hosts=1, devices_per_host=1)) == ""
    assert present(slurm_host) == [("slot", 0), ("slot", 1)]
    slot = slurm_host.devices.filter(kind="slot").first()
    assert slot.name == "One job in Slurm, gres gpu:1, partition gpu"
    assert device_words(slot) == "Slot 0"
    host_beat(host=slurm_host, beat=make_beat(facts=facts(max_jobs=1)))
    assert present(slurm_host) == [("slot", 0)]
    host_beat(host=slurm_host, beat=make_beat(facts=make_facts()))
    slurm_host.refresh_from_db()
    assert (slurm_host.kind, present(slurm_host)) == ("agent", [("cpu", 0)])


def test_two_jobs_that_ask_for_a_whole_host_take_a_slot_each(slurm_host, team, alice):
    jobs = [job_submit(job=make_job(team, alice, slurm_host), by="alice") for _ in range(3)]
    held = [job.current_attempt.allocations.count() for job in jobs if job.current_attempt]
    assert held == [1, 1]
    assert [job.state for job in jobs] == [JobState.PREFLIGHT, JobState.PREFLIGHT, JobState.QUEUED]


def test_a_slot_travels_to_the_host_with_the_claim(slurm_host, team, alice):
    job = job_submit(job=make_job(team, alice, slurm_host), by="alice")
    request = claim(job.current_attempt)
    assert [(one.kind, one.index) for one in request.devices] == [("slot", 0)]


@pytest.mark.django_db(databases=["default", "metrics"])
def test_a_job_in_slurms_queue_says_what_it_waits_for(slurm_host, team, alice):
    job = job_submit(job=make_job(team, alice, slurm_host), by="alice")
    claim(job.current_attempt)
    status = {
        "attempt_id": job.current_attempt_id, "fence": job.current_attempt.fence,
        "phase": "claimed", "last_seq": 0, "acked_seq": 0, "waits_for": "Slurm (job 7): Resources",
    }  # fmt: skip
    host_beat(host=slurm_host, beat=make_beat(attempts=(status,)))
    page = client_of(alice).get(f"/jobs/{job.pk}/")
    assert "waiting in Slurm (job 7): Resources" in page.content.decode()


def test_a_job_that_runs_waits_for_nothing(attempt):
    attempt.job.state = JobState.RUNNING
    assert scheduler_words(attempt.job) == ""


def test_its_page_shows_slots_and_the_login_nodes_memory_keeps_no_job_away(
    slurm_host, alice, team
):
    page = client_of(alice).get(f"/hosts/{slurm_host.slug}/").content.decode()
    for words in ("Slurm 22.05.8", "3 nodes of 64 CPUs", "gpu:a100:8", "Slot 1", "gres gpu:1"):
        assert words in page
    job = make_job(team, alice, slurm_host)
    job.prediction = {"peak_memory_bytes": {"value": 2**60}}
    assert all(check.is_ok for check in run_checks(job, slurm_host))


# Pools, and the devices that hosts say they have.


def gpu(index: int, uuid: str = "") -> dict:
    named = {"index": index, "uuid": uuid or f"GPU-{index}", "name": "NVIDIA L4"}
    return named | {"memory_bytes": 24 * GIB}


def devices(host: Host, **wanted) -> list[tuple[str, int, str]]:
    rows = Device.objects.filter(host=host, **wanted).order_by("index")
    return [(row.kind, row.index, row.uuid) for row in rows]


def test_a_hosts_devices_are_its_gpus_or_its_processor_wherever_they_move(enrolled):
    host, _ = enrolled
    assert devices(host) == [("cpu", 0, "cpu")]
    assert host.devices.get().memory_bytes == 16 * GIB
    devices_sync(enrolled[0], make_facts(gpus=[gpu(0), gpu(1)]))
    present = devices(enrolled[0], is_present=True)
    assert present == [("gpu", 0, "GPU-0"), ("gpu", 1, "GPU-1")]
    devices_sync(enrolled[0], make_facts(gpus=[gpu(0), gpu(1)]))
    devices_sync(enrolled[0], make_facts(gpus=[gpu(0)]))
    assert ("gpu", 1, "GPU-1") in devices(enrolled[0], is_present=False)
    devices_sync(enrolled[0], make_facts(gpus=[gpu(0, "GPU-a")]))
    devices_sync(enrolled[0], make_facts(gpus=[gpu(3, "GPU-a")]))
    assert devices(enrolled[0], uuid="GPU-a") == [("gpu", 3, "GPU-a")]
    devices_sync(enrolled[0], make_facts(gpus=[gpu(0)]))
    Device.objects.filter(uuid="GPU-0").update(cordon_reason="ECC errors")
    devices_sync(enrolled[0], make_facts(gpus=[gpu(0)]))
    assert Device.objects.get(uuid="GPU-0").cordon_reason == "ECC errors"
    host_beat(host=enrolled[0], beat=make_beat(facts=make_facts(gpus=[gpu(0)])))
    assert devices(enrolled[0], is_present=True) == [("gpu", 0, "GPU-0")]


def test_two_teams_have_pools_of_the_same_name_each(team, other_team):
    assert pool_ensure(team=team).pk != pool_ensure(team=other_team).pk
    assert pool_ensure(team=team).pk == pool_ensure(team=team).pk
    assert Pool.objects.count() == 2
