"""Pages of plans: list, tabs, history, launch, clone and delete."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from django.contrib import messages
from django.core.paginator import Page
from django.db import transaction
from django.db.models import Count, QuerySet
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.urls import reverse
from django.views.decorators.http import require_GET, require_POST

from planner.specs.estimate import PlanAnswer
from runners.plans.launch import Launch
from runners.plans.refusals import DraftProblem
from runners.plans.tuning import FIGURES_OF
from webapp.accounts.models import Role, team_ids_of
from webapp.accounts.services import has_role, signed_in, visible_or_404
from webapp.accounts.sign_in import session_secret_keep
from webapp.core.display import quantity
from webapp.core.parameters import page_number, reads_query
from webapp.core.problems import Problem
from webapp.core.queries import NewestFirst, page_by_key
from webapp.deployments.forms import RUN as DEPLOYMENT
from webapp.deployments.forms import DeployForm, deploy_form
from webapp.jobs.endpoints import hashes_of, keep_for_session, new_key
from webapp.jobs.launching import endpoint_command, launchable_of, plan_launch
from webapp.jobs.measured_figures import definition_for
from webapp.jobs.models import Job, Measurement
from webapp.pages.deployments import deploy
from webapp.pages.limits import plan_panel
from webapp.pages.workflows import WORKFLOW_KEYS
from webapp.plans.alternatives import (
    columns_for,
    comparison,
    frontier_of,
    inapplicable,
    offers_of,
    rejections,
)
from webapp.plans.engine_words import engines_named
from webapp.plans.explanation import Phase, explain, phases_of, workload_words
from webapp.plans.exporting import exports_of, file_of
from webapp.plans.models import Plan
from webapp.plans.planning import (
    current_answer,
    is_outdated,
    lacks_only_suggestions,
    plan_again,
    plan_compute,
    plan_keep,
    verdict_answer,
)
from webapp.plans.predicting import planned_speed
from webapp.plans.saving import (
    LISTED_COLUMNS,
    PlanChangedError,
    changeable_plan,
    chip_of,
    draft_begun_from,
    is_named,
    listed_plans,
    plan_remove,
    version_context,
    versions_of,
)
from webapp.plans.side_by_side import side_by_side
from webapp.plans.verdict import price_of, problem_verdict, verdict_of
from webapp.tunings.planning import tuning_refusal
from webapp.wizard.documents import document_of, schema_address, yaml_of
from webapp.wizard.drafts import proposals_fill
from webapp.wizard.engine_search import engine_settle
from webapp.wizard.launch_form import SEARCHED, SHOW_COMMAND, LaunchForm
from webapp.wizard.steps import launch_form_of, step_page
from webapp.workflows.following import RUN as WORKFLOW
from webapp.workflows.following import FollowingForm, following_form
from webapp.workflows.services import workflow_start

# The list of plans: filtered and paginated by an index, loaded without documents.


PAGE_SIZE = 50


def page_of_plans(request: HttpRequest, query: str) -> Page[Plan]:
    """Return a page of saved plans and the person's own drafts, the last saved first."""
    teams = team_ids_of(request.user)
    keys = NewestFirst(listed_plans(request.user, query), "saved_at", teams)
    rows = Plan.objects.select_related("owner", "base").only(*LISTED_COLUMNS)
    page = page_by_key(keys, rows, page_number(request), PAGE_SIZE)
    _read_verdicts([plan for plan in page if not plan.is_draft and not plan.verdict])
    return page


def _read_verdicts(plans: Sequence[Plan]) -> None:
    """Set missing verdicts of saved plans from their documents."""
    keys = [plan.pk for plan in plans]
    documents = Plan.objects.only("state", "verdict", "answer", "draft").in_bulk(keys)
    for plan in plans:
        plan.verdict = chip_of(documents[plan.pk]) if plan.pk in documents else "incomplete"


def num_jobs_of(plans: Iterable[Plan]) -> dict[str, int]:
    """Return the number of jobs per series, over all versions of some saved plans."""
    series = [plan.series for plan in plans if plan.series]
    jobs = Job.objects.filter(plan__series__in=series, deleted_at=None).order_by()
    return dict(jobs.values_list("plan__series").annotate(n=Count("*")))


# History of a plan: its jobs, with predicted and measured figures.


class FigureComparison(NamedTuple):
    """One figure of one job, predicted and measured."""

    job: Job
    metric: str
    predicted: str
    measured: str
    ratio: float
    is_inside: bool


def jobs_of(plan: Plan) -> QuerySet[Job]:
    """Return the jobs launched from any version of a plan, newest first."""
    jobs = Job.objects.filter(plan__series=plan.series, deleted_at=None)
    jobs = jobs if plan.series else jobs.none()
    return jobs.select_related("host", "requested_host", "pool", "owner", "plan")


