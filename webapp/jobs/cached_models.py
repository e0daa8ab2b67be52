"""Models in the Hub's caches of hosts: shown, pinned, deleted by order, pruned by a host's rule.

A host reports what its cache holds (``runners.host.hub_cache``), and gets what to delete and what
to keep with the replies to its heartbeats. What a queued or live job names is never deleted.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NamedTuple

from django.db import transaction
from django.db.models import Count, Max, Min, Sum

from runners.datasets.repositories import DATA_SETS
from runners.hub.links import LinkRate
from runners.hub.repository import COMMIT, store_repository
from runners.jobspec.base import is_store_url
from runners.shared.messages import (
    MAX_CACHED,
    CachedModel,
    CacheOrders,
    CacheReport,
    LinkReport,
)
from webapp.audit.models import event_record
from webapp.core.display import listed
from webapp.core.problems import ConflictProblem, InvalidProblem, NotFoundProblem
from webapp.core.queries import RowChange, update_each
from webapp.hosts.models import Host, HostModel
from webapp.hosts.services import checks_update, publish_host_checks
from webapp.jobs.models import LIVE_STATES, Job, JobState, RepositoryUse

ORDERS = "model_orders"  # key of Host.checks: org/name@commit -> who asked for the deletion
LINKS = "links"  # key of Host.checks: runners.shared.messages.LinkReport each
FIELDS = ("size_bytes", "num_files", "used_at", "is_complete")
LEAST_COMMIT = 7  # digits by which people name one
MAX_KEEP_BYTES = 2**60


class Use(NamedTuple):
    """A repository that a job names; ``revision`` may be a branch or empty."""

    repository: str
    revision: str

    def is_of(self, repository: str, commit: str) -> bool:
        """Return whether this is, or may be, that model: any commit where none is named."""
        is_other = bool(COMMIT.fullmatch(self.revision)) and self.revision != commit
        return repository == self.repository and not (is_other and commit)

    @property
    def key(self) -> str:
        """Return how a rule names it: one commit, or the repository for any."""
        return "@".join(self) if COMMIT.fullmatch(self.revision) else self.repository


def uses_in(spec: object, but_hubs: Collection[str] = ()) -> Iterator[Use]:
    """Yield the repositories that a job's document names, without those it states of some hubs.

    An address of an object store counts under its name in the cache.

    >>> list(uses_in({"model": {"source": "hub", "repository": "a/b", "revision": "main"}}))
    [Use(repository='a/b', revision='main')]
    """
    if isinstance(spec, dict):
        is_left_out = spec.get("hub") in but_hubs
        if (
            spec.get("source") == "hub"
            and isinstance(spec.get("repository"), str)
            and not is_left_out
        ):
            yield Use(spec["repository"], str(spec.get("revision") or ""))
        path = spec.get("path")
        if spec.get("source") in {"folder", "file"} and is_store_url(str(path)):
            yield Use(store_repository(str(path)), "")
        for value in spec.values():
            yield from uses_in(value, but_hubs)
    elif isinstance(spec, list):
        for value in spec:
            yield from uses_in(value, but_hubs)


def largest_use(spec: object) -> Use | None:
    """Return the model that a job names, else its data set; None if it names neither."""
    uses = uses_in(spec)
    return min(uses, key=lambda use: use.repository.startswith(DATA_SETS), default=None)


def uses_record(job: Job) -> None:
    """Store the repositories that a job names."""
    RepositoryUse.objects.bulk_create(
        [
            RepositoryUse(job=job, repository=use.repository, revision=use.revision)
            for use in dict.fromkeys(uses_in(job.spec))
        ],
        ignore_conflicts=True,
    )


# What jobs need


class Need(NamedTuple):
    """A repository that a job which has not ended needs on a host."""

    use: Use
    job_id: str


def needs_on(hosts: Iterable[Host]) -> dict[str, list[Need]]:
    """Return by host what its queued and live jobs need; of many alike that wait, the first.

    A team's hosts on one machine, which may share a cache, count as one. A job that waits for any
    host of a pool may start on each.
    """
    rows = list(hosts)
    boots = {host.boot_id for host in rows if host.boot_id}
    teams = {host.team_id for host in rows}  # names of others' repositories stay with them
    beside = Host.objects.filter(boot_id__in=boots, team__in=teams)
    known = [*beside.only("pk", "pool", "boot_id", "team"), *rows]
    pools = {host.pk: host.pool_id for host in known}
    machines: dict[tuple[str, str], set[str]] = defaultdict(set)
    for host in known:
        machines[_machine(host)].add(host.pk)
    found: dict[str, list[Need]] = defaultdict(list)
    uses = RepositoryUse.objects.filter(job__deleted_at=None).order_by()
    queued = uses.filter(job__state=JobState.QUEUED, job__pool__in=set(pools.values()))
    alike = queued.values_list("repository", "revision", "job__pool", "job__requested_host")
    for repository, revision, pool, named, first in alike.annotate(first=Min("job")):
        need = Need(Use(repository, revision), first)
        for pk in (pk for pk, own in pools.items() if own == pool and named in {None, pk}):
            found[pk].append(need)
    live = uses.filter(
        job__state__in=LIVE_STATES, job__attempts__host__in=pools, job__attempts__ended_at=None
    )
    fields = ("repository", "revision", "job", "job__attempts__host")
    for repository, revision, job_id, pk in live.values_list(*fields):
        found[pk].append(Need(Use(repository, revision), job_id))
    return {
        host.pk: [need for pk in sorted(machines[_machine(host)]) for need in found[pk]]
        for host in rows
    }


def _machine(host: Host) -> tuple[str, str]:
    """Return what a team's hosts on the same machine have in common."""
    return host.team_id, host.boot_id or host.pk


