"""Actions on the models in the Hub's cache of a host, on the host's page."""

from collections.abc import Callable
from functools import partial
from typing import Any, cast

from django import forms
from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect
from django.views.decorators.http import require_POST

from planner.specs.units import GIB
from webapp.accounts.models import Role, team_ids_of
from webapp.accounts.services import has_role
from webapp.core.display import memory
from webapp.core.problems import NotFoundProblem, Problem
from webapp.hosts.model_copies import copies_to, copy_from_host, copy_stop, copyable_to
from webapp.hosts.models import RUNS_JOBS, Host, ModelCopy
from webapp.hosts.permissions import host_for_operator
from webapp.jobs.cached_models import (
    MAX_KEEP_BYTES,
    cache_size,
    keep_models_set,
    link_rates,
    models_delete,
    models_on_host,
    models_pin,
)
from webapp.wizard.combobox import Select
from webapp.wizard.forms import DecimalNumber

NUM_MODELS = 20  # on the host's page, the largest first
NUM_COPIES = 5  # the newest
MOST_COPYABLE = 200
MAX_KEEP_GIB = MAX_KEEP_BYTES // GIB


class KeepForm(forms.Form):
    """How much a host's cache keeps."""

    keep_gib = DecimalNumber(
        "Keep at most, in GiB",
        0,
        MAX_KEEP_GIB,
        required=False,
        hint="Empty: keep everything. Of more, the models that were not used for longest are "
        "deleted, but no pinned ones and none that a queued or running job needs.",
    )


class CopyForm(forms.Form):
    """Which model of another host is copied."""

    model = forms.ChoiceField(
        label="Model on another host",
        widget=Select,
        help_text="It comes over this site, file by file: neither host needs the Hub, nor a "
        "connection to the other one.",
    )

    @classmethod
    def of(cls, host: Host) -> "CopyForm | None":
        """Return the form with what a host lacks; None if the team's others have nothing."""
        rows = copyable_to(host, Host.objects.filter(team=host.team_id))[:MOST_COPYABLE]
        if not rows:
            return None
        made = cls()
        field = cast("forms.ChoiceField", made.fields["model"])
        field.choices = [
            (f"{row.host.slug} {row.key}", f"{row} on {row.host.name}, {memory(row.size_bytes)}")
            for row in rows
        ]
        return made


def models_context(request: HttpRequest, host: Host) -> dict[str, Any]:
    """Return the template context of a host's models: ten queries, however many there are."""
    kept = host.keep_models_bytes
    size = cache_size(host)
    has_agent = host.kind in RUNS_JOBS
    may_copy = has_agent and has_role(request.user, host.team, Role.OPERATOR)
    return {
        "copies": copies_to(host, at_most=NUM_COPIES),
        "copy_form": CopyForm.of(host) if may_copy else None,
        "has_agent": has_agent,
        "links": [rate.figure for _, rate in sorted(link_rates(host).items())],
        "models": models_on_host(host, team_ids_of(request.user), at_most=NUM_MODELS),
        "num_models": size.num_models,
        "models_bytes": size.num_bytes,
        "keep_form": KeepForm(
            initial={"keep_gib": None if kept is None else round(kept / GIB, 3)}
        ),
    }


def _act(
    request: HttpRequest, slug: str, act: Callable[..., object], words: str, **options: Any
) -> HttpResponse:
    """Run an operator's action on a model; the host's page says that it is done, or why not."""
    host, name = host_for_operator(request, slug), str(request.POST.get("model", ""))
    run = partial(act, host=host, name=name, by=request.user.get_username(), **options)
    try:
        run()
    except Problem as problem:
        messages.warning(request, problem.detail)
    else:
        messages.success(request, words.format(model=name.partition("@")[0], host=host.name))
    return redirect("host-detail", slug)


@require_POST
def model_pin(request: HttpRequest, slug: str) -> HttpResponse:
    """Pin a model, so that no rule prunes it."""
    return _act(request, slug, models_pin, "{model} stays on {host}.", is_pinned=True)


@require_POST
def model_unpin(request: HttpRequest, slug: str) -> HttpResponse:
    """Unpin a model."""
    return _act(request, slug, models_pin, "{model} is no longer pinned.", is_pinned=False)


@require_POST
def model_remove(request: HttpRequest, slug: str) -> HttpResponse:
    """Order a host to delete a model from its cache."""
    return _act(request, slug, models_delete, "{host} deletes {model} after its next heartbeat.")


@require_POST
def models_rule(request: HttpRequest, slug: str) -> HttpResponse:
    """Set how much a host's cache keeps."""
    host, form = host_for_operator(request, slug), KeepForm(request.POST)
    if not form.is_valid():
        typed = str(request.POST.get("keep_gib", ""))[:40]
        messages.warning(
            request,
            f"“Keep at most” is {typed!r}; it can be 0 to {MAX_KEEP_GIB:,} GiB, or empty to keep "
            "everything.",
        )
        return redirect("host-detail", slug)
    keep = form.cleaned_data["keep_gib"]
    keep_bytes = None if keep is None else int(keep * GIB)
    keep_models_set(host=host, keep_bytes=keep_bytes, by=request.user.get_username())
    words = "everything" if keep is None else f"at most {keep:,.12g} GiB of models"
    messages.success(request, f"The Hub's cache of {host.name} keeps {words}.")
    return redirect("host-detail", slug)


@require_POST
def copy_begin(request: HttpRequest, slug: str) -> HttpResponse:
    """Begin to copy a model of another host."""
    host = host_for_operator(request, slug)
    source, _, name = str(request.POST.get("model", "")).partition(" ")
    try:
        found = Host.objects.filter(team=host.team_id, slug=source).first()
        if found is None:
            raise NotFoundProblem(
                "source", f"The team of {host.name} has no host {source[:80]!r}. Choose a model."
            )
        copy = copy_from_host(host=host, source=found, name=name, by=request.user.get_username())
    except Problem as problem:
        messages.warning(request, problem.detail)
    else:
        messages.success(
            request, f"{found.name} sends {copy.repository} to {host.name} at its next heartbeat."
        )
    return redirect("host-detail", slug)


@require_POST
def copy_end(request: HttpRequest, slug: str, copy_id: str) -> HttpResponse:
    """Stop a copy."""
    host = host_for_operator(request, slug)
    copy = get_object_or_404(ModelCopy.objects.select_related("host"), host=host, pk=copy_id)
    copy_stop(copy=copy, by=request.user.get_username())
    messages.success(request, f"The copy of {copy.repository} to {host.name} is stopped.")
    return redirect("host-detail", slug)
