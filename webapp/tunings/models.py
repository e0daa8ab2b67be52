"""Database models of tunings and their trials."""

from typing import Any

from django.db import models
from django.db.models import Q

from webapp.hosts.models import Host
from webapp.jobs.models import Job
from webapp.jobs.series import JobSeries, SeriesPart
from webapp.plans.models import Plan


class TrialState(models.TextChoices):
    """The states of a trial: of its job, once it has one."""

    WAITING = "waiting", "Waiting"
    RUNNING = "running", "Running"
    ENDED = "ended", "Ended"


class Tuning(JobSeries):
    """Trials of a plan's candidates on one host; ``failed``: nothing could be measured.

    ``candidates`` are fixed at the start (``webapp.tunings.planning.PlannedCandidate``), and so
    is ``trial``, how much each of them measures (``runners.plans.tuning.Trial``).
    """

    PARTS = "trials"
    ACTOR = "system:tunings"

    plan = models.ForeignKey(Plan, null=True, on_delete=models.SET_NULL, related_name="tunings")
    host = models.ForeignKey(Host, null=True, on_delete=models.SET_NULL, related_name="+")
    options = models.JSONField()  # runners.plans.tuning.TuningOptions
    document = models.JSONField()  # of the plan, with the host of the tuning
    figure = models.CharField(max_length=32)
    candidates = models.JSONField()
    trial = models.JSONField()
    problem = models.TextField(blank=True)  # why it failed, or why no version was made
    # The version with the best strategy; None without a gain.
    result = models.ForeignKey(
        Plan, null=True, blank=True, on_delete=models.SET_NULL, related_name="+"
    )

    class Meta(JobSeries.Meta):
        indexes = [
            models.Index(fields=["team", "-created_at", "-id"], name="tunings_listed"),
            models.Index(
                fields=["state", "id"], condition=Q(state="running"), name="tunings_running"
            ),
        ]

    @property
    def title(self) -> str:
        """Return what a sentence calls it: it has the name of its plan."""
        return f"The tuning of {self.name}"


class TuningTrial(SeriesPart):
    """One job of a tuning, in the order of ``number``; what it has shown once it has ended.

    ``value`` is the tuning's figure in its base unit, ``spread`` its standard error as a share.
    """

    tuning = models.ForeignKey(Tuning, on_delete=models.CASCADE, related_name="trials")
    number = models.PositiveSmallIntegerField()
    candidate = models.PositiveSmallIntegerField()
    state = models.CharField(max_length=16, choices=TrialState, default=TrialState.WAITING)
    ending = models.CharField(max_length=16, blank=True)  # runners.shared.tuning.TrialEnding
    reason = models.TextField(blank=True)  # why it waits, or why it measured nothing
    note = models.TextField(blank=True)  # what disturbed its measurement
    value = models.FloatField(null=True, blank=True)
    spread = models.FloatField(default=0.0)
    is_met = models.BooleanField(default=True)
    seconds = models.FloatField(default=0.0)
    job = models.ForeignKey(
        Job, null=True, blank=True, on_delete=models.SET_NULL, related_name="tuning_trials"
    )

    class Meta:
        ordering = ["number"]
        constraints = [
            models.UniqueConstraint(fields=["tuning", "number"], name="one_trial_per_number")
        ]

    def __str__(self) -> str:
        return f"trial {self.number + 1} of {self.tuning_id}"

    @property
    def key(self) -> str:
        """Return the idempotency key of the trial's job."""
        return f"tuning-{self.tuning_id}-{self.number}"


def document_without_names(document: dict[str, Any]) -> dict[str, Any]:
    """Return a plan's stored document as the question alone."""
    return {key: document[key] for key in document if key not in {"launch", "wizard", "name"}}
