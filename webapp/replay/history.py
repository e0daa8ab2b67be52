"""The history of a pool as a trace, on the pool's hosts."""

from webapp.core.problems import InvalidProblem
from webapp.hosts.models import RUNS_JOBS, Device, Host, HostState, Pool
from webapp.jobs.models import Job
from webapp.jobs.quotas import length_seconds, quota_of
from webapp.replay.blocks import FOREVER, Block
from webapp.replay.fleet import Fleet, Shape
from webapp.replay.traces import Trace


def fleet_of(pool: Pool) -> tuple[Fleet, dict[str, int]]:
    """Return a pool's hosts that are not retired, in blocks by model, and the models' numbers.

    Raises:
        InvalidProblem: the pool has no host with a usable device, or one with several models.
    """
    hosts = Host.objects.filter(pool=pool, kind__in=RUNS_JOBS).exclude(state=HostState.RETIRED)
    ranks = {pk: rank for rank, pk in enumerate(sorted(hosts.values_list("pk", flat=True)))}
    of_host: dict[str, list[str]] = {}
    usable = Device.objects.filter(host__in=ranks, is_present=True, cordoned_at=None)
    for host, name in usable.values_list("host", "name"):
        of_host.setdefault(host, []).append(name)
    mixed = [pk for pk, names in of_host.items() if len(set(names)) > 1]
    if mixed:
        raise InvalidProblem(
            "pool",
            f"{Host.objects.get(pk=mixed[0]).name} has devices of several models, which a replay "
            "cannot tell apart: replay a pool without it.",
        )
    if not of_host:
        raise InvalidProblem(
            "pool", f"The pool {pool.name} has no host with a usable device: name another pool."
        )
    models = sorted({names[0] for names in of_host.values()})
    blocks = []
    for model in models:
        own = sorted(pk for pk, names in of_host.items() if names[0] == model)
        blocks.append(Block([ranks[pk] for pk in own], [len(of_host[pk]) for pk in own]))
    return Fleet(blocks), {model: number for number, model in enumerate(models)}


def trace_of(pool: Pool) -> Trace:
    """Return the jobs of a pool that ran and ended, with the waits that they had.

    A job may go to any model of the pool, and one that asked for a whole host takes the largest.
    Jobs that shared a device are left out.

    Raises:
        InvalidProblem: there is no such job.
    """
    rows = Job.objects.filter(
        pool=pool, queued_at__isnull=False, started_at__isnull=False, ended_at__isnull=False,
        shared_bytes=None,
    )  # fmt: skip
    jobs = list(rows.select_related("team").order_by("queued_at", "pk"))
    if not jobs:
        raise InvalidProblem(
            "pool", f"No job of the pool {pool.name} has run and ended: give a published trace."
        )
    fleet, _ = fleet_of(pool)
    widest = max(num for block in fleet.blocks for num in range(1, 1025) if block.num_hosts(num))
    every = tuple(range(len(fleet.blocks)))
    teams = {job.team_id: job.team for job in jobs}
    numbers = {pk: number for number, pk in enumerate(sorted(teams))}
    times = [
        (job.queued_at, job.started_at, job.ended_at)
        for job in jobs
        if job.queued_at and job.started_at and job.ended_at
    ]
    first = times[0][0]
    lengths = [length_seconds(job, lambda _: None) for job in jobs]
    return Trace(
        submitted=[(queued - first).total_seconds() for queued, _, _ in times],
        seconds=[(ended - started).total_seconds() for _, started, ended in times],
        lengths=[FOREVER if length is None else length for length in lengths],
        shapes=[Shape(job.num_hosts, job.devices_per_host or widest, every) for job in jobs],
        teams=[numbers[job.team_id] for job in jobs],
        team_names=[teams[pk].name for pk in sorted(teams)],
        weights=[max(quota_of(teams[pk]).share, 0.01) for pk in sorted(teams)],
        priorities=[job.priority for job in jobs],
        waits=[(started - queued).total_seconds() for queued, started, _ in times],
    )
