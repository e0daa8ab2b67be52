"""The home page: what needs attention; and the search over everything."""

from collections.abc import Iterable
from datetime import timedelta
from typing import Any, NamedTuple

from django.contrib.auth.models import AnonymousUser, User
from django.db.models import F, Prefetch, QuerySet
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.urls import resolve, reverse
from django.utils.cache import patch_vary_headers
from django.utils.http import urlencode
from django.views.decorators.http import require_GET

from runners.plans.document import GOALS
from webapp.accounts.models import Role, memberships_of
from webapp.accounts.services import chosen_of, is_at_least
from webapp.core.clock import now
from webapp.core.display import clock
from webapp.core.parameters import reads_query
from webapp.core.search import folded
from webapp.core.templatetags.components import NAVIGATION
from webapp.deployments.alarms import alarms_for
from webapp.deployments.models import Deployment
from webapp.deployments.states import DeploymentView, views_of
from webapp.hosts.epoch import RESTORED, is_restored
from webapp.hosts.models import DOCUMENTS as DOCUMENTS_OF_HOSTS
from webapp.hosts.models import RUNS_JOBS, Host, HostState, Pool
from webapp.hosts.services import Contact, contact_of, silent_seconds
from webapp.hosts.use import HostUse, with_use
from webapp.jobs.accuracy import accuracy_for
from webapp.jobs.busy_hosts import busy_effect, busy_words
from webapp.jobs.described_results import described
from webapp.jobs.lookup import JobCounts, counts_of
from webapp.jobs.models import DOCUMENTS, LIVE_STATES, Job, JobState, Measurement
from webapp.jobs.progress import AgainstPrediction, against_prediction, progress
from webapp.jobs.reason_words import words_for
from webapp.jobs.searching import MAX_ROWS, SHORTEST, Group, model_results, search_results
from webapp.modelhub.models import DEMO_NAME
from webapp.pages.docs import search_docs
from webapp.plans.models import Plan, PlanState
from webapp.wizard.combobox import Several, several_devices

FAILED_FOR = timedelta(days=3)  # older failures are not shown
QUEUED_TOO_LONG = timedelta(minutes=10)
ENDED_FOR = timedelta(days=1)
MOST_JOBS = 6
MOST_ENDED = 5
MOST_DRAFTS = 3
MOST_DEPLOYMENTS = 4
MOST_KEYS = 2  # of those at a limit, so that failed jobs have room
NAMED = "named_model"  # in the session: a refused name, until the page shows it again
OF_WAITING = ("name", "queued_at", "host__name", "requested_host__name", "pool__name")


class Attention(NamedTuple):
    """One item that needs attention, with a link to act on it."""

    tone: str
    icon: str
    title: str
    text: str
    url: str
    action: str


def attention_for(user: User | AnonymousUser) -> list[Attention]:
    """Return the items that need attention in the user's teams, most urgent first."""
    used_up, nearly = _keys(user)
    ready = Host.objects.visible_to(user).filter(kind__in=RUNS_JOBS, state=HostState.READY)
    ready_hosts = list(with_use(ready.only("name", "slug", "last_seen_at")))
    hosts = [*_silent_hosts(ready_hosts), *_busy_hosts(ready_hosts)]
    items = [*_backup(), *used_up, *_failed_jobs(user), *hosts, *_stuck_jobs(user)]
    return [*items, *nearly][:MOST_JOBS]


def _backup() -> list[Attention]:
    if not is_restored():
        return []
    where = reverse("docs", args=["configuration"])
    title = "Restored from a backup: nothing starts"
    return [Attention("bad", "cross", title, RESTORED, where, "See the next steps")]


