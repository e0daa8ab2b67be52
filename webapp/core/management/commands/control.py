"""``manage.py control``: ring hosts, and take what they report from Redis."""

import threading
from collections.abc import Callable

import redis
from django.core.management.base import BaseCommand

from runners.timing import scaled
from webapp.core import broker
from webapp.core.loop import Stopper, run_loop
from webapp.hosts.redis_users import provision
from webapp.hosts.round_trips import RoundTrips
from webapp.jobs.consume import StreamConsumer
from webapp.jobs.dispatch import Dispatcher, ring

DISPATCH_SECONDS = scaled(0.25, least=0.1)
REDIS_WAIT_SECONDS = 0.5
TRIP_SECONDS = scaled(1.0, least=0.1)


class Command(BaseCommand):
    """Three loops, one process: each may lose Redis and comes back by itself."""

    help = "Run the control worker: doorbells out, events in."

    def handle(self, *_args: object, **_options: object) -> None:
        """Run until TERM or INT."""
        stop = Stopper()
        stop.listen()
        _take_roles(stop)
        consumer = StreamConsumer(broker.connection(broker.CONSUMER))
        consuming = threading.Thread(
            target=run_loop,
            args=("consumer", _with_users(consumer.step), 0.0, stop),
            name="consumer",
        )
        trips = RoundTrips(broker.connection(broker.CONSUMER), ring)
        trying = threading.Thread(
            target=run_loop, args=("queue check", trips.step, TRIP_SECONDS, stop), name="trips"
        )
        for thread in (consuming, trying):
            thread.start()
        run_loop("dispatcher", Dispatcher().step, DISPATCH_SECONDS, stop)
        for thread in (consuming, trying):
            thread.join()


def _with_users(step: Callable[[], object]) -> Callable[[], object]:
    """Have the step's users made anew when Redis came back without them."""

    def kept() -> object:
        try:
            return step()
        except (redis.AuthenticationError, redis.exceptions.NoPermissionError):
            provision()
            raise

    return kept


def _take_roles(stop: Stopper) -> None:
    """Have narrow users of Redis for both loops; wait for Redis, without which neither works."""
    while not stop.event.is_set():
        try:
            provision()
        except (redis.RedisError, OSError):
            stop.event.wait(REDIS_WAIT_SECONDS)
        else:
            return
