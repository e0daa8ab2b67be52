"""A host's labels, its prices among them: an operator's to change."""

from collections.abc import Mapping

from django.contrib import messages
from django.db import transaction
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.http import require_POST

from webapp.core.clock import now
from webapp.hosts.forms import LabelsForm, written
from webapp.hosts.models import Host
from webapp.hosts.views import host_context, host_for_operator
from webapp.jobs.models import Event


def labels_set(*, host: Host, labels: Mapping[str, str], by: str) -> bool:
    """Give a host these labels instead of those that it has; return whether they differ."""
    with transaction.atomic():
        before = Host.objects.select_for_update(no_key=True).get(pk=host.pk).labels
        if before == labels:
            return False
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
    """Change a host's labels; what was typed stays on the page where it cannot be."""
    host = host_for_operator(request, slug)
    form = LabelsForm(request.POST)
    if not form.is_valid():
        context = host_context(request, host) | {"labels_form": form}
        return render(request, "hosts/detail.html", context, status=400)
    labels = form.cleaned_data["labels"]
    if labels_set(host=host, labels=labels, by=request.user.get_username()):
        said = written(labels) or "none"
        messages.success(request, f"Labels of {host.name}: {said}. Its prices count from now on.")
    return redirect("host-detail", slug)
