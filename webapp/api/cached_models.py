"""Operations on the models in the Hub's caches of hosts."""

from typing import Annotated

from django.http import HttpRequest
from ninja import Query, Router
from pydantic import Field

from planner.specs.units import GIB
from runners.client.replies.cached_models import CachedModelPage, CachedModelReply
from webapp.accounts.models import team_ids_of
from webapp.accounts.services import visible_or_404
from webapp.api.auth import ADMIN, READ
from webapp.api.requests import Paging, Sent, page_of
from webapp.core.problems import REFUSALS
from webapp.hosts.models import Host
from webapp.hosts.permissions import host_for_operator
from webapp.jobs.cached_models import keep_models_set, models_delete, models_on_host, models_pin

router = Router(tags=["hosts"], auth=READ)
ModelName = Annotated[
    str,
    Field(min_length=3, max_length=250, description="As org/name, or org/name@commit"),
]


@router.get(
    "/{slug}/models", response={200: CachedModelPage, **REFUSALS}, operation_id="list_host_models"
)
def model_list(request: HttpRequest, slug: str, paging: Query[Paging]) -> CachedModelPage:
    """Return the models in the Hub's cache of a host, the largest first."""
    host = visible_or_404(Host, request.user, slug=slug)
    rows = models_on_host(host, team_ids_of(request.user))
    shown, more = page_of("host_models", rows, lambda row: row.model.pk, paging)
    items = [
        CachedModelReply(
            repository=row.model.repository,
            commit=row.model.commit,
            size_bytes=row.model.size_bytes,
            num_files=row.model.num_files,
            used_at=row.model.used_at,
            is_complete=row.model.is_complete,
            pinned_by=row.model.pinned_by,
            is_needed=row.is_needed,
            is_deleting=row.is_deleting,
            num_jobs=row.num_jobs,
            last_job=row.last_job.pk if row.last_job else None,
        )
        for row in shown
    ]
    return CachedModelPage(items=items, next_cursor=more)


class ModelPin(Sent):
    """A model of the host's cache, and whether it is pinned."""

    model: ModelName
    is_pinned: Annotated[bool, Field(description="true: no rule prunes it; false: one may")] = True


@router.post(
    "/{slug}/models",
    auth=ADMIN,
    response={200: CachedModelPage, **REFUSALS},
    operation_id="pin_host_model",
)
def model_pin(request: HttpRequest, slug: str, body: ModelPin) -> CachedModelPage:
    """Pin a model of a host's cache, so that it stays there, or unpin it."""
    host, by = host_for_operator(request, slug), request.user.get_username()
    models_pin(host=host, name=body.model, by=by, is_pinned=body.is_pinned)
    return model_list(request, slug, Paging())


@router.delete(
    "/{slug}/models",
    auth=ADMIN,
    response={200: CachedModelPage, **REFUSALS},
    operation_id="delete_host_model",
)
def model_delete(
    request: HttpRequest,
    slug: str,
    model: Annotated[str, Query(max_length=250, description="As org/name, or org/name@commit")],
) -> CachedModelPage:
    """Let a host delete a model from its cache, unless it is pinned or a job needs it."""
    host = host_for_operator(request, slug)
    models_delete(host=host, name=model, by=request.user.get_username())
    return model_list(request, slug, Paging())


class ModelsRule(Sent):
    """How much a host's cache keeps."""

    keep_gib: Annotated[
        Annotated[float, Field(ge=0, le=2**30)] | None,
        Field(description="At most, in GiB, 0 to 2^30: more is pruned; null: everything"),
    ]


@router.put(
    "/{slug}/models/rule",
    auth=ADMIN,
    response={200: CachedModelPage, **REFUSALS},
    operation_id="set_models_rule",
)
def models_rule(request: HttpRequest, slug: str, body: ModelsRule) -> CachedModelPage:
    """Set how much a host's cache keeps: of more, the longest unused models are deleted."""
    keep_bytes = None if body.keep_gib is None else int(body.keep_gib * GIB)
    host = host_for_operator(request, slug)
    keep_models_set(host=host, keep_bytes=keep_bytes, by=request.user.get_username())
    return model_list(request, slug, Paging())
