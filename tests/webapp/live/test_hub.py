"""One reader, many viewers: what each gets, misses, and is told."""

import asyncio
from contextlib import asynccontextmanager

import pytest
import redis

from webapp.live import stream as hub_module
from webapp.live.publish import STREAM
from webapp.live.stream import BYE, MAX_WAITING, RESYNC, STALE, Hub, Viewer, frame_bytes, parse_id


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


@pytest.mark.parametrize("last_id", ["1-0", "nonsense", "5"])
@pytest.mark.asyncio
async def test_whoever_was_away_too_long_is_told_to_ask_the_store(redis_server, last_id):
    async with open_hub(redis_server.url) as hub:
        await ready(hub, "job:1")
        hub._floor = (2, 0)
        late = Viewer(1, ["job:1"])
        hub.join(late, last_id)
        assert late.take() == RESYNC


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


def test_a_viewer_that_lags_loses_its_queue_and_is_told():
    async def lag() -> bytes:
        viewer = Viewer(1, ["job:1"])
        for number in range(MAX_WAITING + 1):
            viewer.put(b"%d " % number)
        return viewer.take()

    assert asyncio.run(lag()) == RESYNC + b"%d " % MAX_WAITING


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


def test_stream_ids_order_as_numbers():
    assert parse_id("9-10") > parse_id("9-9")
    assert parse_id("10-0") > parse_id("9-99")


def test_a_farewell_asks_for_a_quick_return():
    assert BYE.startswith(b"retry: 1500\nevent: bye")