# Reports and orders


def _deleting(host: Host) -> dict[str, str]:
    orders: dict[str, str] = host.checks.get(ORDERS, {})
    return orders


def report_store(host: Host, report: CacheReport) -> dict[str, str]:
    """Store what a host's cache holds; return the orders that the report does not show as done.

    Pins of models that are still there stay.
    """
    told = {(each.repository, each.commit): each for each in report.models}
    known = {(each.repository, each.commit): each for each in host.models.all()}
    is_whole = len(report.models) < MAX_CACHED
    gone = [each for key, each in known.items() if key not in told] if is_whole else []
    new = [
        HostModel(host=host, repository=key[0], commit=key[1], **_fields(each))
        for key, each in told.items()
        if key not in known
    ]
    pruned = {(each.repository, each.commit): each for each in report.pruned}
    for each in gone:
        if note := pruned.get((each.repository, each.commit)):  # and not reported before
            detail = {"model": each.key, "freed_bytes": note.freed_bytes}
            event_record(host, "host.model_pruned", f"host:{host.slug}", detail=detail)
    if gone:
        HostModel.objects.filter(pk__in=[each.pk for each in gone]).delete()
    HostModel.objects.bulk_create(new)
    update_each(
        HostModel,
        [
            RowChange(row.pk, fields)
            for key, row in known.items()
            if key in told
            and (fields := _fields(told[key])) != {name: getattr(row, name) for name in FIELDS}
        ],
    )
    left = {f"{repository}@{commit}" for repository, commit in told}
    return {key: by for key, by in _deleting(host).items() if key in left or not is_whole}


def _fields(model: CachedModel) -> dict[str, Any]:
    at = datetime.fromtimestamp(model.used_at_ms / 1000, UTC) if model.used_at_ms else None
    values = (model.size_bytes, model.num_files, at, model.is_complete)
    return dict(zip(FIELDS, values, strict=True))


def orders_of(hosts: Iterable[Host]) -> dict[str, CacheOrders]:
    """Return by host what its cache deletes and keeps; hosts without orders and rule are left out.

    An order waits while a job needs the model.
    """
    ruled = [each for each in hosts if _deleting(each) or each.keep_models_bytes is not None]
    if not ruled:
        return {}
    needs = needs_on(ruled)
    pinned: dict[str, set[str]] = defaultdict(set)
    for row in HostModel.objects.filter(host__in=ruled).exclude(pinned_by=""):
        pinned[row.host_id].add(row.key)
    found = {}
    for host in ruled:
        has_rule = host.keep_models_bytes is not None
        kept = pinned[host.pk] | {need.use.key for need in needs[host.pk]}
        delete = [key for key in _deleting(host) if not _needing(needs[host.pk], key)]
        found[host.pk] = CacheOrders(
            delete=tuple(sorted(delete)),
            keep_bytes=host.keep_models_bytes,
            kept=tuple(sorted(kept)) if has_rule else (),
        )
    return found


