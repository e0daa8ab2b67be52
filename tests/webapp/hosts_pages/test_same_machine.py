"""Hosts on one machine: what their pages say of it, and an operator's word against it."""

import pytest

from tests.webapp.conftest import client_of, make_beat, make_job
from tests.webapp.machines import GPU, host_of
from webapp.accounts.models import Membership, Role
from webapp.hosts.heartbeats import host_beat
from webapp.hosts.models import Distinction, Host
from webapp.jobs.models import Event, Job
from webapp.jobs.services import job_submit

pytestmark = pytest.mark.django_db(databases="__all__")


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


def test_a_host_alone_on_its_machine_says_nothing_of_it(olga, ours):
    assert "On the same machine" not in page(olga, ours)


def test_another_teams_host_is_told_of_without_its_name(olga, ours, theirs):
    shown = page(olga, ours)
    assert "A host of another team" in shown
    assert "runs as user 1002, this one&#x27;s as 1001: one job at a time" in shown
    assert "theirs" not in shown


def test_ones_own_other_host_is_named(olga, ours, team):
    host_of(team, "beside")
    shown = page(olga, ours)
    assert '<a href="/hosts/beside/">beside</a>' in shown
    assert "Both agents run as user 1001, so that jobs of both run side by side" in shown


def test_gpus_that_both_see_are_named_and_other_gpus_let_both_run(olga, team):
    host_of(team, "one", gpus=[GPU])
    host_of(team, "two", gpus=[GPU | {"index": 2}], user_id=1002)
    three = host_of(team, "three", gpus=[GPU | {"uuid": "GPU-two"}], user_id=1003)
    assert "it sees the same gpu 0" in page(olga, Host.objects.get(name="one")).lower()
    assert "has other GPUs, so that neither waits for the other" in page(olga, three)


def test_a_copy_of_a_disk_image_is_told_by_its_boot(olga, ours, theirs):
    host_beat(host=theirs, beat=make_beat(boot_id="boot-2"))
    assert "they name different boots, as copies of one disk image do" in page(olga, ours)


def test_a_machine_that_cannot_be_known_is_said_to_be_so(olga, team):
    host = host_of(team, "container", machine_id=None)
    assert "jobs of other hosts on it are not noticed" in page(olga, host)


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


def test_nothing_is_said_of_a_host_that_looks_like_another_machine(olga, ours, team):
    other = host_of(team, "elsewhere", machine_id="b" * 64)
    assert "No such host matches the machine of ours" in say(olga, ours, other)
    assert Distinction.objects.count() == 0


def test_who_is_no_operator_says_nothing(alice, ours, theirs):
    say(alice, ours, theirs)
    assert Distinction.objects.count() == 0
    assert "Another machine…" not in page(alice, ours)
