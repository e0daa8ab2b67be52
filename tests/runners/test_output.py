"""A job's output: capped, masked, and as events that the server takes."""

import base64
import json
from typing import get_args
from urllib.parse import quote

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runners.shared import messages
from runners.shared.kinds import ArtefactKind
from runners.shared.log_text import lines_of
from runners.supervision.output import (
    CUT_BEGINNING,
    CUT_HERE,
    EVENT_BYTES_PER_SECOND,
    EVENT_TEXT_BYTES,
    LAST_BYTES,
    LAST_LINES,
    MASK,
    CappedLog,
    EventRefusedError,
    LastLines,
    LogEvents,
    Masker,
    parse_line,
)

# A job's output: capped files, a byte rate for events, and its last lines.


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


def test_a_flood_keeps_its_head_and_its_tail_and_says_what_it_lost(tmp_path):
    log = CappedLog(tmp_path, "stdout", head_bytes=100, tail_bytes=100)
    data = b"".join(b"%07d\n" % number for number in range(1000))
    for at in range(0, len(data), 29):
        log.write(data[at : at + 29])
    log.close()
    head, old, tail = (
        (tmp_path / f"stdout{end}.log").read_bytes() for end in ("", ".tail.old", ".tail")
    )
    assert head.startswith(data[:104] + b"\n[")  # the line at byte 100 is whole
    assert data.endswith(old + tail)
    assert len(old) == 104

    log = CappedLog(tmp_path, "stderr", head_bytes=100, tail_bytes=100)
    log.write(b"x" * 1000)
    log.close()
    assert log.dropped_bytes == 1000 - 125 * 3 + 0
    assert b"[625 bytes were cut here" in (tmp_path / "stderr.log").read_bytes()


@given(st.text("aé日🚢\n", max_size=400), st.integers(1, 40))
def test_no_file_of_a_log_is_cut_within_a_character(tmp_path_factory, text, size):
    folder, data = tmp_path_factory.mktemp("log"), text.encode()
    log = CappedLog(folder, "out", head_bytes=40, tail_bytes=40)
    for at in range(0, len(data), size):
        log.write(data[at : at + size])
    log.close()
    for file in folder.iterdir():
        file.read_bytes().decode()


def test_lines_are_sent_whole_and_an_unfinished_one_waits_but_does_not_pile_up():
    events = LogEvents(Clock())
    assert list(events.feed(b"one\ntwo\nthr")) == ["one\ntwo\n"]
    assert list(events.feed(b"ee\n")) == ["three\n"]
    events = LogEvents(Clock())
    list(events.feed(b"50 %"))
    assert list(events.flush()) == ["50 %"]
    assert list(events.flush()) == []
    events = LogEvents(Clock())
    assert list(events.feed(b"x" * 10_000)) == []
    assert "".join(events.feed(b"x" * 10_000)) == "x" * EVENT_TEXT_BYTES + CUT_HERE
    assert "".join(events.flush()) == "x" * (20_000 - EVENT_TEXT_BYTES)
    (text,) = LogEvents(Clock()).feed(b"\xff\x00ok\n")
    assert text == "\ufffd^@ok\n"


BURSTS = {
    "lines of three-byte letters": "日本語テキスト loss 0.123\n" * 1800,
    "lines of 127": ("x" * 127 + "\n") * 470,
    "long lines": ("é" * 7000 + "\n") * 4,
    "a bar": "".join(f"\r{n:4} |{'█' * (n // 80)}" for n in range(1600)),
    "a bar with line feeds": "".join(f"\r{n:4} |{'█' * 20}\r\n" for n in range(700)),
    "one line": "日🚢" * 8000,
}


def test_a_burst_is_cut_at_line_ends_else_at_characters_and_says_so():
    for name, text in BURSTS.items():
        for size in (100, 4096, 2**18):
            events, masker, data = LogEvents(Clock()), Masker([]), text.encode()
            pieces = (masker.feed(data[at : at + size]) for at in range(0, len(data), size))
            sent = [each for piece in pieces for each in events.feed(piece)]
            sent += [each for piece in (masker.flush(),) for each in events.feed(piece)]
            sent += events.flush()
            assert events.left_out_bytes == 0
            assert "\ufffd" not in "".join(sent), (name, size)
            whole = "".join(each.removesuffix(CUT_HERE) for each in sent)
            assert lines_of(whole) == lines_of(text), (name, size)
            has_cut = any(each.endswith(CUT_HERE) for each in sent)
            assert has_cut == (name == "one line"), (name, size)
            assert all(each.endswith("\n") for each in sent[:-1]), (name, size)


def test_two_streams_and_timers_never_meet_half_a_character():
    masker, last = Masker([b"hf_0123456789"]), LastLines()
    for byte in "日本 hf_0123456789 🚢".encode():
        last.feed(masker.feed(bytes([byte])))
        last.feed(b"|")
    last.feed(masker.flush())
    assert "\ufffd" not in last.text
    assert last.text.replace("|", "") == "日本 [secret] 🚢"
    assert b"".join([masker.feed(b"a\xe6\x97"), masker.flush()]) == b"a\xe6\x97"


