"""The duties that time brings, each with its period."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import structlog

from runners.timing import scaled
from webapp.accounts.guesses import tries_forget_old
from webapp.accounts.sessions import sessions_forget_ended
from webapp.audit.chain import events_seal
from webapp.hosts import redis_users
from webapp.hosts.sweep import ContactSweep, expire_tokens
from webapp.jobs.deadlines import StartDeadline, allocate_all
from webapp.jobs.dispatch import bury_stuck
from webapp.jobs.gangs import settle_all
from webapp.jobs.services import queue_expire
from webapp.metrics.upkeep import prune_old, seal_due

log = structlog.get_logger(__name__)
QUEUE_LIFETIME = timedelta(days=7)


@dataclass
class Duty:
    """One thing to do every ``period_seconds``."""

    name: str
    period_seconds: float
    work: Callable[[], object]
    due_at: float = field(default=0.0)


def all_duties() -> list[Duty]:
    """Return every duty of the product."""
    return [
        Duty("contact", 5.0, ContactSweep().step),
        Duty("allocation", 2.0, allocate_all),
        Duty("start time-out", 5.0, StartDeadline().step),
        Duty("silent hosts of ending jobs", 5.0, settle_all),
        Duty("queue time-out", 60.0, lambda: queue_expire(older_than=QUEUE_LIFETIME)),
        Duty("stuck commands", 30.0, bury_stuck),
        Duty("metric chunks", 10.0, seal_due),
        Duty("metric retention", 3600.0, prune_old),
        Duty("redis users", 30.0, redis_users.keep),
        Duty("tokens", 600.0, expire_tokens),
        Duty("audit chain", 5.0, events_seal),
        Duty("login tries", 600.0, tries_forget_old),
        Duty("ended sessions", 3600.0, sessions_forget_ended),
    ]


class Ticker:
    """Does what is due; a duty that fails is told and tried again at its next turn."""

    def __init__(
        self, duties: Sequence[Duty] | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._duties = list(duties) if duties is not None else all_duties()
        self._clock = clock

    def step(self) -> int:
        """Do every duty whose time has come and return how many were done."""
        due = [duty for duty in self._duties if duty.due_at <= self._clock()]
        return sum(self._do(duty) for duty in due)

    def _do(self, duty: Duty) -> bool:
        duty.due_at = self._clock() + scaled(duty.period_seconds, least=0.2)
        try:
            duty.work()
        except Exception:  # one duty's trouble is not the others'
            log.warning("duty failed", duty=duty.name, exc_info=True)
            return False
        return True
