"""Database models of plans: wizard drafts and their saved versions.

A saved version is immutable: ``webapp/plans/saving.py`` only writes drafts.
"""

from typing import Any

from django.conf import settings
from django.db import models

from runners.jobspec.base import NAME_LENGTH
from runners.plans.document import PlanDocument, read_stored
from runners.plans.refusals import DraftProblem
from webapp.accounts.models import Team, TeamOwned


class PlanState(models.TextChoices):
    """States of a plan; infeasible is a verdict of a computed plan, not a state."""

    DRAFT = "draft", "Draft"
    COMPUTED = "computed", "Computed"


DOCUMENTS = ("draft", "request", "answer", "edits")  # large columns: not loaded in lists


class Plan(TeamOwned):
    """A draft, or one saved version of a plan; all versions of a plan share a ``series``.

    ``draft`` and ``request`` are the question, ``answer`` is the planner's answer.
    """

    # No index of its own: with both, SQLite may choose this one over the composite index.
    team = models.ForeignKey(Team, on_delete=models.CASCADE, related_name="+", db_index=False)
    owner = models.ForeignKey(
        settings.AUTH_USER_MODEL, null=True, on_delete=models.SET_NULL, related_name="+"
    )
    name = models.CharField(max_length=NAME_LENGTH, blank=True)
    # False: the name is derived from the content; null: saved before this was recorded.
    is_named = models.BooleanField(null=True, default=None)
    state = models.CharField(max_length=16, choices=PlanState, default=PlanState.DRAFT)
    # The document (runners.plans.document) and, under "wizard", what only the wizard knows.
    draft = models.JSONField(default=dict, blank=True)
    request = models.JSONField(default=dict, blank=True)  # planner PlanRequest
    answer = models.JSONField(default=dict, blank=True)  # planner PlanAnswer
    # The answer contains only the best plan, without frontier, runners-up and suggestions.
    is_brief = models.BooleanField(default=False)
    # Verdict of a saved version for lists; "" if none was stored.
    verdict = models.CharField(max_length=24, blank=True)
    created_at = models.DateTimeField(auto_now_add=True)
    saved_at = models.DateTimeField(auto_now=True)
    computed_at = models.DateTimeField(null=True, blank=True)
    # Id of the first version, and this version's number; a draft has neither.
    series = models.CharField(max_length=26, blank=True, db_index=True)
    version = models.PositiveIntegerField(null=True, blank=True)
    is_latest = models.BooleanField(default=True)
    base = models.ForeignKey(  # the version that this version or draft was created from
        "self", null=True, blank=True, on_delete=models.SET_NULL, related_name="changed_copies"
    )
    saved_by = models.CharField(max_length=150, blank=True)  # the person who saved the draft
    revision = models.PositiveIntegerField(default=0)  # number of writes of a draft
    edits = models.JSONField(default=dict, blank=True)  # wizard step -> its last writer
    deleted_at = models.DateTimeField(null=True, blank=True)  # its jobs still show the plan

    class Meta:
        ordering = ["-created_at"]
        indexes = [
            models.Index(  # the list's filters, so that only shown rows are read
                fields=[
                    "team",
                    "-saved_at",
                    "-id",
                    "state",
                    "is_latest",
                    "owner",
                    "base",
                    "revision",
                    "name",
                    "deleted_at",  # SQLite needs a condition's column too
                ],
                condition=models.Q(deleted_at=None),
                name="plans_listed",
            )
        ]
        constraints = [
            models.UniqueConstraint(fields=["series", "version"], name="one_row_per_version")
        ]

    def __str__(self) -> str:
        return self.name or f"plan {self.id}"

    def save(self, *args: Any, **kwargs: Any) -> None:
        """Store the row; a plan created as computed becomes version 1 of its own series."""
        if self.state == PlanState.COMPUTED and not self.series:
            self.series, self.version = self.pk, 1
        super().save(*args, **kwargs)

    @property
    def document(self) -> PlanDocument:
        """Return the question as the document that command line, API and wizard share.

        Raises:
            DraftProblem: the row has none, or one that today's model does not read.
        """
        return read_stored(self.draft)

    @document.setter
    def document(self, document: PlanDocument) -> None:
        """Set the question; what only the wizard knows stays."""
        wizard = {name: self.draft[name] for name in ("wizard",) if name in self.draft}
        self.draft = {**document.model_dump(mode="json"), **wizard}

    @property
    def wizard(self) -> dict[str, Any]:
        """Return what only the wizard knows of a draft; changes of it are stored with the row."""
        known: dict[str, Any] = self.draft.setdefault("wizard", {})
        return known

    @property
    def readable_document(self) -> PlanDocument | None:
        """Return the document, None where the row has none that today's model reads."""
        try:
            return self.document
        except DraftProblem:
            return None

    @property
    def is_draft(self) -> bool:
        """Return whether the plan can still be changed."""
        return self.state == PlanState.DRAFT
