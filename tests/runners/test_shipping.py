"""From spool to server, by stream or by HTTP: nothing lost, nothing stored twice."""

import threading
import time
from collections.abc import Iterator

import pytest
import redis

from runners.host import shipping
from runners.host.redis_access import CONSUMER_GROUP, ack_key, decode, events_key
from runners.host.shipping import (
    AttemptShipper,
    RedisStream,
    RefusedError,
    RepeatingThread,
    ServerClient,
    Shipping,
    UnreachableError,
    measure_network,
)
from runners.shared.messages import EventBatch
from runners.shared.spool import SpoolWriter, segments
from runners.supervision.child import LockedError
from tests.runners.acceptor import Acceptor, Stored
from tests.runners.tools import RedisServer, ids_of, wait_for

# From spool to server: by stream or by HTTP, nothing lost, nothing stored twice.

A1, A2 = ids_of(__name__)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class PipeStream:
    """A stream in memory, with the faults that a real one has."""

    def __init__(self, stored: Stored) -> None:
        self.stored = stored
        self.entries: list[EventBatch] = []
        self.is_down = False
        self.eats_entries = False

    def add(self, batch: EventBatch) -> bool:
        if not self.is_down and not self.eats_entries:
            self.entries.append(batch)
        return not self.is_down

    def acked(self, _attempt_id: str) -> int | None:
        return None if self.is_down else len(self.stored.events)

    def consume(self) -> None:
        for batch in self.entries:
            self.stored.accept(batch)
        self.entries.clear()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def stored(acceptor) -> Stored:
    made = acceptor.want(A1)
    made.fence = "fence"
    return made


@pytest.fixture
def folder(attempts):
    return attempts.make()


@pytest.fixture
def spool(folder) -> SpoolWriter:
    return SpoolWriter(folder.spool)


@pytest.fixture
def stream(stored) -> PipeStream:
    return PipeStream(stored)


def append(spool: SpoolWriter, count: int) -> None:
    for number in range(count):
        spool.append("metric", {"source": "job", "values": {"loss": 1.0}, "step": number})


def seqs(stored: Stored) -> list[int]:
    return [event.seq for event in stored.events]


def test_events_go_over_http_where_there_is_no_stream(folder, client, stored, spool):
    append(spool, 3)
    ship = AttemptShipper(folder, client)
    assert ship.pump() == 3
    assert seqs(stored) == [1, 2, 3]
    assert ship.acked_seq == 3
    assert not ship.is_done  # its end is not told yet


def test_a_batch_holds_at_most_its_number_of_events(folder, client, stored, spool):
    append(spool, shipping.MAX_BATCH_EVENTS + 20)
    ship = AttemptShipper(folder, client)
    assert [ship.pump(), ship.pump(), ship.pump()] == [shipping.MAX_BATCH_EVENTS, 20, 0]


def test_what_was_acknowledged_is_remembered_over_a_restart(folder, client, stored, spool):
    append(spool, 3)
    first = AttemptShipper(folder, client)
    first.pump()
    first.close()
    append(spool, 1)
    AttemptShipper(folder, client).pump()
    assert seqs(stored) == [1, 2, 3, 4]
    assert stored.num_duplicates == 0


def test_acknowledgements_in_a_row_are_written_down_once(
    folder, client, stored, spool, stream, clock
):
    ship = AttemptShipper(folder, client, stream, clock)
    noted = []
    for _ in range(4):
        append(spool, 1)
        ship.pump()
        stream.consume()
        ship.pump()
        noted.append((ship.acked_seq, folder.acked_seq()))
    clock.now += shipping.SAVE_SECONDS
    ship.pump()
    later = folder.acked_seq()
    append(spool, 1)
    ship.pump()
    stream.consume()
    ship.pump()
    ship.close()

    assert noted == [(1, 1), (2, 1), (3, 1), (4, 1)]
    assert (later, folder.acked_seq()) == (4, 5)  # whoever ships next begins there


def test_a_lost_note_of_the_acknowledgement_costs_only_duplicates(folder, client, stored, spool):
    append(spool, 3)
    AttemptShipper(folder, client).pump()
    (folder.path / "acked.json").write_bytes(b"\0")
    folder.ship_lock.unlink()
    AttemptShipper(folder, client).pump()
    assert seqs(stored) == [1, 2, 3]
    assert stored.num_duplicates == 3


def test_a_server_that_lost_events_gets_them_again_told_so_or_not(folder, client, stored, spool):
    append(spool, 6)
    ship = AttemptShipper(folder, client)
    ship.pump()
    del stored.events[2:]  # a restored backup
    ship.record_acks(2)
    ship.pump()
    assert seqs(stored) == [1, 2, 3, 4, 5, 6]
    del stored.events[2:]
    append(spool, 1)
    ship.pump()  # its answer tells of it
    ship.pump()
    assert seqs(stored) == [1, 2, 3, 4, 5, 6, 7]


def test_an_absent_server_is_left_alone_for_a_moment(
    folder, acceptor, client, stored, spool, clock
):
    append(spool, 1)
    ship = AttemptShipper(folder, client, clock=clock)
    acceptor.is_away = True
    first, acceptor.is_away = ship.pump(), False
    at_once = ship.pump()
    clock.now += shipping.REFUSED_REST_SECONDS
    later = ship.pump()
    assert (first, at_once, later) == (0, 0, 1)


