"""Plans: a wizard draft that grew into a computed answer."""

from django.conf import settings
from django.db import models

from webapp.accounts.models import TeamOwned


class PlanState(models.TextChoices):
    """Infeasible is a verdict of a computed plan, not a state."""

    DRAFT = "draft", "Draft"
    COMPUTED = "computed", "Computed"


class Plan(TeamOwned):
    """What was asked (``draft``, ``request``) and what the planner answered (``answer``)."""

    owner = models.ForeignKey(
        settings.AUTH_USER_MODEL, null=True, on_delete=models.SET_NULL, related_name="+"
    )
    name = models.CharField(max_length=120, blank=True)
    state = models.CharField(max_length=16, choices=PlanState, default=PlanState.DRAFT)
    draft = models.JSONField(default=dict, blank=True)  # wizard step -> cleaned form fields
    request = models.JSONField(default=dict, blank=True)  # planner PlanRequest
    answer = models.JSONField(default=dict, blank=True)  # planner PlanAnswer
    created_at = models.DateTimeField(auto_now_add=True)
    saved_at = models.DateTimeField(auto_now=True)
    computed_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        ordering = ["-created_at"]

    def __str__(self) -> str:
        return self.name or f"plan {self.id}"
