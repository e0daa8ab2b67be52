"""Optimistic locking of forms, with the author of the last change from the event history."""

from webapp.core.stale import refuse_stale
from webapp.jobs.models import Event


def refuse_if_changed(
    *, seen: str, now_there: object, what: str, subject: str, kind: str, reader: str
) -> None:
    """Reject a form whose values changed since; the last event says who changed them.

    Call it under the lock of the write. ``what`` starts the sentence: "The labels of Box were".

    Raises:
        ConflictProblem: the current values differ from those that the form showed.
    """
    last = Event.objects.filter(subject=subject, kind=kind).order_by("-id").first()
    by, at = (last.actor, last.at) if last else ("", None)
    refuse_stale(seen, now_there, what, by, at, reader=reader)
