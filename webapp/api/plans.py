"""Operations on plans: make, change, plan again, suggest, save, export, launch, delete."""

from collections.abc import Callable
from contextlib import suppress
from typing import Annotated, Any, Literal, TypeVar

from django.http import HttpRequest
from django.urls import reverse
from ninja import Body, Query, Router, Status
from pydantic import Field, TypeAdapter

from planner import api
from planner.specs.base import PlannerError
from planner.specs.estimate import (
    Estimate,
    EstimateRequest,
    InverseAnswer,
    InverseQuestion,
    InverseRequest,
    PlanAnswer,
    PlanRequest,
)
from runners.client.replies.plans import (
    ChangeReply,
    ExportReply,
    FormatReply,
    Imported,
    LaunchNote,
    PlanFormats,
    PlanPage,
    PlanReply,
    PlanSummary,
    PostMortem,
    SuggestionReply,
    VerdictReply,
    VersionPage,
    VersionReply,
)
from runners.jobspec.base import NAME_LENGTH
from runners.plans.document import HardwareChoice, PlanDocument
from runners.plans.old_names import read_document
from runners.plans.refusals import DraftProblem
from runners.plans.training_data import follow_data
from runners.plans.workflow import WorkflowDocument
from runners.plans.workloads import WORKLOADS
from webapp.accounts.models import Role, team_ids_of
from webapp.accounts.services import check_role, current_membership, signed_in, visible_or_404
from webapp.api.auth import PLAN, READ
from webapp.api.requests import Paging, Sent, page_keys, page_of
from webapp.core.clock import now
from webapp.core.display import sentence
from webapp.core.problems import REFUSALS, ConflictProblem, InvalidProblem, NotFoundProblem
from webapp.core.queries import in_order
from webapp.jobs.gangs import deciding_part
from webapp.jobs.launching import clone_begin, launch_note
from webapp.jobs.lookup import load_job
from webapp.jobs.memory_comparison import shortage_of
from webapp.jobs.permissions import job_for
from webapp.jobs.postmortem import fitting_changes
from webapp.jobs.replanning import NO_SHORTAGE, replan
from webapp.plans.exporting import export_plan, exports_of
from webapp.plans.models import Plan
from webapp.plans.planning import (
    current_answer,
    is_outdated,
    limit_of,
    plan_again,
    plan_answer,
    plan_compute,
    plan_keep,
    stored_answer,
)
from webapp.plans.predicting import planned_speed
from webapp.plans.saving import (
    LISTED_COLUMNS,
    changeable_plan,
    chip_of,
    draft_begun_from,
    draft_of,
    is_named,
    listed_plans,
    plan_remove,
    title_of,
    versions_of,
)
from webapp.plans.verdict import problem_verdict, stored_state, verdict_of
from webapp.wizard.documents import (
    SentPlan,
    document_of,
    document_of_request,
    document_parse,
    draft_fill,
    draft_of_document,
)
from webapp.wizard.drafts import (
    proposals_fill,
    suggestion_apply,
)
from webapp.wizard.pasting import paste_draft, paste_read

router = Router(tags=["plans"], auth=READ)
jobs_router = Router(tags=["plans"], auth=READ)
MOST_NAMED = 10  # versions in a message


def _summary(plan: Plan) -> dict[str, Any]:
    return {
        "id": plan.pk,
        "name": plan.name,
        "state": plan.state,
        "verdict": chip_of(plan),
        "version": plan.version,
        "series": plan.series,
        "team": plan.team_id,
        "owner": plan.owner.get_username() if plan.owner else "",
        "saved_at": plan.saved_at,
        "url": reverse("plan-detail", args=[plan.pk]),
    }


