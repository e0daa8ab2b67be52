"""Numbered events on disk and in a stream: no gap, no torn line, and what goes first."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from runners.host.redis_access import ack_key, decode, encode, events_key
from runners.shared.messages import EventBatch, RunEvent
from runners.shared.spool import SpoolReader, SpoolWriter, segments, trim

# Numbered events on disk: no gap, no torn line, and what goes first on a full disk.

POINT = {"source": "job", "values": {"loss": 1.0}, "step": 1}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "spool"


def write(folder: Path, count: int, **options: int) -> SpoolWriter:
    spool = SpoolWriter(folder, **options)
    for _ in range(count):
        spool.append("metric", POINT)
    return spool


def read_all(folder: Path) -> list[dict]:
    return SpoolReader(folder).read_after(0, limit=10**6, max_bytes=10**9)


def test_numbers_start_at_one_have_no_gap_and_go_on_in_a_reopened_spool(folder):
    spool = write(folder, 5)
    assert [event["seq"] for event in read_all(folder)] == [1, 2, 3, 4, 5]
    assert [spool.append("phase", {"name": "a"}), spool.append("metric", POINT)] == [6, 7]
    spool.close()
    assert SpoolWriter(folder).append("metric", POINT) == 8


def test_a_torn_tail_is_cut_and_its_number_given_again(tmp_path):
    for number, torn in enumerate((b'{"seq":4,"t_', b"\0" * 100, b'{"seq":9}\n')):
        folder = tmp_path / str(number)
        write(folder, 3).close()
        with segments(folder)[-1].open("ab") as file:
            file.write(torn)
        spool = SpoolWriter(folder)
        assert spool.next_seq == 4, torn
        assert spool.append("metric", POINT) == 4, torn
        assert [event["seq"] for event in read_all(folder)] == [1, 2, 3, 4], torn


def test_a_reader_does_not_take_half_a_line(folder):
    write(folder, 1)
    with segments(folder)[-1].open("ab") as file:
        file.write(b'{"seq":2,"t_ms":0')
    assert len(read_all(folder)) == 1


def test_segments_roll_at_their_size_and_a_reader_starts_in_any_of_them(folder):
    write(folder, 30, segment_bytes=1000)
    names = [int(path.stem) for path in segments(folder)]
    assert names[0] == 1
    assert len(names) > 2
    assert [event["seq"] for event in read_all(folder)] == list(range(1, 31))
    assert SpoolReader(folder).read_after(17)[0]["seq"] == 18


def test_a_reader_follows_a_writer_over_segments(folder):
    spool, reader, seen = SpoolWriter(folder, segment_bytes=500), SpoolReader(folder), []
    for _ in range(20):
        spool.append("metric", POINT)
        seen += [event["seq"] for event in reader.read_after(len(seen))]
    assert seen == list(range(1, 21))


def test_a_reader_goes_back_when_asked_to_and_reads_nothing_beyond_bytes_or_end(folder):
    write(folder, 100)
    reader = SpoolReader(folder)
    reader.read_after(0)
    assert [event["seq"] for event in reader.read_after(4, limit=2)] == [5, 6]
    assert len(SpoolReader(folder).read_after(0, max_bytes=500)) < 10
    assert SpoolReader(folder).read_after(100) == []
    assert SpoolReader(folder).read_after(109) == []


def test_the_last_number_is_zero_without_a_spool_and_grows_with_it(folder):
    assert SpoolReader(folder).last_seq() == 0
    spool, reader = write(folder, 3, segment_bytes=300), SpoolReader(folder)
    assert reader.last_seq() == 3
    for _ in range(4):
        spool.append("metric", POINT)
    assert reader.last_seq() == 7


def test_trim_deletes_only_what_is_stored_elsewhere_and_keeps_the_last_segment(folder):
    write(folder, 30, segment_bytes=1000).close()
    names = [int(path.stem) for path in segments(folder)]
    assert trim(folder, acked_seq=names[2] - 1) == 2
    assert [int(path.stem) for path in segments(folder)] == names[2:]
    trim(folder, acked_seq=30)
    assert SpoolWriter(folder).next_seq == 31


def test_metrics_go_before_logs_and_logs_before_states_when_the_spool_is_too_large(tmp_path):
    text = {"stream": "stdout", "text": "x"}
    spool = write(tmp_path / "a", 50, cap_bytes=5_500)
    spool.sync()
    assert spool.append("metric", POINT) is None
    assert spool.append("log", text) is not None
    assert spool.dropped_events == 1
    spool = write(tmp_path / "b", 50, cap_bytes=1_000)
    spool.sync()
    assert spool.append("log", text) is None
    assert spool.append("phase", {"name": "save"}) is not None


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40, deadline=None
)
@given(
    counts=st.lists(st.integers(0, 12), min_size=1, max_size=6),
    cut=st.integers(0, 200),
    segment_bytes=st.integers(120, 900),
)
def test_whatever_is_cut_off_the_numbers_stay_whole(tmp_path, counts, cut, segment_bytes):
    folder = tmp_path / "spool"
    shutil.rmtree(folder, ignore_errors=True)
    for count in counts:  # a crash after each: closed or not, the tail may be torn
        write(folder, count, segment_bytes=segment_bytes).close()
        tail = segments(folder)[-1]
        os.truncate(tail, max(tail.stat().st_size - cut, 0))
    write(folder, 1, segment_bytes=segment_bytes)
    seqs = [event["seq"] for event in read_all(folder)]
    assert seqs == list(range(1, len(seqs) + 1))
    assert len(seqs) == SpoolReader(folder).last_seq() >= 1


@pytest.mark.faults
def test_a_full_disk_costs_metrics_but_no_state_and_no_number(small_disk):
    spool = SpoolWriter(small_disk / "spool")
    spool._update_dropped_kinds = lambda: None  # the disk fills between two looks at it
    for _ in range(5_000):
        spool.append("metric", POINT)
    state = spool.append("phase", {"name": "the last"})
    seqs = [event["seq"] for event in read_all(small_disk / "spool")]
    assert spool.dropped_events > 0
    assert state == seqs[-1]
    assert seqs == list(range(1, len(seqs) + 1))


def test_the_supervisor_and_its_spool_load_with_the_standard_library_alone():
    code = "import sys; sys.path.append('.'); import runners.supervision.supervisor, runners.shared.spool"
    done = subprocess.run(
        [sys.executable, "-S", "-E", "-c", code], capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr.decode()


# The spool against the simplest spool there is: a list in memory that never fails.

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


def test_nothing_is_trimmed_before_a_whole_segment_is_stored(folder):
    filled(folder, 30, segment_bytes=200).close()
    for acked in (0, 1):
        assert trim(folder, acked) == 0
        assert int(segments(folder)[0].stem) == 1


def test_a_value_that_json_lacks_leaves_the_spool_as_it_was(folder):
    writer = filled(folder, 2)
    before = segments(folder)[0].read_bytes()
    for value in (float("nan"), float("inf"), float("-inf")):
        with pytest.raises(ValueError, match="JSON"):
            writer.append("phase", {"x": value})
        assert segments(folder)[0].read_bytes() == before, value
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


# Entries of a host's stream: what the shipper writes, the server's consumer reads.

BATCH = EventBatch(
    attempt_id="a1",
    fence="f",
    events=(
        RunEvent(seq=1, t_ms=5, kind="phase", body={"name": "ä"}),
        RunEvent(seq=2, t_ms=6, kind="metric", body={"source": "job", "values": {"loss": 0.5}}),
    ),
)


def test_a_batch_survives_the_stream_and_what_is_none_of_ours_is_refused():
    received = decode(encode(BATCH))
    assert (received.attempt_id, received.fence, received.events) == ("a1", "f", BATCH.events)
    fields = {key.encode(): value.encode() for key, value in encode(BATCH).items()}
    assert decode(fields) == decode(encode(BATCH))
    for fields in [{}, {"a": "1", "f": "2"}, {"a": "1", "f": "2", "b": "{"}]:
        with pytest.raises(ValueError, match=r"lacks|Expecting"):
            decode(fields)
    assert {events_key("h1"), ack_key("h1")} == {"host:h1:events", "host:h1:ack"}
