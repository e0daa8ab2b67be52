"""Rules that hold a job back regardless of free devices, each with its sentence."""

from collections.abc import Sequence
from datetime import timedelta

from runners.timing import scaled
from webapp.core.clock import now
from webapp.hosts.pools import teams_of
from webapp.jobs.models import Event, Job, JobState
from webapp.queue.quotas import devices_sentence, held_devices, hours_sentence, quota_of

PREFLIGHT_RETRY = timedelta(seconds=scaled(30, least=1))


class Rules:
    """The rules for the jobs of one queue, loaded once for all of them."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._failed = {event.subject: event for event in failed_preflights(jobs)}
        guests = {job.pool_id: job.pool for job in jobs if job.team_id != job.pool.team_id}
        self._guests = {pk: teams_of(pool) for pk, pool in guests.items()}
        teams = {job.team_id: job.team for job in jobs}
        self._quotas = {pk: quota_of(team) for pk, team in teams.items()}
        self._held = {
            pk: held_devices(teams[pk])
            for pk, quota in self._quotas.items()
            if quota.max_devices is not None
        }
        self._hours = {pk: hours_sentence(teams[pk], quota) for pk, quota in self._quotas.items()}

    def __call__(self, job: Job) -> str:
        """Return why the job may not start now; empty if it may."""
        of_team = self._not_shared(job) or self._hours[job.team_id]
        return of_team or self._retry_delay(job) or self._devices(job)

    def shares(self) -> dict[str, float]:
        """Return each team's share."""
        return {pk: max(quota.share, 0.01) for pk, quota in self._quotas.items()}

    def may_take(self, job: Job, devices: int) -> bool:
        """Return whether the team may hold this many more devices, and count them if so."""
        limit = self._quotas[job.team_id].max_devices
        held = self._held.get(job.team_id, 0)
        if limit is not None and held + devices > limit:
            return False
        self._held[job.team_id] = held + devices
        return True

    def _not_shared(self, job: Job) -> str:
        """Return why a job waits whose pool is no longer shared with its team."""
        if job.team_id in self._guests.get(job.pool_id, {job.team_id}):
            return ""
        return (
            "Its pool belongs to another team and is not shared with yours any more: stop the "
            "job, or ask an admin to share the pool again."
        )

    def _devices(self, job: Job) -> str:
        return devices_sentence(job, self._quotas[job.team_id], self._held.get(job.team_id, 0))

    def _retry_delay(self, job: Job) -> str:
        """Return why a job waits after a failed preflight."""
        failed = self._failed.get(job.pk)
        if failed is None or failed.at + PREFLIGHT_RETRY <= now():
            return ""
        checks = failed.detail.get("checks", [])
        sentences = [check["sentence"] for check in checks if not check["ok"]]
        return "The last check failed and is tried again: " + " ".join(sentences)


def failed_preflights(jobs: Sequence[Job]) -> list[Event]:
    """Return the preflight failures that requeued one of the jobs, the oldest first."""
    events = Event.objects.filter(
        kind="job.state",
        subject__in=[job.pk for job in jobs],
        from_state=JobState.PREFLIGHT,
        to_state=JobState.QUEUED,
    )
    return list(events.order_by("id"))