def plan_reply(plan: Plan, notes: list[str] | None = None) -> PlanReply:
    """Return a plan with its full answer, computed now if it is missing."""
    answer, problem, is_refused = None, "", False
    try:
        answer = current_answer(plan)
    except DraftProblem as error:
        problem, is_refused = error.sentence, error.is_refused
    verdict = (
        verdict_of(answer, plan.document, speed=planned_speed(plan))
        if answer
        else problem_verdict(problem, is_refused=is_refused)
    )
    note = launch_note(plan)
    can_launch = bool(note["can"] or note.get("can_serve")) and not note.get("is_over")
    return PlanReply(
        **_summary(plan),
        revision=plan.revision,
        document=document_of(plan),
        request=PlanRequest.model_validate(plan.request) if plan.request else None,
        answer=answer,
        problem=problem,
        verdict_words=VerdictReply(
            tone=verdict.tone,
            state=verdict.state,
            sentence=verdict.sentence,
            detail=f"{verdict.detail} {verdict.start}".strip(),
            warnings=list(verdict.warnings),
        ),
        launch=LaunchNote(can=can_launch, title=note["title"], text=note["text"]),
        suggestions=[
            SuggestionReply(number=number, sentence=each.title, changes=each.changes)
            for number, each in enumerate(answer.suggestions if answer else ())
        ],
        is_outdated=plan.is_latest and bool(answer) and is_outdated(plan),
        notes=notes or [],
    )


# List, make and change


class PlanFilters(Paging):
    """Filters of the list of plans."""

    q: Annotated[str, Query(description="Part of the name")] = ""


@router.get("", response={200: PlanPage, **REFUSALS}, operation_id="list_plans")
def plan_list(request: HttpRequest, filters: Query[PlanFilters]) -> PlanPage:
    """Return the teams' saved plans and the caller's own drafts, the last saved first."""
    listed = page_keys(
        listed_plans(request.user, filters.q.strip()),
        "saved_at",
        team_ids_of(request.user),
        filters,
    )
    rows = in_order(Plan.objects.select_related("owner").only(*LISTED_COLUMNS), listed.keys)
    items = [PlanSummary(**_summary(plan)) for plan in rows]
    return PlanPage(items=items, next_cursor=listed.next_cursor)


Keep = Annotated[
    bool,
    Query(
        description="With false nothing is saved: the reply, with status 200, has an empty id and "
        "url, and says what the planner answers and what a launch would do"
    ),
]


@router.post(
    "",
    auth=PLAN,
    response={200: PlanReply, 201: PlanReply, **REFUSALS},
    operation_id="create_plan",
)
def plan_create(request: HttpRequest, body: SentPlan, *, keep: Keep = True) -> Status[PlanReply]:
    """Make a plan from a document, plan it, and save it as its first version.

    What the document leaves out has the wizard's default. A plan that nothing fits is saved too:
    its answer holds the reasons. One that the planner refuses stays a draft.
    """
    return _created(request, body, [], keep=keep)


def _without_launch(document: PlanDocument) -> PlanDocument:
    """Return a document of a plan alone.

    Raises:
        InvalidProblem: it says how to launch the plan, which a plan does not keep.
    """
    if "launch" in document.model_fields_set:
        raise InvalidProblem(
            "launch",
            "A plan does not keep the field launch. Leave it out here and launch the plan by POST "
            "/api/v1/plans/{plan_id}/launch, or send the whole document to POST /api/v1/jobs.",
        )
    return document


def plan_of_document(request: HttpRequest, document: PlanDocument) -> tuple[Plan, list[str]]:
    """Return a draft of a document, neither planned nor saved, and notes on what else changed.

    Raises:
        ForbiddenProblem: the caller's role makes no plans.
        InvalidProblem: the document has a value that its form refuses.
    """
    membership = current_membership(request)
    check_role(Role(membership.role), Role.PRACTITIONER)
    return draft_of_document(membership.team, signed_in(request), document)


def _created(
    request: HttpRequest, document: PlanDocument, notes: list[str], *, keep: bool
) -> Status[PlanReply]:
    plan, more = plan_of_document(request, _without_launch(document))
    notes = [*notes, *more]
    if not keep:
        return Status(200, _forgotten(plan, notes))
    plan.save(force_insert=True)
    return Status(201, _planned(plan, notes, by=request.user.get_username()))


def _forgotten(plan: Plan, notes: list[str]) -> PlanReply:
    """Return the reply about a plan that is computed and not saved."""
    plan.saved_at = now()
    with suppress(DraftProblem):  # the reply says what it is
        plan_answer(plan)
    shown = plan_reply(plan, notes)
    shown.id, shown.url, shown.name = "", "", shown.name or title_of(plan)
    shown.verdict = stored_state(plan.answer, plan.document) if plan.answer else "draft"
    return shown


