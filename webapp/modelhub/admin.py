"""Admin of team models."""

from django.contrib import admin

from webapp.core.admin_base import FreshAdmin
from webapp.modelhub.models import TeamModel


@admin.register(TeamModel)
class TeamModelAdmin(FreshAdmin[TeamModel]):
    """Team models: pasted configs, folders on hosts, outputs of jobs."""

    list_display = ["name", "team", "source", "weight_dtype", "host", "created_at"]
    list_filter = ["source", "team"]
    search_fields = ["name"]
