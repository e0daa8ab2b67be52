"""``manage.py control``: send wake signals to hosts, and consume their event streams.

SIGUSR1 stops only the sending: ``up`` sends it before it stops the jobs of its own machine.
"""

import signal
import threading
from collections.abc import Callable

import redis
from django.core.management.base import BaseCommand

from runners.shared.timing import scale_duration
from webapp.agents.consume import StreamConsumer
from webapp.agents.dispatch import Dispatcher, ring
from webapp.agents.round_trips import RoundTrips
from webapp.core import outages
from webapp.hosts.epoch import provision
from webapp.jobs import allocation
from webapp.operations.ticker import Stopper, run_loop

DISPATCH_SECONDS = scale_duration(0.25, least=0.1)
REDIS_WAIT_SECONDS = 0.5
TRIP_SECONDS = scale_duration(1.0, least=0.1)


class Command(BaseCommand):
    """Run three loops in one process; each recovers by itself when Redis is back."""

    requires_system_checks = ()  # they load every page, which is not needed here
    help = "Run the control worker: doorbells out, events in."

    def handle(self, *_args: object, **_options: object) -> None:
        """Run until SIGTERM or SIGINT."""
        stop, dispatching = Stopper(), Stopper()
        stop.listen(dispatching)
        signal.signal(signal.SIGUSR1, lambda *_: _pause(dispatching))
        _take_roles(stop)
        consumer = StreamConsumer(outages.connection(outages.CONSUMER))
        consuming = threading.Thread(
            target=run_loop,
            args=("consumer", _with_users(consumer.step), 0.0, stop),
            name="consumer",
        )
        trips = RoundTrips(outages.connection(outages.CONSUMER), ring)
        trying = threading.Thread(
            target=run_loop, args=("queue check", trips.step, TRIP_SECONDS, stop), name="trips"
        )
        for thread in (consuming, trying):
            thread.start()
        run_loop("dispatcher", Dispatcher().step, DISPATCH_SECONDS, dispatching)
        for thread in (consuming, trying):
            thread.join()  # events are consumed until SIGTERM


def _pause(dispatching: Stopper) -> None:
    """Stop allocation and dispatch before a site stop; events are still consumed."""
    allocation.paused.set()
    dispatching.event.set()


def _with_users(step: Callable[[], object]) -> Callable[[], object]:
    """Wrap a step so that the Redis users are created again if Redis lost them."""

    def step_with_users() -> object:
        try:
            return step()
        except (redis.AuthenticationError, redis.exceptions.NoPermissionError):
            provision()
            raise

    return step_with_users


def _take_roles(stop: Stopper) -> None:
    """Wait for Redis and create restricted users for the loops."""
    while not stop.event.is_set():
        try:
            provision()
        except (redis.RedisError, OSError):
            stop.event.wait(REDIS_WAIT_SECONDS)
        else:
            return
