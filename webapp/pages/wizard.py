"""The wizard: its steps, uploads, offers, suggestions and the verdict beside them."""

from typing import Any

from django.contrib import messages
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.urls import reverse
from django.views.decorators.http import require_GET, require_http_methods, require_POST

from planner.catalog.models import find_model
from planner.specs.base import UnknownTechniqueError
from planner.specs.estimate import PlannedStrategy
from planner.techniques.registry import Technique
from planner.techniques.registry import get as get_technique
from runners.datasets.text import unix_lines
from runners.jobspec.base import MAX_UPLOAD_BYTES
from runners.plans.refusals import DraftProblem
from runners.plans.workloads import TrainingData
from webapp.accounts.models import Role
from webapp.accounts.services import current_team, require_role, signed_in, visible_or_404
from webapp.core.bodies import takes_file
from webapp.core.display import whole
from webapp.core.parameters import choice_in_query, reads_query
from webapp.core.problems import Problem, QueryProblem
from webapp.deployments.forms import deploy_form
from webapp.hosts.models import Host
from webapp.jobs.comparing import address_of
from webapp.modelhub.models import TeamModel
from webapp.pages.datasets import upload_of_request
from webapp.pages.home import NAMED
from webapp.plans.alternatives import choice_of, strategies_of
from webapp.plans.models import Plan
from webapp.plans.places import draft_shape
from webapp.plans.planning import plan_compute, stored_answer
from webapp.plans.saving import TRIES, PlanChangedError, changeable_plan, draft_of
from webapp.wizard import steps
from webapp.wizard.combobox import Several, several_devices
from webapp.wizard.drafts import (
    PRESETS,
    SLUGS,
    draft_begin,
    first_host,
    first_step,
    fit_context,
    neighbours,
    options_for,
    pins_form,
    proposals_fill,
    step_form,
    store,
    suggestion_apply,
)
from webapp.wizard.forms import MAX_CONFIG_BYTES
from webapp.wizard.pasting import named_draft, own_draft, paste_draft, paste_read
from webapp.wizard.steps import (
    STAGES,
    compute_quietly,
    edit_note,
    form_marks,
    is_overtaken,
    launch_both,
    ready_hosts,
    stale_words,
)
from webapp.workflows.following import following_form

# Upload of a training data file within the wizard.


@require_POST
@takes_file(MAX_UPLOAD_BYTES)
def plan_upload(request: HttpRequest, plan_id: str) -> HttpResponse:
    """Store the file, choose it in both training goals of the plan, and return to the step."""
    plan = changeable_plan(request, plan_id)
    stored = upload_of_request(request, plan.team)
    if isinstance(stored, HttpResponse):
        return stored
    if stored is not None:
        if not plan.is_draft:
            plan = draft_of(plan, signed_in(request))
        _choose(plan, stored.pk)
        messages.success(
            request, f"{stored.name} is uploaded and chosen: {stored.num_records:,} records."
        )
    return redirect("plan-step", plan.pk, "workload")


def _choose(plan: Plan, dataset: str) -> None:
    """Choose an upload for the draft's training; retry after a concurrent write."""
    for _ in range(TRIES):
        document = proposals_fill(plan).document
        if isinstance(document.workload, TrainingData):
            document.workload = document.workload.with_values(
                data_source="upload", dataset=dataset
            )
        plan.document = document
        plan.wizard["is_touched"] = True
        try:
            return compute_quietly(plan)
        except PlanChangedError:
            plan.refresh_from_db()
    raise PlanChangedError(plan)


NO_CONTENT, CONFLICT, UNPROCESSABLE = 204, 409, 422
SAVED_MEANWHILE = (
    "The plan was saved since you opened this page, and a saved plan stays as it is. Your change "
    "is in this draft of it."
)


OF_CATALOG = " Its devices are of the catalog: choose others in the Hardware step."
TOO_FEW = (
    " Its devices are of the catalog, because {} has too few: choose yours in the Hardware step."
)


