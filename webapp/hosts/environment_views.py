"""Operator actions on a host's environments: build and remove."""

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.views.decorators.http import require_POST

from webapp.core.problems import Problem
from webapp.hosts.environments import environment_order
from webapp.hosts.views import host_for_operator


def _order(request: HttpRequest, slug: str, name: str, action: str, words: str) -> HttpResponse:
    host = host_for_operator(request, slug)
    try:
        environment_order(host=host, name=name, action=action, by=request.user.get_username())
    except Problem as problem:
        messages.warning(request, problem.detail)
    else:
        messages.success(request, f"{host.name} {words} {name} after its next heartbeat.")
    return redirect("host-detail", slug)


@require_POST
def environment_build(request: HttpRequest, slug: str, name: str) -> HttpResponse:
    """Request that a host builds an environment before a job needs it."""
    return _order(request, slug, name, "build", "builds")


@require_POST
def environment_remove(request: HttpRequest, slug: str, name: str) -> HttpResponse:
    """Request that a host deletes an environment that no job runs in."""
    return _order(request, slug, name, "remove", "removes")
