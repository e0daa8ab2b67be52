"""The hub of live events: what it sends again, and what it leaves to the store."""

import asyncio
from contextlib import asynccontextmanager

import pytest
import redis
from hypothesis import given, settings
from hypothesis import strategies as st

from webapp.live import stream as hub_module
from webapp.live.stream import (
    BYE,
    MAX_WAITING,
    RESYNC,
    RING_SECONDS,
    STALE,
    STREAM,
    Hub,
    Viewer,
    frame_bytes,
    parse_id,
)

# One reader, many viewers: what each gets, misses, and is told.


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(hub_module, "BLOCK_MS", 50)
    monkeypatch.setattr(hub_module, "RETRY_SECONDS", 0.05)


@asynccontextmanager
async def open_hub(url: str, clock=None):
    hub = Hub(url, clock) if clock else Hub(url)
    try:
        yield hub
    finally:
        hub.close()
        await asyncio.sleep(0)


async def ready(hub: Hub, *topics: str) -> Viewer:
    """Return a viewer of a hub that has found the stream's end."""
    viewer = Viewer(1, topics)
    hub.join(viewer)
    async with asyncio.timeout(5):
        await hub.is_reading.wait()
    return viewer


async def taken(viewer: Viewer) -> bytes:
    async with asyncio.timeout(5):
        await viewer.wait()
    return viewer.take()


def say(client: redis.Redis, topic: str, data: str = "{}", event: str = "job.state") -> str:
    return client.xadd(STREAM, {"t": topic, "e": event, "d": data}).decode()


@pytest.mark.asyncio
async def test_a_viewer_gets_its_topics_and_no_other(redis_server, redis_client):
    async with open_hub(redis_server.url) as hub:
        viewer = await ready(hub, "job:1")
        say(redis_client, "job:2", '"other"')
        number = say(redis_client, "job:1", '"mine"')
        assert await taken(viewer) == frame_bytes(number, "job.state", '"mine"')


@pytest.mark.asyncio
async def test_all_viewers_of_a_topic_get_the_same_bytes(redis_server, redis_client):
    async with open_hub(redis_server.url) as hub:
        viewers = [await ready(hub, "jobs:1") for _ in range(3)]
        say(redis_client, "jobs:1")
        assert len({await taken(viewer) for viewer in viewers}) == 1


@pytest.mark.asyncio
async def test_what_was_said_before_is_not_said_again(redis_server, redis_client):
    say(redis_client, "job:1")
    async with open_hub(redis_server.url) as hub:
        viewer = await ready(hub, "job:1")
        await asyncio.sleep(0.2)
        assert viewer.take() == b""


@pytest.mark.asyncio
async def test_a_broken_line_is_mended_from_the_ring(redis_server, redis_client):
    async with open_hub(redis_server.url) as hub:
        viewer = await ready(hub, "job:1")
        numbers = [say(redis_client, "job:1", str(n)) for n in range(3)]
        while b"data: 2" not in await taken(viewer):
            pass
        again = Viewer(1, ["job:1"])
        hub.join(again, numbers[0])
        assert again.take() == b"".join(
            frame_bytes(numbers[n], "job.state", str(n)) for n in (1, 2)
        )


@pytest.mark.asyncio
async def test_whoever_was_away_too_long_is_told_to_ask_the_store(redis_server):
    async with open_hub(redis_server.url) as hub:
        await ready(hub, "job:1")
        hub._floor = (2, 0)
        for last_id in ("1-0", "nonsense", "5"):
            late = Viewer(1, ["job:1"])
            hub.join(late, last_id)
            assert late.take() == RESYNC, last_id


@pytest.mark.asyncio
async def test_a_frame_older_than_a_minute_leaves_the_ring(redis_server, redis_client):
    at = [0.0]
    async with open_hub(redis_server.url, lambda: at[0]) as hub:
        viewer = await ready(hub, "job:1")
        first = say(redis_client, "job:1")
        await taken(viewer)
        at[0] = 61.0
        say(redis_client, "job:1")
        await taken(viewer)
        await asyncio.sleep(0.1)
        assert hub._floor == parse_id(first)