@require_GET
@require_role(Role.PRACTITIONER)
@reads_query("preset", "model", "host", "technique", "hardware")
def plan_new(request: HttpRequest) -> HttpResponse:
    """Create a draft of what the link names, and redirect to its first open step.

    ``model`` is the id of a model of the team or the catalog, ``technique`` a key of the catalog,
    ``hardware`` a number of a catalog device, such as ``4x a100-sxm4-80gb``.
    """
    preset = choice_in_query(request, "preset", PRESETS)
    model, technique = _model_in_query(request), _technique_in_query(request)
    named = [name for name in ("preset", "model") if request.GET.get(name)]
    if technique and named:
        raise QueryProblem(
            named[0], f"A technique has its own goal and model: leave out {named[0]}."
        )
    if preset == "demo" and model is not None:
        raise QueryProblem(
            "model", "The demo has a model of its own: leave out the parameter model."
        )
    host, devices = None, _devices_in_query(request)
    if host_id := request.GET.get("host"):
        host = visible_or_404(Host, request.user, pk=host_id)
    plan = draft_begin(
        team=current_team(request),
        owner=signed_in(request),
        preset=preset,
        model=model,
        host=host,
        technique=technique,
        devices=devices,
    )
    if technique is not None:
        asked = host or first_host(plan.team)
        of_catalog = TOO_FEW.format(asked.name) if asked else OF_CATALOG
        place = "" if plan.document.hardware.host else of_catalog
        messages.info(request, f"This plan uses the technique {technique.title}.{place}")
    step = first_step(preset, has_model=model is not None, has_technique=technique is not None)
    if devices and model is not None:
        step = "review"
    return redirect("plan-step", plan.pk, step)


def _devices_in_query(request: HttpRequest) -> Several | None:
    """Return the devices that a link names.

    Raises:
        Http404: there are none.
        QueryProblem: the demo or a host is named too.
    """
    if not (named := request.GET.get("hardware")):
        return None
    for other, words in (("host", "a host"), ("technique", "a technique")):
        if request.GET.get(other):
            raise QueryProblem("hardware", f"The link names {words}: leave out hardware.")
    if request.GET.get("preset") == "demo":
        raise QueryProblem("hardware", "The demo runs on a host: leave out hardware.")
    found = several_devices(named, most=1)
    if not found:
        raise Http404(named)
    return found[0]


def _model_in_query(request: HttpRequest) -> TeamModel | str | None:
    """Return the model of the team or the id of one of the catalog that a link names.

    Raises:
        Http404: there is none.
    """
    if not (model_id := request.GET.get("model")):
        return None
    own = TeamModel.objects.visible_to(request.user).select_related("host")
    if found := own.filter(pk=model_id).first():
        return found
    if find_model(model_id) is None:
        raise Http404(model_id)
    return model_id


def _technique_in_query(request: HttpRequest) -> Technique | None:
    """Return the technique that a link names.

    Raises:
        Http404: there is none.
    """
    if not (key := request.GET.get("technique")):
        return None
    try:
        return get_technique(key)
    except UnknownTechniqueError as error:
        raise Http404(key) from error


MAX_NAME = 200


@require_POST
@require_role(Role.PRACTITIONER)
def plan_by_name(request: HttpRequest) -> HttpResponse:
    """Make a draft that serves a model, named as in a document, and show its review."""
    name = request.POST.get("model", "").strip()
    team, owner = current_team(request), signed_in(request)
    try:
        plan, notes = named_draft(team=team, owner=owner, name=name)
    except Problem as problem:
        messages.error(request, problem.detail)
        request.session[NAMED] = name[:MAX_NAME]
        return redirect("home")
    for note in notes:
        messages.info(request, note)
    plan.save(force_insert=True)
    steps.compute_quietly(plan)
    return redirect("plan-step", plan.pk, "review")


PASTED = "pasted"  # in the session: a refused text, until a page shows it again


@require_POST
@require_role(Role.PRACTITIONER)
def plan_paste(request: HttpRequest) -> HttpResponse:
    """Make a draft of a plan's YAML or another tool's text, and show its review."""
    text = unix_lines(request.POST.get("text", ""))
    team, owner = current_team(request), signed_in(request)
    try:
        plan = own_draft(team=team, owner=owner, text=text)
        if plan is None:
            plan, _notes = paste_draft(team=team, owner=owner, imported=paste_read(text))
    except Problem as problem:
        messages.error(request, problem.detail)
        request.session[PASTED] = text  # for the new page's field
        return redirect("plan-new")
    plan.save(force_insert=True)
    steps.compute_quietly(plan)
    return redirect("plan-step", plan.pk, "review")


