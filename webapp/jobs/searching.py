"""Search by name or id over plans, jobs, hosts, models and techniques."""

from typing import Any

from django.contrib.auth.models import AnonymousUser, User
from django.db.models import Q

from planner.catalog.models import list_models
from planner.techniques.registry import TECHNIQUES
from webapp.core.search import folded
from webapp.hosts.models import Host
from webapp.jobs.models import Job
from webapp.modelhub.models import TeamModel
from webapp.plans.models import Plan

MAX_ROWS = 8
SHORTEST = 2


Group = tuple[str, str, list[tuple[Any, str]]]  # heading, URL name, (URL argument, text)


def search_results(user: User | AnonymousUser, query: str, *, most: int = MAX_ROWS) -> list[Group]:
    """Return groups of results: heading, URL name, and at most ``most`` (URL argument, text).

    What has the query in its name is found, and what has it as its id.
    """
    words = folded(query).split()
    is_meant = _is_meant(query)
    matching = Plan.objects.visible_to(user).filter(is_meant, deleted_at=None)
    plans = matching.filter(Q(is_latest=True) | Q(pk=query.upper()))
    jobs = Job.objects.visible_to(user).filter(is_meant, deleted_at=None)
    hosts = Host.objects.visible_to(user).filter(is_meant)
    techniques = [
        (each.key, each.title)
        for each in TECHNIQUES.values()
        if all(word in folded(f"{each.key} {each.title}") for word in words)
    ]
    return [
        ("Plans", "plan-detail", [(plan.pk, plan.name) for plan in plans[:most]]),
        ("Jobs", "job-detail", [(job.pk, job.name) for job in jobs[:most]]),
        ("Hosts", "host-detail", [(host.slug, host.name) for host in hosts[:most]]),
        *model_results(user, query, most=most),
        ("Techniques", "technique-detail", techniques[:most]),
    ]


def model_results(user: User | AnonymousUser, query: str, *, most: int = MAX_ROWS) -> list[Group]:
    """Return the groups of ``search_results`` that are of models."""
    words = folded(query).split()
    models = TeamModel.objects.visible_to(user).filter(_is_meant(query))
    catalog = [
        (entry.id, entry.id)
        for entry in list_models()
        if all(word in folded(entry.id) for word in words)
    ]
    own = [(model.pk, model.name) for model in models[:most]]
    return [
        ("Models of your team", "model-detail", own),
        ("Catalog", "model-detail", catalog[:most]),
    ]


def _is_meant(query: str) -> Q:
    return Q(name__folded_contains=query) | Q(pk=query.upper())
