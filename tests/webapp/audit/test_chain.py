"""The chain over the history: what it covers, what it finds, and what the database refuses."""

import pytest
from django.core.management import CommandError, call_command
from django.db import DatabaseError, connection, transaction

from webapp.audit import chain
from webapp.audit.guard import NAMES, guards_missing, guards_set
from webapp.audit.models import Link
from webapp.core.clock import now
from webapp.jobs.models import Event

pytestmark = pytest.mark.django_db


def happen(number: int, **changes) -> Event:
    fields = {"kind": "job.state", "subject": f"job-{number}", "actor": "alice"}
    detail = {"number": number, "share": 0.5, "words": "ünïcode"}
    return Event.objects.create(at=now(), detail=detail, **{**fields, **changes})


@pytest.fixture
def history(db) -> list[Event]:
    events = [happen(number) for number in range(5)]
    chain.events_seal()
    return events


def without_guards() -> None:
    """Do what somebody who owns the database could do first."""
    with connection.cursor() as cursor:
        for name in NAMES:
            table = name.split("_no_")[0]
            on = f" ON {table}" if connection.vendor == "postgresql" else ""
            cursor.execute(f"DROP TRIGGER {name}{on}")


def found(expected_head: str = "") -> list[str]:
    """Return what is found beyond the guards that a test took away."""
    return [words for words in chain.findings(expected_head) if "guard" not in words]


def test_every_committed_event_is_sealed_once(history):
    assert chain.events_seal() == 0
    assert list(Link.objects.values_list("event_id", flat=True)) == [e.pk for e in history]
    assert (list(chain.findings()), chain.num_unsealed()) == ([], 0)


def test_a_batch_goes_on_where_the_one_before_ended(db):
    for number in range(5):
        happen(number)

    assert [chain.events_seal(most=2) for _ in range(4)] == [2, 2, 1, 0]
    assert found() == []


def test_an_event_that_was_committed_late_is_sealed_behind_the_others(history):
    late = happen(9, pk=history[-1].pk + 100)
    chain.events_seal()
    happen(8, pk=late.pk - 50)

    assert chain.events_seal() == 1
    assert Link.objects.latest("position").event_id == late.pk - 50
    assert found() == []


@pytest.mark.parametrize("field", ["actor", "kind", "subject", "to_state", "reason", "team_id"])
def test_one_changed_character_is_found(history, field):
    without_guards()
    Event.objects.filter(pk=history[2].pk).update(**{field: "mallory"})

    [words] = found()
    assert words.startswith(f"Event {history[2].pk} ")


def test_a_changed_detail_is_found(history):
    without_guards()
    Event.objects.filter(pk=history[2].pk).update(detail={"number": 3})

    assert len(found()) == 1


def test_a_deleted_event_is_found(history):
    without_guards()
    Event.objects.filter(pk=history[1].pk).delete()

    assert found() == [f"Event {history[1].pk}, sealed as link 2, was deleted."]


def test_an_event_that_was_deleted_with_its_link_is_found(history):
    without_guards()
    Event.objects.filter(pk=history[1].pk).delete()
    Link.objects.filter(position=2).delete()

    assert "Links 2 to 2 are gone." in found()


def test_an_end_that_was_cut_off_is_found_by_a_head_kept_elsewhere(history):
    kept = chain.head()
    without_guards()
    Link.objects.filter(position=5).delete()

    assert found() == []
    assert found(kept) == [f"The head {kept} is not in the chain: its end was cut or made anew."]


def test_a_chain_that_was_made_anew_does_not_hold_the_head_kept_elsewhere(history):
    kept = chain.head()
    without_guards()
    Event.objects.filter(pk=history[0].pk).update(actor="mallory")
    Link.objects.all().delete()
    chain.events_seal()

    assert found() == []
    assert len(found(kept)) == 1


@pytest.mark.parametrize("table", ["jobs_event", "audit_link"])
@pytest.mark.parametrize("statement", ["DELETE FROM {}", "UPDATE {} SET {} = 'x'"])
def test_the_database_refuses_to_change_what_is_sealed(history, table, statement):
    column = {"jobs_event": "actor", "audit_link": "digest"}[table]
    with (
        pytest.raises(DatabaseError, match="append-only"),
        transaction.atomic(),
        connection.cursor() as cursor,
    ):
        cursor.execute(statement.format(table, column))


def test_a_guard_that_was_taken_away_is_found_and_set_again(history):
    without_guards()
    assert guards_missing() == sorted(NAMES)

    guards_set()
    assert guards_missing() == []


def test_the_command_says_what_it_found_and_fails(history, capsys):
    without_guards()
    Event.objects.filter(pk=history[2].pk).update(actor="mallory")

    with pytest.raises(CommandError, match="does not agree"):
        call_command("audit", "verify")
    assert f"Event {history[2].pk} " in capsys.readouterr().err


def test_the_command_agrees_with_a_head_that_it_printed(history, capsys):
    call_command("audit", "head")
    kept = capsys.readouterr().out.strip()

    call_command("audit", "verify", expect=kept)
    assert kept in capsys.readouterr().out
