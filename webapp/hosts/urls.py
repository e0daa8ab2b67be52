"""URLs of the host pages; actions are POST."""

from django.urls import URLPattern, URLResolver, path

from webapp.hosts import actions, adding, device, proofs, views

HOST = "hosts/<slug:slug>/"
DEVICE = f"{HOST}devices/<slug:device_id>/"
ENVIRONMENT = f"{HOST}environments/<slug:name>/"

urlpatterns: list[URLPattern | URLResolver] = [
    path("hosts/", views.host_list, name="host-list"),
    path("hosts/add/", adding.host_add, name="host-add"),
    path("hosts/add/<slug:token_id>/", adding.host_check, name="host-check"),
    path("hosts/add/<slug:token_id>/revoke/", adding.token_revoke_view, name="token-revoke"),
    path("hosts/virtual/new/", device.virtual_host_new, name="host-virtual"),
    path(HOST, views.host_detail, name="host-detail"),
    path(f"{HOST}drain/", views.host_drain, name="host-drain"),
    path(f"{HOST}undrain/", views.host_undrain, name="host-undrain"),
    path(f"{HOST}recheck/", views.host_recheck, name="host-recheck"),
    path(f"{HOST}prove/", views.host_prove, name="host-prove"),
    path("jobs/<slug:job_id>/proof/", proofs.proof_report, name="proof-report"),
    path(f"{HOST}rotate/", views.host_rotation, name="host-rotation"),
    path(f"{HOST}address/", actions.host_address, name="host-address"),
    path(f"{HOST}labels/", actions.host_labels, name="host-labels"),
    path(f"{HOST}apart/", actions.host_apart, name="host-apart"),
    path(f"{HOST}revoke/", views.host_revoke, name="host-revoke"),
    path(f"{HOST}maintenance/", actions.host_maintenance, name="host-maintenance"),
    path(f"{HOST}retire/", actions.host_retire, name="host-retire"),
    path(f"{DEVICE}cordon/", actions.device_cordon_view, name="device-cordon"),
    path(f"{DEVICE}uncordon/", actions.device_uncordon_view, name="device-uncordon"),
    path(f"{ENVIRONMENT}build/", actions.environment_build, name="environment-build"),
    path(f"{ENVIRONMENT}remove/", actions.environment_remove, name="environment-remove"),
]
