"""Team models in addition to the catalog: pasted configs, host folders, job outputs."""

from django.db import models

from webapp.accounts.models import TeamOwned
from webapp.hosts.models import Host


class TeamModel(TeamOwned):
    """One model of a team; with ``host`` and ``path``, its weights can be run on that host."""

    name = models.CharField(max_length=120)
    source = models.CharField(
        max_length=16,
        choices=[("config", "Pasted config"), ("folder", "Folder"), ("job", "Made by a job")],
    )
    config = models.JSONField(default=dict)  # Hugging Face config.json
    num_parameters = models.BigIntegerField(default=0)
    host = models.ForeignKey(Host, null=True, blank=True, on_delete=models.SET_NULL)
    path = models.CharField(max_length=400, blank=True)  # source "folder": a path on the host
    attempt_id = models.CharField(max_length=26, blank=True)  # source "job"
    artefact_name = models.CharField(max_length=80, blank=True)
    weight_dtype = models.CharField(max_length=16, blank=True)
    facts = models.JSONField(default=dict, blank=True)  # perplexity, sizes, who measured them
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ["-created_at"]

    def __str__(self) -> str:
        return self.name
