"""How each host's part of a job ended, which ended first, and the last lines of its ranks."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from django.utils.timezone import localtime

from runners.reasons import Reason
from webapp.core.clock import now
from webapp.core.units import clock
from webapp.core.wording import capitalised, listed
from webapp.hosts.contact import Contact, contact_of, silent_seconds
from webapp.jobs.endings import ending_words, host_rows
from webapp.jobs.gangs import first_ended, members_of
from webapp.jobs.logs import SUPERVISOR, log_lines
from webapp.jobs.models import Attempt, Job
from webapp.jobs.rank_lines import RankOutput, first_failure, only_rank, split_by_rank
from webapp.jobs.reasons import words_for

LOG_LINES = 2000  # log lines searched for the last ones of each rank
RANK_LINES = 40


@dataclass(frozen=True)
class RankLines:
    """The last lines of one rank."""

    title: str
    lines: Sequence[str]


@dataclass(frozen=True)
class PartEnd:
    """How a job's part on one host ended."""

    attempt: Attempt
    at: datetime | None  # by the server's clock; None: no end reported
    rank: int | None  # the first rank to end there, as far as the processes reported it
    how: str
    why: str
    silence: str
    is_first: bool
    is_shared: bool  # one of several processes, on this or other hosts
    ranks: Sequence[RankLines]
    report: Sequence[str]
    host_rows: Sequence[tuple[str, str]]

    @property
    def host_name(self) -> str:
        """Return the name of the part's host."""
        return self.attempt.host.name

    @property
    def rank_words(self) -> str:
        """Return for example ``rank 3`` if the rank is known and not the only one."""
        return "" if self.rank is None or not self.is_shared else f"rank {self.rank}"


def part_ends(job: Job) -> list[PartEnd]:
    """Return the parts of a job's latest attempt: the one that ended first, then by host."""
    if job.current_attempt is None:
        return []
    first = first_ended(job.current_attempt)
    decisive = first.member.pk if first else None
    parts = [_part(job, each, decisive) for each in members_of(job.current_attempt)]
    return sorted(parts, key=lambda part: (not part.is_first, part.attempt.node_rank))


def _part(job: Job, attempt: Attempt, decisive: str | None) -> PartEnd:
    record = attempt.exit_record
    last = [str(line) for line in record.get("last_lines") or ()]
    num_ranks = max(1, attempt.allocations.filter(device__kind="gpu").count())
    output = _rank_output(job, last, num_ranks)
    failure = first_failure(last)
    return PartEnd(
        attempt=attempt,
        at=_ended_at(attempt),
        rank=failure.rank if failure else only_rank(output),
        how=ending_words(failure.record if failure else record),
        why=_reason_sentence(record),
        silence=_silence(attempt),
        is_first=attempt.pk == decisive,
        is_shared=job.is_shared_out,
        ranks=_rank_lines(attempt, output, num_ranks),
        report=output.report,
        host_rows=host_rows(record),
    )


def _ended_at(attempt: Attempt) -> datetime | None:
    ended_ms = attempt.exit_record.get("ended_at_ms")
    if not ended_ms:
        return None
    offset_ms = attempt.host.clock_offset_ms or 0
    return datetime.fromtimestamp((int(ended_ms) - offset_ms) / 1000, tz=UTC)


def _reason_sentence(record: dict[str, Any]) -> str:
    reason = record.get("reason")
    return words_for(str(reason)).sentence if reason else ""


def _silence(attempt: Attempt) -> str:
    """Return how long the host of an open part has been silent; empty while in contact."""
    seconds = silent_seconds(attempt.host)
    if attempt.ended_at is not None or seconds is None:
        return ""
    return "" if contact_of(attempt.host) is Contact.LIVE else clock(seconds)


def _rank_output(job: Job, lines: Sequence[str], num_ranks: int) -> RankOutput:
    if job.is_shared_out:
        return split_by_rank(lines, is_one=num_ranks == 1)
    return RankOutput({None: list(lines)} if lines else {}, [])


def _rank_lines(attempt: Attempt, output: RankOutput, num_ranks: int) -> list[RankLines]:
    """Return the last lines of each rank: from the exit record, else from the log."""
    by_rank = output.by_rank
    if num_ranks > 1 or not by_rank:
        log_page = log_lines(attempt, limit=LOG_LINES)
        stored = [line.text for line in log_page if line.stream != SUPERVISOR]
        by_rank = {**_rank_output(attempt.job, stored, num_ranks).by_rank, **by_rank}
    return [
        RankLines("" if rank is None else f"rank {rank}", lines[-RANK_LINES:])
        for rank, lines in sorted(by_rank.items(), key=lambda each: (each[0] is None, each[0]))
    ]


def first_words(parts: Sequence[PartEnd]) -> str:
    """Return which part ended first, when and how; empty for a job of one process."""
    first = next((part for part in parts if part.is_first), None)
    if first is None or not first.is_shared:
        return ""
    if first.at is None:
        when = "at a time it did not say"
    else:
        local = localtime(first.at)
        is_today = local.date() == localtime(now()).date()
        when = f"{local:%H:%M:%S}" if is_today else f"{local.day} {local:%b, %H:%M:%S}"
    place = ", ".join(text for text in (first.host_name, first.rank_words, when) if text)
    return f"Ended first on {place}. {capitalised(first.how)}"


def unheard_words(parts: Sequence[PartEnd]) -> str:
    """Return which parts never reported an end, and the likely consequence."""
    open_parts = [part for part in parts if part.attempt.ended_at is None]
    if not open_parts or len(parts) == 1:
        return ""
    names = listed(
        [
            f"{part.host_name} (silent for {part.silence})" if part.silence else part.host_name
            for part in open_parts
        ]
    )
    lost = any(
        part.is_first and part.attempt.exit_record.get("reason") == Reason.RANK_LOST
        for part in parts
    )
    cause = " It may be the cause: the others only lost it." if lost else ""
    return f"No end was reported by {names}.{cause}"
