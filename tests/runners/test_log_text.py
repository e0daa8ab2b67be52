"""Logs of real and of hostile programs: the same lines in events and exit record, however read."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runners.shared.log_text import last_line, lines_of, plain, shortened
from runners.supervision.output import CUT_HERE, EVENT_TEXT_BYTES, LastLines, LogEvents, Masker
from tests.runners.program_logs import HOSTILE, PROGRAMS

LOGS = {name: (log.encode(), lines_of(log)) for name, log in PROGRAMS.items()} | HOSTILE


def events_of(data: bytes, size: int, tick: int) -> tuple[list[str], LastLines]:
    """Return the texts of a stream that is read in pieces, with a tick after some of them."""
    events, masker, last, texts = LogEvents(lambda: 0.0), Masker([]), LastLines(), []
    for number, at in enumerate(range(0, len(data), size)):
        piece = masker.feed(data[at : at + size])
        last.feed(piece)
        texts += events.feed(piece)
        if number % tick == 0:
            texts += events.flush()
    rest = masker.flush()
    last.feed(rest)
    texts += [*events.feed(rest), *events.flush(is_end=True)]
    assert events.left_out_bytes == 0
    return texts, last


def shown(texts: list[str]) -> list[str]:
    """Return the lines of one stream's texts, as every reader has to see them."""
    lines, is_open = [], False
    for text in texts:
        if text.startswith("\r") and is_open:
            lines.pop()
        lines += lines_of(text)
        is_open = bool(text.removeprefix("\r")) and not text.endswith("\n")
    return lines


@pytest.mark.parametrize("name", LOGS)
def test_a_program_has_the_same_lines_however_it_is_read(name):
    data, lines = LOGS[name]
    assert lines_of(data) == lines
    for size, tick in [(1, 3), (7, 1), (50, 2), (10**6, 9)]:
        texts, last = events_of(data, size, tick)
        assert shown(texts) == lines, (size, tick)
        assert last.lines() == lines[-40:], (size, tick)


def test_no_line_of_a_real_program_holds_what_a_terminal_would_do():
    for name, log in PROGRAMS.items():
        text = "".join(lines_of(log))
        assert text.isprintable(), name
        assert "^[" not in text, name
    assert "INFO 11-27 14:03:21 [api_server.py:1839] vLLM" in lines_of(PROGRAMS["vllm"])[0]
    assert [line.partition("|")[0] for line in lines_of(PROGRAMS["tqdm"])] == [
        "outer:   0%", "outer:  50%", "inner: 100%", "outer: 100%",
    ]  # fmt: skip
    assert lines_of(PROGRAMS["rich"]) == [
        "Training ━━━━━ 100% 0:00:00", "[14:03:21] saved to model",
    ]  # fmt: skip
    assert lines_of(PROGRAMS["pip"])[2] == "     ━━━━━━━━━━━━ 888.0/888.0 MB"


@given(st.text(st.sampled_from("ab\r\n\x1b[]mA;\x07\0\u202e🚢\x9b"), max_size=40))
def test_plain_text_is_plain_and_stays_so(text):
    once = plain(text)
    assert plain(once) == once
    assert not set(once.removeprefix("\r")) & set("\r\x1b\x07\0\u202e\x9b")
    texts, last = events_of(text.encode(), 3, 2)
    assert shown(texts) == last.lines() == lines_of(text)


def test_a_bar_of_many_states_is_a_few_texts_and_a_line_of_megabytes_says_that_it_is_cut():
    events, last = LogEvents(lambda: 0.0), LastLines()
    for step in range(0, 200_000, 1000):
        states = "".join(f"\r{n:7} |██" for n in range(step, step + 1000)).encode()
        last.feed(states)
        assert list(events.feed(states)) == []
    assert list(events.flush()) == [" 199999 |██"]
    assert list(events.feed(b"\n")) == ["\r 199999 |██\n"]
    assert last.lines() == [" 199999 |██"]
    texts = [text for _ in range(20) for text in events.feed(b"x" * 10**6)]
    assert texts
    assert all(text.endswith(CUT_HERE) for text in texts[1:])
    assert max(map(len, texts)) <= EVENT_TEXT_BYTES + len(CUT_HERE)
    assert events.left_out_bytes > 19 * 10**6


def test_a_bar_of_a_day_is_sent_every_ten_seconds_and_what_a_flood_lost_is_said_at_the_next_tick():
    events = LogEvents(lambda: 0.0)
    sent = []
    for second in range(3600):
        assert list(events.feed(b"\r%d s" % second)) == []
        sent += events.flush()
    assert len(sent) < 500
    assert sent[:3] == ["0 s", "\r1 s", "\r2 s"]
    assert list(events.flush(is_end=True)) == ["\r3599 s"]
    events = LogEvents(lambda: 0.0)
    sent = [text for _ in range(9) for text in events.feed(b"x" * 16_000 + b"\n")]
    (said,) = events.flush()
    assert said == f"[{events.left_out_bytes} bytes of output were not sent]\n"
    assert list(events.flush(is_end=True)) == []


def test_what_never_ends_a_sequence_takes_no_longer_than_other_text():
    for text in ("\x9d" * 200_000, "\x1b]" * 100_000, "\x1b[" + "0" * 200_000, "\x1b[A" * 60_000):
        began = time.process_time()
        plain(text)
        LastLines().feed(text.encode())
        assert time.process_time() - began < 2, text[:3]


def test_lines_of_two_streams_are_not_mixed():
    last = LastLines()
    for stream, data in [
        ("stdout", b"loading ..."), ("stderr", b"BAD_INPUT: no tokenizer"), ("stdout", b"..."),
        ("stderr", b" in model\n"), ("stderr", b"\r 5%"),
    ]:  # fmt: skip
        last.feed(data, stream)
    assert last.lines() == ["BAD_INPUT: no tokenizer in model", "loading ......", " 5%"]


def test_a_quoted_program_is_quoted_by_its_last_line_without_what_a_terminal_would_do():
    assert last_line(b"\x1b[31mERROR: caf\xe9\x1b[0m\r\n\n  \n") == "ERROR: caf\ufffd"
    assert last_line("", "code 3") == "code 3"
    assert last_line("é" * 400).startswith("é" * 300 + " … (a line of 400 characters)")
    assert shortened("é" * 5, 5) == "é" * 5
