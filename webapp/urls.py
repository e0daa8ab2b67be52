"""Every address of the site, app by app; the API's are in ``webapp.api.urls``."""

from django.conf import settings
from django.contrib import admin
from django.contrib.auth.views import LogoutView
from django.urls import URLPattern, URLResolver, include, path

from webapp.accounts import secrets, sign_in
from webapp.accounts.sign_in import GuardedLogin
from webapp.audit import chain
from webapp.compare import views as compare_views
from webapp.datasets import services as datasets
from webapp.docs import views as docs_views
from webapp.home import views as home_views
from webapp.hosts import adding, environments, machines
from webapp.hosts import views as hosts_views
from webapp.jobs import artefacts, calibration_page, listing, playground
from webapp.jobs import views as jobs_views
from webapp.jobs.evaluating import model_evaluate
from webapp.limits import views as limits_views
from webapp.modelhub import views as modelhub_views
from webapp.plans import views as plans_views
from webapp.queue import views as queue_views
from webapp.wizard import pages as wizard_pages
from webapp.wizard import views as wizard_views

handler404 = "webapp.core.outages.not_found"
handler500 = "webapp.core.outages.server_error"

JOB = "jobs/<slug:job_id>/"
POOL = "queue/<slug:pool_id>/"
HOST = "hosts/<slug:slug>/"
DEVICE = f"{HOST}devices/<slug:device_id>/"
ENVIRONMENT = f"{HOST}environments/<slug:name>/"