def _needing(needs: Sequence[Need], key: str) -> str:
    """Return the id of a job that needs a model, "" if none does."""
    repository, _, commit = key.partition("@")
    return next((need.job_id for need in needs if need.use.is_of(repository, commit)), "")


# What people see and order


@dataclass(frozen=True)
class ModelRow:
    """A model in a host's cache, and who uses it."""

    model: HostModel
    is_deleting: bool  # its host is ordered to delete it, and has not
    is_needed: bool  # by a queued or live job
    num_jobs: int  # of the reader's teams, that used it on this host
    last_job: Job | None  # the newest of them


def models_on_host(
    host: Host, teams: Collection[str], *, at_most: int | None = None
) -> list[ModelRow]:
    """Return the models in a host's cache, the largest first, with what these teams' jobs used.

    Five queries, however many models and jobs.
    """
    models = list(host.models.order_by("-size_bytes", "pk")[:at_most])
    if not models:
        return []
    needs, deleting = needs_on([host])[host.pk], _deleting(host)
    uses = RepositoryUse.objects.filter(
        repository__in={each.repository for each in models},
        job__attempts__host=host,
        job__team__in=teams,
        job__deleted_at=None,
    )
    counted = {
        Use(row["repository"], row["revision"]): (row["number"], row["last"])
        for row in uses.order_by()
        .values("repository", "revision")
        .annotate(number=Count("job", distinct=True), last=Max("job"))
    }
    jobs = Job.objects.only("pk", "name").in_bulk({last for _, last in counted.values()})
    rows = []
    for model in models:
        own = [row for use, row in counted.items() if use.is_of(model.repository, model.commit)]
        last = max((last for _, last in own), default="")
        rows.append(
            ModelRow(
                model=model,
                is_deleting=model.key in deleting,
                is_needed=bool(_needing(needs, model.key)),
                num_jobs=sum(number for number, _ in own),
                last_job=jobs.get(last),
            )
        )
    return rows


class CacheSize(NamedTuple):
    """How much a host's cache holds."""

    num_models: int
    num_bytes: int


def cache_size(host: Host) -> CacheSize:
    """Return how many models a host's cache holds, and their bytes."""
    found = host.models.order_by().aggregate(number=Count("pk"), size=Sum("size_bytes"))
    return CacheSize(found["number"], found["size"] or 0)


def models_named(host: Host, name: str) -> list[HostModel]:
    """Return the models of a host that a name means: org/name, or with @ and a commit's beginning.

    Raises:
        NotFoundProblem: the host's cache has none of it.
    """
    repository, _, commit = name.strip().partition("@")
    found = list(host.models.filter(repository=repository, commit__startswith=commit))
    if not found or (commit and len(commit) < LEAST_COMMIT):
        has = sorted(set(host.models.values_list("repository", flat=True)[:5]))
        raise NotFoundProblem(
            "model",
            f"The cache of {host.name} has no model {name[:80]!r}: it has "
            f"{listed(has) or 'none'}. Name one as org/name, or as org/name@commit with at least "
            f"{LEAST_COMMIT} digits of the commit.",
        )
    return found


def models_pin(*, host: Host, name: str, by: str, is_pinned: bool) -> list[HostModel]:
    """Pin the models of a name, so that no rule prunes them, or unpin them.

    A pin withdraws an order to delete that the host has not carried out.

    Raises:
        NotFoundProblem: the host's cache has none of it.
    """
    found = models_named(host, name)
    with transaction.atomic():
        rows = HostModel.objects.filter(pk__in=[each.pk for each in found])
        rows.update(pinned_by=by[:150] if is_pinned else "")
        if is_pinned:
            _order(host, {}, withdrawn={each.key for each in found})
        kind = "host.model_pinned" if is_pinned else "host.model_unpinned"
        event_record(host, kind, by, detail={"model": _shown(found)})
    publish_host_checks(host)
    return found