@pytest.mark.asyncio
async def test_a_revoked_users_streams_end_and_others_stay(redis_server, redis_client):
    async with open_hub(redis_server.url) as hub:
        mine, other = await ready(hub, "job:1"), Viewer(2, ["job:1"])
        hub.join(other)
        say(redis_client, "revoke:1")
        async with asyncio.timeout(5):
            await mine.wait()
        assert (mine.is_closing, other.is_closing) == (True, False)


@pytest.mark.asyncio
async def test_without_redis_viewers_are_told_once(tmp_path):
    async with open_hub(f"unix://{tmp_path}/nobody.sock") as hub:
        viewer = Viewer(1, ["job:1"])
        hub.join(viewer)
        assert await taken(viewer) == STALE
        await asyncio.sleep(0.2)
        assert viewer.take() == b""


@pytest.mark.asyncio
async def test_a_viewer_that_joins_while_redis_is_away_is_told(tmp_path):
    async with open_hub(f"unix://{tmp_path}/nobody.sock") as hub:
        first = Viewer(1, ["job:1"])
        hub.join(first)
        await taken(first)
        second = Viewer(1, ["job:1"])
        hub.join(second)
        assert second.take() == STALE


@pytest.mark.faults
@pytest.mark.asyncio
async def test_a_killed_redis_costs_no_frame(redis_server, redis_client):
    async with open_hub(redis_server.url) as hub:
        viewer = await ready(hub, "job:1")
        say(redis_client, "job:1", "1")
        got = await taken(viewer)
        redis_server.kill()
        got += await taken(viewer)
        await asyncio.to_thread(redis_server.start)
        say(redis_client, "job:1", "2")
        while b"data: 2" not in got:
            got += await taken(viewer)
        assert (got.count(b"data: 1"), got.count(STALE), got.count(b"data: 2")) == (1, 1, 1)


@pytest.mark.asyncio
async def test_the_end_of_the_process_closes_every_viewer(redis_server):
    hub = Hub(redis_server.url)
    viewer = await ready(hub, "job:1")
    hub.close()
    await taken(viewer)
    assert viewer.is_closing


def test_stream_ids_order_as_numbers_and_a_farewell_asks_for_a_quick_return():
    assert parse_id("9-10") > parse_id("9-9")
    assert parse_id("10-0") > parse_id("9-99")
    assert BYE.startswith(b"retry: 1500\nevent: bye")


# What a viewer's queue and the hub's memory do at their limits, without any Redis.


NUMBERS = st.integers(0, 2**63)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def hub(clock) -> Hub:
    """A hub that knows the stream from its beginning."""
    made = Hub("unix:///nowhere.sock", clock)
    made._last = made._floor = (0, 0)
    return made


def hand_out(hub: Hub, number: int, topic: str = "jobs:1") -> bytes:
    """Let the hub hand out one message; return the frame that it becomes."""
    hub._dispatch(f"{number}-0", {"t": topic, "e": "job.state", "d": str(number)})
    return frame_bytes(f"{number}-0", "job.state", str(number))


def resumed(hub: Hub, last_id: str, *topics: str) -> bytes:
    """What a viewer is given that comes back with the id of the last frame it saw."""
    viewer = Viewer(1, topics or ("jobs:1",))
    hub._resume(viewer, parse_id(last_id))
    return viewer.take()


def test_a_viewer_that_comes_back_gets_what_it_missed_and_nothing_twice(hub):
    frames = [hand_out(hub, number) for number in (1, 2, 3)]
    assert resumed(hub, "1-0") == frames[1] + frames[2]
    assert resumed(hub, "3-0") == b""


def test_what_was_missed_of_other_topics_is_not_told(hub):
    hand_out(hub, 1, "jobs:2")
    mine = hand_out(hub, 2, "jobs:1")
    assert resumed(hub, "0-0", "jobs:1") == mine