def _keys(user: User | AnonymousUser) -> tuple[list[Attention], list[Attention]]:
    """Return the keys that have used up their tokens of a period, and those that nearly have."""
    where, found = reverse("serving-keys"), alarms_for(user)
    used_up = [
        Attention(
            "bad", "cross", f"The key {each.key.name} is answered 429 until its limit begins anew",
            each.words, where, "See the keys",
        )
        for each in found if each.percent == 100  # noqa: PLR2004 (all of it)
    ]  # fmt: skip
    nearly = [
        Attention(
            "warn", "triangle", f"The key {each.key.name} has used {each.percent} % of a limit",
            each.words, where, "See the keys",
        )
        for each in found if each.percent < 100  # noqa: PLR2004 (as above)
    ]  # fmt: skip
    return used_up[:MOST_KEYS], nearly[:MOST_KEYS]


def _failed_jobs(user: User | AnonymousUser) -> list[Attention]:
    recent = Job.objects.visible_to(user).filter(deleted_at=None, ended_at__gte=now() - FAILED_FOR)
    shown = recent.order_by().values_list("ended_at", "pk")
    failed, error = (shown.filter(state=state) for state in (JobState.FAILED, JobState.ERROR))
    latest = failed.union(error, all=True).order_by("-ended_at")[
        :MOST_JOBS
    ]  # of each from its index
    jobs = Job.objects.only("name", "state", "reason").in_bulk([pk for _, pk in latest])
    return [
        Attention(
            "bad",
            "cross",
            f"{job.name} {'failed' if job.state == JobState.FAILED else 'ended with an error'}",
            words_for(job.reason).sentence if job.reason else "",
            reverse("job-detail", args=[job.pk]),
            "See what happened",
        )
        for job in (jobs[pk] for _, pk in latest if pk in jobs)
    ]


def _silent_hosts(hosts: Iterable[Host]) -> list[Attention]:
    silent = [host for host in hosts if contact_of(host) is Contact.UNREACHABLE]
    return [
        Attention(
            "warn",
            "triangle",
            f"{host.name} has been unreachable for {clock(silent_seconds(host) or 0)}",
            "Its jobs continue; they report again when the host is back.",
            reverse("host-detail", args=[host.slug]),
            "Open the host",
        )
        for host in silent
    ]


def _busy_hosts(hosts: Iterable[Host]) -> list[Attention]:
    """Return the hosts that other programs than jobs keep busy."""
    used = [(host, use) for host in hosts if (use := HostUse.of_row(host)) and not use.num_jobs]
    return [
        Attention(
            "warn",
            "triangle",
            words,
            busy_effect(use),
            reverse("host-detail", args=[host.slug]),
            "Open the host",
        )
        for host, use in used
        if (words := busy_words(host, use))
    ]


def _stuck_jobs(user: User | AnonymousUser) -> list[Attention]:
    late = Job.objects.visible_to(user).filter(
        state=JobState.QUEUED, deleted_at=None, queued_at__lt=now() - QUEUED_TOO_LONG
    )
    # With the pool in the condition, the queue index covers the query.
    late = late.filter(pool__in=Pool.objects.order_by().values("pk"))
    longest = late.order_by("queued_at", "pk").values_list("pk", flat=True)[:MOST_JOBS]
    jobs = Job.objects.select_related("host", "requested_host", "pool").only(*OF_WAITING)
    by_id = jobs.in_bulk(list(longest))
    return [
        Attention(
            "warn",
            "triangle",
            f"{job.name} has waited for {clock((now() - job.queued_at).total_seconds())}",
            f"It waits for {job.place}.",
            reverse("job-detail", args=[job.pk]),
            "See why",
        )
        for job in (by_id[pk] for pk in longest if pk in by_id)
        if job.queued_at
    ]


LEFT_OUT = (
    *DOCUMENTS,
    *(f"{host}__{name}" for host in ("host", "requested_host") for name in DOCUMENTS_OF_HOSTS),
)