def test_only_one_shipper_serves_an_attempt(folder, client):
    first = AttemptShipper(folder, client)
    with pytest.raises(LockedError):
        AttemptShipper(folder, client)
    first.close()
    AttemptShipper(folder, client).close()


def test_the_stream_is_taken_where_it_works_and_nothing_sent_twice_meanwhile(
    folder, client, stored, spool, stream
):
    append(spool, 3)
    ship = AttemptShipper(folder, client, stream)
    assert [ship.pump(), ship.pump()] == [3, 0]
    stream.consume()
    ship.pump()
    assert seqs(stored) == [1, 2, 3]
    assert ship.acked_seq == 3


def test_without_progress_the_stream_gets_it_again(folder, client, stored, spool, stream, clock):
    append(spool, 3)
    ship = AttemptShipper(folder, client, stream, clock)
    stream.eats_entries = True
    ship.pump()
    stream.eats_entries = False
    clock.now += shipping.STALL_SECONDS + 0.1
    ship.pump()
    stream.consume()
    assert seqs(stored) == [1, 2, 3]


def test_a_stream_that_leads_nowhere_gives_way_to_http(
    folder, client, stored, spool, stream, clock
):
    append(spool, 3)
    ship = AttemptShipper(folder, client, stream, clock)
    stream.eats_entries = True
    for _ in range(6):
        ship.pump()
        clock.now += shipping.STALL_SECONDS + 0.1
    assert seqs(stored) == [1, 2, 3]


def test_a_dead_redis_costs_no_time_and_is_tried_again_later(
    folder, client, stored, spool, stream, clock
):
    append(spool, 3)
    stream.is_down = True
    ship = AttemptShipper(folder, client, stream, clock)
    ship.pump()
    ship.pump()
    assert seqs(stored) == [1, 2, 3]
    stream.is_down = False
    clock.now += shipping.STREAM_REST_SECONDS
    append(spool, 2)
    ship.pump()
    assert [event.seq for event in stream.entries[0].events] == [4, 5]


def test_late_entries_of_the_stream_are_duplicates_after_http(
    folder, client, stored, spool, stream, clock
):
    append(spool, 3)
    ship = AttemptShipper(folder, client, stream, clock)
    ship.pump()
    stream.is_down = True
    ship.pump()
    ship.pump()
    stream.consume()
    assert seqs(stored) == [1, 2, 3]
    assert stored.num_duplicates == 3


def test_the_end_is_told_and_then_the_disk_freed(attempts, client, stored):
    folder = attempts.run(code="for n in range(20000): print('line', n)")
    folder.settle("internal")
    ship = AttemptShipper(folder, client)
    while ship.pump():
        pass
    ship.finish()
    assert ship.is_done
    assert stored.has_exited
    assert len(segments(folder.spool)) == 1


# Shipping through a real Redis while it is killed: nothing lost, nothing stored twice.


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
def shipped(host_dir, acceptor, redis_server, attempts) -> Iterator[Shipping]:
    for name in (A1, A2):
        attempts.make(name)
        acceptor.want(name).fence = "fence"
    client = ServerClient(acceptor.url, "host-credential")
    stream = RedisStream(redis_server.url, "h1")
    made = Shipping(host_dir, client, stream)
    loop = RepeatingThread("shipping", made.step)
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
def test_events_travel_by_the_stream(shipped, consumer, acceptor, attempts):
    write(attempts, A1, 1200)
    wait_for(lambda: is_whole(acceptor, A1, 1200))
    wait_for(lambda: consumer.num_entries >= 3)  # 500 events each at most


@pytest.mark.slow
@pytest.mark.faults
def test_a_redis_killed_again_and_again_loses_and_doubles_nothing(
    shipped, consumer, acceptor, attempts, redis_server
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
    shipped, consumer, acceptor, attempts, redis_server
):
    redis_server.kill()
    write(attempts, A1, 700)
    wait_for(lambda: is_whole(acceptor, A1, 700))


@pytest.mark.faults
def test_a_flushed_redis_gets_everything_again(
    shipped, consumer, acceptor, attempts, redis_server
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

    loop = RepeatingThread("resting", step)
    loop.start()
    wait_for(lambda: len(steps) == 1)
    loop.wake()
    wait_for(lambda: len(steps) == 2)
    loop.stop()
    assert not loop.is_alive()


# The way to the server, measured over the way that everything takes.


def test_the_way_to_the_server_is_measured_in_both_directions(acceptor, client):
    found = measure_network(client)
    assert found.round_trip_seconds > 0
    assert found.upload_bytes_per_second > 0
    assert found.download_bytes_per_second > 0
    assert max(acceptor.echoed) <= shipping.MAX_BYTES


def test_a_slow_line_is_given_small_pieces(acceptor, client, monkeypatch):
    answer = acceptor.echo

    def slow(num_bytes: int) -> bytes:
        time.sleep(num_bytes / 100_000)
        return answer(num_bytes)

    monkeypatch.setattr(acceptor, "echo", slow)

    found = measure_network(client)

    assert max(acceptor.echoed) == shipping.FIRST_BYTES
    assert 50_000 < found.download_bytes_per_second < 110_000


def test_an_absent_server_is_told_and_a_stranger_measures_nothing(credential, acceptor):
    with pytest.raises(UnreachableError):
        measure_network(ServerClient("http://127.0.0.1:9", "host-credential"))
    client = ServerClient(acceptor.url, "stranger")
    with pytest.raises(RefusedError):
        measure_network(client)
    client.close()
