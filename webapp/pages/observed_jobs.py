"""The page of a job that somebody else gave to a host's scheduler, and the forms around it."""

from datetime import UTC, datetime
from typing import Any

from django import forms
from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.views.decorators.http import require_GET, require_POST

from webapp.accounts.models import Role, Team
from webapp.accounts.services import has_role, signed_in
from webapp.core.refusals import RefusableForm
from webapp.hosts.models import Host
from webapp.hosts.permissions import host_for_operator
from webapp.jobs.models import MOST_JOB_ID, ObservedJob
from webapp.jobs.observed_figures import rows_of
from webapp.jobs.observed_jobs import (
    OBSERVED_ON,
    job_for_operator,
    job_forget,
    job_observe,
    report_of,
    visible_job,
)
from webapp.live.stream import live_context, page_or_regions
from webapp.pages.acting import act
from webapp.plans.models import Plan, PlanState
from webapp.servers.observed_jobs import server_of

MOST_PLANS = 200
SHOWN = 20  # on a host's page, the newest first


class ObserveForm(RefusableForm):
    """A job of a host's scheduler to observe, and the plan that stands beside it."""

    job_id = forms.CharField(
        label="Job",
        max_length=MOST_JOB_ID,
        help_text="Its id in the scheduler, such as 17 or 17_3, or a pod's name. It is only read.",
    )
    plan = forms.ChoiceField(
        label="Plan", required=False, help_text="What it says stands beside what is read."
    )

    def __init__(
        self,
        team: Team,
        data: Any = None,  # noqa: ANN401 -- a QueryDict or None, as Django has it
        job: ObservedJob | None = None,
    ) -> None:
        initial = {"job_id": job.job_id, "plan": job.plan_id} if job else {}
        super().__init__(data, initial=initial)
        rows = Plan.objects.filter(team=team, deleted_at=None, state=PlanState.COMPUTED)
        plans = list(rows.order_by("-created_at", "-id").only("name", "version")[:MOST_PLANS])
        if job is not None and job.plan is not None and job.plan not in plans:
            plans.append(job.plan)
        self.plans = {each.pk: each for each in plans}
        labels = [(key, f"{each}, version {each.version}") for key, each in self.plans.items()]
        self.fields["plan"].choices = [("", "None"), *labels]  # type: ignore[attr-defined]
        if job is not None:
            self.fields["job_id"].widget = forms.HiddenInput()


def observed_context(host: Host, *, is_operator: bool) -> dict[str, Any]:
    """Return what a host's page shows of the jobs that are observed there."""
    if host.kind not in OBSERVED_ON:
        return {}
    rows = ObservedJob.objects.filter(host=host)
    listed = list(rows.select_related("plan")[:SHOWN])
    return {
        "observed": [(each, report_of(each)) for each in listed],
        "num_observed": rows.count() if len(listed) == SHOWN else len(listed),
        "observe_form": ObserveForm(host.team) if is_operator else None,
    }


@require_POST
def host_observe(request: HttpRequest, slug: str) -> HttpResponse:
    """Observe a job of the host's scheduler; of one that is observed, its plan is changed."""
    host = host_for_operator(request, slug)
    form = ObserveForm(host.team, request.POST)
    if not form.is_valid():
        messages.error(request, str(next(iter(form.errors.values()))[0]))
        return redirect("host-detail", slug)
    found: list[ObservedJob] = []
    plan = form.plans.get(form.cleaned_data["plan"])
    named = form.cleaned_data["job_id"]
    by = signed_in(request)
    act(
        request,
        lambda: found.append(job_observe(host=host, by=by, job_id=named, plan=plan)),
        f"{named} is observed: its host reads it with the next heartbeats.",
    )
    return redirect("observed-job", found[0].pk) if found else redirect("host-detail", slug)


@require_GET
def observed_job(request: HttpRequest, observed_id: str) -> HttpResponse:
    """Show a job that somebody else started, its figures and log, and what its plan says."""
    job = visible_job(request, observed_id)
    report = report_of(job)
    may_change = has_role(request.user, job.team, Role.OPERATOR)
    context: dict[str, Any] = {
        "job": job,
        "report": report,
        "started": datetime.fromtimestamp(report.started_at_ms / 1000, UTC)
        if report.started_at_ms
        else None,
        "rows": rows_of(job),
        "server": server_of(job),
        "may_change": may_change,
        "form": ObserveForm(job.team, job=job) if may_change else None,
    }
    context |= live_context(request, [f"host:{job.host_id}"])
    page, regions = "hosts/observed.html", "hosts/_observed_regions.html"
    return page_or_regions(request, page, regions, context)


@require_POST
def observed_job_remove(request: HttpRequest, observed_id: str) -> HttpResponse:
    """Observe a job no longer; the job itself is left alone."""
    job = job_for_operator(request, observed_id)
    words = f"{job} is observed no longer; it runs on untouched."
    act(request, lambda: job_forget(job=job, by=signed_in(request)), words)
    return redirect("host-detail", job.host.slug)
