"""Periodic tasks, in two groups that run in parallel until a signal arrives."""

import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import structlog
from django.db import close_old_connections

from runners.timing import scaled
from webapp.accounts.login import tries_forget_old
from webapp.accounts.sessions import sessions_forget_ended
from webapp.audit.chain import events_seal
from webapp.hosts import redis_users
from webapp.hosts.contact import ContactSweep, expire_tokens
from webapp.jobs.deadlines import StartDeadline, allocate_all
from webapp.jobs.dispatch import expire_stuck_commands
from webapp.jobs.gangs import settle_all
from webapp.jobs.services import queue_expire
from webapp.metrics.rollup import prune_old, seal_due

# Run a function periodically until a signal arrives, whatever it raises.


log = structlog.get_logger(__name__)
FAILURE_REST_SECONDS = 1.0
CONNECTION_SECONDS = 60.0  # a new connection per round costs more than most rounds


class Stopper:
    """Stop event set by SIGTERM and SIGINT; loops check it between rounds and sleep on it."""

    def __init__(self) -> None:
        self.event = threading.Event()

    def listen(self, *others: "Stopper") -> None:
        """Install signal handlers that stop this and others; main thread only."""

        def stop(*_: object) -> None:
            for each in (self, *others):
                each.event.set()

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, stop)


def run_loop(name: str, step: Callable[[], object], every_seconds: float, stop: Stopper) -> None:
    """Call ``step`` periodically; a repeated exception is logged once."""
    last_failure = ""
    renewed_at = time.monotonic()
    while not stop.event.is_set():
        if last_failure or time.monotonic() - renewed_at > CONNECTION_SECONDS:
            close_old_connections()
            renewed_at = time.monotonic()
        rest = every_seconds
        try:
            step()
            if last_failure:
                log.info("works again", loop=name)
            last_failure = ""
        except Exception as error:  # the loop survives any failure of a round
            rest = max(FAILURE_REST_SECONDS, every_seconds)
            if repr(error) != last_failure:
                log.warning("round failed", loop=name, exc_info=True)
            last_failure = repr(error)
        stop.event.wait(rest)
    close_old_connections()


QUEUE_LIFETIME = timedelta(days=7)


PROMPT, UPKEEP = "prompt", "upkeep"


@dataclass
class Duty:
    """One task to run every ``period_seconds``."""

    name: str
    period_seconds: float
    work: Callable[[], object]
    group: str = PROMPT
    due_at: float = field(default=0.0)


def all_duties() -> list[Duty]:
    """Return all periodic tasks."""
    return [
        Duty("contact", 5.0, ContactSweep().step),
        Duty("allocation", 2.0, allocate_all),
        Duty("start time-out", 5.0, StartDeadline().step),
        Duty("silent hosts of ending jobs", 5.0, settle_all),
        Duty("queue time-out", 60.0, lambda: queue_expire(older_than=QUEUE_LIFETIME)),
        Duty("stuck commands", 30.0, expire_stuck_commands),
        Duty("metric chunks", 10.0, seal_due, UPKEEP),
        Duty("metric retention", 3600.0, prune_old, UPKEEP),
        Duty("redis users", 30.0, redis_users.keep),
        Duty("tokens", 600.0, expire_tokens),
        Duty("audit chain", 5.0, events_seal, UPKEEP),
        Duty("login tries", 600.0, tries_forget_old, UPKEEP),
        Duty("ended sessions", 3600.0, sessions_forget_ended, UPKEEP),
    ]


class Ticker:
    """Runs tasks that are due; a failed task is logged and retried in its next period."""

    def __init__(
        self, duties: Sequence[Duty] | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._duties = list(duties) if duties is not None else all_duties()
        self._clock = clock

    def step(self) -> int:
        """Run every due task and return the number that succeeded."""
        due = [duty for duty in self._duties if duty.due_at <= self._clock()]
        return sum(self._do(duty) for duty in due)

    def _do(self, duty: Duty) -> bool:
        duty.due_at = self._clock() + scaled(duty.period_seconds, least=0.2)
        try:
            duty.work()
        except Exception:  # a failed task must not stop the others
            log.warning("duty failed", duty=duty.name, exc_info=True)
            return False
        return True