def models_delete(*, host: Host, name: str, by: str) -> list[HostModel]:
    """Order a host to delete the models of a name from its cache.

    Raises:
        NotFoundProblem: the host's cache has none of it.
        ConflictProblem: one is pinned, or a queued or live job needs it.
    """
    found = models_named(host, name)
    needs = needs_on([host])[host.pk]
    for each in found:
        if each.pinned_by:
            raise ConflictProblem(
                "pinned", f"{each.repository} is pinned by {each.pinned_by}; unpin it first."
            )
        if job_id := _needing(needs, each.key):
            job = Job.objects.get(pk=job_id)
            user = job.name if job.team_id == host.team_id else "Another team's job"
            raise ConflictProblem(
                "in_use",
                f"{user} needs {each.repository} and is {job.get_state_display().lower()}; stop "
                "it first, or wait for its end.",
            )
    with transaction.atomic():
        _order(host, {each.key: by for each in found})
        event_record(host, "host.model_deleted", by, detail={"model": _shown(found)})
    publish_host_checks(host)
    return found


def _order(host: Host, orders: Mapping[str, str], withdrawn: Collection[str] = ()) -> None:
    row = Host.objects.select_for_update(no_key=True).only("checks").get(pk=host.pk)
    left = {key: by for key, by in _deleting(row).items() if key not in withdrawn}
    host.checks = checks_update(host.pk, **{ORDERS: {**left, **orders}})


def _shown(models: Sequence[HostModel]) -> str:
    return ", ".join(str(each) for each in models)[:400]


def keep_models_set(*, host: Host, keep_bytes: int | None, by: str) -> None:
    """Set how much a host's cache keeps at most; None: everything.

    Raises:
        InvalidProblem: the size is negative or too large.
    """
    if keep_bytes is not None and not 0 <= keep_bytes <= MAX_KEEP_BYTES:
        raise InvalidProblem(
            "keep_gib",
            f"keep_gib is {keep_bytes / 2**30:g}; it can be 0 to {MAX_KEEP_BYTES // 2**30:,}, or "
            "empty to keep everything.",
        )
    with transaction.atomic():
        before = Host.objects.select_for_update(no_key=True).get(pk=host.pk).keep_models_bytes
        if before == keep_bytes:
            return
        Host.objects.filter(pk=host.pk).update(keep_models_bytes=keep_bytes)
        detail = {"before_bytes": before, "keep_bytes": keep_bytes}
        event_record(host, "host.models_rule", by, detail=detail)
    host.keep_models_bytes = keep_bytes
    publish_host_checks(host)


# Which hosts have a model


def hosts_with(uses: Collection[Use], hosts: Collection[str]) -> dict[Use, frozenset[str]]:
    """Return by use the hosts, of those given, whose cache has all of its weights: one query."""
    if not uses or not hosts:
        return {}
    rows = HostModel.objects.filter(
        repository__in={use.repository for use in uses}, host__in=hosts, is_complete=True
    ).values_list("host", "repository", "commit")
    known = list(rows)
    return {
        use: frozenset(host for host, repository, commit in known if use.is_of(repository, commit))
        for use in uses
    }


def link_rates(host: Host) -> dict[str, LinkRate]:
    """Return how fast files came to a host, by link, as its transfers measured."""
    return {
        each.link: LinkRate(
            each.address,
            each.bytes_per_second,
            each.low,
            each.high,
            each.num_transfers,
            each.is_limited,
        )
        for each in map(LinkReport.model_validate, host.checks.get(LINKS) or ())
    }


def bytes_to_download(use: Use, host: Host, known_bytes: int | None) -> int | None:
    """Return what a host's cache lacks of a model, in bytes; None: not known. One query.

    The size is that of another copy on the team's hosts, else ``known_bytes``. Of a revision that
    is no commit, any commit counts.
    """
    rows = HostModel.objects.filter(repository=use.repository, host__team=host.team_id)
    found = [row for row in rows if use.is_of(row.repository, row.commit)]
    own = [row for row in found if row.host_id == host.pk]
    if any(row.is_complete for row in own):
        return 0
    size = max((row.size_bytes for row in found if row.is_complete), default=known_bytes)
    if size is None:
        return None
    arrived = max((row.size_bytes for row in own), default=0)
    return size - arrived if size > arrived else None