class PlannerRequest(Sent):
    """A planner's request, whole or in part, and where the plan is to run."""

    request: dict[str, Any]
    host: Annotated[str, Field(max_length=NAME_LENGTH, description="Name or id of a host")] = ""
    pool: Annotated[str, Field(max_length=NAME_LENGTH, description="Name or id of a pool")] = ""
    name: Annotated[str, Field(max_length=NAME_LENGTH)] = ""


@router.post(
    "/from-request",
    auth=PLAN,
    response={200: PlanReply, 201: PlanReply, **REFUSALS},
    operation_id="create_plan_from_request",
)
def plan_from_request(
    request: HttpRequest, body: PlannerRequest, *, keep: Keep = True
) -> Status[PlanReply]:
    """Make a plan from a planner's request, such as the one of a plan that was made offline.

    ``notes`` names what the wizard has no field for.
    """
    parts, notes = document_of_request(body.request, host=body.host, pool=body.pool)
    document = document_parse(parts | {"name": body.name})
    return _created(request, document, notes, keep=keep)


def _planned(plan: Plan, notes: list[str], *, by: str) -> PlanReply:
    """Plan a draft and save it as a version, unless the planner refuses it."""
    try:
        plan_compute(plan)
    except DraftProblem:
        return plan_reply(plan, notes)
    return plan_reply(plan_keep(plan, by=by), notes)


class Pasted(Sent):
    """Another tool's command line or configuration, and where the plan is to run."""

    text: Annotated[str, Field(max_length=65_536)]
    host: Annotated[str, Field(max_length=NAME_LENGTH, description="Name or id of a host")] = ""
    pool: Annotated[str, Field(max_length=NAME_LENGTH, description="Name or id of a pool")] = ""


@router.post(
    "/import",
    auth=PLAN,
    response={200: Imported, 201: Imported, **REFUSALS},
    operation_id="import_plan",
)
def plan_import(request: HttpRequest, body: Pasted, *, keep: Keep = True) -> Status[Imported]:
    """Make a draft of a command line of an engine or a trainer, or of one of their files."""
    membership = current_membership(request)
    check_role(Role(membership.role), Role.PRACTITIONER)
    imported = paste_read(body.text)
    plan, notes = paste_draft(
        team=membership.team,
        owner=signed_in(request),
        imported=imported,
        host=body.host,
        pool=body.pool,
    )
    if keep:
        plan.save(force_insert=True)
        with suppress(DraftProblem):
            plan_compute(plan)
    parts = imported.model_dump(mode="json")
    reply = Imported(
        plan=plan_reply(plan, notes) if keep else _forgotten(plan, notes),
        kind=imported.kind,
        launch=plan.document.launch.model_dump(mode="json", exclude_defaults=True),
        missing=list(imported.missing),
        **{name: parts.get(name) or [] for name in ("understood", "ignored", "unknown")},
    )
    return Status(201 if keep else 200, reply)


@router.get("/schema", response={200: dict[str, Any], **REFUSALS}, operation_id="get_plan_schema")
def plan_schema(request: HttpRequest) -> dict[str, Any]:  # noqa: ARG001 (ninja passes it)
    """Return the JSON schema of plans and of workflows, for editors of ``job.yaml``."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A plan or a workflow of Slipway",
        **TypeAdapter(SentPlan | WorkflowDocument).json_schema(),
    }


@router.get("/{plan_id}", response={200: PlanReply, **REFUSALS}, operation_id="get_plan")
def plan_get(request: HttpRequest, plan_id: str) -> PlanReply:
    """Return a plan with the planner's answer."""
    return plan_reply(visible_or_404(Plan, request.user, pk=plan_id, deleted_at=None))


@router.patch(
    "/{plan_id}", auth=PLAN, response={200: PlanReply, **REFUSALS}, operation_id="change_plan"
)
def plan_change(
    request: HttpRequest,
    plan_id: str,
    body: Annotated[dict[str, Any], Body(description="A JSON merge patch (RFC 7396)")],
) -> PlanReply:
    """Change a plan's document by a JSON merge patch, plan it, and save the next version.

    A draft that the planner refuses stays a draft; a plan that was saved stays as it is, and the
    reply is its next version.
    """
    plan = plan_to_change(request, plan_id)
    draft = plan if plan.is_draft else draft_begun_from(plan, signed_in(request))
    proposals_fill(draft)
    try:
        document = document_parse(_changed(document_of(draft), read_document(body)))
        notes = draft_fill(draft, _without_launch(document))
    except Exception:
        if draft is not plan:
            draft.delete()
        raise
    draft.wizard["is_touched"] = True
    if document.name and document.name != draft.name:
        draft.name, draft.is_named = document.name, True
    return _planned(draft, notes, by=request.user.get_username())


