"""Root URL configuration; each app defines its own URLs."""

from django.conf import settings
from django.contrib import admin
from django.urls import include, path

handler404 = "webapp.core.outages.not_found"
handler500 = "webapp.core.outages.server_error"
urlpatterns = [
    path(settings.ADMIN_PATH, admin.site.urls),
    path("", include("webapp.accounts.urls")),
    path("", include("webapp.audit.urls")),
    path("", include("webapp.home.urls")),
    path("", include("webapp.wizard.urls")),
    path("", include("webapp.plans.urls")),
    path("", include("webapp.limits.urls")),
    path("", include("webapp.modelhub.urls")),
    path("", include("webapp.datasets.urls")),
    path("", include("webapp.jobs.urls")),
    path("", include("webapp.compare.urls")),
    path("", include("webapp.queue.urls")),
    path("", include("webapp.hosts.urls")),
    path("", include("webapp.docs.urls")),
    path("", include("webapp.api.urls")),
]
