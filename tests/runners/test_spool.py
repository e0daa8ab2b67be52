"""Numbered events on disk: no gap, no torn line, and what goes first on a full disk."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runners.spool import SpoolReader, SpoolWriter, segments, trim

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


def test_numbers_start_at_one_and_have_no_gap(folder):
    write(folder, 5)

    assert [event["seq"] for event in read_all(folder)] == [1, 2, 3, 4, 5]


def test_append_returns_the_number_of_the_event(folder):
    spool = SpoolWriter(folder)

    assert [spool.append("phase", {"name": "a"}), spool.append("metric", POINT)] == [1, 2]


def test_a_reopened_spool_goes_on_with_the_next_number(folder):
    write(folder, 3).close()

    assert SpoolWriter(folder).append("metric", POINT) == 4


def test_a_torn_tail_is_cut_and_its_number_given_again(folder):
    write(folder, 3).close()
    with segments(folder)[-1].open("ab") as file:
        file.write(b'{"seq":4,"t_')

    spool = SpoolWriter(folder)

    assert spool.append("metric", POINT) == 4
    assert [event["seq"] for event in read_all(folder)] == [1, 2, 3, 4]


def test_a_tail_of_zero_bytes_is_cut(folder):
    write(folder, 2).close()
    with segments(folder)[-1].open("ab") as file:
        file.write(b"\0" * 100)

    assert SpoolWriter(folder).next_seq == 3


def test_a_line_that_is_whole_but_no_event_ends_the_spool(folder):
    write(folder, 2).close()
    with segments(folder)[-1].open("ab") as file:
        file.write(b'{"seq":9}\n')

    assert SpoolWriter(folder).next_seq == 3


def test_a_reader_does_not_take_half_a_line(folder):
    write(folder, 1)
    with segments(folder)[-1].open("ab") as file:
        file.write(b'{"seq":2,"t_ms":0')

    assert len(read_all(folder)) == 1


def test_segments_roll_at_their_size_and_are_named_by_their_first_number(folder):
    write(folder, 30, segment_bytes=1000)

    names = [int(path.stem) for path in segments(folder)]
    assert names[0] == 1
    assert len(names) > 2
    assert [event["seq"] for event in read_all(folder)] == list(range(1, 31))


def test_a_reader_follows_a_writer_over_segments(folder):
    spool, reader, seen = SpoolWriter(folder, segment_bytes=500), SpoolReader(folder), []
    for _ in range(20):
        spool.append("metric", POINT)
        seen += [event["seq"] for event in reader.read_after(len(seen))]

    assert seen == list(range(1, 21))


def test_a_reader_starts_in_the_middle_of_a_later_segment(folder):
    write(folder, 30, segment_bytes=1000)

    assert SpoolReader(folder).read_after(17)[0]["seq"] == 18


def test_a_reader_goes_back_when_asked_to(folder):
    write(folder, 10)
    reader = SpoolReader(folder)
    reader.read_after(0)

    assert [event["seq"] for event in reader.read_after(4, limit=2)] == [5, 6]


def test_a_batch_ends_at_its_bytes(folder):
    write(folder, 100)

    assert len(SpoolReader(folder).read_after(0, max_bytes=500)) < 10


def test_nothing_is_read_beyond_the_end(folder):
    write(folder, 3)

    assert SpoolReader(folder).read_after(3) == []
    assert SpoolReader(folder).read_after(9) == []


def test_the_last_number_of_an_absent_spool_is_zero(folder):
    assert SpoolReader(folder).last_seq() == 0


def test_the_last_number_grows_with_the_spool(folder):
    spool, reader = write(folder, 3, segment_bytes=300), SpoolReader(folder)
    first = reader.last_seq()
    for _ in range(4):
        spool.append("metric", POINT)

    assert (first, reader.last_seq()) == (3, 7)


def test_trim_deletes_only_what_is_stored_elsewhere(folder):
    write(folder, 30, segment_bytes=1000)
    names = [int(path.stem) for path in segments(folder)]

    gone = trim(folder, acked_seq=names[2] - 1)

    assert gone == 2
    assert [int(path.stem) for path in segments(folder)] == names[2:]


def test_trim_keeps_the_last_segment_for_its_number(folder):
    write(folder, 30, segment_bytes=1000).close()

    trim(folder, acked_seq=30)

    assert SpoolWriter(folder).next_seq == 31


def test_a_number_that_is_not_finite_is_never_written(folder):
    spool = SpoolWriter(folder)

    with pytest.raises(ValueError, match="JSON"):
        spool.append("metric", {"values": {"loss": float("nan")}})
    assert spool.append("metric", POINT) == 1


def test_metrics_go_before_logs_when_the_spool_is_too_large(folder):
    spool = write(folder, 50, cap_bytes=5_500)
    spool.sync()

    assert spool.append("metric", POINT) is None
    assert spool.append("log", {"stream": "stdout", "text": "x"}) is not None
    assert spool.dropped_events == 1


def test_logs_go_before_states_when_the_spool_is_too_large(folder):
    spool = write(folder, 50, cap_bytes=1_000)
    spool.sync()

    assert spool.append("log", {"stream": "stdout", "text": "x"}) is None
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
    code = "import sys; sys.path.append('.'); import runners.supervisor, runners.spool"

    done = subprocess.run(
        [sys.executable, "-S", "-E", "-c", code], capture_output=True, check=False
    )

    assert done.returncode == 0, done.stderr.decode()