def plan_to_change(request: HttpRequest, plan_id: str) -> Plan:
    """Return a plan that the caller may change, and that is not deleted.

    Raises:
        ForbiddenProblem: the caller's role changes no plans.
        Http404: the caller's teams have no such plan.
        NotFoundProblem: it is deleted.
    """
    plan = changeable_plan(request, plan_id)
    if plan.deleted_at is not None:
        raise NotFoundProblem("not_found", "This plan is deleted.")
    return plan


def _changed(document: dict[str, Any], patch: dict[str, Any]) -> dict[str, Any]:
    """Return a plan's document with a merge patch applied; null empties a field that can be."""
    merged: dict[str, Any] = _merged(document, patch)
    parts = {"workload": WORKLOADS.get(str(merged.get("goal"))), "hardware": HardwareChoice}
    for name, part in parts.items():
        values = patch.get(name)
        if part is not None and isinstance(values, dict):
            deleted = [each for each, value in values.items() if value is None]
            merged[name] |= dict.fromkeys(each for each in deleted if each in part.model_fields)
    if isinstance(stated := patch.get("workload"), dict):
        merged["workload"] = follow_data(merged["workload"], stated)
    return merged


def _merged(document: Any, patch: Any) -> Any:  # noqa: ANN401 (JSON)
    """Return a document with a merge patch applied; null deletes (RFC 7396)."""
    if not isinstance(patch, dict):
        return patch
    merged = dict(document) if isinstance(document, dict) else {}
    for name, value in patch.items():
        if value is None:
            merged.pop(name, None)
        else:
            merged[name] = _merged(merged.get(name), value)
    return merged


@router.post(
    "/{plan_id}/compute",
    auth=PLAN,
    response={200: PlanReply, **REFUSALS},
    operation_id="compute_plan",
)
def plan_compute_again(request: HttpRequest, plan_id: str) -> PlanReply:
    """Plan again with the host's current measurements; a changed answer is the next version."""
    plan = plan_to_change(request, plan_id)
    try:
        return plan_reply(plan_again(plan, signed_in(request)))
    except DraftProblem as problem:
        raise InvalidProblem("draft", problem.sentence) from problem


@router.post(
    "/{plan_id}/suggestions/{number}",
    auth=PLAN,
    response={200: PlanReply, **REFUSALS},
    operation_id="apply_suggestion",
)
def plan_suggestion(request: HttpRequest, plan_id: str, number: int) -> PlanReply:
    """Apply one of the plan's suggestions, plan it, and save the next version."""
    plan = plan_to_change(request, plan_id)
    answer = stored_answer(plan)
    if answer is None or not 0 <= number < len(answer.suggestions):
        count = len(answer.suggestions) if answer else 0
        raise NotFoundProblem("no_suggestion", f"The plan has {count} suggestions, from 0 on.")
    draft = plan if plan.is_draft else draft_of(plan, signed_in(request), is_untouched=True)
    unapplied = suggestion_apply(proposals_fill(draft), answer.suggestions[number].changes)
    notes = [f"Not changed, because the plan lacks the field: {name}." for name in unapplied]
    return _planned(draft, notes, by=request.user.get_username())


@router.post(
    "/{plan_id}/clone", auth=PLAN, response={201: PlanReply, **REFUSALS}, operation_id="clone_plan"
)
def plan_clone(request: HttpRequest, plan_id: str) -> Status[PlanReply]:
    """Return a draft copy, to be saved as a separate plan."""
    plan = plan_to_change(request, plan_id)
    name = f"{plan.name[:110]} (copy)" if is_named(plan) else plan.name
    copy = draft_begun_from(plan, signed_in(request), base=None, name=name, revision=1)
    return Status(201, plan_reply(copy))


class Saving(Sent):
    """How a draft is saved."""

    name: Annotated[str, Field(max_length=NAME_LENGTH)] = ""
    save_as: Literal["next", "new"] = "next"