@require_http_methods(["GET", "POST"])
@takes_file(MAX_UPLOAD_BYTES)
@reads_query("offers")
def plan_step(request: HttpRequest, plan_id: str, step: str) -> HttpResponse:
    """Show one step; a POST saves it and redirects, or shows the errors of its fields.

    Back leads to the step before in any case, and says if the changes were not saved.
    """
    if step not in SLUGS:
        raise Http404(step)
    plan = changeable_plan(request, plan_id)
    if not plan.is_draft and step != "review":
        plan = draft_of(plan, signed_in(request))
        if request.method == "GET":
            return redirect("plan-step", plan.pk, step)
        messages.info(request, SAVED_MEANWHILE)
    plan = proposals_fill(plan)
    if request.method == "GET":
        if "offers" in request.GET:  # requested by a browser without JavaScript
            steps.offers_found(plan)
        page = steps.step_page(plan, step)
        if step == "review":
            page["following"] = following_form(plan, page["note"])
            page["deploying"] = deploy_form(plan, page["model_words"])
        if step == "goal":
            page["pasted"] = request.session.pop(PASTED, "")
        return render(request, "wizard/step.html", page)
    before, after = neighbours(step)
    is_back = request.POST.get("go") == "back" and before is not None
    problem_page = _save(request, plan, step)
    if problem_page and is_back and not problem_page.get("stale"):
        sentence = steps.problem_rail(plan, problem_page)["verdict"].sentence
        name = problem_page["step"].name.lower()
        messages.warning(request, f"The changes of the step {name} are not saved: {sentence}")
    elif problem_page:
        status = CONFLICT if problem_page.get("stale") else UNPROCESSABLE
        page = problem_page | steps.problem_rail(plan, problem_page)
        return render(request, "wizard/step.html", page, status=status)
    target = {"back": before, "stay": None}.get(request.POST.get("go", "next"), after)
    return redirect("plan-step", plan.pk, target.slug if target else step)


def _save(request: HttpRequest, plan: Plan, step: str) -> dict[str, Any] | None:
    """Store a step and compute the plan; return the page context with errors if invalid.

    After a concurrent write, the step is stored again on the new draft.
    """
    for _ in range(TRIES):
        try:
            return _save_once(request, plan, step)
        except PlanChangedError:
            plan.refresh_from_db()
            proposals_fill(plan)
    raise PlanChangedError(plan, request.user.get_username())


def _save_once(request: HttpRequest, plan: Plan, step: str) -> dict[str, Any] | None:
    posted = request.POST.dict()
    document = plan.document
    form = step_form(step, document, options_for(plan), request.POST, request.FILES)
    if form is None:
        return None
    pins = pins_form(document, request.POST) if step == "hardware" else None
    is_autosave = "HX-Request" in request.headers
    if is_overtaken(plan, step, posted, is_autosave=is_autosave):
        return None
    if stale := stale_words(plan, step, posted, request.user.get_username()):
        page = steps.step_page(plan, step, form, pins)
        return page | {"stale": stale, **form_marks(plan, step, posted)}
    if not form.is_valid() or (pins and not pins.is_valid()):
        return steps.step_page(plan, step, form, pins) | form_marks(plan, step, posted)
    store(plan, form)
    if pins:
        store(plan, pins)
    edit_note(plan, step, posted, request.user.get_username())
    if step == "model" and not is_autosave:
        _fit_context(request, plan)
    steps.compute_quietly(plan)
    return None


def _fit_context(request: HttpRequest, plan: Plan) -> None:
    """Shorten the workloads to the chosen model's context, and add a message."""
    shape, document = draft_shape(plan), plan.document
    if shape is None:
        return
    fitting = fit_context(document.workload, shape.max_position_embeddings)
    if fitting != document.workload:
        document.workload = fitting
        plan.document = document
        tokens = whole(shape.max_position_embeddings)
        messages.info(
            request, f"This model reads {tokens} tokens at once: workloads were shortened."
        )


@require_http_methods(["GET", "POST"])
@takes_file(MAX_CONFIG_BYTES)
@reads_query("step")
def plan_verdict(request: HttpRequest, plan_id: str) -> HttpResponse:
    """Return the rail; a POST of a step's form saves it first."""
    step = choice_in_query(request, "step", SLUGS)
    if request.method == "GET":
        plan = proposals_fill(visible_or_404(Plan, request.user, pk=plan_id))
        return render(request, "wizard/rail.html", steps.rail(plan, step))
    plan = changeable_plan(request, plan_id)
    if step not in SLUGS:
        raise Http404(step)
    is_saved = not plan.is_draft
    if is_saved:
        plan = draft_of(plan, signed_in(request))
    plan = proposals_fill(plan)
    try:
        problem_page = _save(request, plan, step)
    except PlanChangedError as problem:
        problem_page = steps.step_page(plan, step) | {"stale": problem.detail}
    if problem_page:
        return render(request, "wizard/live.html", steps.problem_rail(plan, problem_page))
    if is_saved:  # the page's form belongs to the saved plan, not to the new draft
        messages.info(request, SAVED_MEANWHILE)
        answer = HttpResponse(status=NO_CONTENT)
        answer["HX-Redirect"] = reverse("plan-step", args=[plan.pk, step])
        return answer
    return render(request, "wizard/live.html", steps.live(plan, step))


