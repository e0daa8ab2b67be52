"""Refused messages of hosts: stored, counted and bounded, for operators."""

from collections.abc import Iterable
from itertools import groupby
from typing import Literal, NamedTuple

from django.db.models import F

from webapp.core.clock import now
from webapp.hosts.models import RefusedMessage

MAX_ROWS_PER_HOST = 100  # distinct reasons; the oldest are deleted first
MAX_REASON_CHARACTERS = 300
MAX_EXCERPT_CHARACTERS = 500
RefusedKind = Literal["heartbeat", "event", "stream"]


class Refusal(NamedTuple):
    """One rejected message or part of a message."""

    kind: RefusedKind
    reason: str
    excerpt: str = ""
    attempt_id: str = ""


def refusals_record(host_id: str, refusals: Iterable[Refusal]) -> None:
    """Count a host's refusals by kind and reason; store an excerpt of the last of each."""
    truncated = [
        each._replace(
            reason=each.reason[:MAX_REASON_CHARACTERS],
            excerpt=each.excerpt[:MAX_EXCERPT_CHARACTERS],
            attempt_id=each.attempt_id[:64],
        )
        for each in refusals
    ]
    for _, group in groupby(sorted(truncated, key=_key), key=_key):
        _count(host_id, list(group))


def _key(refusal: Refusal) -> tuple[str, str]:
    return refusal.kind, refusal.reason


def _count(host_id: str, refusals: list[Refusal]) -> None:
    last, instant = refusals[-1], now()
    existing = RefusedMessage.objects.filter(host=host_id, kind=last.kind, reason=last.reason)
    fields = {"attempt_id": last.attempt_id, "excerpt": last.excerpt, "last_at": instant}
    if existing.update(count=F("count") + len(refusals), **fields):
        return
    RefusedMessage.objects.bulk_create(
        [
            RefusedMessage(
                host_id=host_id, kind=last.kind, reason=last.reason, count=len(refusals),
                first_at=instant, **fields,
            )
        ],
        ignore_conflicts=True,
    )  # fmt: skip
    rows = RefusedMessage.objects.filter(host=host_id)
    oldest = rows.values_list("pk", flat=True)[MAX_ROWS_PER_HOST:]
    rows.filter(pk__in=list(oldest)).delete()
