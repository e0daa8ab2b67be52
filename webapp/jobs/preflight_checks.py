"""The preflight checks of an attempt, by host and server."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from runners.datasets.repositories import DATA_SETS
from runners.shared.reasons import Reason
from webapp.audit.models import Event
from webapp.core.display import capitalised
from webapp.hosts.models import Host
from webapp.jobs.allocation import MAX_PREFLIGHTS
from webapp.jobs.cached_models import hosts_with, largest_use
from webapp.jobs.models import Job, JobState

MODEL = "Model"  # the check of the weights that a job names
BY_HOST = "host:"  # before the slug of a host that acts


@dataclass(frozen=True)
class ChecklistLine:
    """One line of a checklist."""

    name: str
    is_ok: bool
    sentence: str
    remedy: str

    @property
    def status(self) -> str:
        """Return the status that selects the line's icon."""
        return "ready" if self.is_ok else "failed"


@dataclass(frozen=True)
class CheckRun:
    """One run of the preflight checks: title, time, and every check."""

    title: str
    at: datetime
    checks: tuple[ChecklistLine, ...]


@dataclass(frozen=True)
class Preflight:
    """The state of a job's preflight: a sentence, and the latest check runs."""

    sentence: str
    looks: tuple[CheckRun, ...]


def checks_of(event: Event) -> tuple[ChecklistLine, ...]:
    """Return the checks of an event: failed ones first, then those with advice."""
    checks = [
        ChecklistLine(
            capitalised(str(check.get("name", ""))),
            bool(check.get("ok")),
            str(check.get("sentence", "")),
            str(check.get("remedy", "")),
        )
        for check in event.detail.get("checks", ())
    ]
    return tuple(sorted(checks, key=lambda check: (check.is_ok, not check.remedy)))


def preflight_of(job: Job, events: Sequence[Event]) -> Preflight | None:
    """Return the preflight of a job in preflight or returned from it, else None."""
    is_back = job.state == JobState.QUEUED or job.reason == Reason.PREFLIGHT_FAILED
    check_events = [event for event in events if event.kind == "job.state" and event.detail]
    check_events = [event for event in check_events if event.detail.get("checks")]
    if not check_events or not (is_back or job.state == JobState.PREFLIGHT):
        return None
    last = check_events[-1]
    if job.state == JobState.PREFLIGHT:
        sentence = (
            f"{_host(job)} passes the checks by its last heartbeat. The host now runs its own "
            "checks, then the job starts."
        )
        return Preflight(sentence, (_check_run(last),))
    return Preflight(_outcome(job, events), (_with_copies(job, last),))


def _with_copies(job: Job, event: Event) -> CheckRun:
    """Return checks; of a model that a host cannot have, with one that has it: two queries."""
    run, host = _check_run(event), event.actor.removeprefix(BY_HOST)
    lacks = [each for each in run.checks if each.name == MODEL and not each.is_ok]
    use = largest_use(job.spec)
    if not lacks or use is None or use.repository.startswith(DATA_SETS):
        return run
    others = dict(Host.objects.filter(team=job.team_id).values_list("pk", "slug"))
    having = sorted(others[each] for each in hosts_with([use], others.keys())[use])
    if not having or host in having:
        return run
    copy = f"slipway models copy {use.repository} {host} --from {having[0]}"
    more = f"The cache of {having[0]} has it: `{copy}`."
    checks = tuple(
        replace(each, remedy=f"{each.remedy} {more}".strip()) if each in lacks else each
        for each in run.checks
    )
    return replace(run, checks=checks)


def _host(job: Job) -> str:
    return job.place


def _outcome(job: Job, events: Sequence[Event]) -> str:
    failed = sum(1 for event in events if event.reason == Reason.PREFLIGHT_FAILED)
    if job.state == JobState.QUEUED:
        return f"Try {failed} of {MAX_PREFLIGHTS} failed; the next attempt is in half a minute."
    tries = "1 try" if failed == 1 else f"{failed} tries"
    return f"{tries} failed, so the job ended. Correct the problem and clone the job."


def _check_run(event: Event) -> CheckRun:
    by_host = event.actor.startswith(BY_HOST)
    title = "Checked by the host" if by_host else "By the host's last heartbeat"
    return CheckRun(title, event.at, checks_of(event))