@require_GET
def home(request: HttpRequest) -> HttpResponse:
    """Show items that need attention, running jobs, hosts and prediction accuracy."""
    visible = Job.objects.visible_to(request.user).filter(deleted_at=None)
    jobs = visible.select_related("host", "requested_host", "pool").defer(*LEFT_OUT)
    running = sorted(
        jobs.filter(state__in=[*LIVE_STATES, JobState.QUEUED])[:MAX_ROWS],
        key=lambda job: job.state == JobState.QUEUED,  # what runs comes first
    )
    counts = counts_of(visible)
    attention_items = attention_for(request.user)
    enrolled = Host.objects.visible_to(request.user).exclude(state=HostState.RETIRED)
    hosts = with_use(enrolled.defer(*DOCUMENTS_OF_HOSTS))
    ended = _ended(jobs)
    recent = [] if running or ended else list(jobs.order_by("-created_at")[:4])
    context = {
        "today": now(),
        "attention": attention_items,
        "running": [(job, progress(job)) for job in running],
        "recent": recent,
        "ended": ended,
        "deployments": _deployments(request.user),
        "drafts": _drafts(request.user),
        "hosts": [_host_row(host) for host in hosts[:MAX_ROWS]],
        "accuracy": accuracy_for(request.user),
        "named": request.session.pop(NAMED, ""),
        "is_fresh": not running and not ended and not recent,
        "counts": counts,
        "headline": headline(len(attention_items), counts),
    }
    template = "home/jobs.html" if request.headers.get("HX-Request") else "home/home.html"
    response = render(request, template, context)
    patch_vary_headers(response, ["HX-Request"])
    return response


def _host_row(host: Host) -> tuple[Host, Contact, HostUse | None]:
    """Return a host with its contact, and what is in use of it if that is of now."""
    contact = contact_of(host)
    return host, contact, HostUse.of_row(host) if contact is Contact.LIVE else None


def _ended(jobs: QuerySet[Job]) -> list[tuple[Job, AgainstPrediction | None]]:
    """Return the jobs that ended since yesterday, the latest first, with their main figure."""
    latest = jobs.filter(ended_at__gte=now() - ENDED_FOR).order_by("-ended_at")
    measured = Prefetch(
        "measurements", queryset=Measurement.objects.only("job", "metric", "ratio")
    )
    found = latest.prefetch_related(measured)[:MOST_ENDED]
    return [(job, against_prediction(job.measurements.all())) for job in found]


def _deployments(user: User | AnonymousUser) -> list[DeploymentView]:
    """Return the deployments of the user's teams with their states, the last used first."""
    rows = Deployment.objects.visible_to(user).filter(deleted_at=None).select_related("plan")
    latest = rows.order_by(F("last_used_at").desc(nulls_last=True), "-created_at", "pk")
    found = list(latest[:MOST_DEPLOYMENTS])
    return views_of(found) if found else []


def _drafts(user: User | AnonymousUser) -> list[tuple[Plan, str]]:
    """Return the user's own drafts that were changed with their names, the latest first."""
    drafts = Plan.objects.filter(owner_id=user.pk, state=PlanState.DRAFT, deleted_at=None)
    changed = drafts.visible_to(user).filter(draft__wizard__is_touched=True)
    latest = changed.only("name", "saved_at", "draft").order_by("-saved_at")[:MOST_DRAFTS]
    return [(plan, plan.name or _draft_words(plan)) for plan in latest]


def _draft_words(plan: Plan) -> str:
    """Return the goal of a draft without a name, and the model where the draft names one."""
    document = plan.readable_document
    if document is None:
        return "Draft plan"
    model, goal = document.model, GOALS[document.goal][0]
    named = {"catalog": model.catalog_id, "hub": model.repository, "demo": DEMO_NAME}
    words = named.get(str(model.source))
    return f"{goal} {words}" if words else f"{goal}, a draft"


def headline(num_attention: int, counts: JobCounts) -> str:
    """Return the summary sentence: number of items that need attention, and job counts."""
    needs = f"{_counted(num_attention, 'thing')} need{'s' if num_attention == 1 else ''} you"
    return f"{needs if num_attention else 'No problems'}; {counts.sentence}"


def _counted(number: int, noun: str) -> str:
    words = ("No", "One", "Two", "Three", "Four", "Five", "Six", "Seven", "Eight")
    count = words[number] if number < len(words) else str(number)
    return f"{count} {noun}{'' if number == 1 else 's'}"


