"""Identifiers, assets, the breaker before Redis, room on the disk, documents of refusals."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from webapp.core import broker, disk, problems
from webapp.core.broker import Breaker
from webapp.core.display import TERMS, memory_row
from webapp.core.ids import ULID_LENGTH, new_ulid
from webapp.core.problems import BusyProblem, Problem
from webapp.core.staticfiles import HashedStaticFilesStorage

CLASSES = [name for _, _, names in TERMS for name in names]


def test_identifiers_differ_and_have_one_length():
    made = {new_ulid() for _ in range(1000)}

    assert len(made) == 1000
    assert {len(one) for one in made} == {ULID_LENGTH}


def test_identifiers_sort_by_when_they_were_made():
    first = new_ulid()
    time.sleep(0.002)

    assert first < new_ulid()


def test_an_asset_without_a_manifest_keeps_its_name(tmp_path):
    storage = HashedStaticFilesStorage(location=tmp_path, base_url="/static/")

    assert storage.url("css/tokens.css") == "/static/css/tokens.css"


def test_an_asset_of_the_manifest_has_its_hash(tmp_path):
    storage = HashedStaticFilesStorage(location=tmp_path, base_url="/static/")
    storage.hashed_files = {"css/tokens.css": "css/tokens.0123456789ab.css"}

    assert storage.stored_name("css/tokens.css") == "css/tokens.0123456789ab.css"


def test_an_asset_that_is_new_since_collecting_keeps_its_name(tmp_path):
    storage = HashedStaticFilesStorage(location=tmp_path, base_url="/static/")
    storage.hashed_files = {"other.css": "other.0.css"}

    assert storage.stored_name("css/new.css").startswith("css/new")


def test_a_breaker_lets_through_until_it_trips():
    breaker = Breaker()
    assert not breaker.is_open()

    breaker.trip()

    assert breaker.is_open()


def test_a_breaker_closes_by_itself(monkeypatch):
    monkeypatch.setattr(broker, "RETRY_AFTER_SECONDS", 0.01)
    breaker = Breaker()
    breaker.trip()
    time.sleep(0.02)

    assert not breaker.is_open()


def test_a_broker_is_asked_with_time_outs():
    options = broker.client("redis://127.0.0.1:1/0").connection_pool.connection_kwargs

    assert options["socket_timeout"] <= 2
    assert options["socket_connect_timeout"] <= 1


def test_there_is_one_client_for_one_address():
    assert broker.client("redis://127.0.0.1:1/0") is broker.client("redis://127.0.0.1:1/0")


def test_a_disk_with_room_is_quiet(tmp_path):
    assert disk.check_room(tmp_path, 1) is None


def test_a_full_disk_says_when_to_come_again(tmp_path):
    with pytest.raises(BusyProblem) as caught:
        disk.check_room(tmp_path, 2**62)
    assert (caught.value.status, caught.value.facts) == (429, {"retry_after_seconds": 60})


@pytest.mark.parametrize(
    "kind",
    [one for one in vars(problems).values() if isinstance(one, type)],
    ids=lambda one: one.__name__,
)
def test_every_refusal_has_a_status_and_a_title(kind):
    assert issubclass(kind, Problem)
    assert 400 <= kind.status < 500 or kind is problems.UnavailableProblem
    assert kind.title


def test_no_two_refusals_share_their_title():
    kinds = [one for one in vars(problems).values() if isinstance(one, type)]

    assert len({one.title for one in kinds}) == len(kinds)


@given(
    st.dictionaries(st.sampled_from(CLASSES), st.floats(0, 1e13), max_size=8), st.floats(0, 1e13)
)
def test_the_segments_of_a_memory_bar_add_up_to_its_total(parts, capacity):
    row = memory_row("Memory", parts, capacity)

    assert sum(segment.size for segment in row.segments) == pytest.approx(row.total_bytes)
    assert row.is_over == (row.total_bytes > capacity)


@given(st.dictionaries(st.sampled_from(CLASSES), st.floats(1e6, 1e12), min_size=1, max_size=8))
def test_segments_follow_each_other_without_a_gap(parts):
    row = memory_row("Memory", parts, 1e12)

    for before, after in zip(row.segments, row.segments[1:], strict=False):
        assert after.span.start == pytest.approx(before.span.end, abs=0.02)
