"""The history: its chain, its cuts and its page."""

import csv
import io
import re
from datetime import timedelta

import pytest
import time_machine
from django.core.management import CommandError, call_command
from django.db import DatabaseError, connection, transaction

from tests.webapp.conftest import client_of
from webapp.accounts.models import Role
from webapp.accounts.services import member_add
from webapp.audit import chain
from webapp.audit.chain import KIND, events_seal, history_cut, old_history
from webapp.audit.guard import NAMES, guards_missing, guards_set
from webapp.audit.models import Cut, Event, Link
from webapp.core.clock import now
from webapp.core.display import cell
from webapp.core.problems import ConflictProblem

# The chain over the history: what it covers, what it finds, and what the database refuses.


pytestmark = pytest.mark.django_db(databases="__all__")


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


def test_one_changed_character_is_found(history):
    without_guards()
    row = Event.objects.filter(pk=history[2].pk)
    for field in ("actor", "kind", "subject", "to_state", "reason", "team_id", "detail"):
        before = row.values_list(field, flat=True).get()
        row.update(**{field: {"number": 3} if field == "detail" else "mallory"})
        [words] = found()
        assert words.startswith(f"Event {history[2].pk} "), field
        row.update(**{field: before})
        assert found() == [], field


def test_a_deleted_event_is_found_with_or_without_its_link(history):
    without_guards()
    Event.objects.filter(pk=history[1].pk).delete()
    assert found() == [f"Event {history[1].pk}, sealed as link 2, was deleted."]
    Link.objects.filter(position=2).delete()
    assert "Links 2 to 2 are missing." in found()


def test_an_end_that_was_cut_off_is_found_by_a_head_kept_elsewhere(history):
    kept = chain.head()
    without_guards()
    Link.objects.filter(position=5).delete()
    assert found() == []
    assert found(kept) == [
        f"The head {kept} is not in the chain: the end of the chain was cut or rewritten."
    ]


def test_a_chain_that_was_made_anew_does_not_hold_the_head_kept_elsewhere(history):
    kept = chain.head()
    without_guards()
    Event.objects.filter(pk=history[0].pk).update(actor="mallory")
    Link.objects.all().delete()
    chain.events_seal()
    assert found() == []
    assert len(found(kept)) == 1


def test_the_database_refuses_to_change_what_is_sealed(history):
    for table in ["jobs_event", "audit_link"]:
        for statement in ["DELETE FROM {}", "UPDATE {} SET {} = 'x'"]:
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


def test_the_command_agrees_with_a_head_that_it_printed_and_fails_by_what_it_found(
    history, capsys
):
    call_command("audit", "head")
    kept = capsys.readouterr().out.strip()
    call_command("audit", "verify", expect=kept)
    assert kept in capsys.readouterr().out
    without_guards()
    Event.objects.filter(pk=history[2].pk).update(actor="mallory")
    with pytest.raises(CommandError, match="does not agree"):
        call_command("audit", "verify")
    assert f"Event {history[2].pk} " in capsys.readouterr().err


# Old history goes by a cut that the chain tells of, and in no other way.


YEAR = timedelta(days=365)


@pytest.fixture
def long_history(db) -> list[Event]:
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


def test_what_is_old_goes_and_the_cut_is_told_and_sealed_in_the_part_that_stays(long_history):
    kept = Link.objects.get(position=5).digest
    assert cut() == 5
    left = Event.objects.exclude(kind=KIND).values_list("pk", flat=True)
    assert list(left) == [event.pk for event in long_history[5:]]
    assert (found(), chain.num_unsealed()) == ([], 0)
    told = Event.objects.get(kind=KIND)
    assert told.detail == {"position": 5, "digest": kept, "num_events": 5}
    assert told.actor == "root"
    assert Link.objects.latest("position").event_id == told.pk


def test_nothing_old_or_a_chain_that_does_not_hold_is_no_cut(long_history):
    assert history_cut(before=now() - 3 * YEAR, by="root") == 0
    assert not Cut.objects.exists()
    without_guards()
    Event.objects.filter(pk=long_history[1].pk).update(actor="mallory")
    with pytest.raises(ConflictProblem, match="Nothing was cut"):
        cut()
    assert Event.objects.count() == 8


def test_an_old_event_behind_a_young_one_stays(long_history):
    with time_machine.travel(now() - 2 * YEAR):
        late = happen(9)
    chain.events_seal()
    assert old_history(now() - YEAR).num_events == 5
    cut()
    assert Event.objects.filter(pk=late.pk).exists()
    assert found() == []


def test_the_chain_goes_on_after_a_cut_and_is_cut_again(long_history):
    cut()
    happen(20)
    assert chain.events_seal() == 1
    with time_machine.travel(now() + 2 * YEAR):
        assert cut() == 5
        assert Event.objects.get().kind == KIND
        assert found() == []


def test_all_history_may_go_but_for_the_word_of_it(long_history):
    with time_machine.travel(now() + 2 * YEAR):
        assert cut() == 8
    assert found() == []
    assert chain.events_seal() == 0


