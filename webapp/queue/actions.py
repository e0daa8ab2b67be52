"""Changes by operators: the order of a queue, priorities, and a team's quota."""

import hashlib
from collections.abc import Callable, Mapping, Sequence

from django import forms
from django.contrib import messages
from django.db import transaction
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.http import require_http_methods

from webapp.accounts.models import Quota, Role, Team
from webapp.accounts.roles import check_role, current_role, current_team, is_at_least
from webapp.audit.models import refuse_if_changed
from webapp.core.clock import now
from webapp.core.problems import ConflictProblem, InvalidProblem, Problem
from webapp.core.stale import SEEN, mark_of
from webapp.hosts.models import Pool
from webapp.jobs.models import Event, Job, JobState, Priority
from webapp.jobs.reservations import pool_lock
from webapp.live.publish import jobs_topic, publish_all
from webapp.queue.policy import in_order
from webapp.queue.pool_state import pool_state_of, waiting_jobs
from webapp.queue.quotas import HOUR, limit_sentences, quota_of
from webapp.queue.rules import Rules

# Changes of a queue by operators: the order of jobs and their priority.


LONGEST = 9  # digits


def order_digest(order: Sequence[str]) -> str:
    """Return a digest of the first turns of a queue; a different order has another digest."""
    return f"{len(order)}_{hashlib.sha256(','.join(order).encode()).hexdigest()[:16]}"


def is_sealed(order: Sequence[str], seen: str) -> bool:
    """Return whether an order begins with the turns that a page showed."""
    number = seen.partition("_")[0]
    is_number = number.isascii() and number.isdigit() and len(number) < LONGEST
    return is_number and order_digest(order[: int(number)]) == seen


def job_move(*, pool: Pool, job_id: str, is_up: bool, seen: str, by: str) -> Job:
    """Swap a job with its neighbour, if the order still matches the digest ``seen``.

    Raises:
        ConflictProblem: the queue changed meanwhile, the job left it, or its neighbour has
            another priority.
    """
    with transaction.atomic():
        pool_lock(pool.pk)
        waiting = waiting_jobs(pool)
        jobs = {job.pk: job for job in waiting}
        snapshot = pool_state_of(pool, waiting, Rules(waiting)).snapshot
        order = [demand.job for demand in in_order(snapshot)]
        if job_id not in jobs or not is_sealed(order, seen):
            raise ConflictProblem(
                "queue_changed", "The queue has changed, so nothing was moved. Try again."
            )
        job = jobs[job_id]
        group = [pk for pk in order if jobs[pk].priority == job.priority]
        old = group.index(job_id)
        new = old + (-1 if is_up else 1)
        if not 0 <= new < len(group):
            raise ConflictProblem(
                "at_the_edge",
                f"{job.name} is {'first' if is_up else 'last'} of its priority; change the "
                "priority to move it further.",
            )
        group[old], group[new] = group[new], group[old]
        _rank(group, upto=max(old, new, _last_ranked(group, jobs)))
        _record(job, "job.moved", by, {"from": old + 1, "to": new + 1})
    _publish_change(pool)
    return job


def _last_ranked(group: Sequence[str], jobs: dict[str, Job]) -> int:
    return max((i for i, pk in enumerate(group) if jobs[pk].queue_rank is not None), default=0)


def _rank(group: Sequence[str], *, upto: int) -> None:
    """Set manual ranks for the first jobs of a group; later jobs remain in fair order."""
    for rank, pk in enumerate(group[: upto + 1], 1):
        Job.objects.filter(pk=pk).update(queue_rank=rank)


def job_prioritise(*, pool: Pool, job_id: str, priority: str, by: str, seen: str = "") -> Job:
    """Change the priority of a queued job and clear its manual rank.

    Raises:
        InvalidProblem: there is no such priority.
        ConflictProblem: the job is not queued in this pool any more, or its priority changed
            since the page that showed ``seen``.
    """
    if priority not in {str(value) for value in Priority.values}:
        choices = ", ".join(f"{value} ({label})" for value, label in Priority.choices)
        raise InvalidProblem("priority", f"priority is {priority!r}; it can be {choices}.")
    with transaction.atomic():
        rows = Job.objects.filter(pk=job_id, pool=pool, state=JobState.QUEUED, deleted_at=None)
        job = rows.select_for_update().first()
        if job is None:
            raise ConflictProblem("not_waiting", "The job has left the queue.")
        refuse_if_changed(
            seen=seen,
            now_there=job.priority,
            what=f"The priority of {job.name} was",
            subject=job.pk,
            kind="job.priority",
            reader=by,
        )
        before, job.priority, job.queue_rank = job.priority, int(priority), None
        job.save(update_fields=["priority", "queue_rank"])
        _record(job, "job.priority", by, {"from": before, "to": job.priority})
    _publish_change(pool)
    return job


