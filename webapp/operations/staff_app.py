"""App config that selects the admin site; the settings name it before models are loaded."""

from django.contrib.admin.apps import AdminConfig


class StaffConfig(AdminConfig):
    """Replaces Django's admin site by ``StaffSite``."""

    default_site = "webapp.operations.staff_site.StaffSite"
