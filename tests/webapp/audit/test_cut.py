"""Old history goes by a cut that the chain tells of, and in no other way."""

from datetime import timedelta

import pytest
import time_machine
from django.core.management import CommandError, call_command
from django.db import DatabaseError, connection, transaction

from tests.webapp.audit.test_chain import found, happen, without_guards
from webapp.audit import chain
from webapp.audit.chain import KIND, history_cut, old_history
from webapp.audit.models import Cut, Link
from webapp.core.clock import now
from webapp.core.problems import ConflictProblem
from webapp.jobs.models import Event

pytestmark = pytest.mark.django_db
YEAR = timedelta(days=365)


@pytest.fixture
def history(db) -> list[Event]:
    """Five events of two years ago and three of today, all sealed."""
    with time_machine.travel(now() - 2 * YEAR):
        old = [happen(number) for number in range(5)]
        chain.events_seal()
    young = [happen(number) for number in range(5, 8)]
    chain.events_seal()
    return [*old, *young]


def cut() -> int:
    return history_cut(before=now() - YEAR, by="root")


def refused(statement: str) -> bool:
    """Return whether the database refuses a statement."""
    try:
        with transaction.atomic(), connection.cursor() as cursor:
            cursor.execute(statement)
    except DatabaseError as error:
        return "append-only" in str(error)
    return False


def test_what_is_old_goes_and_the_rest_holds(history):
    assert cut() == 5
    assert [event.pk for event in Event.objects.exclude(kind=KIND)] == [e.pk for e in history[5:]]
    assert (found(), chain.num_unsealed()) == ([], 0)


def test_the_cut_is_told_in_the_part_that_stays_and_sealed_there(history):
    kept = Link.objects.get(position=5).digest
    cut()
    told = Event.objects.get(kind=KIND)
    assert told.detail == {"position": 5, "digest": kept, "num_events": 5}
    assert told.actor == "root"
    assert Link.objects.latest("position").event_id == told.pk


def test_nothing_old_is_no_cut(history):
    assert history_cut(before=now() - 3 * YEAR, by="root") == 0
    assert not Cut.objects.exists()


def test_an_old_event_behind_a_young_one_stays(history):
    with time_machine.travel(now() - 2 * YEAR):
        late = happen(9)
    chain.events_seal()
    assert old_history(now() - YEAR).num_events == 5
    cut()
    assert Event.objects.filter(pk=late.pk).exists()
    assert found() == []


def test_the_chain_goes_on_after_a_cut_and_is_cut_again(history):
    cut()
    happen(20)
    assert chain.events_seal() == 1
    with time_machine.travel(now() + 2 * YEAR):
        assert cut() == 5
        assert Event.objects.get().kind == KIND
        assert found() == []


def test_all_history_may_go_but_for_the_word_of_it(history):
    with time_machine.travel(now() + 2 * YEAR):
        assert cut() == 8
    assert found() == []
    assert chain.events_seal() == 0


def test_a_head_of_the_part_that_stays_is_still_found(history):
    kept = chain.head()
    cut()
    assert found(kept) == []
    assert found(f"{Cut.objects.get()}") == []


def test_a_head_that_went_is_said_to_have_gone(history):
    gone = str(Link.objects.get(position=3))
    cut()
    assert any("went with the cut at link 5" in words for words in found(gone))


def test_a_chain_that_does_not_hold_is_not_cut(history):
    without_guards()
    Event.objects.filter(pk=history[1].pk).update(actor="mallory")
    with pytest.raises(ConflictProblem, match="Nothing was cut"):
        cut()
    assert Event.objects.count() == 8


def test_after_a_cut_the_database_still_refuses_to_touch_the_rest(history):
    cut()
    assert refused("DELETE FROM jobs_event WHERE kind <> 'audit.cut'")
    assert refused("DELETE FROM audit_link WHERE position = 7")
    assert refused("UPDATE jobs_event SET actor = 'x'")
    assert refused("UPDATE audit_link SET digest = 'x'")


def test_a_cut_is_neither_changed_nor_taken_back(history):
    cut()
    assert refused("UPDATE audit_cut SET position = 8")
    assert refused("DELETE FROM audit_cut")


@pytest.mark.parametrize("position", [5, 8, 99])
def test_a_cut_that_no_sealed_event_tells_of_is_refused(history, position):
    digest = Link.objects.get(position=min(position, 8)).digest
    with pytest.raises(DatabaseError, match="append-only"), transaction.atomic():
        Cut.objects.create(
            position=position, digest=digest, event_id=history[7].pk, num_events=5, at=now()
        )


def test_a_cut_that_was_moved_is_found(history):
    cut()
    without_guards()
    Cut.objects.update(num_events=4)
    assert found() == ["The cut at link 5 is not the one that the sealed history tells of."]


def test_the_event_of_a_cut_that_was_changed_is_found(history):
    cut()
    without_guards()
    Event.objects.filter(kind=KIND).update(detail={})
    assert len(found()) == 2


def test_a_row_that_was_changed_after_a_cut_is_found(history):
    cut()
    without_guards()
    Event.objects.filter(pk=history[5].pk).update(actor="mallory")
    [words] = found()
    assert words.startswith(f"Event {history[5].pk} ")


def test_the_command_verifies_after_a_cut(history, capsys):
    cut()
    call_command("audit", "verify")
    assert "The chain holds up to 9:" in capsys.readouterr().out
    with pytest.raises(CommandError):
        call_command("audit", "verify", expect="2:abc")
