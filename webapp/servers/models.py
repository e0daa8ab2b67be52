"""Database model of a server that Slipway watches and did not start."""

from django.conf import settings
from django.db import models
from django.db.models import Q

from runners.jobspec.base import NAME_LENGTH
from webapp.accounts.models import TeamOwned
from webapp.hosts.models import Host
from webapp.plans.models import Plan

MOST_URL = 300  # characters of an address
MOST_PROBLEM = 300


class ServerState(models.TextChoices):
    """What the last look found."""

    UNKNOWN = "unknown", "Not seen yet"
    SERVING = "serving", "Serving"
    SILENT = "silent", "Not answering"


class ObservedServer(TeamOwned):
    """An OpenAI-compatible server that somebody else started; Slipway only reads from it.

    The points of its charts are in the metrics database, under its id as that of an attempt.
    """

    owner = models.ForeignKey(
        settings.AUTH_USER_MODEL, null=True, on_delete=models.SET_NULL, related_name="+"
    )
    name = models.CharField(max_length=NAME_LENGTH)
    url = models.CharField(max_length=MOST_URL)  # without /v1 and a last slash
    sealed_key = models.TextField(blank=True)  # webapp.servers.keys
    plan = models.ForeignKey(
        Plan, null=True, blank=True, on_delete=models.SET_NULL, related_name="+"
    )
    host = models.ForeignKey(
        Host, null=True, blank=True, on_delete=models.SET_NULL, related_name="+"
    )
    created_at = models.DateTimeField(auto_now_add=True)
    # What the looks found; webapp.servers.looking writes it, and another key begins anew.
    engine = models.CharField(max_length=16, blank=True)  # a name of webapp.servers.engines
    release = models.CharField(max_length=80, blank=True)
    served_models = models.JSONField(default=list, blank=True)  # of webapp.servers.reading.Served
    looked_at = models.DateTimeField(null=True, blank=True)
    answered_at = models.DateTimeField(null=True, blank=True)
    silent_since = models.DateTimeField(null=True, blank=True)
    problem = models.CharField(max_length=MOST_PROBLEM, blank=True)  # of the last look
    figures = models.JSONField(default=dict, blank=True)  # since the look before, by metric
    window = models.JSONField(default=dict, blank=True)  # webapp.servers.figures.Window

    class Meta:
        ordering = ["-created_at", "-id"]
        indexes = [models.Index(fields=["team", "-created_at", "-id"], name="servers_listed")]
        constraints = [
            models.UniqueConstraint(fields=["team", "name"], name="one_server_name"),
            models.UniqueConstraint(fields=["team", "url"], name="one_server_url"),
            models.CheckConstraint(condition=~Q(url=""), name="server_has_a_url"),
        ]

    def __str__(self) -> str:
        return self.name

    @property
    def has_key(self) -> bool:
        """Return whether the server is asked with a key."""
        return bool(self.sealed_key)

    @property
    def state(self) -> ServerState:
        """Return what the last look found."""
        if self.silent_since is not None:
            return ServerState.SILENT
        return ServerState.UNKNOWN if self.looked_at is None else ServerState.SERVING
