"""Models of teams."""

from django.contrib import admin

from webapp.modelhub.models import TeamModel


@admin.register(TeamModel)
class TeamModelAdmin(admin.ModelAdmin[TeamModel]):
    """Pasted configs, folders on hosts, outputs of jobs."""

    list_display = ["name", "team", "source", "weight_dtype", "host", "created_at"]
    list_filter = ["source", "team"]
    search_fields = ["name"]