def test_an_id_that_is_none_has_the_page_ask_the_store(hub):
    for last_id in ["", "7", "7-", "-7", "a-b", "1-0-0"]:
        hand_out(hub, 1)
        assert resumed(hub, last_id) == RESYNC, last_id


def test_a_viewer_may_miss_as_much_as_a_queue_holds_and_no_more(hub):
    frames = [hand_out(hub, number) for number in range(1, MAX_WAITING + 2)]
    assert resumed(hub, "1-0") == b"".join(frames[1:])
    assert resumed(hub, "0-0") == RESYNC


def test_a_frame_is_kept_for_the_whole_of_its_minute(hub, clock):
    frame = hand_out(hub, 1)
    clock.now = RING_SECONDS
    hub._drop_old()
    kept = resumed(hub, "0-0")
    clock.now = RING_SECONDS + 0.001
    hub._drop_old()
    assert (kept, resumed(hub, "0-0")) == (frame, RESYNC)


def test_frames_are_kept_up_to_a_number_of_bytes_and_no_longer(hub, monkeypatch):
    first, *later = [hand_out(hub, number) for number in (1, 2, 3)]
    monkeypatch.setattr(hub_module, "RING_BYTES", len(b"".join(later)))
    hub._drop_old()
    assert resumed(hub, "0-0") == RESYNC
    assert resumed(hub, "1-0") == b"".join(later)
    hand_out(hub, 4)
    hub._drop_old()
    assert resumed(hub, "1-0") == RESYNC, first


def test_what_waits_for_a_viewer_is_bounded_in_bytes(monkeypatch):
    monkeypatch.setattr(hub_module, "MAX_WAITING_BYTES", 100)
    viewer = Viewer(1, ("jobs:1",))
    for data in (b"a" * 60, b"b" * 40):
        viewer.put(data)
    assert len(viewer.take()) == 100
    viewer.put(b"c" * 500)  # one that is longer by itself is still sent
    assert viewer.take() == b"c" * 500
    for data in (b"d" * 60, b"e" * 41):
        viewer.put(data)
    assert viewer.take() == RESYNC + b"e" * 41


def test_who_saw_the_last_forgotten_frame_has_missed_nothing(hub, clock):
    hand_out(hub, 1)
    clock.now = RING_SECONDS + 1
    later = hand_out(hub, 2)
    hub._drop_old()
    assert resumed(hub, "1-0") == later


def test_a_full_queue_becomes_one_word_and_the_newest_frame():
    viewer = Viewer(1, ("jobs:1",))
    for _ in range(MAX_WAITING):
        viewer.put(b"old")
    viewer.put(b"new")
    assert viewer.take() == RESYNC + b"new"
    assert viewer.take() == b""


def test_a_revoked_user_is_known_by_the_whole_number_and_no_page_is_told(hub):
    one, eleven = Viewer(1, ("jobs:1",)), Viewer(11, ("jobs:1",))
    hub.viewers = {one, eleven}
    hub._dispatch("1-0", {"t": "revoke:1"})
    assert (one.is_closing, eleven.is_closing) == (True, False)
    viewer = Viewer(2, ("revoke:1",))
    hub.viewers = {viewer}
    hub._dispatch("1-0", {"t": "revoke:1"})
    assert viewer.take() == b""
    assert resumed(hub, "0-0", "revoke:1") == b""


def test_an_entry_without_a_number_is_left_out(hub):
    for entry_id in ["", "x-1", "5"]:
        viewer = Viewer(1, ("jobs:1",))
        hub.viewers = {viewer}
        hub._dispatch(entry_id, {"t": "jobs:1", "e": "job.state", "d": "{}"})
        assert viewer.take() == b"", entry_id


@settings(deadline=None)
@given(NUMBERS, NUMBERS)
def test_every_number_of_a_stream_is_read_back(milliseconds, number):
    assert parse_id(f"{milliseconds}-{number}") == (milliseconds, number)
