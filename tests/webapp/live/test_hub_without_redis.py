"""What a viewer's queue and the hub's memory do at their limits, without any Redis."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from webapp.live.stream import (
    MAX_WAITING,
    RESYNC,
    RING_SECONDS,
    Hub,
    Viewer,
    frame_bytes,
    parse_id,
)

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


def say(hub: Hub, number: int, topic: str = "jobs:1") -> bytes:
    """Let the hub hand out one message; return the frame that it becomes."""
    hub._dispatch(f"{number}-0", {"t": topic, "e": "job.state", "d": str(number)})
    return frame_bytes(f"{number}-0", "job.state", str(number))


def resumed(hub: Hub, last_id: str, *topics: str) -> bytes:
    """What a viewer is given that comes back with the id of the last frame it saw."""
    viewer = Viewer(1, topics or ("jobs:1",))
    hub._resume(viewer, parse_id(last_id))
    return viewer.take()


def test_a_viewer_that_comes_back_gets_what_it_missed_and_nothing_twice(hub):
    frames = [say(hub, number) for number in (1, 2, 3)]

    assert resumed(hub, "1-0") == frames[1] + frames[2]
    assert resumed(hub, "3-0") == b""


def test_what_was_missed_of_other_topics_is_not_told(hub):
    say(hub, 1, "jobs:2")
    mine = say(hub, 2, "jobs:1")

    assert resumed(hub, "0-0", "jobs:1") == mine


@pytest.mark.parametrize("last_id", ["", "7", "7-", "-7", "a-b", "1-0-0"])
def test_an_id_that_is_none_has_the_page_ask_the_store(hub, last_id):
    say(hub, 1)

    assert resumed(hub, last_id) == RESYNC


def test_a_viewer_may_miss_as_much_as_a_queue_holds_and_no_more(hub):
    frames = [say(hub, number) for number in range(1, MAX_WAITING + 2)]

    assert resumed(hub, "1-0") == b"".join(frames[1:])
    assert resumed(hub, "0-0") == RESYNC


def test_a_frame_is_kept_for_the_whole_of_its_minute(hub, clock):
    frame = say(hub, 1)

    clock.now = RING_SECONDS
    hub._drop_old()
    kept = resumed(hub, "0-0")
    clock.now = RING_SECONDS + 0.001
    hub._drop_old()

    assert (kept, resumed(hub, "0-0")) == (frame, RESYNC)


def test_who_saw_the_last_forgotten_frame_has_missed_nothing(hub, clock):
    say(hub, 1)
    clock.now = RING_SECONDS + 1
    later = say(hub, 2)
    hub._drop_old()

    assert resumed(hub, "1-0") == later


def test_a_full_queue_becomes_one_word_and_the_newest_frame():
    viewer = Viewer(1, ("jobs:1",))
    for _ in range(MAX_WAITING):
        viewer.put(b"old")

    viewer.put(b"new")

    assert viewer.take() == RESYNC + b"new"
    assert viewer.take() == b""


def test_a_revoked_user_is_known_by_the_whole_number(hub):
    one, eleven = Viewer(1, ("jobs:1",)), Viewer(11, ("jobs:1",))
    hub.viewers = {one, eleven}

    hub._dispatch("1-0", {"t": "revoke:1"})

    assert (one.is_closing, eleven.is_closing) == (True, False)


def test_a_revocation_is_told_to_no_page(hub):
    viewer = Viewer(2, ("revoke:1",))
    hub.viewers = {viewer}

    hub._dispatch("1-0", {"t": "revoke:1"})

    assert viewer.take() == b""
    assert resumed(hub, "0-0", "revoke:1") == b""


@pytest.mark.parametrize("entry_id", ["", "x-1", "5"])
def test_an_entry_without_a_number_is_left_out(hub, entry_id):
    viewer = Viewer(1, ("jobs:1",))
    hub.viewers = {viewer}

    hub._dispatch(entry_id, {"t": "jobs:1", "e": "job.state", "d": "{}"})

    assert viewer.take() == b""


@settings(deadline=None)
@given(NUMBERS, NUMBERS)
def test_every_number_of_a_stream_is_read_back(milliseconds, number):
    assert parse_id(f"{milliseconds}-{number}") == (milliseconds, number)