def measured_of(plan: Plan) -> list[FigureComparison]:
    """Return every predicted figure that jobs of any version measured."""
    if not plan.series:
        return []
    rows = Measurement.objects.filter(job__plan__series=plan.series, job__deleted_at=None)
    rows = rows.select_related("job")
    return [_comparison(row) for row in rows.order_by("-job__created_at", "id")]


def _comparison(row: Measurement) -> FigureComparison:
    low, high, definition = (
        row.predicted_low,
        row.predicted_high,
        definition_for(row.job, row.metric),
    )
    return FigureComparison(
        job=row.job,
        metric=definition.label,
        predicted=str(quantity(row.predicted, definition.unit)),
        measured=str(quantity(row.measured, definition.unit)),
        ratio=row.ratio,
        is_inside=low is not None and high is not None and low <= row.measured <= high,
    )


KEY_LENGTH = 64
UNPROCESSABLE = 422
SHOWN_REJECTIONS = 8
TABS = {
    "summary": "Summary",
    "alternatives": "Alternatives",
    "why": "Why",
    "limits": "Limits",
    "exports": "Exports",
    "history": "History",
}


@require_GET
@reads_query("q", "page")
def plan_list(request: HttpRequest) -> HttpResponse:
    """List the team's plans, newest first; ``q`` filters by name."""
    query = request.GET.get("q", "").strip()
    page = page_of_plans(request, query)
    counts = num_jobs_of(page)
    rows = [(plan, chip_of(plan), counts.get(plan.series, 0)) for plan in page]
    return render(request, "plans/list.html", {"page": page, "rows": rows, "filter": query})


@require_GET
@reads_query("offers", "question", repeated=("strategy",))
def plan_detail(request: HttpRequest, plan_id: str, tab: str = "summary") -> HttpResponse:
    """Show a plan: the answer first, then the figures, then the reasons."""
    if tab not in TABS:
        raise Http404(tab)
    plan = visible_or_404(Plan, request.user, pk=plan_id)
    readable = plan.readable_document
    context: dict[str, Any] = {
        "plan": plan,
        "tab": tab,
        "tabs": [_tab(plan, slug, tab) for slug in TABS],
        "title": plan.name or "Draft plan",
        "may_change": has_role(request.user, plan.team, Role.PRACTITIONER),
        "work": workload_words(readable.workload) if readable else "",
        **version_context(plan, request.user),
    }
    try:
        is_shown = lacks_only_suggestions(plan) and "offers" not in request.GET
        answer = verdict_answer(plan) if is_shown else current_answer(plan)
    except DraftProblem as problem:
        context["verdict"] = problem_verdict(problem.sentence, is_refused=problem.is_refused)
        context["slug"] = "review"
        if problem.is_refused:
            context["engines"] = engines_named(problem.sentence, plan.document)
        return render(request, "plans/detail.html", context)
    url, document = reverse("plan-tab", args=[plan.pk, "why"]), plan.document
    context |= {
        "answer": answer,
        "best": answer.plans[0] if answer.plans else None,
        "verdict": verdict_of(answer, document, url, speed=planned_speed(plan)),
        "is_on_host": not document.hardware.is_catalog,
        **_tuning(plan, answer),
        "has_offers_to_come": lacks_only_suggestions(plan),
        "is_outdated": plan.is_latest and is_outdated(plan),
        **(_limits(request, plan) if tab == "limits" else PANELS[tab](plan, answer)),
    }
    if tab == "alternatives":
        ticked = request.GET.getlist("strategy")
        context |= {"side": side_by_side(answer, document, ticked), "ticked": ticked}
    if tab == "exports":
        context["file"] = yaml_of(document_of(plan), schema_address(request))
    is_part = tab == "limits" and "HX-Request" in request.headers
    return render(request, "limits/of_plan.html" if is_part else "plans/detail.html", context)


def _tab(plan: Plan, slug: str, current: str) -> dict[str, Any]:
    is_first = slug == "summary"
    url = reverse("plan-detail" if is_first else "plan-tab", args=[plan.pk, slug][: 2 - is_first])
    return {"url": url, "name": TABS[slug], "is_current": slug == current}


def _summary(plan: Plan, answer: PlanAnswer) -> dict[str, Any]:
    return {
        "frontier": frontier_of(answer, plan.document),
        "columns": columns_for(answer, plan.document),
        "comparison": comparison(answer, plan.document),
        "price": price_of(answer.plans[0] if answer.plans else None),
        "phases": _phases(plan, answer),
        **_ruled_out(answer),
        "offers": offers_of(answer, plan.document),
        "slug": "review",
    }


def _tuning(plan: Plan, answer: PlanAnswer) -> dict[str, Any]:
    """Return whether a plan can be tuned, or why not, where its goal is one that is tuned."""
    if plan.deleted_at or not answer.plans or plan.document.goal not in FIGURES_OF:
        return {}
    refusal = tuning_refusal(plan, answer)
    return {"may_tune": not refusal, "tuning_refusal": refusal}


