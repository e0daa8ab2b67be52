"""Operations on the files that ended jobs keep on hosts."""

from typing import Annotated, Literal

from django.http import HttpRequest
from ninja import Query, Router

from runners.client.replies.stored_files import StoredFilesPage, StoredFilesReply
from webapp.accounts.models import team_ids_of
from webapp.accounts.services import visible_or_404
from webapp.api.auth import LAUNCH, READ
from webapp.api.requests import Paging, page_of
from webapp.core.problems import REFUSALS
from webapp.hosts.models import Host
from webapp.jobs.lookup import load_job
from webapp.jobs.permissions import job_for
from webapp.jobs.stored_files import Stored, files_delete, stored_of_job, stored_on_host

router = Router(tags=["jobs"], auth=READ)


def _page(kept: list[Stored], name: str, paging: Paging) -> StoredFilesPage:
    shown, more = page_of(name, kept, lambda each: each.attempt.pk, paging)
    items = [
        StoredFilesReply(
            job=each.attempt.job_id,
            job_name=each.attempt.job.name,
            is_deleted=each.attempt.job.deleted_at is not None,
            attempt=each.attempt.pk,
            host=each.attempt.host.slug,
            checkpoint_bytes=each.attempt.checkpoint_bytes or 0,
            output_bytes=each.attempt.output_bytes or 0,
            ended_at=each.attempt.ended_at,
            pending=each.pending,
        )
        for each in shown
    ]
    return StoredFilesPage(items=items, next_cursor=more)


@router.get(
    "/hosts/{slug}/files",
    response={200: StoredFilesPage, **REFUSALS},
    operation_id="list_host_files",
)
def host_files(request: HttpRequest, slug: str, paging: Query[Paging]) -> StoredFilesPage:
    """Return what ended jobs keep on a host's disk, the largest first."""
    host = visible_or_404(Host, request.user, slug=slug)
    kept = stored_on_host(host, team_ids_of(request.user))
    return _page(kept, "host_files", paging)


@router.get(
    "/jobs/{job_id}/files",
    response={200: StoredFilesPage, **REFUSALS},
    operation_id="list_job_files",
)
def job_files(request: HttpRequest, job_id: str, paging: Query[Paging]) -> StoredFilesPage:
    """Return what an ended job keeps on its hosts' disks, its last attempt first."""
    return _page(stored_of_job(load_job(request, job_id)), "job_files", paging)


@router.delete(
    "/jobs/{job_id}/files",
    auth=LAUNCH,
    response={200: StoredFilesPage, **REFUSALS},
    operation_id="delete_job_files",
)
def job_files_delete(
    request: HttpRequest,
    job_id: str,
    part: Annotated[
        Literal["checkpoint", "all"],
        Query(
            description="checkpoint: the job can no longer be resumed; all: also what it made, so "
            "that models of the team which it made are deleted as well"
        ),
    ],
) -> StoredFilesPage:
    """Order the hosts of an ended job to delete its checkpoints, or all that it keeps there.

    A host does so after its next heartbeat. Log, measurements and uploaded artefacts stay.
    """
    job = job_for(request, job_id, "delete")
    kept = files_delete(job=job, part=part, by=request.user.get_username())
    return _page(kept, "job_files", Paging())
