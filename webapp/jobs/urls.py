"""URLs of the job pages: tabs are paths, actions are POST."""

from django.urls import URLPattern, URLResolver, path

from webapp.jobs import (
    actions,
    artefacts,
    calibration_page,
    exports,
    listing,
    playground,
    views,
)

JOB = "jobs/<slug:job_id>/"

urlpatterns: list[URLPattern | URLResolver] = [
    path("jobs/", listing.job_list, name="job-list"),
    path(JOB, views.job_detail, name="job-detail"),
    path(f"{JOB}metrics/", views.job_metrics, name="job-metrics"),
    path(f"{JOB}logs/", views.job_logs, name="job-logs"),
    path(f"{JOB}events/", views.job_events, name="job-events"),
    path(f"{JOB}config/", views.job_config, name="job-config"),
    path(f"{JOB}artefacts/", views.job_artefacts, name="job-artefacts"),
    path(f"{JOB}artefacts/<str:name>/download/", artefacts.job_download, name="job-download"),
    path(f"{JOB}figures.<slug:form>", exports.job_figures, name="job-figures"),
    path(f"{JOB}playground/", playground.playground, name="job-playground"),
    path(f"{JOB}playground/answer/", playground.playground_answer, name="job-playground-answer"),
    path(f"{JOB}post-mortem/", views.job_postmortem, name="job-postmortem"),
    path(f"{JOB}post-mortem/changes/", views.job_changes, name="job-changes"),
    path(f"{JOB}replan/", views.job_replan, name="job-replan"),
    path(f"{JOB}abandon/", actions.job_abandon_view, name="job-abandon"),
    path(f"{JOB}stop/", actions.job_stop_view, name="job-stop"),
    path(f"{JOB}clone/", actions.job_clone_view, name="job-clone"),
    path(f"{JOB}run-again/", actions.job_rerun, name="job-rerun"),
    path(
        f"{JOB}measurements/<int:measurement_id>/decide/",
        calibration_page.measurement_decide_view,
        name="measurement-decide",
    ),
    path(f"{JOB}delete/", actions.job_delete_view, name="job-delete"),
]
