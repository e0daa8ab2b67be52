"""``manage.py control``: ring hosts, and take what they report from Redis."""

import threading

import redis
from django.core.management.base import BaseCommand

from runners.timing import scaled
from webapp.core import broker
from webapp.core.loop import Stopper, run_loop
from webapp.hosts.redis_users import provision
from webapp.jobs.consume import StreamConsumer
from webapp.jobs.dispatch import Dispatcher

DISPATCH_SECONDS = scaled(0.25, least=0.1)
REDIS_WAIT_SECONDS = 0.5


class Command(BaseCommand):
    """Two loops, one process: either may lose Redis and comes back by itself."""

    help = "Run the control worker: doorbells out, events in."

    def handle(self, *_args: object, **_options: object) -> None:
        """Run until TERM or INT."""
        stop = Stopper()
        stop.listen()
        _take_roles(stop)
        consumer = StreamConsumer(broker.connection(broker.CONSUMER))
        consuming = threading.Thread(
            target=run_loop, args=("consumer", consumer.step, 0.0, stop), name="consumer"
        )
        consuming.start()
        run_loop("dispatcher", Dispatcher().step, DISPATCH_SECONDS, stop)
        consuming.join()


def _take_roles(stop: Stopper) -> None:
    """Have narrow users of Redis for both loops; wait for Redis, without which neither works."""
    while not stop.event.is_set():
        try:
            provision()
        except (redis.RedisError, OSError):
            stop.event.wait(REDIS_WAIT_SECONDS)
        else:
            return
