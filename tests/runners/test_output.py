"""A job's output: capped files, a byte rate for events, and its last lines."""

from runners.supervision.output import (
    EVENT_BYTES_PER_SECOND,
    LAST_BYTES,
    LAST_LINES,
    CappedLog,
    LastLines,
    LogEvents,
)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_short_log_is_kept_as_it_was(tmp_path):
    log = CappedLog(tmp_path, "stdout")
    log.write(b"one\n")
    log.write(b"two\n")
    log.close()

    assert (tmp_path / "stdout.log").read_bytes() == b"one\ntwo\n"
    assert not (tmp_path / "stdout.tail.log").exists()


def test_a_flood_keeps_its_head_and_its_tail(tmp_path):
    log = CappedLog(tmp_path, "stdout", head_bytes=100, tail_bytes=100)
    data = b"".join(b"%07d\n" % number for number in range(1000))
    log.write(data)
    log.close()

    tail = (tmp_path / "stdout.tail.old.log").read_bytes() + (
        tmp_path / "stdout.tail.log"
    ).read_bytes()
    assert (tmp_path / "stdout.log").read_bytes().startswith(data[:100])
    assert data.endswith(tail)
    assert len(tail) >= 100


def test_what_a_flood_lost_is_counted_and_said(tmp_path):
    log = CappedLog(tmp_path, "stdout", head_bytes=100, tail_bytes=100)
    log.write(b"x" * 1000)
    log.close()

    assert log.dropped_bytes == 1000 - 100 - 200
    assert b"[700 bytes were cut here" in (tmp_path / "stdout.log").read_bytes()


def test_lines_are_sent_whole_and_an_unfinished_one_waits():
    events = LogEvents(Clock())

    assert list(events.feed(b"one\ntwo\nthr")) == ["one\ntwo\n"]
    assert list(events.feed(b"ee\n")) == ["three\n"]


def test_an_unfinished_line_is_sent_when_flushed():
    events = LogEvents(Clock())
    list(events.feed(b"50 %"))

    assert list(events.flush()) == ["50 %"]
    assert list(events.flush()) == []


def test_a_line_without_end_does_not_pile_up():
    events = LogEvents(Clock())

    assert "".join(events.feed(b"x" * 10_000)) == "x" * 10_000


def test_a_flood_is_held_to_its_rate():
    events = LogEvents(Clock())

    sent = sum(len(text) for _ in range(100) for text in events.feed(b"x" * 4095 + b"\n"))

    assert 0 < sent <= EVENT_BYTES_PER_SECOND
    assert events.left_out_bytes == 100 * 4096 - sent


def test_the_rate_refills_with_time_and_the_gap_is_said():
    clock = Clock()
    events = LogEvents(clock)
    for _ in range(100):
        list(events.feed(b"x" * 4095 + b"\n"))
    clock.now = 10.0

    told, text = list(events.feed(b"after\n"))

    assert told == f"[{events.left_out_bytes} bytes of output were not sent]\n"
    assert text == "after\n"


def test_bytes_that_are_no_text_are_replaced():
    (text,) = LogEvents(Clock()).feed(b"\xff\x00ok\n")

    assert text == "\ufffd\ufffdok\n"


def test_the_last_lines_are_the_last_ones():
    last = LastLines()
    for number in range(10_000):
        last.feed(b"line %d\n" % number)

    assert last.lines()[-1] == "line 9999"
    assert len(last.lines()) == LAST_LINES
    assert len(last.text) <= LAST_BYTES


def test_one_huge_piece_of_output_keeps_its_end():
    last = LastLines()
    last.feed(b"a" * 10**6 + b"\nend\n")

    assert last.lines()[-1] == "end"