@require_GET
@reads_query("q")
def search(request: HttpRequest) -> HttpResponse:
    """List matches of ``q`` in the user's objects, then in the catalogs."""
    query = request.GET.get("q", "").strip()
    groups = search_results(request.user, query) if len(query) >= SHORTEST else []
    groups = [group for group in groups if group[2]]
    context: dict[str, Any] = {"query": query, "groups": groups, "found": []}
    if "HX-Request" in request.headers:  # the palette, which offers pages and actions as well
        context["found"] = palette_entries(request, query, groups)
    else:
        context["sections"] = described(groups)
    template = "home/palette.html" if "HX-Request" in request.headers else "home/search.html"
    response = render(request, template, context)
    patch_vary_headers(response, ["HX-Request"])
    return response


class Entry(NamedTuple):
    """One line of the palette: what it is, its words, where it leads."""

    kind: str
    words: str
    url: str


OF_PALETTE = (
    *((words, url) for url, words in NAVIGATION),
    ("Add a host", "/hosts/add/"), ("New plan", "/plans/new/"),
    ("Run the demo", "/plans/new/?preset=demo"),
    ("Access tokens", "/settings/tokens/"), ("Secrets", "/settings/secrets/"),
    ("Compare jobs", "/compare/"), ("Workflows", "/workflows/"), ("Approvals", "/approvals/"),
)  # fmt: skip
MOST_ACTIONS = 3


def palette_entries(request: HttpRequest, query: str, groups: list[Group]) -> list[Entry]:
    """Return pages, plans to make, and what the search found, in the order of a keyboard's use.

    What needs a higher role than the user's is left out.
    """
    words = folded(query.casefold().removeprefix("plan ")).split()
    sought, on, hardware = query.partition(" on ")
    pages = [
        Entry("Go to", name, url)
        for name, url in OF_PALETTE
        if all(word in folded(name) for word in words)
    ]
    models = [
        _plan_entry(key, name, place)
        for _, _, rows in _models(request, query, sought, groups)
        for key, name in rows[:MOST_ACTIONS]
        for place in (several_devices(hardware) if on and hardware.strip() else [None])
    ]
    found = [
        Entry(heading, name, reverse(address, args=[key]))
        for heading, address, rows in groups
        for key, name in rows
    ]
    docs = [
        Entry("Docs", f"{each.title}{f' · {each.heading}' if each.heading else ''}", each.url)
        for each in search_docs(query)[:MOST_ACTIONS]
    ]
    membership = chosen_of(request, memberships_of(request.user))
    role = Role(membership.role) if membership else Role.VIEWER
    open_pages = [each for each in pages if _is_open(each, role)][:MOST_JOBS]
    return [*open_pages, *(each for each in models if _is_open(each, role)), *found, *docs]


def _plan_entry(model: str, name: str, place: Several | None) -> Entry:
    """Return the line that plans to serve a model, on named devices or the usual host."""
    query = {"preset": "serve", "model": model}
    if place:
        query["hardware"] = f"{place.devices_per_node * place.nodes}x {place.device}"
    words = f"Serve {name} on {place.words}" if place else f"Serve {name}"
    return Entry("Plan", words, f"{reverse('plan-new')}?{urlencode(query)}")


def _is_open(entry: Entry, role: Role) -> bool:
    """Return whether the page of an entry is for users of a role."""
    view = resolve(entry.url.partition("?")[0]).func
    return is_at_least(role, getattr(view, "required_role", Role.VIEWER))


def _models(request: HttpRequest, query: str, sought: str, groups: list[Group]) -> list[Group]:
    """Return the groups of models; of “plan llama 70b on 4x a100” those of “llama 70b”."""
    rest = sought.casefold().removeprefix("plan ").strip()
    if rest != query.casefold() and len(rest) >= SHORTEST:
        groups = model_results(request.user, rest)
    return [group for group in groups if group[1] == "model-detail"]
