"""The post-mortem tab and its actions."""

from typing import Any

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.http import require_GET, require_POST

from webapp.core.problems import Problem
from webapp.jobs.actions import job_for
from webapp.jobs.lookup import load_job
from webapp.jobs.memory_terms import story_of
from webapp.jobs.models import Job
from webapp.jobs.postmortem import has_postmortem, postmortem_of, replan_words
from webapp.jobs.views import job_context
from webapp.live.page import page_or_regions
from webapp.plans.access import signed_in
from webapp.plans.errors import DraftProblem
from webapp.plans.models import Plan
from webapp.plans.planning import plan_compute
from webapp.plans.replan import change_at, limit_words, replan, smallest_changes
from webapp.wizard.drafts import suggestion_apply

TAB = "job-postmortem"


@require_GET
def job_postmortem(request: HttpRequest, job_id: str) -> HttpResponse:
    """Explain why a job failed, with its measurements and changes that would fit."""
    job = load_job(request, job_id)
    context = job_context(request, job, TAB) | {"outcome": None}  # the tab itself shows it
    if has_postmortem(job):
        post_mortem = postmortem_of(job)
        context["found"] = post_mortem
        if post_mortem.memory and job.plan_id:
            context["replan_words"] = replan_words(post_mortem.memory.story)
    context["changes"] = _changes(job) if "changes" in request.GET else None
    return page_or_regions(request, "jobs/postmortem.html", "jobs/_status.html", context)


@require_GET
def job_changes(request: HttpRequest, job_id: str) -> HttpResponse:
    """Return the smallest changes that would fit; loaded separately because it searches."""
    job = load_job(request, job_id)
    context = {
        "job": job,
        "changes": _changes(job),
        "allowed": job_context(request, job, TAB)["allowed"],
    }
    return render(request, "jobs/_changes.html", context)


def _changes(job: Job) -> list[Any]:
    story = story_of(job) if has_postmortem(job) else None
    return smallest_changes(job, story) if story else []


@require_POST
def job_replan(request: HttpRequest, job_id: str) -> HttpResponse:
    """Create a plan from a failed job's: for editing, with its need as a limit, or changed."""
    job = job_for(request, job_id, "clone")
    how = request.POST.get("how", "")
    story = story_of(job) if how != "edit" else None
    try:
        plan = replan(job=job, owner=signed_in(request), story=story)
    except DraftProblem as problem:
        messages.warning(request, problem.sentence)
        return redirect(TAB, job.pk)
    if how == "edit":
        return redirect("plan-step", plan.pk, "workload")
    if story is not None:
        messages.info(request, limit_words(story))
        _apply(request, job, plan)
    return redirect("plan-detail", plan.pk)


def _apply(request: HttpRequest, job: Job, plan: Plan) -> None:
    """Apply the chosen change to the draft and plan it."""
    chosen = change_at(_changes(job), request.POST.get("change", ""))
    if chosen and (ignored := suggestion_apply(plan.draft, chosen.changes)):
        messages.warning(
            request, f"Not changed, because this draft lacks the field: {', '.join(ignored)}."
        )
    try:
        plan_compute(plan)
    except (DraftProblem, Problem) as problem:
        messages.error(request, str(problem))
