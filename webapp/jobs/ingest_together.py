"""Store routine events of many attempts in one transaction: points, logs, progress, phases.

They change no state, so they only need the job's row lock. All other batches go through
``ingest`` alone, as do batches that were refused here or whose job could not be locked.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from django.db import transaction
from pydantic import ValidationError

from runners.messages import ReceivedBatch, RunEvent, first_fault
from runners.wire import excerpt
from webapp.core.rows import RowChange, update_each
from webapp.hosts.hourly import QuotaProblem, keep_events
from webapp.hosts.refused import Refusal, refusals_record
from webapp.jobs.attempt_events import job_figures
from webapp.jobs.ingest import event_row, is_row, metric_points, split_batch, storable
from webapp.jobs.live import messages_of
from webapp.jobs.models import LIVE_STATES, Attempt, AttemptEvent, Job
from webapp.live.publish import publish_all
from webapp.metrics import store

ROUTINE = frozenset({"metric", "log", "progress", "phase"})


class HostBatch(NamedTuple):
    """A batch with the id of its sender and its transmitted size in bytes."""

    host_id: str
    batch: ReceivedBatch
    num_bytes: int = 0


@dataclass
class _Report:
    """The events that one locked attempt reports in this transaction."""

    attempt: Attempt
    team_id: str
    is_current: bool  # the job is live and has no newer attempt
    stored_seq: int  # before this transaction
    has_reported: bool = False
    rows: list[RunEvent] = field(default_factory=list)  # stored even if their body is invalid
    understood: list[RunEvent] = field(default_factory=list)
    points: list[store.Point] = field(default_factory=list)
    refused: list[Refusal] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)

    def take(self, batch: ReceivedBatch) -> int:
        """Accept the next events and return the last sequence number stored afterwards."""
        attempt = self.attempt
        sifted = split_batch(batch.events, attempt.acked_seq)
        fresh = [storable(each) for each in sifted.fresh if isinstance(each, RunEvent)]
        attempt.acked_seq += len(fresh)
        attempt.dropped_duplicates += sifted.duplicates
        attempt.refused_gaps += sifted.gaps
        points, refused = metric_points(attempt, fresh)
        self.points += points
        self.refused += refused
        numbers = {point.seq for point in points}
        self.rows += filter(is_row, fresh)
        self.understood += [
            each
            for each in fresh
            if (self._read_figures(each) if is_row(each) else each.seq in numbers)
        ]
        self.has_reported = True
        return attempt.acked_seq

    def _read_figures(self, event: RunEvent) -> bool:
        """Read the job's figures from an event; return whether its body is valid."""
        try:
            self.figures |= job_figures(event.kind, event.body)
        except ValidationError as error:
            reason = f"{event.kind}: {first_fault(error)}"
            self.refused.append(Refusal("event", reason, excerpt(event.body), self.attempt.pk))
            return False
        return True


def is_routine(batch: ReceivedBatch) -> bool:
    """Return whether a batch holds only valid events that change no state."""
    return all(isinstance(each, RunEvent) and each.kind in ROUTINE for each in batch.events)


def events_accept_together(batches: Sequence[HostBatch]) -> list[int | None]:
    """Store routine batches and return for each the highest number stored.

    None means that a batch must be stored alone: its host has no such attempt with this fence or
    exceeded its quota, or another transaction has locked the job.
    """
    with transaction.atomic():
        reports = _locked({each.batch.attempt_id for each in batches})
        stored: list[int | None] = []
        for each in batches:
            report = reports.get(each.batch.attempt_id)
            may_take = report is not None and _is_own(report, each) and _is_within_quota(each)
            stored.append(report.take(each.batch) if report and may_take else None)
        reporting = [report for report in reports.values() if report.has_reported]
        _store(reporting)
    publish_all(
        message
        for report in reporting
        for message in messages_of(report.attempt, report.team_id, report.understood)
    )
    return stored


def _is_own(report: _Report, batch: HostBatch) -> bool:
    """Return whether host and fence match the attempt."""
    attempt = report.attempt
    return (attempt.host_id, attempt.fence) == (batch.host_id, batch.batch.fence)


def _is_within_quota(sent: HostBatch) -> bool:
    host_id, batch, num_bytes = sent
    try:
        keep_events(host_id, batch.attempt_id, num_events=len(batch.events), num_bytes=num_bytes)
    except QuotaProblem:  # reported when the batch is stored alone
        return False
    return True


def _locked(attempt_ids: set[str]) -> dict[str, _Report]:
    """Return the attempts whose jobs could be locked without waiting, each locked after its job.

    Locks are skipped, not awaited: waiting for one job while holding another may deadlock.
    """
    job_ids = set(Attempt.objects.filter(pk__in=attempt_ids).values_list("job_id", flat=True))
    jobs = {
        pk: (team, current if state in LIVE_STATES else None)
        for pk, team, current, state in Job.objects.select_for_update(skip_locked=True)
        .filter(pk__in=job_ids)
        .order_by("pk")
        .values_list("pk", "team_id", "current_attempt_id", "state")
    }
    attempts = (
        Attempt.objects.select_for_update(skip_locked=True)
        .filter(pk__in=attempt_ids, job__in=jobs)
        .order_by("pk")
        .only(
            "job_id", "host_id", "fence", "node_rank", "acked_seq", "dropped_duplicates",
            "refused_gaps",
        )
    )  # fmt: skip
    return {
        each.pk: _Report(
            each, jobs[each.job_id][0], jobs[each.job_id][1] == each.pk, each.acked_seq
        )
        for each in attempts
    }


def _store(reports: Sequence[_Report]) -> None:
    surplus = store.append_all(
        store.Delivery(each.attempt.pk, each.points, each.stored_seq) for each in reports
    )
    for attempt_id, reasons in surplus.items():
        report = next(each for each in reports if each.attempt.pk == attempt_id)
        report.refused += [Refusal("event", why, attempt_id=attempt_id) for why in reasons]
    AttemptEvent.objects.bulk_create(
        event_row(each.attempt, event) for each in reports for event in each.rows
    )
    update_each(Attempt, map(_attempt_change, reports))
    update_each(Job, _job_changes(reports))
    for each in reports:
        refusals_record(each.attempt.host_id, each.refused)


def _attempt_change(report: _Report) -> RowChange:
    attempt = report.attempt
    values = {
        "acked_seq": attempt.acked_seq,
        "missed_beats": 0,
        "dropped_duplicates": attempt.dropped_duplicates,
        "refused_gaps": attempt.refused_gaps,
    }
    return RowChange(attempt.pk, values)


def _job_changes(reports: Iterable[_Report]) -> Iterable[RowChange]:
    """Return the job columns to update; only current attempts update their jobs."""
    return (
        RowChange(each.attempt.job_id, each.figures)
        for each in reports
        if each.is_current and each.figures
    )