@router.post(
    "/{plan_id}/save", auth=PLAN, response={200: PlanReply, **REFUSALS}, operation_id="save_plan"
)
def plan_save(request: HttpRequest, plan_id: str, body: Saving) -> PlanReply:
    """Save a draft as a version; a saved plan is returned unchanged."""
    plan = plan_to_change(request, plan_id)
    by = request.user.get_username()
    return plan_reply(plan_keep(plan, body.name, by=by, as_new=body.save_as == "new"))


@router.delete(
    "/{plan_id}", auth=PLAN, response={204: None, **REFUSALS}, operation_id="delete_plan"
)
def plan_delete(
    request: HttpRequest,
    plan_id: str,
    *,
    all_versions: Annotated[
        bool, Query(description="Needed if the plan has several versions: all are deleted")
    ] = False,
) -> Status[None]:
    """Delete a draft, or a saved plan with all its versions; its jobs remain.

    One version of several cannot be deleted alone: without ``all_versions=true`` that is refused
    with 409 ``has_versions``, which names the versions.
    """
    plan = plan_to_change(request, plan_id)
    if not (plan.is_draft or all_versions):
        saved = Plan.objects.filter(series=plan.series, deleted_at=None).order_by("version")
        versions = [str(version) for version in saved.values_list("version", flat=True)]
        if len(versions) > 1:
            raise ConflictProblem(
                "has_versions",
                f"The plan {plan_id} is version {plan.version} of {len(versions)} "
                f"({', '.join(versions[:MOST_NAMED])}{', …' * (len(versions) > MOST_NAMED)}), "
                "which are deleted together. Repeat the request with ?all_versions=true to delete "
                "every one; the jobs remain.",
            )
    plan_remove(plan)
    return Status(204, None)


@router.get(
    "/{plan_id}/versions",
    response={200: VersionPage, **REFUSALS},
    operation_id="list_plan_versions",
)
def plan_versions(request: HttpRequest, plan_id: str, paging: Query[Paging]) -> VersionPage:
    """Return every version of a saved plan, newest first."""
    plan = visible_or_404(Plan, request.user, pk=plan_id, deleted_at=None)
    shown, more = page_of(
        f"versions {plan.series}", versions_of(plan), lambda each: each.plan.pk, paging
    )
    items = [
        VersionReply(
            id=each.plan.pk,
            version=each.plan.version or 0,
            name=each.plan.name,
            verdict=each.verdict,
            saved_by=each.plan.saved_by,
            saved_at=each.plan.saved_at,
            words=each.words,
            changes=[f"{one.name}: {one.before} → {one.after}" for one in each.changes],
            num_jobs=each.num_jobs,
        )
        for each in shown
    ]
    return VersionPage(items=items, next_cursor=more)


# Exports and limits


def _answer(plan: Plan) -> PlanAnswer:
    try:
        return current_answer(plan)
    except DraftProblem as problem:
        raise InvalidProblem("draft", str(problem)) from problem


@router.get(
    "/{plan_id}/exports", response={200: PlanFormats, **REFUSALS}, operation_id="list_exports"
)
def formats(request: HttpRequest, plan_id: str) -> PlanFormats:
    """Return the formats that a plan can be exported to."""
    plan = visible_or_404(Plan, request.user, pk=plan_id, deleted_at=None)
    exports = exports_of(plan, _answer(plan))
    fields = FormatReply.model_fields
    listed = [
        FormatReply(**{name: getattr(export, name) for name in fields}) for export in exports
    ]
    return PlanFormats(plan=plan.pk, formats=listed)


@router.get(
    "/{plan_id}/exports/{key}", response={200: ExportReply, **REFUSALS}, operation_id="export_plan"
)
def exported(request: HttpRequest, plan_id: str, key: str) -> ExportReply:
    """Return a plan in one format, with its notes and the script that measures it."""
    plan = visible_or_404(Plan, request.user, pk=plan_id, deleted_at=None)
    try:
        export = export_plan(plan, _answer(plan), key)
    except PlannerError as error:
        raise NotFoundProblem("no_export", error.message) from error
    return ExportReply(**{name: getattr(export, name) for name in ExportReply.model_fields})