def _record(job: Job, kind: str, by: str, detail: dict[str, int]) -> None:
    Event.objects.create(
        at=now(),
        team_id=job.team_id,
        kind=kind,
        subject=job.pk,
        from_state=job.state,
        to_state=job.state,
        actor=by,
        detail=detail,
    )


def _publish_change(pool: Pool) -> None:
    """Refresh open pages of all teams that may launch in the pool."""
    teams = [pool.team_id, *pool.shared_with.values_list("pk", flat=True)]
    publish_all((jobs_topic(team), "queue.changed", {"pool": pool.pk}) for team in teams)


# Quota of the current team: visible to all members, editable by operators.


HOURS_PER_YEAR = 366 * 24
BOUNDS = {
    "max_devices": (0, 100_000),
    "max_gpu_hours_per_month": (0, 1e9),
    "max_duration_hours": (0.01, HOURS_PER_YEAR),
    "max_queued_per_user": (0, 10_000),
    "share": (0.01, 1000),
}


class QuotaForm(forms.ModelForm[Quota]):
    """A form for a team's quota; an empty field means no limit."""

    max_duration_hours = forms.FloatField(
        required=False,
        label="Longest job, in hours",
        help_text="A job that runs longer is stopped. Empty: no limit.",
    )

    class Meta:
        model = Quota
        fields = ("max_devices", "max_gpu_hours_per_month", "max_queued_per_user", "share")
        labels = {
            "max_devices": "Devices at once",
            "max_gpu_hours_per_month": "GPU-hours a month",
            "max_queued_per_user": "Places in queues a person",
            "share": "Share",
        }
        help_texts = {
            "max_devices": "Of all pools together. Empty: no limit.",
            "max_gpu_hours_per_month": "Counted while a GPU is held. Empty: no limit.",
            "share": "A team of share 2 gets two turns while a team of share 1 gets one.",
        }

    field_order = ("max_devices", "max_gpu_hours_per_month", "max_duration_hours")

    def __init__(self, data: Mapping[str, object] | None, *, instance: Quota) -> None:
        seconds = instance.max_duration_seconds
        initial = {"max_duration_hours": seconds / HOUR if seconds else None}
        super().__init__(data, instance=instance, initial=initial)
        for name, (least, most) in BOUNDS.items():
            self.fields[name].validators.append(_between(least, most))

    def save(self, commit: bool = True) -> Quota:  # noqa: FBT001, FBT002 -- Django's signature
        """Store the limits, with the maximum duration in seconds."""
        hours = self.cleaned_data["max_duration_hours"]
        self.instance.max_duration_seconds = hours * HOUR if hours else None
        return super().save(commit)


def _between(least: float, most: float) -> Callable[[float], None]:
    def check(value: float) -> None:
        if not least <= value <= most:
            raise forms.ValidationError(f"It is {value:g}; it can be {least:g} to {most:g}.")

    return check


@require_http_methods(["GET", "POST"])
def queue_limits(request: HttpRequest) -> HttpResponse:
    """Show the limits of the current team; operators can change them."""
    team, role = current_team(request), current_role(request)
    if request.method == "POST":
        check_role(role, Role.OPERATOR)
    quota = quota_of(team)
    form = QuotaForm(request.POST or None, instance=quota)
    if request.method == "POST" and form.is_valid():
        try:
            _store(form, team, request.user.get_username(), request.POST.get(SEEN, ""))
        except Problem as problem:
            messages.warning(request, problem.detail)
        else:
            messages.success(request, f"The limits of {team.name} are changed.")
        return redirect("queue-limits")
    context = {
        "form": form,
        "team": team,
        "seen": mark_of(_values(quota)) if not form.is_bound else request.POST.get(SEEN, ""),
        "told": limit_sentences(team, request.user.pk),
        "is_operator": is_at_least(role, Role.OPERATOR),
    }
    return render(request, "queue/limits.html", context, status=422 if form.errors else 200)


def _store(form: QuotaForm, team: Team, by: str, seen: str) -> None:
    """Store the limits if they are unchanged since the person loaded the page.

    Raises:
        ConflictProblem: somebody else changed them since.
    """
    with transaction.atomic():
        Team.objects.select_for_update(no_key=True).get(pk=team.pk)
        refuse_if_changed(
            seen=seen,
            now_there=_values(quota_of(team)),
            what=f"The limits of {team.name} were",
            subject=team.pk,
            kind="team.quota",
            reader=by,
        )
        form.save()
        _record_quota(form.instance, by, form.changed_data)


def _values(quota: Quota) -> dict[str, object]:
    names = ("max_duration_seconds", *QuotaForm.Meta.fields)
    return {name: getattr(quota, name) for name in names}


def _record_quota(quota: Quota, by: str, changed: list[str]) -> None:
    Event.objects.create(
        at=now(),
        team_id=quota.team_id,
        kind="team.quota",
        subject=quota.team_id,
        actor=by,
        detail={"changed": changed},
    )
