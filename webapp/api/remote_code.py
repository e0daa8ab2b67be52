"""Operations on the code of repositories that the team's jobs may run."""

from typing import Annotated

from django.http import HttpRequest
from ninja import Query, Router, Status
from pydantic import Field

from runners.client.replies.remote_code import TrustedCodePage, TrustedCodeReply
from webapp.accounts.models import Role
from webapp.accounts.services import check_role, current_membership, visible_or_404
from webapp.api.auth import ADMIN, READ
from webapp.api.requests import Paging, Sent, page_of
from webapp.core.problems import REFUSALS
from webapp.modelhub.models import TrustedCode
from webapp.modelhub.remote_code import LONGEST_REASON, code_allow, code_forbid

router = Router(tags=["library"], auth=READ)


def _reply(row: TrustedCode) -> TrustedCodeReply:
    fields = TrustedCodeReply.model_fields
    return TrustedCodeReply(**{name: getattr(row, name) for name in fields})


@router.get(
    "/trusted-code", response={200: TrustedCodePage, **REFUSALS}, operation_id="list_trusted_code"
)
def code_list(request: HttpRequest, paging: Query[Paging]) -> TrustedCodePage:
    """Return the repositories and commits whose own code the current team's jobs may run."""
    rows = TrustedCode.objects.filter(team=current_membership(request).team)
    shown, more = page_of("trusted_code", list(rows), lambda row: row.pk, paging)
    return TrustedCodePage(items=[_reply(row) for row in shown], next_cursor=more)


class AllowedCode(Sent):
    """A repository at a commit whose code an administrator has read."""

    model: Annotated[
        str, Field(max_length=250, description="As org/name@COMMIT, the commit with 40 digits")
    ]
    reason: Annotated[
        str, Field(max_length=LONGEST_REASON, description="Who read it, and what it is for")
    ] = ""


@router.post(
    "/trusted-code",
    auth=ADMIN,
    response={201: TrustedCodeReply, **REFUSALS},
    operation_id="allow_code",
)
def code_post(request: HttpRequest, body: AllowedCode) -> Status[TrustedCodeReply]:
    """Let the team's jobs run the own code of a repository, at this commit alone, as an admin."""
    membership = current_membership(request)
    check_role(Role(membership.role), Role.ADMIN)
    row = code_allow(
        team=membership.team,
        name=body.model,
        reason=body.reason,
        by=request.user.get_username(),
    )
    return Status(201, _reply(row))


@router.delete(
    "/trusted-code/{code_id}",
    auth=ADMIN,
    response={204: None, **REFUSALS},
    operation_id="forbid_code",
)
def code_delete(request: HttpRequest, code_id: str) -> Status[None]:
    """Withdraw the permission; jobs that have not started no longer get the code."""
    membership = current_membership(request)
    row = visible_or_404(TrustedCode, request.user, team=membership.team, pk=code_id)
    check_role(Role(membership.role), Role.ADMIN)
    code_forbid(row=row, by=request.user.get_username())
    return Status(204, None)
