"""The page of a team's training data: list, contents, upload and deletion."""

from django.contrib import messages
from django.core.files.uploadedfile import UploadedFile
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.urls import reverse
from django.views.decorators.http import require_GET, require_POST

from runners.datasets.records import FileSummary
from runners.jobspec.base import MAX_UPLOAD_BYTES
from webapp.accounts.models import Role, Team
from webapp.accounts.services import (
    check_role,
    current_role,
    current_team,
    is_at_least,
    membership_of,
    require_role,
    signed_in,
    visible_or_404,
)
from webapp.core.bodies import takes_file
from webapp.core.problems import Problem
from webapp.datasets.models import Dataset
from webapp.datasets.services import UnusableDataError, dataset_store
from webapp.jobs.artefacts import dataset_delete

UNPROCESSABLE = 422
PAGE = "dataset-list"


@require_GET
def dataset_list(request: HttpRequest) -> HttpResponse:
    """List the team's training data, with the upload form."""
    return render(request, "datasets/list.html", _context(request))


def _context(
    request: HttpRequest, rejected_file: FileSummary | None = None, name: str = ""
) -> dict[str, object]:
    team = current_team(request)
    return {
        "team": team,
        "datasets": Dataset.objects.filter(team=team).select_related("uploaded_by"),
        "may_change": is_at_least(current_role(request), Role.PRACTITIONER),
        "upload_url": reverse("dataset-upload"),
        "limit_bytes": MAX_UPLOAD_BYTES,
        "rejected_file": rejected_file,
        "rejected_name": name,
    }


@require_POST
@require_role(Role.PRACTITIONER)
@takes_file(MAX_UPLOAD_BYTES)
def dataset_upload(request: HttpRequest) -> HttpResponse:
    """Store an uploaded file; show the errors of an unusable one."""
    stored = upload_of_request(request, current_team(request))
    if isinstance(stored, HttpResponse):
        return stored
    if stored is not None:
        messages.success(
            request,
            f"{stored.name} is uploaded: {stored.num_records:,} records. Plans can now choose "
            f"this file. {stored.left_out_sentence}".rstrip(),
        )
    return redirect(PAGE)


def upload_of_request(request: HttpRequest, team: Team) -> Dataset | HttpResponse | None:
    """Return the stored dataset, an error page, or None after adding an error message."""
    sent = request.FILES.getlist("file")
    if len(sent) > 1:
        messages.error(request, f"{len(sent)} files were sent. Upload them one at a time.")
        return None
    upload = request.FILES.get("file")
    if not isinstance(upload, UploadedFile):
        messages.error(request, "No file was chosen. Choose a file, or drop one on the field.")
        return None
    try:
        return dataset_store(team=team, by=signed_in(request), upload=upload)
    except UnusableDataError as error:
        context = _context(request, error.found, str(upload.name))
        return render(request, "datasets/list.html", context, status=UNPROCESSABLE)
    except Problem as problem:
        messages.error(request, problem.detail)
        return None


@require_POST
def dataset_remove(request: HttpRequest, dataset_id: str) -> HttpResponse:
    """Delete a dataset of the team."""
    dataset = visible_or_404(Dataset, request.user, pk=dataset_id)
    membership = membership_of(request.user, dataset.team)
    check_role(Role(membership.role) if membership else Role.VIEWER, Role.PRACTITIONER)
    dataset_delete(dataset=dataset, by=signed_in(request))
    messages.success(request, f"{dataset.name} is deleted.")
    return redirect(PAGE)