def test_a_head_of_the_part_that_stays_is_found_and_one_that_went_said_to_have_gone(long_history):
    kept, gone = chain.head(), str(Link.objects.get(position=3))
    cut()
    assert found(kept) == []
    assert found(f"{Cut.objects.get()}") == []
    assert any("was removed by the cut at link 5" in words for words in found(gone))


def test_after_a_cut_the_database_still_refuses_to_touch_the_rest_and_the_cut(long_history):
    cut()
    assert refused("DELETE FROM jobs_event WHERE kind <> 'audit.cut'")
    assert refused("DELETE FROM audit_link WHERE position = 7")
    assert refused("UPDATE jobs_event SET actor = 'x'")
    assert refused("UPDATE audit_link SET digest = 'x'")
    assert refused("UPDATE audit_cut SET position = 8")
    assert refused("DELETE FROM audit_cut")


def test_a_cut_that_no_sealed_event_tells_of_is_refused(long_history):
    for position in [5, 8, 99]:
        digest = Link.objects.get(position=min(position, 8)).digest
        with pytest.raises(DatabaseError, match="append-only"), transaction.atomic():
            Cut.objects.create(
                position=position, digest=digest, event_id=long_history[7].pk, num_events=5, at=now(),
            )  # fmt: skip


def test_a_cut_that_was_moved_is_found(long_history):
    cut()
    without_guards()
    Cut.objects.update(num_events=4)
    assert found() == ["The cut at link 5 is not the cut that the sealed history records."]


def test_the_event_of_a_cut_that_was_changed_is_found(long_history):
    cut()
    without_guards()
    Event.objects.filter(kind=KIND).update(detail={})
    assert len(found()) == 2


def test_a_row_that_was_changed_after_a_cut_is_found(long_history):
    cut()
    without_guards()
    Event.objects.filter(pk=long_history[5].pk).update(actor="mallory")
    [words] = found()
    assert words.startswith(f"Event {long_history[5].pk} ")


def test_the_command_verifies_after_a_cut(long_history, capsys):
    cut()
    call_command("audit", "verify")
    assert "The chain holds up to 9:" in capsys.readouterr().out
    with pytest.raises(CommandError):
        call_command("audit", "verify", expect="2:abc")


# The page of the history and its export.


@pytest.fixture
def admin(alice, team):
    member_add(team=team, user=alice, role=Role.ADMIN)
    return client_of(alice)


def happen_in(team, **changes) -> Event:
    fields = {"kind": "job.state", "subject": "one", "actor": "alice"}
    return Event.objects.create(at=now(), team_id=team.pk, **{**fields, **changes})


def shown(client, query: str = "") -> list[str]:
    return [event.subject for event in client.get(f"/audit/?{query}").context["page"]]


def test_the_newest_comes_first_says_whether_it_is_sealed_and_shows_markup_as_text(admin, team):
    happen_in(team)
    happen_in(team, subject="two")
    assert shown(admin) == ["two", "one"]
    happen_in(team)
    before = admin.get("/audit/").content.decode()
    events_seal()
    assert "pending" in before
    assert "pending" not in admin.get("/audit/").content.decode()
    happen_in(team, actor="<script>alert(1)</script>")
    assert "<script>alert(1)" not in admin.get("/audit/").content.decode()


def test_objects_are_links_with_their_names_and_what_is_gone_is_its_id(
    admin, team, alice, job, host
):
    for subject in (job.pk, host.pk, str(alice.pk), "01H" + "Z" * 23):
        happen_in(team, subject=subject)
    page = admin.get("/audit/").content.decode()
    for url, name in [
        (f"/jobs/{job.pk}/", job.name), (f"/hosts/{host.slug}/", host.name),
        ("/audit/?actor=alice", "alice"),
    ]:  # fmt: skip
        assert re.search(rf'href="{re.escape(url)}" title="[^"]+">{name}</a>', page), url
    assert f"<code>01H{'Z' * 23}</code>" in page


def test_another_teams_history_and_the_administrations_are_not_shown(admin, team, other_team):
    happen_in(other_team)
    Event.objects.create(at=now(), team_id="", kind="admin.write", actor="root")
    assert shown(admin) == []


def test_a_filter_keeps_what_matches(admin, team):
    happen_in(team)
    for query in ("from=2999-01-01", "to=2000-01-01"):
        assert shown(admin, query) == [], query
    happen_in(team, kind="host.state", actor="olga", subject="two")
    for query in (
        "kind=host.state",
        "actor=olga",
        "subject=two",
        "kind=host.state&from=2000-01-01",
    ):
        assert shown(admin, query) == ["two"], query


def test_no_cell_of_the_export_begins_a_formula(admin, team):
    names = ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", "  =1"]
    for name in names:
        happen_in(team, actor=name)
    text = admin.get("/audit/export/").content.decode()
    rows = list(csv.DictReader(io.StringIO(text, newline="")))
    assert sorted(row["actor"] for row in rows) == sorted(f"'{name}" for name in names)
    assert cell("alice - the first") == "alice - the first"
