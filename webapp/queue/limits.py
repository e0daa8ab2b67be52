"""Quota of the current team: visible to all members, editable by operators."""

from collections.abc import Callable, Mapping

from django import forms
from django.contrib import messages
from django.db import transaction
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.http import require_http_methods

from webapp.accounts.models import Quota, Role, Team
from webapp.accounts.roles import check_role, current_role, current_team, is_at_least
from webapp.audit.changes import refuse_if_changed
from webapp.core.clock import now
from webapp.core.problems import Problem
from webapp.core.stale import SEEN, mark_of
from webapp.jobs.models import Event
from webapp.queue.quotas import HOUR, limit_sentences, quota_of

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
        _record(form.instance, by, form.changed_data)


def _values(quota: Quota) -> dict[str, object]:
    names = ("max_duration_seconds", *QuotaForm.Meta.fields)
    return {name: getattr(quota, name) for name in names}


def _record(quota: Quota, by: str, changed: list[str]) -> None:
    Event.objects.create(
        at=now(),
        team_id=quota.team_id,
        kind="team.quota",
        subject=quota.team_id,
        actor=by,
        detail={"changed": changed},
    )