def test_a_flood_is_held_to_its_rate_which_refills_with_time():
    events = LogEvents(Clock())
    sent = sum(len(text) for _ in range(100) for text in events.feed(b"x" * 4095 + b"\n"))
    assert 0 < sent <= EVENT_BYTES_PER_SECOND
    assert events.left_out_bytes == 100 * 4096 - sent
    clock = Clock()
    events = LogEvents(clock)
    for _ in range(100):
        list(events.feed(b"x" * 4095 + b"\n"))
    clock.now = 10.0
    told, text = list(events.feed(b"after\n"))
    assert told == f"[{events.left_out_bytes} bytes of output were not sent]\n"
    assert text == "after\n"


def test_the_last_lines_are_the_last_ones_even_of_one_huge_piece():
    last = LastLines()
    for number in range(10_000):
        last.feed(b"line %d\n" % number)
    assert last.lines()[-1] == "line 9999"
    assert len(last.lines()) == LAST_LINES
    assert len(last.text) <= LAST_BYTES
    last = LastLines()
    last.feed(b"a" * 10**6 + b"\nend\n")
    assert last.lines()[-1] == "end"


def test_the_last_lines_are_those_of_the_page_and_a_bar_is_one_of_them():
    last = LastLines()
    assert last.lines() == []
    bar = "".join(f"\r{n} % |███" for n in range(99))
    last.feed(f"why\u2028it ended\x0chere\r\n{bar}\nend\n".encode())
    assert last.lines() == ["why<U+2028>it ended^Lhere", "98 % |███", "end"]


def test_the_last_lines_begin_with_a_line_or_say_that_it_began_before():
    for text, first in [
        ("日本語\n" * 20_000, "日本語"),
        ("a" * 99 + "\n" + "日" * 40_000 + "\nend", f"{CUT_BEGINNING.decode()}日"),
        ("é" * 5000, f"{CUT_BEGINNING.decode()}é"),
        ("short\n", "short"),
        (("x" * (LAST_BYTES - len(CUT_BEGINNING) - 1) + "\n") * 2, "x" * 99),
    ]:
        for size in (1000, 10**6):
            last, data = LastLines(), text.encode()
            for at in range(0, len(data), size):
                last.feed(data[at : at + size])
            assert len(last.text.encode()) <= LAST_BYTES
            for found in (last.text, last.longer_text):
                assert "\ufffd" not in found, (first, size)
            assert last.text.startswith(first), (first, size)
            assert text.endswith(last.text.removeprefix(CUT_BEGINNING.decode())), (first, size)


# What a job may say: every event that passes is one that the server takes.

BODIES = {
    "phase": messages.PhaseBody,
    "progress": messages.ProgressBody,
    "metric": messages.MetricPoint,
    "log": messages.LogBody,
    "result": messages.ResultBody,
    "artefact": messages.ArtefactBody,
    "endpoint": messages.EndpointBody,
}


def line(kind: str, body: object) -> bytes:
    return json.dumps({"kind": kind, "body": body}).encode()


def test_a_metric_keeps_its_values_step_and_source_but_cannot_speak_as_the_host():
    assert parse_line(line("metric", {"values": {"loss": 2.5}, "step": 3})) == (
        "metric",
        {"source": "job", "values": {"loss": 2.5}, "step": 3},
    )
    _, body = parse_line(line("metric", {"source": "host", "values": {"loss": 1}}))
    assert body["source"] == "job"
    _, body = parse_line(line("metric", {"source": "gpu", "values": {"gpu0_utilization": 0.5}}))
    assert body["source"] == "gpu"


def test_a_phase_says_whether_the_progress_so_far_was_of_a_preparation():
    for body, kept in (
        ({"name": "Loading"}, {"name": "Loading"}),
        ({"name": "Loading", "begins_anew": False}, {"name": "Loading"}),
        ({"name": "Starting", "begins_anew": True}, {"name": "Starting", "begins_anew": True}),
        ({"name": "Starting", "begins_anew": "yes"}, {"name": "Starting"}),
    ):
        assert parse_line(line("phase", body)) == ("phase", kept), body


ENDPOINT = {"host": "127.0.0.1", "port": 8000, "model": "demo", "has_keys": True}


def test_an_endpoint_says_where_it_answers_and_never_at_no_address():
    assert parse_line(line("endpoint", ENDPOINT)) == ("endpoint", ENDPOINT)
    plain = ENDPOINT | {"has_chat_template": False}
    assert parse_line(line("endpoint", plain)) == ("endpoint", plain)
    assert parse_line(line("endpoint", plain | {"has_chat_template": "x"}))[1] == ENDPOINT
    for changes in [
        {"host": "metadata.internal"},
        {"host": "127.0.0.1/admin"},
        {"port": 22},
        {"port": 70_000},
        {"port": "8000"},
        {"model": "a b"},
    ]:
        with pytest.raises(EventRefusedError, match=f"^{next(iter(changes))} is "):
            parse_line(line("endpoint", {**ENDPOINT, **changes}))


