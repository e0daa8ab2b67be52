"""Every address of the site, subject by subject; the API's are in ``webapp.api.urls``."""

from django.conf import settings
from django.contrib import admin
from django.contrib.auth.views import LogoutView
from django.urls import URLPattern, URLResolver, include, path

from webapp.accounts import secrets, sign_in, tokens
from webapp.accounts.sign_in import GuardedLogin
from webapp.pages import (
    add_host,
    approvals,
    audit,
    calibration,
    compare,
    datasets,
    deployments,
    docs,
    downloads,
    evaluation,
    home,
    host_models,
    hosts,
    job_actions,
    job_list,
    jobs,
    limits,
    model_catalog,
    observed_jobs,
    plans,
    playground,
    queue,
    remote_code,
    servers,
    tunings,
    wizard,
    workflows,
)

handler404 = "webapp.core.outages.not_found"
handler500 = "webapp.core.outages.server_error"

JOB = "jobs/<slug:job_id>/"
POOL = "queue/<slug:pool_id>/"
HOST = "hosts/<slug:slug>/"
DEPLOYMENT = "deployments/<slug:deployment_id>/"
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
    path("settings/tokens/", tokens.token_list, name="tokens"),
    path("settings/tokens/save/", tokens.token_save, name="token-save"),
    path("settings/tokens/<slug:access_id>/revoke/", tokens.token_remove, name="token-remove"),
    path("settings/sessions/", sign_in.session_list, name="sessions"),
    path("settings/sessions/end/", sign_in.session_end, name="session-end"),
    path("settings/password/", sign_in.password_change, name="password"),
    path("password/forgotten/", sign_in.password_forgotten, name="password-forgotten"),
    path("password/new/<slug:uid>/<slug:token>/", sign_in.password_new, name="password-new"),
    path("theme/", sign_in.theme_choose, name="theme"),
    # audit
    path("audit/", audit.audit_list, name="audit"),
    path("audit/export/", audit.audit_export, name="audit-export"),
    # home
    path("", home.home, name="home"),
    path("search/", home.search, name="search"),
    # wizard
    path("plans/new/", wizard.plan_new, name="plan-new"),
    path("plans/by-name/", wizard.plan_by_name, name="plan-by-name"),
    path("plans/paste/", wizard.plan_paste, name="plan-paste"),
    path("plans/template/classification/", wizard.template_launch, name="template-launch"),
    path("plans/<str:plan_id>/edit/<slug:step>/", wizard.plan_step, name="plan-step"),
    path("plans/<str:plan_id>/upload/", wizard.plan_upload, name="plan-upload"),
    path("plans/<str:plan_id>/offers/", wizard.plan_offers, name="plan-offers"),
    path("plans/<str:plan_id>/verdict/", wizard.plan_verdict, name="plan-verdict"),
    path("plans/<str:plan_id>/suggestion/", wizard.plan_suggestion, name="plan-suggestion"),
    # plans
    path("plans/", plans.plan_list, name="plan-list"),
    path("plans/<str:plan_id>/", plans.plan_detail, name="plan-detail"),
    path("plans/<str:plan_id>/launch/", plans.plan_launch_view, name="plan-launch"),
    path("plans/<str:plan_id>/clone/", plans.plan_clone, name="plan-clone"),
    path("plans/<str:plan_id>/delete/", plans.plan_delete, name="plan-delete"),
    path("plans/<str:plan_id>/compute/", plans.plan_compute_view, name="plan-compute"),
    path("plans/<str:plan_id>/exports/<slug:key>/", plans.plan_export, name="plan-export"),
    path("plans/<str:plan_id>/tune/", tunings.plan_tune, name="plan-tune"),
    path("plans/<str:plan_id>/<slug:tab>/", plans.plan_detail, name="plan-tab"),
    # limits
    path("limits/", limits.limits, name="limits"),
    path("choices/models/", model_catalog.model_choices, name="model-choices"),
    path("choices/devices/", model_catalog.device_choices, name="device-choices"),
    # modelhub
    path("models/", model_catalog.model_list, name="model-list"),
    path("models/new/", model_catalog.model_new, name="model-new"),
    path("models/code/", remote_code.code_list, name="remote-code"),
    path("models/code/save/", remote_code.code_save, name="remote-code-save"),
    path("models/code/<slug:code_id>/delete/", remote_code.code_remove, name="remote-code-remove"),
    path("models/<slug:model_id>/evaluate/", evaluation.model_evaluate, name="model-evaluate"),
    path("models/<slug:model_id>/publish/", evaluation.model_push, name="model-publish"),
    path("models/<slug:model_id>/rename/", model_catalog.model_rename_view, name="model-rename"),
    path("models/<slug:model_id>/delete/", model_catalog.model_delete_view, name="model-delete"),
    path("models/<path:model_id>/", model_catalog.model_detail, name="model-detail"),
    path("techniques/", model_catalog.technique_list, name="technique-list"),
    path("techniques/<str:key>/", model_catalog.technique_detail, name="technique-detail"),
    # datasets
    path("data/", datasets.dataset_list, name="dataset-list"),
    path("data/upload/", datasets.dataset_upload, name="dataset-upload"),
    path("data/<slug:dataset_id>/delete/", datasets.dataset_remove, name="dataset-remove"),
    # jobs
    path("jobs/", job_list.job_list, name="job-list"),
    path(JOB, jobs.job_detail, name="job-detail"),
    path(f"{JOB}metrics/", jobs.job_metrics, name="job-metrics"),
    path(f"{JOB}logs/", jobs.job_logs, name="job-logs"),
    path(f"{JOB}logs/download/", downloads.job_log, name="job-log"),
    path(f"{JOB}events/", jobs.job_events, name="job-events"),
    path(f"{JOB}config/", jobs.job_config, name="job-config"),
    path(f"{JOB}artefacts/", jobs.job_artefacts, name="job-artefacts"),
    path(f"{JOB}artefacts/<str:name>/download/", downloads.job_download, name="job-download"),
    path(f"{JOB}figures.<slug:form>", downloads.job_figures, name="job-figures"),
    path(f"{JOB}playground/", playground.playground, name="job-playground"),
    path(f"{JOB}playground/answer/", playground.playground_answer, name="job-playground-answer"),
    path(f"{JOB}post-mortem/", jobs.job_postmortem, name="job-postmortem"),
    path(f"{JOB}post-mortem/changes/", jobs.job_changes, name="job-changes"),
    path(f"{JOB}replan/", jobs.job_replan, name="job-replan"),
    path(f"{JOB}abandon/", job_actions.job_abandon_view, name="job-abandon"),
    path(f"{JOB}stop/", job_actions.job_stop_view, name="job-stop"),
    path(f"{JOB}clone/", job_actions.job_clone_view, name="job-clone"),
    path(f"{JOB}resume/", job_actions.job_resume_view, name="job-resume"),
    path(f"{JOB}run-again/", job_actions.job_rerun, name="job-rerun"),
    path(
        f"{JOB}measurements/<int:measurement_id>/decide/",
        calibration.measurement_decide_view,
        name="measurement-decide",
    ),
    path(f"{JOB}files/delete/", job_actions.job_files_delete_view, name="job-files-delete"),
    path(f"{JOB}delete/", job_actions.job_delete_view, name="job-delete"),
    # tunings
    path("tunings/", tunings.tuning_list, name="tuning-list"),
    path("tunings/<slug:tuning_id>/", tunings.tuning_detail, name="tuning-detail"),
    path("tunings/<slug:tuning_id>/stop/", tunings.tuning_stop_view, name="tuning-stop"),
    path("tunings/<slug:tuning_id>/delete/", tunings.tuning_delete_view, name="tuning-delete"),
    # workflows
    path("workflows/", workflows.workflow_list, name="workflow-list"),
    path("workflows/<slug:workflow_id>/", workflows.workflow_detail, name="workflow-detail"),
    path("workflows/<slug:workflow_id>/stop/", workflows.workflow_stop_view, name="workflow-stop"),
    path(
        "workflows/<slug:workflow_id>/delete/",
        workflows.workflow_delete_view,
        name="workflow-delete",
    ),
    path(
        "workflows/<slug:workflow_id>/resume/",
        workflows.workflow_resume_view,
        name="workflow-resume",
    ),
    # deployments
    path("deployments/", deployments.deployment_list, name="deployment-list"),
    path("deployments/keys/", deployments.key_list, name="serving-keys"),
    path("deployments/keys/make/", deployments.key_save, name="serving-key-save"),
    path(
        "deployments/keys/<slug:serving_key_id>/revoke/",
        deployments.key_remove,
        name="serving-key-revoke",
    ),
    path(
        "deployments/keys/<slug:serving_key_id>/rotate/",
        deployments.key_renew,
        name="serving-key-rotate",
    ),
    path("deployments/usage/", deployments.usage_list, name="serving-usage"),
    path("deployments/usage.csv", deployments.usage_file, name="serving-usage-file"),
    path(DEPLOYMENT, deployments.deployment_detail, name="deployment-detail"),
    path(
        f"{DEPLOYMENT}playground/", deployments.deployment_playground, name="deployment-playground"
    ),
    path(
        f"{DEPLOYMENT}playground/key/",
        deployments.deployment_playground_key,
        name="deployment-playground-key",
    ),
    path(f"{DEPLOYMENT}wake/", deployments.deployment_wake_view, name="deployment-wake"),
    path(f"{DEPLOYMENT}sleep/", deployments.deployment_sleep_view, name="deployment-sleep"),
    path(f"{DEPLOYMENT}change/", deployments.deployment_change_view, name="deployment-change"),
    path(
        f"{DEPLOYMENT}draft/roll-out/", deployments.draft_start_view, name="deployment-draft-start"
    ),
    path(
        f"{DEPLOYMENT}draft/discard/",
        deployments.draft_discard_view,
        name="deployment-draft-discard",
    ),
    path(f"{DEPLOYMENT}delete/", deployments.deployment_delete_view, name="deployment-delete"),
    # observed servers
    path("servers/", servers.server_list, name="server-list"),
    path("servers/save/", servers.server_save, name="server-save"),
    path("servers/<slug:server_id>/", servers.server_detail, name="server-detail"),
    path("servers/<slug:server_id>/change/", servers.server_edit, name="server-change"),
    path("servers/<slug:server_id>/remove/", servers.server_delete, name="server-remove"),
    path("observed-jobs/<slug:observed_id>/", observed_jobs.observed_job, name="observed-job"),
    path(
        "observed-jobs/<slug:observed_id>/remove/",
        observed_jobs.observed_job_remove,
        name="observed-job-remove",
    ),
    # approvals
    path("approvals/", approvals.approval_list, name="approvals"),
    path("approvals/<slug:request_id>/approve/", approvals.approve, name="approve"),
    path("approvals/<slug:request_id>/deny/", approvals.deny, name="deny"),
    path("approvals/<slug:request_id>/withdraw/", approvals.withdraw, name="withdraw"),
    # compare
    path("compare/", compare.compare, name="compare"),
    # queue
    path("queue/", queue.queue_list, name="queue-list"),
    path("queue/limits/", queue.queue_limits, name="queue-limits"),
    path(POOL, queue.queue_detail, name="queue-detail"),
    path(f"{POOL}up/", queue.queue_up, name="queue-up"),
    path(f"{POOL}down/", queue.queue_down, name="queue-down"),
    path(f"{POOL}priority/", queue.queue_priority, name="queue-priority"),
    # hosts
    path("hosts/", hosts.host_list, name="host-list"),
    path("hosts/add/", add_host.host_add, name="host-add"),
    path("hosts/add/<slug:token_id>/", add_host.host_check, name="host-check"),
    path("hosts/add/<slug:token_id>/revoke/", add_host.token_revoke_view, name="token-revoke"),
    path("hosts/virtual/new/", add_host.virtual_host_new, name="host-virtual"),
    path(HOST, hosts.host_detail, name="host-detail"),
    path(f"{HOST}drain/", hosts.host_drain, name="host-drain"),
    path(f"{HOST}undrain/", hosts.host_undrain, name="host-undrain"),
    path(f"{HOST}observe/", observed_jobs.host_observe, name="host-observe"),
    path(f"{HOST}recheck/", hosts.host_recheck, name="host-recheck"),
    path(f"{HOST}prove/", hosts.host_prove, name="host-prove"),
    path("jobs/<slug:job_id>/proof/", hosts.proof_report, name="proof-report"),
    path(f"{HOST}rotate/", hosts.host_rotation, name="host-rotation"),
    path(f"{HOST}address/", hosts.host_address, name="host-address"),
    path(f"{HOST}labels/", hosts.host_labels, name="host-labels"),
    path(f"{HOST}apart/", hosts.host_apart, name="host-apart"),
    path(f"{HOST}revoke/", hosts.host_revoke, name="host-revoke"),
    path(f"{HOST}maintenance/", hosts.host_maintenance, name="host-maintenance"),
    path(f"{HOST}retire/", hosts.host_retire, name="host-retire"),
    path(f"{DEVICE}cordon/", hosts.device_cordon_view, name="device-cordon"),
    path(f"{DEVICE}uncordon/", hosts.device_uncordon_view, name="device-uncordon"),
    path(f"{HOST}models/pin/", host_models.model_pin, name="host-model-pin"),
    path(f"{HOST}models/unpin/", host_models.model_unpin, name="host-model-unpin"),
    path(f"{HOST}models/delete/", host_models.model_remove, name="host-model-remove"),
    path(f"{HOST}models/rule/", host_models.models_rule, name="host-models-rule"),
    path(f"{HOST}copies/begin/", host_models.copy_begin, name="host-copy-begin"),
    path(f"{HOST}copies/<slug:copy_id>/stop/", host_models.copy_end, name="host-copy-stop"),
    path(f"{ENVIRONMENT}build/", hosts.environment_build, name="environment-build"),
    path(f"{ENVIRONMENT}remove/", hosts.environment_remove, name="environment-remove"),
    # docs
    path("docs/<path:page>", docs.docs_page, name="docs"),
    path("docs/", docs.docs_page, {"page": ""}, name="docs-index"),
    path("", include("webapp.api.urls")),
]
