"""Says which site Django's admin uses; named in the settings, before any model is there."""

from django.contrib.admin.apps import AdminConfig


class StaffConfig(AdminConfig):
    """Puts ``StaffSite`` in the place of Django's own site."""

    default_site = "webapp.accounts.staff_site.StaffSite"
