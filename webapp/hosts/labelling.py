"""Change a host's labels, including its prices; operators only."""

from collections.abc import Mapping

from django.contrib import messages
from django.db import transaction
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.http import require_POST

from webapp.audit.changes import refuse_if_changed
from webapp.core.clock import now
from webapp.core.problems import Problem
from webapp.core.stale import SEEN
from webapp.hosts.forms import LabelsForm, written
from webapp.hosts.models import Host
from webapp.hosts.views import host_context, host_for_operator
from webapp.jobs.models import Event


def labels_set(*, host: Host, labels: Mapping[str, str], by: str, seen: str = "") -> bool:
    """Replace a host's labels; return whether they changed.

    ``seen`` is the version mark of the labels that the page showed.

    Raises:
        ConflictProblem: another person changed them since.
    """
    with transaction.atomic():
        before = Host.objects.select_for_update(no_key=True).get(pk=host.pk).labels
        if before == labels:
            return False
        refuse_if_changed(
            seen=seen,
            now_there=before,
            what=f"The labels of {host.name} were",
            subject=host.pk,
            kind="host.labels",
            reader=by,
        )
        Host.objects.filter(pk=host.pk).update(labels=dict(labels))
        Event.objects.create(
            at=now(),
            team_id=host.team_id,
            kind="host.labels",
            subject=host.pk,
            actor=by,
            detail={"labels": dict(labels), "before": before},
        )
    return True


@require_POST
def host_labels(request: HttpRequest, slug: str) -> HttpResponse:
    """Change a host's labels; show the form again with the input if it is invalid."""
    host = host_for_operator(request, slug)
    form = LabelsForm(request.POST)
    if not form.is_valid():
        context = host_context(request, host) | {"labels_form": form}
        return render(request, "hosts/detail.html", context, status=400)
    labels = form.cleaned_data["labels"]
    by, seen = request.user.get_username(), request.POST.get(SEEN, "")
    try:
        is_changed = labels_set(host=host, labels=labels, by=by, seen=seen)
    except Problem as problem:
        messages.warning(request, f"{problem.detail} You had typed: {written(labels) or 'none'}.")
        return redirect("host-detail", slug)
    if is_changed:
        text = written(labels) or "none"
        messages.success(request, f"Labels of {host.name}: {text}. Its prices count from now on.")
    return redirect("host-detail", slug)