@router.get(
    "/{plan_id}/limits/{question}",
    response={200: dict[str, Any], **REFUSALS},
    operation_id="get_plan_limit",
)
def limit(request: HttpRequest, plan_id: str, question: InverseQuestion) -> dict[str, Any]:
    """Return a limit of a plan, such as ``longest_context`` or ``most_users``."""
    plan = visible_or_404(Plan, request.user, pk=plan_id, deleted_at=None)
    try:
        return limit_of(plan, question).model_dump(mode="json")
    except DraftProblem as problem:
        raise InvalidProblem("limit", str(problem)) from problem


# Plans from jobs, and the template of two jobs


@jobs_router.get(
    "/jobs/{job_id}/post-mortem",
    response={200: PostMortem, **REFUSALS},
    operation_id="get_post_mortem",
)
def postmortem(request: HttpRequest, job_id: str) -> PostMortem:
    """Return what is known of a job's failure, and what would fit."""
    job = load_job(request, job_id)
    part = deciding_part(job)
    record = part.exit_record if part else {}
    return PostMortem(
        exit_code=record.get("exit_code"),
        signal=record.get("signal"),
        last_lines=[str(line) for line in record.get("last_lines") or ()],
        changes=[
            ChangeReply(number=number, title=each.title, changes=each.changes)
            for number, each in enumerate(fitting_changes(job))
        ],
    )


class PlanFromJob(Sent):
    """How a job becomes a plan.

    ``clone``: its plan with its launch options; ``need``: with the measured memory need as limit,
    of a job that ran out of memory; ``change``: with one of the changes of its post-mortem.
    """

    how: Literal["clone", "need", "change"] = "clone"
    change: Annotated[int, Field(ge=0, le=1000)] | None = None


@jobs_router.post(
    "/jobs/{job_id}/plan",
    auth=PLAN,
    response={201: PlanReply, **REFUSALS},
    operation_id="plan_from_job",
)
def plan_of_job(request: HttpRequest, job_id: str, body: PlanFromJob) -> Status[PlanReply]:
    """Make a draft plan from a job."""
    job, owner = job_for(request, job_id, "clone"), signed_in(request)
    story = shortage_of(job) if body.how != "clone" else None
    changes = fitting_changes(job) if body.how == "change" else []
    if body.how == "change" and (body.change is None or body.change >= len(changes)):
        raise NotFoundProblem(
            "no_change", f"The post-mortem of this job has {len(changes)} changes, from 0 on."
        )
    try:
        if body.how == "clone":
            return Status(201, plan_reply(clone_begin(job=job, owner=owner)))
        if story is None:
            raise ConflictProblem("no_shortage", NO_SHORTAGE)
        plan = replan(job=job, owner=owner, story=story)
    except DraftProblem as problem:
        raise ConflictProblem("no_plan", problem.sentence) from problem
    notes = []
    if body.how == "change":
        left = suggestion_apply(plan, changes[body.change or 0].changes)
        notes = [f"Not changed, because the plan lacks the field: {name}." for name in left]
    with suppress(DraftProblem):
        plan_compute(plan)
    return Status(201, plan_reply(plan, notes))


# The planner itself: nothing is stored

planner_router = Router(tags=["planner"], auth=READ)


@planner_router.post("/plan", response={200: PlanAnswer, **REFUSALS}, operation_id="ask_plan")
def ask_plan(request: HttpRequest, body: PlanRequest) -> PlanAnswer:  # noqa: ARG001 (ninja)
    """Answer a planner question in the planner's own contract."""
    return _planner_says(lambda: api.plan(body))


@planner_router.post(
    "/estimate", response={200: Estimate, **REFUSALS}, operation_id="ask_estimate"
)
def ask_estimate(request: HttpRequest, body: EstimateRequest) -> Estimate:  # noqa: ARG001 (ninja)
    """Return the estimate of one strategy."""
    return _planner_says(lambda: api.estimate(body))


@planner_router.post(
    "/inverse", response={200: InverseAnswer, **REFUSALS}, operation_id="ask_inverse"
)
def ask_inverse(request: HttpRequest, body: InverseRequest) -> InverseAnswer:  # noqa: ARG001 (ninja)
    """Return a limit, such as the longest context or the cheapest instance."""
    return _planner_says(lambda: api.inverse(body))


Answer = TypeVar("Answer")


def _planner_says(compute: Callable[[], Answer]) -> Answer:
    try:
        return compute()
    except PlannerError as error:
        faults = [{"field": error.field or "", "message": sentence(error.message)}]
        raise InvalidProblem("planner", sentence(error.message), errors=faults) from error