def _phases(plan: Plan, answer: PlanAnswer) -> list[Phase]:
    is_batch = plan.document.goal == "generate"
    return phases_of(answer.plans[0], is_batch=is_batch) if answer.plans else []


def _alternatives(plan: Plan, answer: PlanAnswer) -> dict[str, Any]:
    return {
        "columns": columns_for(answer, plan.document),
        "comparison": comparison(answer, plan.document, has_front=True),
        "slug": "review",
        **_ruled_out(answer),
    }


def _ruled_out(answer: PlanAnswer) -> dict[str, Any]:
    rejected = rejections(answer)
    return {
        "rejections": rejected[:SHOWN_REJECTIONS],
        "more_rejections": rejected[SHOWN_REJECTIONS:],
        "inapplicable": inapplicable(answer),
    }


def _limits(request: HttpRequest, plan: Plan) -> dict[str, Any]:
    return plan_panel(plan, request.GET.get("question", ""))


def _why(_plan: Plan, answer: PlanAnswer) -> dict[str, Any]:
    return {"groups": explain(answer.plans[0]) if answer.plans else []}


def _exports(plan: Plan, answer: PlanAnswer) -> dict[str, Any]:
    """Return the exports of a plan: other tools' formats, the question, the job spec."""
    texts = [("question", "The question", "Input of python -m planner plan", plan.request)]
    if answer.plans:
        strategy = answer.plans[0].strategy.model_dump(mode="json")
        texts.append(("strategy", "The chosen strategy", "With every default filled in", strategy))
    try:
        document = launchable_of(plan).spec.model_dump(mode="json")
        texts.append(("job", "The job", "The document that the host would run", document))
    except DraftProblem:
        pass
    formats = exports_of(plan, answer)
    return {
        "formats": formats,
        "measure": formats[0].measure if formats else "",
        "exports": [(*text[:3], json.dumps(text[3], indent=2)) for text in texts],
    }


@require_GET
def plan_export(request: HttpRequest, plan_id: str, key: str) -> HttpResponse:
    """Send one export of a plan as a file."""
    plan = visible_or_404(Plan, request.user, pk=plan_id)
    try:
        export_file = file_of(plan, current_answer(plan), key)
    except DraftProblem as problem:
        raise Http404(str(problem)) from problem
    if export_file is None:
        raise Http404(key)
    name, text = export_file
    response = HttpResponse(text, content_type="text/plain; charset=utf-8")
    response["Content-Disposition"] = f'attachment; filename="{name}"'
    return response


def _history(plan: Plan, _answer: PlanAnswer) -> dict[str, Any]:
    versions = versions_of(plan)
    return {"jobs": jobs_of(plan), "measured": measured_of(plan), "versions": versions}


PANELS = {
    "summary": _summary,
    "alternatives": _alternatives,
    "why": _why,
    "exports": _exports,
    "history": _history,
}


@require_POST
def plan_launch_view(request: HttpRequest, plan_id: str) -> HttpResponse:
    """Launch a plan's job and go to its page, or only save the plan.

    A launch that is refused shows the form again, with the problem at its field.
    """
    plan = changeable_plan(request, plan_id)
    form = launch_form_of(proposals_fill(plan), request.POST)
    try:
        if not form.is_valid():
            return _refused(request, plan, form)
        reviewed = request.POST.get("revision", "")  # the draft may have changed since
        if plan.is_draft and reviewed not in {"", str(plan.revision)}:
            raise PlanChangedError(plan, request.user.get_username())
        if request.POST.get("go") == "keep":
            return _keep(request, plan, form.launch)
        if request.POST.get("run") == SHOW_COMMAND:
            page = step_page(plan, "review", launch=form)
            page |= {"following": following_form(plan, page["note"])}
            page |= {"deploying": deploy_form(plan, page["model_words"])}
            page |= {"command": endpoint_command(plan, form.launch), "has_asked": True}
            return render(request, "wizard/step.html", page)
        return _started(request, plan, form)
    except (DraftProblem, Problem) as problem:
        form.refuse(problem)
        return _refused(request, plan, form)


def _started(request: HttpRequest, plan: Plan, form: LaunchForm) -> HttpResponse:
    """Start what the pressed button says, and go to its page."""
    run = request.POST.get("run")
    if run == WORKFLOW:
        return _start_workflow(request, plan, form)
    if run == DEPLOYMENT:
        key = request.POST.get("key", "")[:KEY_LENGTH]
        made = deploy(request, plan, form.launch, DeployForm(request.POST), key)
        return redirect("deployment-detail", made.pk)
    if run == SEARCHED:
        return redirect("job-detail", _launch_searched(request, plan, form.launch).pk)
    return redirect("job-detail", _launch(request, plan, form.launch).pk)


