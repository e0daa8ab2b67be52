"""A database that is an old backup is noticed, and what was revoked does not come back."""

import pytest
from django.contrib.sessions.models import Session
from django.core.management import call_command

from runners.messages import BeatReply, EpochShown
from tests.webapp.api.conftest import HostClient
from tests.webapp.conftest import claim, client_of, enrol, make_beat, make_microbench
from webapp.core.problems import BusyProblem
from webapp.hosts.epoch import epoch, epoch_advance, epoch_raise, is_restored, shown
from webapp.hosts.heartbeats import host_beat
from webapp.hosts.models import EnrolmentToken, Epoch, Host
from webapp.hosts.services import credential_revoke, token_create
from webapp.jobs.models import Attempt, Event
from webapp.jobs.services import job_submit

pytestmark = pytest.mark.django_db(databases="__all__")


def beat(host: Host, seen: EpochShown | None = None) -> BeatReply:
    return host_beat(host=host, beat=make_beat(epoch=seen, microbench=make_microbench()))


def restore(number: int = 1) -> None:
    """Put the database back to where it was: a host may have seen more."""
    Epoch.objects.update(number=number, highest_seen=0)
    Host.objects.update(epoch_seen=0)


def test_every_beat_takes_the_epoch_home(host):
    assert beat(host).epoch == shown(epoch().number)


def test_revoking_and_enrolling_raise_it(host):
    before = epoch().number
    credential_revoke(host=host, by="olga")
    enrol(host.team, name="Next")
    assert epoch().number == before + 2


def test_a_host_that_saw_more_tells_that_this_is_a_backup(host):
    seen = shown(9)
    restore()
    beat(host, seen)
    assert is_restored()
    assert Event.objects.get(kind="site.restored").detail == {"seen": 9}


def test_it_is_told_once(host):
    restore()
    for _ in range(3):
        beat(host, shown(9))
    assert Event.objects.filter(kind="site.restored").count() == 1


def test_a_host_cannot_make_an_epoch_up(host):
    beat(host, EpochShown(number=999, proof="0" * 64))
    assert not is_restored()
    host.refresh_from_db()
    assert host.epoch_seen == 0


def test_a_host_that_saw_as_much_or_less_is_no_sign(host):
    epoch_advance()
    beat(host, shown(epoch().number))
    beat(host, shown(1))
    assert not is_restored()


def test_a_backup_starts_nothing(draft, host):
    restore()
    beat(host, shown(9))
    job = job_submit(job=draft, by="alice")
    assert not Attempt.objects.filter(job=job).exists()
    assert beat(host, shown(9)).wanted == ()


def test_a_backup_gives_no_spec_to_what_was_chosen_before(job, host):
    restore()
    beat(host, shown(9))
    assert beat(host, shown(9)).wanted == ()
    with pytest.raises(BusyProblem, match="epoch raise"):
        claim(job.current_attempt)


def test_the_first_page_says_so(alice, job, host):
    restore()
    beat(host, shown(9))
    assert "Restored from a backup: nothing starts" in client_of(alice).get("/").content.decode()


def test_after_it_was_raised_work_goes_on(job, host):
    restore()
    beat(host, shown(9))
    epoch_raise(by="root")
    reply = beat(host, shown(9))
    assert [each.attempt_id for each in reply.wanted] == [job.current_attempt_id]
    assert reply.epoch == shown(10)


def test_a_credential_that_was_revoked_after_the_backup_does_not_come_back(team):
    honest, _ = enrol(team, name="Honest")
    stolen, credential = enrol(team, name="Stolen")
    kept = Host.objects.get(pk=stolen.pk)
    seen_before = shown(epoch().number)
    credential_revoke(host=stolen, by="olga")
    seen_after = shown(epoch().number)
    restore(number=seen_before.number)
    kept.save()
    assert (
        HostClient(credential).post("/hosts/beat", make_beat(epoch=seen_before)).status_code == 200
    )
    beat(honest, seen_after)
    assert [host.name for host in epoch_raise(by="root")] == ["Stolen"]
    assert HostClient(credential).post("/hosts/beat", make_beat()).status_code == 401
    assert Host.objects.get(pk=honest.pk).credential_hash


def test_sessions_and_unused_tokens_end_with_a_backup(alice, team, host):
    client_of(alice)
    token_create(team=team, by=None, name="Old")
    restore()
    beat(host, shown(9))
    epoch_raise(by="root")
    assert not Session.objects.exists()
    assert not EnrolmentToken.objects.filter(used_at=None, revoked_at=None).exists()


def test_raising_it_without_a_backup_ends_nothing(host, alice):
    client_of(alice)
    assert epoch_raise(by="root") == []
    assert Session.objects.exists()


def test_the_command_says_where_the_site_stands(host, capsys):
    restore()
    beat(host, shown(9))
    call_command("epoch", "show")
    assert "1 hosts have seen 9" in capsys.readouterr().out
    call_command("epoch", "raise")
    assert "This site's epoch is 10." in capsys.readouterr().out