@require_GET
@reads_query("step")
def plan_offers(request: HttpRequest, plan_id: str) -> HttpResponse:
    """Return the suggested changes, which the rail loads after its verdict."""
    plan = proposals_fill(visible_or_404(Plan, request.user, pk=plan_id))
    context = {
        "plan": plan,
        "slug": choice_in_query(request, "step", SLUGS),
        "offers": steps.offers_found(plan),
    }
    return render(request, "plans/offers.html", context)


@require_POST
def plan_suggestion(request: HttpRequest, plan_id: str) -> HttpResponse:
    """Apply the chosen suggestion, strategy or engine, plan it, and return to the step.

    For a saved plan, a new draft of it is changed and shown.
    """
    plan = changeable_plan(request, plan_id)
    step = request.POST.get("step", "review")
    answer, chosen = stored_answer(plan), request.POST.get("suggestion", "")
    is_old = request.POST.get("revision", "") not in {"", str(plan.revision)}
    changes: dict[str, object] | None = None
    wanted: PlannedStrategy | None = None
    strategy = request.POST.get("strategy", "")
    if answer is not None and strategy in map(str, range(len(strategies_of(answer)))):
        wanted = strategies_of(answer)[int(strategy)]
        changes = choice_of(answer, plan.document, int(strategy))
    elif engine := request.POST.get("engine", ""):
        changes = {"engine": engine}
    elif answer is not None and chosen in map(str, range(len(answer.suggestions))):
        changes = answer.suggestions[int(chosen)].changes
    if is_old or changes is None:
        messages.error(
            request, "The suggestion belongs to an older verdict. This page shows the new verdict."
        )
        return redirect("plan-step", plan.pk, step if step in SLUGS else "review")
    if not plan.is_draft:
        plan = draft_of(plan, signed_in(request), is_untouched=True)
    _apply(request, proposals_fill(plan), changes)
    if answer is not None and wanted is not None and not _is_first(plan, wanted):
        whole = choice_of(answer, plan.document, int(strategy), is_whole=True)
        _apply(request, plan, whole)
    return redirect("plan-step", plan.pk, step if step in SLUGS else "review")


def _is_first(plan: Plan, wanted: PlannedStrategy) -> bool:
    """Return whether a strategy with its engine is the best of a plan's stored answer."""
    found = stored_answer(plan)
    best = found.plans[0] if found and found.plans else None
    return best is not None and (best.strategy, best.engine) == (wanted.strategy, wanted.engine)


def _apply(request: HttpRequest, plan: Plan, changes: dict[str, object]) -> None:
    if unapplied := suggestion_apply(plan, changes):
        messages.warning(
            request, f"Not changed, because this draft lacks the field: {', '.join(unapplied)}."
        )
    try:
        plan_compute(plan, brief=True)
    except (DraftProblem, PlanChangedError) as problem:
        messages.error(request, str(problem))


KEY_LENGTH = 40


@require_POST
@require_role(Role.PRACTITIONER)
def template_launch(request: HttpRequest) -> HttpResponse:
    """Launch the template's two jobs and redirect to their comparison."""
    team = current_team(request)
    hosts = {host.pk: host for host in ready_hosts(team)}
    host = hosts.get(request.POST.get("host", ""))
    stage = request.POST.get("zero_stage", "")
    if host is None:
        messages.error(request, "The host cannot run two ranks now. Choose a ready host.")
        return redirect("plan-new")
    if stage not in map(str, STAGES):
        messages.error(request, f"“ZeRO stage” is {stage[:20]}; it can be 1, 2 or 3.")
        return redirect("plan-new")
    try:
        jobs = launch_both(
            team=team,
            by=signed_in(request),
            host=host,
            zero_stage=int(stage),
            key=request.POST.get("key", "")[:KEY_LENGTH],
        )
    except (DraftProblem, Problem) as problem:
        messages.error(request, str(problem))
        return redirect("plan-new")
    return redirect(address_of([job.pk for job in jobs]))