def _refused(request: HttpRequest, plan: Plan, form: LaunchForm) -> HttpResponse:
    """Show the review page with the form as it was sent, and what is wrong."""
    page = step_page(plan, "review", launch=form)
    page["following"] = following_form(plan, page["note"], request.POST)
    page["deploying"] = deploy_form(plan, page["model_words"], request.POST)
    for texts in form.errors.values():
        messages.error(request, " ".join(map(str, texts)))
    return render(request, "wizard/step.html", page, status=UNPROCESSABLE)


def _chosen_name(posted: Mapping[str, str]) -> str:
    """Return the name that a person entered; "" if it is the proposed one."""
    name = posted.get("name", "").strip()
    return "" if name == posted.get("proposed", "").strip() else name


def _keep(request: HttpRequest, plan: Plan, launch: Launch) -> HttpResponse:
    base, as_new = plan.base, launch.save_as == "new"
    name = _chosen_name(request.POST.dict())
    saved = plan_keep(plan, name, by=request.user.get_username(), as_new=as_new)
    if base is not None and saved.pk == base.pk:
        messages.info(
            request, f"The draft equals version {base.version}, so no new version was saved."
        )
    elif saved.version and saved.version > 1:
        messages.success(request, f"Version {saved.version} of the plan is saved.")
    else:
        messages.success(request, "The plan is saved.")
    return redirect("plan-detail", saved.pk)


def _launch(request: HttpRequest, plan: Plan, launch: Launch) -> Job:
    """Launch the plan with the review form's options and return the job."""
    endpoint_key = new_key() if launch.run == "endpoint" else None
    job = plan_launch(
        plan=plan,
        by=signed_in(request),
        launch=launch,
        key_hashes=hashes_of(endpoint_key) if endpoint_key else (),
        idempotency_key=request.POST.get("key", "")[:KEY_LENGTH] or None,
        is_named=bool(_chosen_name(request.POST.dict())),
    )
    if endpoint_key:
        keep_for_session(request, job, endpoint_key)
    return job


def _launch_searched(request: HttpRequest, plan: Plan, launch: Launch) -> Job:
    """Start the endpoint on the best engine of the host, and say why it is that one.

    The plan is then that engine's: a draft itself, of a saved plan a new version.
    """
    with transaction.atomic():
        draft = plan if plan.is_draft else draft_begun_from(plan, signed_in(request))
        # Further arguments are those of one engine.
        notes = engine_settle(draft, launch.with_values(engine_args=[]))
        plan_compute(draft)
        job = _launch(request, draft, draft.document.launch)
    for note in notes:
        messages.info(request, note)
    return job


def _start_workflow(request: HttpRequest, plan: Plan, form: LaunchForm) -> HttpResponse:
    """Start the plan's job and the steps that are to follow it, and go to their page."""
    following = FollowingForm(request.POST, plan=plan)
    started = workflow_start(
        team=plan.team,
        by=signed_in(request),
        document=following.document(_chosen_name(request.POST.dict()), form.launch),
        first=plan,
        idempotency_key=request.POST.get("key", "")[:KEY_LENGTH] or None,
    )
    if started.endpoint_key:
        session_secret_keep(request, WORKFLOW_KEYS, started.workflow.pk, started.endpoint_key)
    return redirect("workflow-detail", started.workflow.pk)


@require_POST
def plan_compute_view(request: HttpRequest, plan_id: str) -> HttpResponse:
    """Plan again, with the host's current measurements; a saved plan gets a new version."""
    plan = changeable_plan(request, plan_id)
    try:
        plan = plan_again(plan, signed_in(request))
        messages.success(request, "Planned again with the current measurements.")
    except (DraftProblem, Problem) as problem:
        messages.error(request, str(problem))
    return redirect("plan-detail", plan.pk)


@require_POST
def plan_clone(request: HttpRequest, plan_id: str) -> HttpResponse:
    """Open the wizard on a copy that will be saved as a separate plan."""
    plan = changeable_plan(request, plan_id)
    name = f"{plan.name[:110]} (copy)" if is_named(plan) else plan.name
    copy = draft_begun_from(plan, signed_in(request), base=None, name=name, revision=1)
    messages.info(request, f"A copy of {plan.name or 'the draft'}, with everything filled in.")
    return redirect("plan-step", copy.pk, "review")


@require_POST
def plan_delete(request: HttpRequest, plan_id: str) -> HttpResponse:
    """Delete a draft, or a plan with all its versions; its jobs remain."""
    plan = changeable_plan(request, plan_id)
    stays = "" if plan.is_draft else "; its jobs stay"
    messages.success(request, f"{plan.name or 'The draft'} is deleted{stays}.")
    plan_remove(plan)
    return redirect("plan-list")
