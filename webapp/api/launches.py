"""Operations that launch: a plan, a document, the classifier's two jobs; requests for approval."""

from typing import Annotated, Any, Literal, cast

from django.db import transaction
from django.http import HttpRequest
from django.urls import reverse
from ninja import Query, Router, Status
from pydantic import Field

from planner.catalog.engines import AUTO
from runners.client.replies.jobs import JobReply
from runners.client.replies.launches import Launched, LaunchRequestPage, LaunchRequestReply
from runners.jobspec.base import NAME_LENGTH
from runners.jobspec.serve import key_hash
from runners.plans.document import PlanDocument
from runners.plans.launch import Launch
from runners.plans.refusals import DraftProblem
from webapp.accounts.models import Role, team_ids_of
from webapp.accounts.services import check_role, current_membership, signed_in, visible_or_404
from webapp.accounts.tokens import acting_token
from webapp.api.auth import LAUNCH, PLAN, READ
from webapp.api.jobs import job_reply
from webapp.api.jobs import router as jobs_router
from webapp.api.plans import plan_of_document, plan_to_change
from webapp.api.requests import Paging, Sent, job_key, page_of
from webapp.core.problems import REFUSALS, ConflictProblem, InvalidProblem
from webapp.jobs.approvals import open_requests, request_make, request_withdraw
from webapp.jobs.endpoints import hashes_of, new_key, planned_command
from webapp.jobs.launching import plan_launch
from webapp.jobs.models import LaunchRequest
from webapp.plans.models import Plan
from webapp.plans.planning import plan_answer, plan_keep
from webapp.wizard.documents import SentLaunch, SentPlan, check_launch
from webapp.wizard.steps import launch_both, ready_hosts

router = Router(tags=["launches"], auth=READ)


DryRun = Annotated[
    bool,
    Query(
        description="With true nothing is started or kept: the request is checked as a launch is, "
        "against quotas and the token's budget too, and the reply, with status 200, has a job "
        "without an id"
    ),
]


@router.post(
    "/plans/{plan_id}/launch",
    auth=LAUNCH,
    response={200: Launched, 201: Launched, **REFUSALS},
    operation_id="launch_plan",
)
def plan_start(
    request: HttpRequest, plan_id: str, body: SentLaunch, *, dry_run: DryRun = False
) -> Status[Launched]:
    """Launch a plan as a job; with an ``Idempotency-Key`` a repetition launches nothing more.

    A token with a budget launches only what its rest suffices for.
    """
    plan = plan_to_change(request, plan_id)
    if not dry_run:
        return Status(201, _launched(request, plan, body))
    with transaction.atomic():
        launched = _launched(request, plan, body)
        transaction.set_rollback(True)
    return Status(200, _without_id(launched))


@jobs_router.post(  # one router has all methods of an address
    "/jobs",
    auth=LAUNCH,
    response={200: Launched, 201: Launched, **REFUSALS},
    operation_id="launch_document",
)
def document_start(
    request: HttpRequest, body: SentPlan, *, dry_run: DryRun = False
) -> Status[Launched]:
    """Plan a document, save the plan, and launch it as its field ``launch`` says.

    It is done as a whole or not at all: a launch that is refused keeps no plan.
    """
    plan, notes = _planned(request, body)
    with transaction.atomic():
        is_searched = body.hardware.engine == AUTO
        launch = plan.document.launch if is_searched else body.launch
        launched = _launched(request, _saved(plan), launch)
        if dry_run or launched.job.plan != plan.pk:  # else an earlier request with this key did
            transaction.set_rollback(True)
    launched = launched.model_copy(update={"notes": notes})
    return Status(200, _without_id(launched)) if dry_run else Status(201, launched)


def _without_id(launched: Launched) -> Launched:
    """Return the reply to a dry run: a job that is not there."""
    return Launched(
        job=launched.job.model_copy(update={"id": "", "url": "", "plan": None}),
        endpoint_key=None,
        command=launched.command,
        notes=launched.notes,
    )


def _planned(request: HttpRequest, document: PlanDocument) -> tuple[Plan, list[str]]:
    """Return a draft of a document with its answer, not saved, and notes on what else changed.

    Raises:
        InvalidProblem: the planner or a form refuses it.
    """
    plan, notes = plan_of_document(request, document)
    try:
        plan_answer(plan)
    except DraftProblem as problem:
        raise InvalidProblem("draft", problem.sentence) from problem
    return plan, notes


def _saved(plan: Plan) -> Plan:
    """Return a draft as the first version of a plan; its owner saves it."""
    plan.save(force_insert=True)
    return plan_keep(plan, by=plan.owner.get_username() if plan.owner else "")


def _launched(request: HttpRequest, plan: Plan, launch: Launch) -> Launched:
    check_launch(plan, launch)
    key = new_key() if launch.run == "endpoint" else None
    try:
        job = plan_launch(
            plan=plan,
            by=signed_in(request),
            launch=launch,
            key_hashes=hashes_of(key) if key else (),
            idempotency_key=job_key(request),
            is_named=bool(launch.name.strip()),
        )
    except DraftProblem as problem:
        raise ConflictProblem("cannot_launch", problem.sentence) from problem
    is_its_key = key is not None and job.spec.get("key_hashes", [""])[:1] == [key_hash(key)]
    return Launched(
        job=job_reply(job),
        endpoint_key=key if is_its_key else None,
        command=planned_command(job),
    )


class LaunchToApprove(Sent):
    """A launch that a person is asked to approve, and why."""

    launch: SentLaunch = Field(default_factory=Launch)
    reason: Annotated[str, Field(max_length=400)] = ""


