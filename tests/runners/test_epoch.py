"""A host remembers how far its server had come, across restarts of its agent."""

import pytest

from runners.enrolment import EPOCH, EpochMemory
from runners.messages import BeatReply, EpochShown, StopOrder, Wanted
from runners.reasons import Reason


def reply(number: int | None, **changes) -> BeatReply:
    said = None if number is None else EpochShown(number=number, proof="a" * 64)
    return BeatReply(server_time_ms=1, epoch=said, **changes)


ORDERS = {
    "wanted": (Wanted(attempt_id="01", fence="f"),),
    "stop": (StopOrder(attempt_id="02", reason=Reason.STOPPED_BY_USER),),
    "forget": ("03",),
    "rotate": True,
    "acked": {"04": 7},
}


@pytest.fixture
def memory(tmp_path) -> EpochMemory:
    memory = EpochMemory(tmp_path)
    memory.heed(reply(7))
    return memory


@pytest.mark.parametrize("number", [7, 8, None])
def test_a_server_that_is_no_further_back_is_heeded(memory, number):
    assert memory.heed(reply(number, **ORDERS)) == (reply(number, **ORDERS), "")


def test_a_server_that_went_back_starts_stops_and_forgets_nothing(memory):
    held, words = memory.heed(reply(6, **ORDERS))
    assert (held.wanted, held.stop, held.forget, held.rotate) == ((), (), (), False)
    assert held.acked == {"04": 7}
    assert "shows epoch 6, but this host has seen 7" in words


def test_it_is_remembered_by_the_next_agent(memory, tmp_path):
    assert EpochMemory(tmp_path).heed(reply(6))[1]
    assert oct((tmp_path / EPOCH).stat().st_mode)[-3:] == "600"


def test_after_it_was_raised_the_server_is_heeded_again(memory):
    memory.heed(reply(6, **ORDERS))
    assert memory.heed(reply(8, **ORDERS))[1] == ""
    assert memory.seen is not None
    assert memory.seen.number == 8


def test_a_damaged_memory_is_none(tmp_path):
    (tmp_path / EPOCH).write_text("{")
    assert EpochMemory(tmp_path).seen is None


def test_a_host_that_is_enrolled_anew_begins_anew(memory, tmp_path):
    memory.forget()
    assert EpochMemory(tmp_path).heed(reply(1, **ORDERS)) == (reply(1, **ORDERS), "")
