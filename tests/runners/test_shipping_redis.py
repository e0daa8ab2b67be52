"""Shipping through a real Redis while it is killed: nothing lost, nothing stored twice."""

import threading
import time
from collections.abc import Iterator

import pytest
import redis

from runners.client import ServerClient
from runners.redis_access import CONSUMER_GROUP, ack_key, decode, events_key
from runners.shipping import Loop, RedisStream, Shipping
from runners.spool import SpoolWriter
from tests.runners.acceptor import Acceptor
from tests.runners.tools import RedisServer, ids_of, wait_for

A1, A2 = ids_of(__name__)


class Consumer(threading.Thread):
    """The server's side in small: one group, accept, then acknowledge."""

    def __init__(self, server: RedisServer, acceptor: Acceptor) -> None:
        super().__init__(daemon=True)
        self.server, self.acceptor = server, acceptor
        self.is_stopped = False
        self.num_entries = 0

    def run(self) -> None:
        while not self.is_stopped:
            try:
                with self.server.client() as client:
                    self.serve(client)
            except redis.RedisError:
                time.sleep(0.05)

    def serve(self, client: redis.Redis) -> None:
        if not client.exists(events_key("h1")) or not client.xinfo_groups(events_key("h1")):
            client.xgroup_create(events_key("h1"), CONSUMER_GROUP, id="0", mkstream=True)
        start = "0"  # what was read and not acknowledged comes first after any error
        while not self.is_stopped:
            streams = {events_key("h1"): start}
            found = client.xreadgroup(CONSUMER_GROUP, "c", streams, count=10, block=100)
            entries = found[0][1] if found else []
            for entry, fields in entries:
                self.take(client, entry, fields)
            if not entries:
                start = ">"

    def take(self, client: redis.Redis, entry: str, fields: dict[str, str]) -> None:
        batch = decode(fields)
        _, ack = self.acceptor.events(batch.attempt_id, batch)
        client.xack(events_key("h1"), CONSUMER_GROUP, entry)
        client.xdel(events_key("h1"), entry)
        client.hset(ack_key("h1"), batch.attempt_id, ack.acked_seq)
        self.num_entries += 1


@pytest.fixture
def consumer(redis_server, acceptor) -> Iterator[Consumer]:
    made = Consumer(redis_server, acceptor)
    made.start()
    yield made
    made.is_stopped = True
    made.join(10)


@pytest.fixture
def shipping(host_dir, acceptor, redis_server, attempts) -> Iterator[Shipping]:
    for name in (A1, A2):
        attempts.make(name)
        acceptor.want(name).fence = "fence"
    client = ServerClient(acceptor.url, "host-credential")
    stream = RedisStream(redis_server.url, "h1")
    made = Shipping(host_dir, client, stream)
    loop = Loop("shipping", made.step)
    loop.start()
    yield made
    loop.stop()
    made.close()
    client.close()
    stream.close()


def write(attempts, name: str, count: int, pause: float = 0.0) -> None:
    spool = SpoolWriter(next(each.spool for each in attempts.made if each.attempt_id == name))
    for number in range(count):
        spool.append(
            "metric", {"source": "job", "values": {"loss": float(number)}, "step": number}
        )
        time.sleep(pause)
    spool.close()


def is_whole(acceptor, name: str, count: int) -> bool:
    events = acceptor.attempts[name].events
    return [event.body["step"] for event in events] == list(range(count))


@pytest.mark.faults
def test_events_travel_by_the_stream(shipping, consumer, acceptor, attempts):
    write(attempts, A1, 1200)

    wait_for(lambda: is_whole(acceptor, A1, 1200))
    wait_for(lambda: consumer.num_entries >= 3)  # 500 events each at most


@pytest.mark.faults
def test_a_redis_killed_again_and_again_loses_and_doubles_nothing(
    shipping, consumer, acceptor, attempts, redis_server
):
    writers = [
        threading.Thread(target=write, args=(attempts, name, 300, 0.01)) for name in (A1, A2)
    ]
    for writer in writers:
        writer.start()
    for _ in range(3):
        time.sleep(0.5)
        redis_server.kill()
        time.sleep(0.3)
        redis_server.start()
    for writer in writers:
        writer.join()

    for name in (A1, A2):
        wait_for(lambda name=name: is_whole(acceptor, name, 300), 30)


@pytest.mark.faults
def test_a_redis_that_stays_away_is_done_without(
    shipping, consumer, acceptor, attempts, redis_server
):
    redis_server.kill()
    write(attempts, A1, 700)

    wait_for(lambda: is_whole(acceptor, A1, 700))


@pytest.mark.faults
def test_a_flushed_redis_gets_everything_again(
    shipping, consumer, acceptor, attempts, redis_server
):
    write(attempts, A1, 300)
    with redis_server.client() as client:
        client.flushall()
    write(attempts, A1, 0)

    wait_for(lambda: is_whole(acceptor, A1, 300))


def test_news_end_a_loops_rest():
    steps = []

    def step() -> float:
        steps.append(len(steps))
        return 3600.0

    loop = Loop("resting", step)
    loop.start()
    wait_for(lambda: len(steps) == 1)
    loop.wake()
    wait_for(lambda: len(steps) == 2)
    loop.stop()
    assert not loop.is_alive()