def _request_reply(row: LaunchRequest) -> LaunchRequestReply:
    return LaunchRequestReply(
        id=row.pk,
        plan=row.plan_id,
        plan_name=row.plan.name,
        launch=row.document,
        reason=row.reason,
        asked_by=row.asked_by.get_username() if row.asked_by else "",
        token=row.token_name,
        asked_at=row.asked_at,
        state=cast("Any", "denied" if row.state == "withdrawn" else row.state),
        withdrawn=row.state == "withdrawn",
        decided_by=row.decided_by.get_username() if row.decided_by else "",
        decided_at=row.decided_at,
        answer=row.answer,
        job=row.job_id,
        url=reverse("approvals"),
    )


@router.post(
    "/plans/{plan_id}/launch-requests",
    auth=PLAN,
    response={201: LaunchRequestReply, **REFUSALS},
    operation_id="request_launch",
)
def launch_request(
    request: HttpRequest, plan_id: str, body: LaunchToApprove
) -> Status[LaunchRequestReply]:
    """Ask a person of the team to approve a launch; they decide on the page Approvals."""
    plan = plan_to_change(request, plan_id)
    return Status(201, _requested(request, plan, body.launch, body.reason))


class DocumentToApprove(Sent):
    """A document whose launch a person is asked to approve, and why."""

    document: Annotated[SentPlan, Field(description="A plan's document, with its field launch")]
    reason: Annotated[str, Field(max_length=400, description="Shown to who decides")] = ""


@router.post(
    "/launch-requests",
    auth=PLAN,
    response={201: LaunchRequestReply, **REFUSALS},
    operation_id="request_launch_of_document",
)
def launch_request_of_document(
    request: HttpRequest, body: DocumentToApprove
) -> Status[LaunchRequestReply]:
    """Plan a document, save the plan, and ask a person to approve its launch.

    It is done as a whole or not at all: a request that is refused keeps no plan.
    """
    plan, _ = _planned(request, body.document)
    is_searched = body.document.hardware.engine == AUTO
    launch = plan.document.launch if is_searched else body.document.launch
    with transaction.atomic():
        return Status(201, _requested(request, _saved(plan), launch, body.reason))


def _requested(
    request: HttpRequest, plan: Plan, launch: Launch, reason: str
) -> LaunchRequestReply:
    check_launch(plan, launch)
    token = acting_token()
    try:
        made = request_make(
            plan=plan,
            by=signed_in(request),
            document=launch.model_dump(mode="json", exclude_unset=True),
            reason=reason,
            token_name=token.name if token else "",
        )
    except DraftProblem as problem:
        raise ConflictProblem("cannot_launch", problem.sentence) from problem
    return _request_reply(made)


@router.get(
    "/launch-requests",
    response={200: LaunchRequestPage, **REFUSALS},
    operation_id="list_launch_requests",
)
def launch_request_list(request: HttpRequest, paging: Query[Paging]) -> LaunchRequestPage:
    """Return the teams' launches that wait for an approval, the oldest first."""
    rows = list(open_requests(team_ids_of(request.user)))
    shown, more = page_of("launch-requests", rows, lambda row: row.pk, paging)
    return LaunchRequestPage(items=[_request_reply(row) for row in shown], next_cursor=more)


@router.get(
    "/launch-requests/{request_id}",
    response={200: LaunchRequestReply, **REFUSALS},
    operation_id="get_launch_request",
)
def launch_request_get(request: HttpRequest, request_id: str) -> LaunchRequestReply:
    """Return a request with its decision, and the job of an approved one."""
    return _request_reply(visible_or_404(LaunchRequest, request.user, pk=request_id))


class Withdrawal(Sent):
    """Why a request is withdrawn."""

    reason: Annotated[str, Field(max_length=400, description="Kept with the request")] = ""


@router.post(
    "/launch-requests/{request_id}/withdraw",
    auth=PLAN,
    response={200: LaunchRequestReply, **REFUSALS},
    operation_id="withdraw_launch_request",
)
def launch_request_withdraw(
    request: HttpRequest, request_id: str, body: Withdrawal
) -> LaunchRequestReply:
    """Withdraw a launch that waits for an approval; only the account that asked may."""
    row = visible_or_404(LaunchRequest, request.user, pk=request_id)
    done = request_withdraw(request=row, by=signed_in(request), why=body.reason)
    return _request_reply(done)


class TwoJobs(Sent):
    """Where the classifier's two jobs run, and the ZeRO stage that is compared with DDP."""

    host: Annotated[str, Field(max_length=NAME_LENGTH, description="Slug or id of a host")]
    zero_stage: Literal[1, 2, 3] = 2


@router.post(
    "/templates/classification",
    auth=LAUNCH,
    response={201: list[JobReply], **REFUSALS},
    operation_id="launch_classification",
)
def classification(request: HttpRequest, body: TwoJobs) -> Status[list[JobReply]]:
    """Launch the same classifier with DDP and with ZeRO on one host, to be compared."""
    membership = current_membership(request)
    check_role(Role(membership.role), Role.PRACTITIONER)
    hosts = ready_hosts(membership.team)
    host = next((each for each in hosts if body.host in {each.pk, each.slug}), None)
    if host is None:
        names = ", ".join(each.slug for each in hosts) or "none"
        raise InvalidProblem(
            "host",
            f"The field host is {body.host!r}; hosts that can run two ranks now: {names}.",
        )
    try:
        jobs = launch_both(
            team=membership.team,
            by=signed_in(request),
            host=host,
            zero_stage=body.zero_stage,
            key=(job_key(request) or "")[:40],
        )
    except DraftProblem as problem:
        raise ConflictProblem("cannot_launch", problem.sentence) from problem
    return Status(201, [job_reply(job) for job in jobs])
