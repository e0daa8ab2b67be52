"""The first page and the search."""

from typing import Any

from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.utils.cache import patch_vary_headers
from django.views.decorators.http import require_GET

from planner.catalog.models import list_models
from planner.techniques.registry import TECHNIQUES
from webapp.core.clock import now
from webapp.home.accuracy import accuracy_for
from webapp.home.attention import attention_for
from webapp.hosts.contact import contact_of
from webapp.hosts.models import Host, HostState
from webapp.jobs.figures import progress
from webapp.jobs.models import LIVE_STATES, Job, JobState
from webapp.modelhub.models import TeamModel
from webapp.plans.models import Plan

MOST = 8
SHORTEST = 2


@require_GET
def home(request: HttpRequest) -> HttpResponse:
    """Show what needs a person first, then what runs, then how good the predictions are."""
    visible = Job.objects.visible_to(request.user).filter(deleted_at=None)
    jobs = visible.select_related("host", "requested_host", "pool")
    running = list(jobs.filter(state__in=[*LIVE_STATES, JobState.QUEUED])[:MOST])
    attention = attention_for(request.user)
    hosts = Host.objects.visible_to(request.user).exclude(state=HostState.RETIRED)
    recent = [] if running else list(jobs.order_by("-created_at")[:4])
    context = {
        "today": now(),
        "attention": attention,
        "running": [(job, progress(job)) for job in running],
        "recent": recent,
        "hosts": [(host, contact_of(host)) for host in hosts[:MOST]],
        "accuracy": accuracy_for(request.user),
        "is_fresh": not running and not recent,
        "headline": _headline(len(attention), len(running)),
    }
    template = "home/jobs.html" if request.headers.get("HX-Request") else "home/home.html"
    response = render(request, template, context)
    patch_vary_headers(response, ["HX-Request"])
    return response


def _headline(num_attention: int, num_running: int) -> str:
    """Return the page's answer in one sentence."""
    needs = f"{_counted(num_attention, 'thing')} need{'s' if num_attention == 1 else ''} you"
    runs = f"{_counted(num_running, 'job')} {'is' if num_running == 1 else 'are'} running"
    if num_attention:
        return f"{needs}; {runs.lower() if num_running else 'nothing is running'}"
    return f"All is well; {runs.lower()}" if num_running else "All is well; nothing is running"


def _counted(number: int, noun: str) -> str:
    words = ("No", "One", "Two", "Three", "Four", "Five", "Six", "Seven", "Eight")
    count = words[number] if number < len(words) else str(number)
    return f"{count} {noun}{'' if number == 1 else 's'}"


@require_GET
def search(request: HttpRequest) -> HttpResponse:
    """List what the words of ``q`` are found in: the user's own things, then the catalogs."""
    query = request.GET.get("q", "").strip()
    groups = _found(request, query) if len(query) >= SHORTEST else []
    context = {"query": query, "groups": [group for group in groups if group[2]]}
    return render(request, "home/search.html", context)


def _found(request: HttpRequest, query: str) -> list[tuple[str, str, list[tuple[Any, str]]]]:
    """Return groups of results: heading, name of the address, (its argument, words)."""
    user, words = request.user, query.lower().split()
    plans = Plan.objects.visible_to(user).filter(name__icontains=query)
    jobs = Job.objects.visible_to(user).filter(name__icontains=query, deleted_at=None)
    hosts = Host.objects.visible_to(user).filter(name__icontains=query)
    models = TeamModel.objects.visible_to(user).filter(name__icontains=query)
    return [
        ("Plans", "plan-detail", [(plan.pk, plan.name) for plan in plans[:MOST]]),
        ("Jobs", "job-detail", [(job.pk, job.name) for job in jobs[:MOST]]),
        ("Hosts", "host-detail", [(host.slug, host.name) for host in hosts[:MOST]]),
        ("Models of your team", "model-detail", [(one.pk, one.name) for one in models[:MOST]]),
        ("Catalog", "model-detail", [(one, one) for one in _catalog(words)[:MOST]]),
        ("Techniques", "technique-detail", _techniques(words)[:MOST]),
    ]


def _catalog(words: list[str]) -> list[str]:
    ids = (entry.id for entry in list_models())
    return [one for one in ids if all(word in one.lower() for word in words)]


def _techniques(words: list[str]) -> list[tuple[Any, str]]:
    known = ((one.key, one.title) for one in TECHNIQUES.values())
    return [pair for pair in known if all(word in " ".join(pair).lower() for word in words)]
