"""Views of the home page and the search."""

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
from webapp.hosts.models import DOCUMENTS as DOCUMENTS_OF_HOSTS
from webapp.hosts.models import Host, HostState
from webapp.jobs.counts import JobCounts, counts_of
from webapp.jobs.figures import progress
from webapp.jobs.models import DOCUMENTS, LIVE_STATES, Job, JobState
from webapp.modelhub.models import TeamModel
from webapp.plans.models import Plan

MOST = 8
SHORTEST = 2
LEFT_OUT = (
    *DOCUMENTS,
    *(f"{host}__{name}" for host in ("host", "requested_host") for name in DOCUMENTS_OF_HOSTS),
)


@require_GET
def home(request: HttpRequest) -> HttpResponse:
    """Show items that need attention, running jobs, hosts and prediction accuracy."""
    visible = Job.objects.visible_to(request.user).filter(deleted_at=None)
    jobs = visible.select_related("host", "requested_host", "pool").defer(*LEFT_OUT)
    running = list(jobs.filter(state__in=[*LIVE_STATES, JobState.QUEUED])[:MOST])
    counts = counts_of(visible)
    attention = attention_for(request.user)
    hosts = Host.objects.visible_to(request.user).exclude(state=HostState.RETIRED)
    hosts = hosts.defer(*DOCUMENTS_OF_HOSTS)
    recent = [] if running else list(jobs.order_by("-created_at")[:4])
    context = {
        "today": now(),
        "attention": attention,
        "running": [(job, progress(job)) for job in running],
        "recent": recent,
        "hosts": [(host, contact_of(host)) for host in hosts[:MOST]],
        "accuracy": accuracy_for(request.user),
        "is_fresh": not running and not recent,
        "counts": counts,
        "headline": headline(len(attention), counts),
    }
    template = "home/jobs.html" if request.headers.get("HX-Request") else "home/home.html"
    response = render(request, template, context)
    patch_vary_headers(response, ["HX-Request"])
    return response


def headline(num_attention: int, counts: JobCounts) -> str:
    """Return the summary sentence: number of items that need attention, and job counts."""
    needs = f"{_counted(num_attention, 'thing')} need{'s' if num_attention == 1 else ''} you"
    return f"{needs if num_attention else 'All is well'}; {counts.sentence}"


def _counted(number: int, noun: str) -> str:
    words = ("No", "One", "Two", "Three", "Four", "Five", "Six", "Seven", "Eight")
    count = words[number] if number < len(words) else str(number)
    return f"{count} {noun}{'' if number == 1 else 's'}"


@require_GET
def search(request: HttpRequest) -> HttpResponse:
    """List matches of ``q`` in the user's objects, then in the catalogs."""
    query = request.GET.get("q", "").strip()
    groups = _results(request, query) if len(query) >= SHORTEST else []
    context = {"query": query, "groups": [group for group in groups if group[2]]}
    return render(request, "home/search.html", context)


def _results(request: HttpRequest, query: str) -> list[tuple[str, str, list[tuple[Any, str]]]]:
    """Return groups of results: heading, URL name, and (URL argument, text) pairs."""
    user, words = request.user, query.lower().split()
    matching = Plan.objects.visible_to(user).filter(name__icontains=query)
    plans = matching.filter(is_latest=True, deleted_at=None)
    jobs = Job.objects.visible_to(user).filter(name__icontains=query, deleted_at=None)
    hosts = Host.objects.visible_to(user).filter(name__icontains=query)
    models = TeamModel.objects.visible_to(user).filter(name__icontains=query)
    return [
        ("Plans", "plan-detail", [(plan.pk, plan.name) for plan in plans[:MOST]]),
        ("Jobs", "job-detail", [(job.pk, job.name) for job in jobs[:MOST]]),
        ("Hosts", "host-detail", [(host.slug, host.name) for host in hosts[:MOST]]),
        (
            "Models of your team",
            "model-detail",
            [(model.pk, model.name) for model in models[:MOST]],
        ),
        ("Catalog", "model-detail", [(model, model) for model in _catalog(words)[:MOST]]),
        ("Techniques", "technique-detail", _techniques(words)[:MOST]),
    ]


def _catalog(words: list[str]) -> list[str]:
    ids = (entry.id for entry in list_models())
    return [model_id for model_id in ids if all(word in model_id.lower() for word in words)]


def _techniques(words: list[str]) -> list[tuple[Any, str]]:
    techniques = ((technique.key, technique.title) for technique in TECHNIQUES.values())
    return [pair for pair in techniques if all(word in " ".join(pair).lower() for word in words)]