def test_values_that_are_no_numbers_are_left_out_and_one_must_remain():
    _, body = parse_line(b'{"kind":"metric","body":{"values":{"loss":NaN,"lr":1e999,"tps":5}}}')
    assert body["values"] == {"tps": 5}
    with pytest.raises(EventRefusedError, match="no finite number"):
        parse_line(b'{"kind":"metric","body":{"values":{"loss":NaN}}}')


def test_what_is_no_event_of_a_job_is_refused():
    for kind in ["started", "exited", "beat", ""]:
        with pytest.raises(EventRefusedError, match="a job sends no"):
            parse_line(line(kind, {}))
    for text in [b"loss: 3", b"[]", b"{}", b'{"kind":"phase"}', b"\xff", b"1"]:
        with pytest.raises(EventRefusedError):
            parse_line(text)
    with pytest.raises(EventRefusedError):
        parse_line(b"[" * 200_000)
    with pytest.raises(EventRefusedError, match="done is -1, expected a number from 0 up"):
        parse_line(line("progress", {"done": -1, "total": 2, "unit": "steps"}))


def test_an_artefact_is_of_a_known_kind_with_a_digest_for_each_file():
    for kind in get_args(ArtefactKind):
        body = {
            "name": "it",
            "kind": kind,
            "total_bytes": 1,
            "files": {"a": 1},
            "sha256": {"a": "0"},
        }
        assert parse_line(line("artefact", body))[1]["kind"] == kind, kind

    body = {"name": "it", "kind": "rootkit", "total_bytes": 0, "files": {}, "sha256": {}}
    with pytest.raises(EventRefusedError, match="one of model, adapter, report"):
        parse_line(line("artefact", body))

    body = {"name": "model", "kind": "model", "total_bytes": 1, "files": {"a": 1}, "sha256": {}}
    with pytest.raises(EventRefusedError, match="same paths"):
        parse_line(line("artefact", body))


SCALARS = st.none() | st.booleans() | st.integers(-5, 5) | st.floats() | st.text(max_size=5)
NAMED = st.dictionaries(st.text(max_size=4), SCALARS, max_size=3)
FIELDS = {name for body in BODIES.values() for name in body.model_fields}


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(
    kind=st.sampled_from(sorted(BODIES)),
    body=st.dictionaries(st.sampled_from(sorted(FIELDS)), SCALARS | NAMED, max_size=8),
)
def test_whatever_passes_is_an_event_of_the_protocol(kind, body):
    try:
        kind, passed = parse_line(line(kind, body))
    except EventRefusedError:
        return
    BODIES[kind].model_validate(passed)
    json.dumps(passed, allow_nan=False)


# What a job writes of a secret never passes, however it is cut and spelt.

TOKEN = b"hf_AbC+d/e=f0123456789"


def through(masker: Masker, *pieces: bytes) -> bytes:
    return b"".join(masker.feed(piece) for piece in pieces) + masker.flush()


def test_a_value_that_comes_in_two_reads_is_masked():
    for cut in range(len(TOKEN) + 1):
        assert (
            through(Masker([TOKEN]), b"a " + TOKEN[:cut], TOKEN[cut:] + b" b")
            == b"a " + MASK + b" b"
        )


def test_what_holds_no_value_passes_unchanged():
    assert through(Masker([TOKEN]), b"hf_AbC", b" is short") == b"hf_AbC is short"
    masker = Masker([])
    assert masker.feed(TOKEN) == TOKEN
    assert masker.flush() == b""


def test_other_spellings_and_every_line_of_a_value_are_masked_too():
    for spelt in [
        TOKEN,
        base64.b64encode(TOKEN),
        quote(TOKEN.decode(), safe="").encode(),
        json.dumps('say "hf_AbC+d/e=f0123456789"').encode(),
    ]:
        assert TOKEN not in through(Masker([TOKEN]), spelt), spelt
        assert spelt.strip(b'"') not in through(Masker([TOKEN]), spelt), spelt
    key = b"-----BEGIN KEY-----\nMIIEvQIBADANBgkq\nhkiG9w0BAQEFAASC\n-----END KEY-----"
    assert b"hkiG9w0" not in through(Masker([key]), b"line: hkiG9w0BAQEFAASC\n")


@given(st.lists(st.binary(max_size=12), max_size=8), st.integers(0, 40))
def test_no_cut_of_any_stream_lets_a_value_through(noise, at):
    stream = b"".join(noise)
    stream = stream[:at] + TOKEN + stream[at:]
    masker = Masker([TOKEN])
    out = through(masker, *(stream[i : i + 5] for i in range(0, len(stream), 5)))
    assert TOKEN not in out


@given(st.lists(st.sampled_from([b"x", b"h", b"hf_", b"\n"]), max_size=30))
def test_a_stream_without_a_value_comes_out_as_it_went_in(pieces):
    assert through(Masker([TOKEN]), *pieces) == b"".join(pieces)
