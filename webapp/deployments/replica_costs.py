"""What deployments cost: their replicas' device time, by the cost per hour of their hosts.

A duty adds the time since its last round to the day's cost of each deployment, at what the label
``usd_per_hour`` of the host says then: that is the cost of all its devices. What several jobs hold
at once they share equally. A day's cost is shared by its answers' tokens, prompt and generated
alike, so that the price of an answer holds the time in which the model waited for one.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from datetime import date, datetime, timedelta
from itertools import pairwise
from typing import NamedTuple

from django.db import transaction
from django.db.models import F, Q, QuerySet, Sum

from planner.specs.units import HOUR
from webapp.core.clock import now
from webapp.deployments.models import DeploymentCost, Replica, Usage
from webapp.deployments.usage import NUM_TOKENS
from webapp.hosts.machines import HOURLY, price_of
from webapp.hosts.models import Device
from webapp.jobs.models import Allocation

MOST_REPLICAS = 1000  # of one round; the others follow in the next one
SOURCE = "by the cost per hour of their hosts (label usd_per_hour), shared by tokens"
Rates = dict[tuple[str, date], float]  # dollars per token, by deployment and day


class Held(NamedTuple):
    """For how long a device was held."""

    begin: datetime
    end: datetime


def day_shares(held: Held, others: Sequence[Held]) -> dict[date, float]:
    """Return the seconds by day (UTC) for which a device was held, less what others have of them.

    Each moment is shared equally by those that hold the device then.
    """
    edges = {held.begin, held.end, *_midnights(held)}
    edges |= {edge for each in others for edge in each if held.begin < edge < held.end}
    shares: dict[date, float] = defaultdict(float)
    for begin, end in pairwise(sorted(edges)):
        holders = 1 + sum(each.begin <= begin and end <= each.end for each in others)
        shares[begin.date()] += (end - begin).total_seconds() / holders
    return dict(shares)


def _midnights(held: Held) -> Iterator[datetime]:
    midnight = held.begin.replace(hour=0, minute=0, second=0, microsecond=0)
    while (midnight := midnight + timedelta(days=1)) < held.end:
        yield midnight


def costs_add() -> int:
    """Add the device time since the last round to the costs; return of how many replicas."""
    instant = now()
    behind = Q(ended_at=None) | Q(costed_until=None) | Q(costed_until__lt=F("ended_at"))
    due = Replica.objects.filter(behind).order_by(F("costed_until").asc(nulls_first=True), "pk")
    rows = due.only("deployment", "job", "costed_until")[:MOST_REPLICAS]
    return sum(_add(each, instant) for each in list(rows))


def _add(replica: Replica, instant: datetime) -> bool:
    """Add one replica's time; return whether there was any, and no other process did."""
    since = replica.costed_until
    if since is not None and since >= instant:  # the clock was set back
        return False
    held = Allocation.objects.filter(attempt__job=replica.job_id).select_related("device__host")
    if since is not None:
        held = held.exclude(released_at__lte=since)
    with transaction.atomic():
        for each in held:
            _add_allocation(replica.deployment_id, each, since, instant)
        fenced = Replica.objects.filter(pk=replica.pk, costed_until=since)
        if not fenced.update(costed_until=instant):
            transaction.set_rollback(True)
            return False
    return True


def _add_allocation(
    deployment_id: str, allocation: Allocation, since: datetime | None, instant: datetime
) -> None:
    begin = max(allocation.taken_at, since or allocation.taken_at)
    end = min(allocation.released_at or instant, instant)
    if begin >= end:
        return
    others = Allocation.objects.filter(device=allocation.device_id, taken_at__lt=end)
    others = others.exclude(pk=allocation.pk).exclude(released_at__lte=begin)
    spans = [
        Held(taken, released or instant)
        for taken, released in others.values_list("taken_at", "released_at")
    ]
    rate = _usd_per_second(allocation.device)
    for day, seconds in day_shares(Held(begin, end), spans).items():
        row, _ = DeploymentCost.objects.get_or_create(deployment_id=deployment_id, day=day)
        DeploymentCost.objects.filter(pk=row.pk).update(
            usd=F("usd") + seconds * (rate or 0.0),
            device_seconds=F("device_seconds") + seconds,
            unpriced_seconds=F("unpriced_seconds") + (seconds if rate is None else 0.0),
        )


def _usd_per_second(device: Device) -> float | None:
    """Return what a device costs now; None where its host states no cost, as for a Slurm slot."""
    hourly = price_of(device.host.labels, HOURLY)
    if hourly is None or device.kind == "slot":
        return None
    return hourly / HOUR / (device.host.devices.filter(is_present=True).count() or 1)


def rates_of(rows: QuerySet[Usage]) -> Rates:
    """Return the dollars per token of the deployments and days of usage, where all is known."""
    pairs = set(rows.order_by().values_list("deployment", "day").distinct())
    return _rates({each for each, _ in pairs}, {day for _, day in pairs})


def rates_of_rows(rows: Iterable[Usage]) -> Rates:
    """Return ``rates_of`` of rows that are read already."""
    rows = list(rows)
    return _rates({each.deployment_id for each in rows}, {each.day for each in rows})


def _rates(deployments: Collection[str], days: Collection[date]) -> Rates:
    if not days:
        return {}
    of_them = Q(deployment__in=deployments, day__gte=min(days), day__lte=max(days))
    costs = DeploymentCost.objects.filter(of_them, unpriced_seconds=0).order_by()
    usd = {(each.deployment_id, each.day): each.usd for each in costs}
    if not usd:
        return {}
    sums = Usage.objects.filter(of_them).order_by().values("deployment", "day")
    return {
        where: usd[where] / each["tokens"]
        for each in sums.annotate(tokens=Sum(NUM_TOKENS))
        if (where := (each["deployment"], each["day"])) in usd and each["tokens"]
    }


def usd_of(row: Usage, rates: Rates) -> float | None:
    """Return what a row of usage cost; None if that is not known."""
    rate = rates.get((row.deployment_id, row.day))
    return None if rate is None else rate * (row.prompt_tokens + row.completion_tokens)


class GroupCost(NamedTuple):
    """The cost of what a group used, and how many of its tokens have none that is known."""

    usd: float = 0.0
    unpriced_tokens: int = 0


def group_costs(rows: QuerySet[Usage], name: str, rates: Rates) -> dict[object, GroupCost]:
    """Return the costs of usage by the values of a column; empty where none is known."""
    if not rates:
        return {}
    sums = rows.order_by().values("deployment_id", "day", group=F(name))
    found: dict[object, GroupCost] = defaultdict(GroupCost)
    for each in sums.annotate(tokens=Sum(NUM_TOKENS)):
        rate, before = rates.get((each["deployment_id"], each["day"])), found[each["group"]]
        if rate is None:
            found[each["group"]] = before._replace(
                unpriced_tokens=before.unpriced_tokens + each["tokens"]
            )
        else:
            found[each["group"]] = before._replace(usd=before.usd + rate * each["tokens"])
    return dict(found)
