"""The spool against the simplest spool there is: a list in memory that never fails."""

import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from runners.spool import SpoolReader, SpoolWriter, segments, trim

KINDS = st.sampled_from(["metric", "progress", "log", "phase", "result"])
BODIES = st.dictionaries(st.text(max_size=6), st.integers() | st.text(max_size=30), max_size=3)


class AgainstAList(RuleBasedStateMachine):
    """Appends, reopens, cuts off, trims and reads, in any order; the list does the same."""

    def __init__(self):
        super().__init__()
        self.home = tempfile.TemporaryDirectory()
        self.folder = Path(self.home.name) / "spool"
        self.written, self.trimmed, self.acked = [], 0, 0
        self.writer = SpoolWriter(self.folder, segment_bytes=300)
        self.reader = SpoolReader(self.folder)

    def teardown(self):
        self.writer.close()
        self.home.cleanup()

    @rule(kind=KINDS, body=BODIES, t_ms=st.integers(0, 2**40))
    def append(self, kind, body, t_ms):
        number = self.writer.append(kind, body, t_ms)

        self.written.append({"seq": number, "t_ms": t_ms, "kind": kind, "body": body})
        assert number == len(self.written)

    @rule()
    def reopen(self):
        self.writer.close()
        self.writer = SpoolWriter(self.folder, segment_bytes=300)

    @rule(torn=st.sampled_from([b'{"seq":', b"\0" * 40, b"\n", b"[]\n", b'{"seq":0}\n', b"\xff"]))
    def crash_with_a_torn_tail(self, torn):
        self.writer.close()
        with segments(self.folder)[-1].open("ab") as tail:
            tail.write(torn)

        self.writer = SpoolWriter(self.folder, segment_bytes=300)

    @precondition(lambda self: self.acked < len(self.written))
    @rule(data=st.data(), limit=st.integers(1, 6))
    def ship(self, data, limit):
        start = data.draw(st.integers(self.acked, len(self.written)))

        read = self.reader.read_after(start, limit=limit)

        assert read == self.written[start : start + limit]
        self.acked = data.draw(st.integers(self.acked, start + len(read)))

    @rule()
    def trim_what_is_stored(self):
        trim(self.folder, self.acked)

        kept = int(segments(self.folder)[0].stem)
        assert kept <= self.acked + 1

    @invariant()
    def everything_that_is_not_stored_can_be_read(self):
        fresh = SpoolReader(self.folder)

        assert fresh.read_after(self.acked, limit=10**6) == self.written[self.acked :]
        assert fresh.last_seq() == len(self.written) == self.writer.next_seq - 1


AgainstAList.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
TestTheSpoolAndAList = AgainstAList.TestCase


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "spool"


def filled(folder, count, **options):
    writer = SpoolWriter(folder, **options)
    for number in range(count):
        writer.append("metric", {"n": number}, 0)
    return writer


@settings(max_examples=40, deadline=None)
@given(limit=st.integers(1, 7), max_bytes=st.integers(1, 400))
def test_batches_of_any_size_together_are_the_whole_spool(limit, max_bytes):
    with tempfile.TemporaryDirectory() as home:
        folder = Path(home) / "spool"
        filled(folder, 23, segment_bytes=200).close()
        reader, seen = SpoolReader(folder), []

        while batch := reader.read_after(len(seen), limit=limit, max_bytes=max_bytes):
            assert len(batch) <= limit
            seen += [event["body"]["n"] for event in batch]

    assert seen == list(range(23))


def test_a_batch_goes_over_its_bytes_by_one_event_at_most(folder):
    filled(folder, 10).close()
    line = len(segments(folder)[0].read_bytes().splitlines(keepends=True)[0])

    read = SpoolReader(folder).read_after(0, max_bytes=2 * line + 1)

    assert len(read) == 3


def test_a_number_before_the_first_kept_segment_is_not_answered_with_later_events(folder):
    filled(folder, 30, segment_bytes=200).close()
    trim(folder, acked_seq=30)
    first = int(segments(folder)[0].stem)

    assert SpoolReader(folder).read_after(0) == []
    assert SpoolReader(folder).read_after(first - 1)[0]["seq"] == first > 1


@pytest.mark.parametrize("acked", [0, 1])
def test_nothing_is_trimmed_before_a_whole_segment_is_stored(folder, acked):
    filled(folder, 30, segment_bytes=200).close()

    assert trim(folder, acked) == 0
    assert int(segments(folder)[0].stem) == 1


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_value_that_json_lacks_leaves_the_spool_as_it_was(folder, value):
    writer = filled(folder, 2)
    before = segments(folder)[0].read_bytes()

    with pytest.raises(ValueError, match="JSON"):
        writer.append("phase", {"x": value})

    assert segments(folder)[0].read_bytes() == before
    assert writer.next_seq == 3


def test_a_body_with_line_ends_stays_one_line(folder):
    writer = SpoolWriter(folder)
    writer.append("log", {"text": "one\ntwo\r\nthree\u2028four\x85five"}, 0)
    writer.close()

    (line,) = segments(folder)[0].read_bytes().splitlines()

    assert json.loads(line)["body"]["text"] == "one\ntwo\r\nthree\u2028four\x85five"


def test_only_the_owner_reads_a_spool(folder):
    filled(folder, 1).close()

    assert folder.stat().st_mode & 0o077 == 0
    assert segments(folder)[0].stat().st_mode & 0o077 == 0


def test_a_spool_that_was_trimmed_below_its_cap_takes_metrics_again(folder):
    writer = filled(folder, 60, segment_bytes=400, cap_bytes=3000)
    writer.sync()
    assert writer.append("metric", {}) is None

    trim(folder, acked_seq=writer.next_seq - 1)
    writer.sync()

    assert writer.append("metric", {}) == 61
    assert writer.dropped_events == 1