urlpatterns: list[URLPattern | URLResolver] = [
    path(settings.ADMIN_PATH, admin.site.urls),
    # accounts
    path("login/", GuardedLogin.as_view(redirect_authenticated_user=True), name="login"),
    path("logout/", LogoutView.as_view(), name="logout"),
    path("team/", sign_in.team_choose, name="team-choose"),
    path("settings/secrets/", secrets.secret_list, name="secrets"),
    path("settings/secrets/save/", secrets.secret_save, name="secret-save"),
    path(
        "settings/secrets/<slug:secret_id>/delete/",
        secrets.secret_remove,
        name="secret-remove",
    ),
    path("settings/sessions/", sign_in.session_list, name="sessions"),
    path("settings/sessions/end/", sign_in.session_end, name="session-end"),
    path("settings/password/", sign_in.password_change, name="password"),
    path("password/forgotten/", sign_in.password_forgotten, name="password-forgotten"),
    path("password/new/<slug:uid>/<slug:token>/", sign_in.password_new, name="password-new"),
    path("theme/", sign_in.theme_choose, name="theme"),
    # audit
    path("audit/", chain.audit_list, name="audit"),
    path("audit/export/", chain.audit_export, name="audit-export"),
    # home
    path("", home_views.home, name="home"),
    path("search/", home_views.search, name="search"),
    # wizard
    path("plans/new/", wizard_views.plan_new, name="plan-new"),
    path("plans/template/classification/", wizard_pages.template_launch, name="template-launch"),
    path("plans/<str:plan_id>/edit/<slug:step>/", wizard_views.plan_step, name="plan-step"),
    path("plans/<str:plan_id>/upload/", wizard_views.plan_upload, name="plan-upload"),
    path("plans/<str:plan_id>/offers/", wizard_views.plan_offers, name="plan-offers"),
    path("plans/<str:plan_id>/verdict/", wizard_views.plan_verdict, name="plan-verdict"),
    path("plans/<str:plan_id>/suggestion/", wizard_views.plan_suggestion, name="plan-suggestion"),
    # plans
    path("plans/", plans_views.plan_list, name="plan-list"),
    path("plans/<str:plan_id>/", plans_views.plan_detail, name="plan-detail"),
    path("plans/<str:plan_id>/launch/", plans_views.plan_launch_view, name="plan-launch"),
    path("plans/<str:plan_id>/clone/", plans_views.plan_clone, name="plan-clone"),
    path("plans/<str:plan_id>/delete/", plans_views.plan_delete, name="plan-delete"),
    path("plans/<str:plan_id>/compute/", plans_views.plan_compute_view, name="plan-compute"),
    path("plans/<str:plan_id>/exports/<slug:key>/", plans_views.plan_export, name="plan-export"),
    path("plans/<str:plan_id>/<slug:tab>/", plans_views.plan_detail, name="plan-tab"),
    # limits
    path("limits/", limits_views.limits, name="limits"),
    # modelhub
    path("models/", modelhub_views.model_list, name="model-list"),
    path("models/new/", modelhub_views.model_new, name="model-new"),
    path("models/<slug:model_id>/evaluate/", model_evaluate, name="model-evaluate"),
    path("models/<path:model_id>/", modelhub_views.model_detail, name="model-detail"),
    path("techniques/", modelhub_views.technique_list, name="technique-list"),
    path("techniques/<str:key>/", modelhub_views.technique_detail, name="technique-detail"),
    # datasets
    path("data/", datasets.dataset_list, name="dataset-list"),
    path("data/upload/", datasets.dataset_upload, name="dataset-upload"),
    path("data/<slug:dataset_id>/delete/", datasets.dataset_remove, name="dataset-remove"),
    # jobs
    path("jobs/", listing.job_list, name="job-list"),
    path(JOB, jobs_views.job_detail, name="job-detail"),
    path(f"{JOB}metrics/", jobs_views.job_metrics, name="job-metrics"),
    path(f"{JOB}logs/", jobs_views.job_logs, name="job-logs"),
    path(f"{JOB}events/", jobs_views.job_events, name="job-events"),
    path(f"{JOB}config/", jobs_views.job_config, name="job-config"),
    path(f"{JOB}artefacts/", jobs_views.job_artefacts, name="job-artefacts"),
    path(f"{JOB}artefacts/<str:name>/download/", artefacts.job_download, name="job-download"),
    path(f"{JOB}figures.<slug:form>", artefacts.job_figures, name="job-figures"),
    path(f"{JOB}playground/", playground.playground, name="job-playground"),
    path(f"{JOB}playground/answer/", playground.playground_answer, name="job-playground-answer"),
    path(f"{JOB}post-mortem/", jobs_views.job_postmortem, name="job-postmortem"),
    path(f"{JOB}post-mortem/changes/", jobs_views.job_changes, name="job-changes"),
    path(f"{JOB}replan/", jobs_views.job_replan, name="job-replan"),
    path(f"{JOB}abandon/", listing.job_abandon_view, name="job-abandon"),
    path(f"{JOB}stop/", listing.job_stop_view, name="job-stop"),
    path(f"{JOB}clone/", listing.job_clone_view, name="job-clone"),
    path(f"{JOB}run-again/", listing.job_rerun, name="job-rerun"),
    path(
        f"{JOB}measurements/<int:measurement_id>/decide/",
        calibration_page.measurement_decide_view,
        name="measurement-decide",
    ),
    path(f"{JOB}delete/", listing.job_delete_view, name="job-delete"),
    # compare
    path("compare/", compare_views.compare, name="compare"),
    # queue
    path("queue/", queue_views.queue_list, name="queue-list"),
    path("queue/limits/", queue_views.queue_limits, name="queue-limits"),
    path(POOL, queue_views.queue_detail, name="queue-detail"),
    path(f"{POOL}up/", queue_views.queue_up, name="queue-up"),
    path(f"{POOL}down/", queue_views.queue_down, name="queue-down"),
    path(f"{POOL}priority/", queue_views.queue_priority, name="queue-priority"),
    # hosts
    path("hosts/", hosts_views.host_list, name="host-list"),
    path("hosts/add/", adding.host_add, name="host-add"),
    path("hosts/add/<slug:token_id>/", adding.host_check, name="host-check"),
    path("hosts/add/<slug:token_id>/revoke/", adding.token_revoke_view, name="token-revoke"),
    path("hosts/virtual/new/", machines.virtual_host_new, name="host-virtual"),
    path(HOST, hosts_views.host_detail, name="host-detail"),
    path(f"{HOST}drain/", hosts_views.host_drain, name="host-drain"),
    path(f"{HOST}undrain/", hosts_views.host_undrain, name="host-undrain"),
    path(f"{HOST}recheck/", hosts_views.host_recheck, name="host-recheck"),
    path(f"{HOST}prove/", hosts_views.host_prove, name="host-prove"),
    path("jobs/<slug:job_id>/proof/", environments.proof_report, name="proof-report"),
    path(f"{HOST}rotate/", hosts_views.host_rotation, name="host-rotation"),
    path(f"{HOST}address/", hosts_views.host_address, name="host-address"),
    path(f"{HOST}labels/", hosts_views.host_labels, name="host-labels"),
    path(f"{HOST}apart/", hosts_views.host_apart, name="host-apart"),
    path(f"{HOST}revoke/", hosts_views.host_revoke, name="host-revoke"),
    path(f"{HOST}maintenance/", hosts_views.host_maintenance, name="host-maintenance"),
    path(f"{HOST}retire/", hosts_views.host_retire, name="host-retire"),
    path(f"{DEVICE}cordon/", hosts_views.device_cordon_view, name="device-cordon"),
    path(f"{DEVICE}uncordon/", hosts_views.device_uncordon_view, name="device-uncordon"),
    path(f"{ENVIRONMENT}build/", hosts_views.environment_build, name="environment-build"),
    path(f"{ENVIRONMENT}remove/", hosts_views.environment_remove, name="environment-remove"),
    # docs
    path("docs/<path:page>", docs_views.docs_page, name="docs"),
    path("docs/", docs_views.docs_page, {"page": ""}, name="docs-index"),
    path("", include("webapp.api.urls")),
]
