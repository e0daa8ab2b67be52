"""Seals committed events in batches, apart from whoever writes them, and finds what was changed.

Whoever writes an event never waits for the chain: the ticker seals what was committed, some
seconds later. Until then, and against somebody who may take triggers away and compute the chain
anew, only a head that is kept elsewhere helps: ``manage.py audit head`` prints it.
"""

import hashlib
import json
from collections.abc import Iterator
from datetime import UTC

from django.db import transaction

from webapp.audit.guard import guards_missing
from webapp.audit.models import Link
from webapp.jobs.models import Event

BATCH = 2000
# Transactions commit out of the order of their ids: so far back a late one is looked for.
LOOK_BACK = 10_000
BEGINNING = "0" * 64


def digest_of(event: Event, before: str) -> str:
    """Return the seal of an event after the link ``before``."""
    row = [
        event.pk,
        event.at.astimezone(UTC).isoformat(timespec="microseconds"),
        *(event.team_id, event.kind, event.subject, event.attempt_id),
        *(event.from_state, event.to_state, event.reason, event.actor, event.detail),
    ]
    content = json.dumps(row, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(f"{before}{content}".encode()).hexdigest()


def events_seal(most: int = BATCH) -> int:
    """Seal committed events that are not sealed yet; return how many.

    Two that seal at once want the same position: one of them fails and comes back.
    """
    with transaction.atomic():
        last = Link.objects.order_by("-position").first()
        since = last.event_id - LOOK_BACK if last else 0
        sealed = Link.objects.filter(event_id__gt=since).values("event_id")
        waiting = Event.objects.filter(pk__gt=since).exclude(pk__in=sealed).order_by("pk")
        position, digest = (last.position, last.digest) if last else (0, BEGINNING)
        links = []
        for event in waiting[:most]:
            position, digest = position + 1, digest_of(event, digest)
            links.append(Link(position=position, event_id=event.pk, digest=digest))
        Link.objects.bulk_create(links)
    return len(links)


def head() -> str:
    """Return the last link as ``position:digest``."""
    last = Link.objects.order_by("-position").first()
    return str(last) if last else f"0:{BEGINNING}"


def findings(expected_head: str = "") -> Iterator[str]:
    """Say what does not agree with the chain: a sentence each, nothing when all is well.

    A row that was changed is told once; what follows is judged from the stored link on.
    """
    for name in guards_missing():
        yield f"The database's guard {name} is gone: run `manage.py migrate` and ask who took it."
    before, place = BEGINNING, 0
    is_expected = not expected_head or expected_head == f"0:{BEGINNING}"
    for links in _batches():
        events = Event.objects.in_bulk([link.event_id for link in links])
        for link in links:
            place += 1
            if link.position != place:
                yield f"Links {place} to {link.position - 1} are gone."
                place = link.position
            event = events.get(link.event_id)
            if event is None:
                yield f"Event {link.event_id}, sealed as link {place}, was deleted."
            elif digest_of(event, before) != link.digest:
                yield f"Event {link.event_id} ({event.kind}) or its link {place} was changed."
            before = link.digest
            is_expected = is_expected or str(link) == expected_head
    if not is_expected:
        yield f"The head {expected_head} is not in the chain: its end was cut or made anew."


def _batches() -> Iterator[list[Link]]:
    place = 0
    while links := list(Link.objects.filter(position__gt=place)[:BATCH]):
        yield links
        place = links[-1].position


def num_unsealed() -> int:
    """Return how many events no link covers."""
    return Event.objects.exclude(pk__in=Link.objects.values("event_id")).count()
