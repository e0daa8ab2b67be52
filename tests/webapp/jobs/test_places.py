"""Where the hosts of a job meet: an address each, and a port that no other gang has."""

import pytest
from django.db import IntegrityError, transaction

from runners.messages import ClaimRequest, PreflightCheck
from tests.webapp.conftest import claim, make_facts, make_job
from tests.webapp.jobs.gangs import make_gang, make_hosts, members, start
from webapp.hosts.models import Host
from webapp.hosts.pools import devices_sync
from webapp.jobs.claims import attempt_claim
from webapp.jobs.models import Attempt
from webapp.jobs.reservations import free_port, gang_of
from webapp.jobs.services import job_submit

pytestmark = pytest.mark.django_db(databases="__all__")


@pytest.fixture
def hosts(team):
    return make_hosts(team, 2)


def reply_to(member: Attempt, **checks: bool):
    """Return what a host is answered whose preflight came out so."""
    found = tuple(PreflightCheck(name=name, ok=ok, sentence=name) for name, ok in checks.items())
    request = claim_request(member, found)
    return attempt_claim(attempt_id=member.pk, host=member.host, request=request)


def claim_request(member: Attempt, checks=()):
    return ClaimRequest(fence=member.fence, claim_id="folder", boot_id="boot-1", checks=checks)


def test_every_host_learns_where_the_first_is_and_who_it_is_itself(team, alice, hosts):
    first, second = (gang_of(member) for member in members(make_gang(team, alice, hosts)))

    assert (first.master_address, first.master_port) == ("10.0.0.1", 29400)
    assert (second.master_address, second.own_address) == ("10.0.0.1", "10.0.0.2")
    assert (second.node_rank, second.num_nodes, second.num_processes) == (1, 2, 1)
    assert first.rendezvous_id == second.rendezvous_id


def test_the_address_that_the_operator_chose_comes_before_the_first(team, alice, hosts):
    facts = hosts[0].facts | {"addresses": ["10.0.0.1", "192.168.7.1"]}
    Host.objects.filter(pk=hosts[0].pk).update(facts=facts, address="192.168.7.1")

    job = make_gang(team, alice, hosts)

    assert {member.address for member in members(job)} == {"10.0.0.2", "192.168.7.1"}


def test_a_host_without_an_address_sends_the_job_back_with_the_way_out(team, alice, hosts):
    Host.objects.filter(pk=hosts[1].pk).update(facts=hosts[1].facts | {"addresses": []})

    job = make_gang(team, alice, hosts)

    assert (job.state, job.reason) == ("queued", "preflight_failed")


def test_two_gangs_on_one_host_meet_at_different_ports(team, alice, hosts):
    gpus = [{"index": i, "uuid": f"G{i}", "name": "L4", "memory_bytes": 2**34} for i in range(4)]
    devices_sync(hosts[0], make_facts(gpus=gpus))
    jobs = [
        job_submit(job=make_job(team, alice, hosts[0], devices_per_host=2), by="alice")
        for _ in range(2)
    ]

    found = [gang_of(job.current_attempt) for job in jobs]

    assert [(place.master_port, place.num_processes) for place in found] == [
        (29400, 2),
        (29401, 2),
    ]
    assert {place.master_address for place in found} == {"127.0.0.1"}


def test_the_database_refuses_one_port_to_two_gangs(team, alice, hosts):
    leader, other = members(make_gang(team, alice, hosts))

    with pytest.raises(IntegrityError), transaction.atomic():
        Attempt.objects.filter(pk=other.pk).update(host=leader.host, master_port=29400)


def test_a_port_is_free_again_when_the_gang_has_ended(team, alice, hosts):
    job = make_gang(team, alice, hosts)
    Attempt.objects.filter(job=job).update(ended_at="2026-01-01T00:00Z")
    assert free_port(hosts[0]) == 29400


def test_a_port_that_is_taken_on_the_host_is_replaced_before_the_claim_holds(team, alice, hosts):
    leader = members(make_gang(team, alice, hosts))[0]

    reply = reply_to(leader, kind=True, ports=False)

    leader.refresh_from_db()
    assert (reply.may_start, reply.request.gang.master_port) == (False, 29401)
    assert (leader.claimed_at, leader.taken_ports) == (None, [29400])


def test_every_port_taken_sends_the_job_back(team, alice, hosts):
    facts = hosts[0].facts | {"last_gang_port": 29400}
    Host.objects.filter(pk=hosts[0].pk).update(facts=facts)
    job = make_gang(team, alice, hosts)

    with pytest.raises(Exception, match="given back"):
        reply_to(members(job)[0], ports=False)

    job.refresh_from_db()
    assert (job.state, job.reason) == ("queued", "preflight_failed")


def test_a_host_that_waits_for_the_others_is_asked_again_and_not_given_back(team, alice, hosts):
    leader, other = members(make_gang(team, alice, hosts))
    assert reply_to(leader, memory=True).may_start is False

    assert reply_to(leader, memory=False).may_start is False
    claim(other)

    assert reply_to(leader, memory=False).may_start is True


def test_one_host_that_is_not_fit_gives_back_every_part(team, alice, hosts):
    job = make_gang(team, alice, hosts)
    leader, other = members(job)
    claim(leader, "folder")

    with pytest.raises(Exception, match="given back"):
        reply_to(other, memory=False)
    with pytest.raises(Exception, match="withdrawn"):
        reply_to(leader)
    assert Attempt.objects.filter(job=job, ended_at=None).count() == 0


def test_a_job_of_one_process_has_no_place(attempt):
    assert gang_of(attempt) is None


def test_a_started_gang_still_gets_its_answer_when_the_reply_was_lost(team, alice, hosts):
    leader = start(make_gang(team, alice, hosts))[0]

    assert attempt_claim(
        attempt_id=leader.pk,
        host=leader.host,
        request=claim_request(leader).model_copy(update={"claim_id": "folder-0"}),
    ).may_start
