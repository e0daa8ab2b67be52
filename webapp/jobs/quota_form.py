"""The form that shows and stores a team's limits."""

from collections.abc import Callable, Mapping
from typing import ClassVar

from django import forms
from django.db import transaction

from planner.specs.units import HOUR
from webapp.accounts.models import Quota, Team
from webapp.audit.models import Event, refuse_if_changed
from webapp.core.clock import now
from webapp.core.numbers import DecimalField, WholeField
from webapp.jobs.quotas import quota_of

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

    max_duration_hours = DecimalField(
        required=False,
        label="Longest job, in hours",
        help_text="A job that runs longer is stopped. Empty: no limit.",
    )

    class Meta:
        model = Quota
        fields = ("max_devices", "max_gpu_hours_per_month", "max_queued_per_user", "share")
        field_classes: ClassVar = {
            "max_devices": WholeField,
            "max_queued_per_user": WholeField,
            "max_gpu_hours_per_month": DecimalField,
            "share": DecimalField,
        }
        labels = {
            "max_devices": "Devices at once",
            "max_gpu_hours_per_month": "GPU-hours a month",
            "max_queued_per_user": "Queued jobs per person",
            "share": "Fair-share weight",
        }
        help_texts = {
            "max_devices": "Over all pools. Empty: no limit.",
            "max_gpu_hours_per_month": "Counted while a GPU is held. Empty: no limit.",
            "share": "A team of weight 2 gets two turns while a team of weight 1 gets one.",
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
            raise forms.ValidationError(
                f"The value is {value:g}; it can be {least:g} to {most:g}."
            )

    return check


def quota_store(form: QuotaForm, team: Team, by: str, seen: str) -> None:
    """Store the limits if they are unchanged since the person loaded the page.

    Raises:
        ConflictProblem: somebody changed the limits after the page was opened.
    """
    with transaction.atomic():
        Team.objects.select_for_update(no_key=True).get(pk=team.pk)
        refuse_if_changed(
            seen=seen,
            now_there=quota_values(quota_of(team)),
            what=f"The limits of {team.name} were",
            subject=team.pk,
            kind="team.quota",
            reader=by,
        )
        form.save()
        Event.objects.create(
            at=now(),
            team_id=form.instance.team_id,
            kind="team.quota",
            subject=form.instance.team_id,
            actor=by,
            detail={"changed": form.changed_data},
        )


def quota_values(quota: Quota) -> dict[str, object]:
    names = ("max_duration_seconds", *QuotaForm.Meta.fields)
    return {name: getattr(quota, name) for name in names}
