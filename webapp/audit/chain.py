"""Hash chain over committed events: built, verified, and cut to what is kept."""

import hashlib
import json
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import NamedTuple

from django.db import transaction

from webapp.audit.guard import guards_missing
from webapp.audit.models import Cut, Event, Link
from webapp.core.clock import now
from webapp.core.log_collector import audit_send
from webapp.core.problems import ConflictProblem

BATCH = 2000
# Event ids are not in commit order: search this far back for late commits.
LOOK_BACK = 10_000
BEGINNING = "0" * 64


def digest_of(event: Event, before: str) -> str:
    """Return the digest of an event, chained to the digest ``before``."""
    row = [
        event.pk,
        event.at.astimezone(UTC).isoformat(timespec="microseconds"),
        *(event.team_id, event.kind, event.subject, event.attempt_id),
        *(event.from_state, event.to_state, event.reason, event.actor, event.detail),
    ]
    content = json.dumps(row, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(f"{before}{content}".encode()).hexdigest()


def events_seal(most: int = BATCH) -> int:
    """Seal committed, unsealed events; return their number.

    Concurrent calls use the same position, so one of them fails and is retried later. What is
    sealed and committed goes to the log collector.
    """
    with transaction.atomic():
        last = Link.objects.order_by("-position").first()
        since = last.event_id - LOOK_BACK if last else 0
        sealed = Link.objects.filter(event_id__gt=since).values("event_id")
        waiting = Event.objects.filter(pk__gt=since).exclude(pk__in=sealed).order_by("pk")
        position, digest = (last.position, last.digest) if last else (0, BEGINNING)
        events, links = list(waiting[:most]), []
        for event in events:
            position, digest = position + 1, digest_of(event, digest)
            links.append(Link(position=position, event_id=event.pk, digest=digest))
        Link.objects.bulk_create(links)
    for event, link in zip(events, links, strict=True):
        fields = {name: value for name, value in vars(event).items() if not name.startswith("_")}
        audit_send(**fields | {"position": link.position, "digest": link.digest})
    return len(links)


def head() -> str:
    """Return the last link as ``position:digest``."""
    last = Link.objects.order_by("-position").first()
    return str(last) if last else f"0:{BEGINNING}"


def findings(expected_head: str = "") -> Iterator[str]:
    """Verify the chain and yield one sentence per inconsistency.

    A changed row is reported once; the following rows are verified from the stored link on. After
    a cut, the chain starts with the link named by the cut.
    """
    for name in guards_missing():
        yield (
            f"The database's guard {name} is missing: run `manage.py migrate`, and find out who "
            "dropped it."
        )
    cut = Cut.objects.order_by("-position").first()
    before, place = (cut.digest, cut.position) if cut else (BEGINNING, 0)
    known_heads = {"", f"0:{BEGINNING}", f"{place}:{before}"}
    if cut is not None:
        yield from _cut_findings(cut, expected_head)
    for links in _batches():
        known_heads |= {expected_head} & {str(link) for link in links}
        yield from _link_findings(links, before, place)
        before, place = links[-1].digest, links[-1].position
    if expected_head not in known_heads:
        yield (
            f"The head {expected_head} is not in the chain: the end of the chain was cut or "
            "rewritten."
        )


def _link_findings(links: list[Link], before: str, place: int) -> Iterator[str]:
    """Yield inconsistencies of consecutive links after the given digest and position."""
    events = Event.objects.in_bulk([link.event_id for link in links])
    for link in links:
        place += 1
        if link.position != place:
            yield f"Links {place} to {link.position - 1} are missing."
            place = link.position
        event = events.get(link.event_id)
        if event is None:
            yield f"Event {link.event_id}, sealed as link {place}, was deleted."
        elif digest_of(event, before) != link.digest:
            yield f"Event {link.event_id} ({event.kind}) or its link {place} was changed."
        before = link.digest


def _cut_findings(cut: Cut, expected_head: str) -> Iterator[str]:
    event = Event.objects.filter(pk=cut.event_id).first()
    is_sealed = Link.objects.filter(event_id=cut.event_id, position__gt=cut.position).exists()
    expected = {"position": cut.position, "digest": cut.digest, "num_events": cut.num_events}
    if event is None or not is_sealed or event.detail != expected:
        yield f"The cut at link {cut.position} is not the cut that the sealed history records."
    position = expected_head.partition(":")[0]
    if position.isdecimal() and 0 < int(position) < cut.position:
        yield (
            f"The head {expected_head} was removed by the cut at link {cut.position} of "
            f"{cut.at:%Y-%m-%d}: it can no longer be compared. Record a newer head."
        )


def _batches() -> Iterator[list[Link]]:
    place = 0
    while links := list(Link.objects.filter(position__gt=place)[:BATCH]):
        yield links
        place = links[-1].position


def num_unsealed() -> int:
    """Return the number of events without a link."""
    return Event.objects.exclude(pk__in=Link.objects.values("event_id")).count()


# Deletion of old history, such that the rest can still be verified by its chain.
#
# A cut is anchored first: an event with the last link to be deleted, its digest and the number of
# events is sealed at the chain's end. The triggers allow deletion only before an anchored cut.


KIND = "audit.cut"
SLICE = 2000


class Old(NamedTuple):
    """The part of the history to delete: its last link and its number of events."""

    link: Link
    num_events: int


def old_history(before: datetime) -> Old | None:
    """Return the longest prefix of the chain whose events all happened before ``before``."""
    recent = Event.objects.filter(at__gte=before).values("pk")
    first_recent = Link.objects.filter(event_id__in=recent).order_by("position").first()
    deletable = Link.objects.order_by("position")
    if first_recent is not None:
        deletable = deletable.filter(position__lt=first_recent.position)
    last = deletable.last()
    return Old(last, deletable.count()) if last else None


def history_cut(*, before: datetime, by: str) -> int:
    """Delete sealed events before an instant with their links; return their number.

    Raises:
        ConflictProblem: the chain is inconsistent; a cut would hide that.
    """
    while events_seal():
        pass
    if finding := next(findings(), ""):
        raise ConflictProblem("chain_broken", f"Nothing was cut: {finding}")
    with transaction.atomic():
        old = old_history(before)
        if old is None:
            return 0
        cut_anchor(old, by)
        while keys := list(
            Link.objects.filter(position__lte=old.link.position)
            .order_by("position")
            .values_list("event_id", flat=True)[:SLICE]
        ):
            Event.objects.filter(pk__in=keys).delete()
            Link.objects.filter(event_id__in=keys).delete()
    return old.num_events


def cut_anchor(old: Old, by: str) -> None:
    """Store and seal the event of a cut, then the cut itself."""
    instant = now()
    position, digest = old.link.position, old.link.digest
    detail = {"position": position, "digest": digest, "num_events": old.num_events}
    event = Event.objects.create(at=instant, team_id="", kind=KIND, actor=by[:80], detail=detail)
    while events_seal():
        pass
    cut = Cut(position=position, digest=digest, event_id=event.pk, at=instant)
    cut.num_events = old.num_events
    cut.save(force_insert=True)
