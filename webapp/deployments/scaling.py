"""How many replicas a deployment needs: by the requests that gateways count."""

import math
from datetime import datetime, timedelta

from django.db.models import Sum

from webapp.core.clock import now
from webapp.deployments.models import Deployment, GatewayLoad, Replica

FILL_RATIO = 0.8  # of what a replica may have open, before another one is started
REPORTED = timedelta(seconds=10.0)  # a gateway that is silent for longer counts no more
BUSY = timedelta(seconds=10.0)  # of too many requests, before a replica is added
SPARE = timedelta(minutes=5.0)  # of too few, before one leaves


def open_requests(deployment: Deployment) -> int:
    """Return the requests that gateways answer or hold for a deployment now."""
    rows = GatewayLoad.objects.filter(deployment=deployment, at__gte=now() - REPORTED)
    total: int | None = rows.aggregate(total=Sum("requests"))["total"]
    return total or 0


def num_needed(deployment: Deployment, replica: Replica, requests: int) -> int:
    """Return how many replicas like one are needed for requests, within the limits."""
    room = FILL_RATIO * (replica.job.spec.get("max_concurrency") or 1)
    least, most = deployment.min_replicas, deployment.max_replicas
    return min(most, max(least, math.ceil(requests / room)))


def is_idle(deployment: Deployment, replicas: list[Replica], instant: datetime) -> bool:
    """Return whether a deployment without requests is to sleep now."""
    if deployment.idle_seconds is None or deployment.is_warm(instant):
        return False
    ready = [each.ready_at for each in replicas if each.ready_at and each.is_ready]
    if not ready:
        return False
    used = [each for each in (deployment.last_used_at, max(ready)) if each is not None]
    return max(used) + timedelta(seconds=deployment.idle_seconds) <= instant
