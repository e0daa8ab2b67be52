"""The list of plans: filtered and paginated by an index, loaded without documents."""

from collections.abc import Iterable, Sequence

from django.core.paginator import Page
from django.db.models import Count, Q, QuerySet
from django.http import HttpRequest

from webapp.accounts.models import team_ids_of
from webapp.core.paging import NewestFirst, page_by_key
from webapp.jobs.models import Job
from webapp.plans.models import Plan, PlanState
from webapp.plans.versions import chip_of

PAGE_SIZE = 50
SHOWN = (
    "team", "name", "state", "verdict", "saved_at", "series", "version", "is_latest",
    "owner__username", "base__version",
)  # fmt: skip


def page_of_plans(request: HttpRequest, query: str) -> Page[Plan]:
    """Return a page of saved plans and the person's own drafts, the last saved first."""
    teams = team_ids_of(request.user)
    keys = NewestFirst(_listed(request, query), "saved_at", teams)
    rows = Plan.objects.select_related("owner", "base").only(*SHOWN)
    page = page_by_key(keys, rows, request.GET.get("page"), PAGE_SIZE)
    _read_verdicts([plan for plan in page if not plan.is_draft and not plan.verdict])
    return page


def _read_verdicts(plans: Sequence[Plan]) -> None:
    """Set missing verdicts of saved plans from their documents."""
    keys = [plan.pk for plan in plans]
    documents = Plan.objects.only("state", "verdict", "answer", "draft").in_bulk(keys)
    for plan in plans:
        plan.verdict = chip_of(documents[plan.pk]) if plan.pk in documents else "incomplete"


def _listed(request: HttpRequest, query: str) -> QuerySet[Plan]:
    is_newest = Q(state=PlanState.COMPUTED, is_latest=True)
    is_own = Q(state=PlanState.DRAFT, owner=request.user.pk)
    is_untouched_copy = Q(state=PlanState.DRAFT, base__isnull=False, revision=0)
    plans = Plan.objects.visible_to(request.user).filter(is_newest | is_own, deleted_at=None)
    plans = plans.exclude(is_untouched_copy)
    return plans.filter(name__icontains=query) if query else plans


def num_jobs_of(plans: Iterable[Plan]) -> dict[str, int]:
    """Return the number of jobs per series, over all versions of some saved plans."""
    series = [plan.series for plan in plans if plan.series]
    jobs = Job.objects.filter(plan__series__in=series, deleted_at=None).order_by()
    return dict(jobs.values_list("plan__series").annotate(n=Count("*")))
