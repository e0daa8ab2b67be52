"""Logs of real and of hostile programs: page, download, API and search show the same lines."""

import re
from html import unescape

import pytest
from django.utils.html import escape

from runners.shared.log_text import lines_of as text_lines
from runners.supervision.output import LogEvents
from tests.runners.program_logs import HOSTILE, PROGRAMS
from tests.webapp.conftest import EXIT_OK
from webapp.jobs.logs import lines_of, log_lines, log_of, with_replaced
from webapp.jobs.models import AttemptEvent

pytestmark = pytest.mark.django_db(databases="__all__")
OUTPUT = {name: log.encode() for name, log in PROGRAMS.items()} | {
    name: log for name, (log, _) in HOSTILE.items()
}


def sent(data: bytes, size: int = 40) -> list[str]:
    """Return the texts of a program's events, with a tick after every few reads."""
    events, texts = LogEvents(lambda: 0.0), []
    for number, at in enumerate(range(0, len(data), size)):
        texts += events.feed(data[at : at + size])
        texts += events.flush() if number % 2 else []
    return [*texts, *events.flush(is_end=True)]


@pytest.fixture
def wrote(report) -> list[str]:
    """All programs write, one after the other; a line of each ends before the next one begins."""
    lines = []
    for output in OUTPUT.values():
        data = output if output.endswith(b"\n") else output + b"\n"
        report(*[("log", {"stream": "stderr", "text": text}) for text in sent(data)])
        lines += text_lines(data)
    return lines


def test_the_page_the_download_the_api_and_the_search_show_the_lines_of_every_program(
    wrote, attempt, as_alice
):
    assert [line.text for line in log_lines(attempt, limit=999)] == wrote
    assert [line.text for line in log_of(attempt)] == wrote

    html = as_alice.get(f"/jobs/{attempt.job_id}/logs/").content.decode()
    rows = re.findall(
        r'<div class="line stderr[^>]*><span class="t">[^<]*</span>(.*?)</div>', html
    )
    assert [unescape(row) for row in rows] == wrote
    assert escape("<script>alert(1)</script>") in html
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", html)

    answer = as_alice.get(f"/api/v1/jobs/{attempt.job_id}/events", {"kind": "log"}).json()
    events = [
        AttemptEvent(seq=event["seq"], t_ms=0, kind=event["kind"], body=event["body"])
        for event in answer["events"]
    ]
    shown = [
        list(lines_of(event, is_replaced=is_replaced))
        for event, is_replaced in with_replaced(reversed(events))
    ]
    assert [line.text for lines in reversed(shown) for line in lines] == wrote

    for needle in ("failed (exitcode", "KeyError: '🚢'", "<U+202E>", "you are root", "<script>"):
        found = [line.text for line in log_lines(attempt, limit=999, needle=needle)]
        assert found == [line for line in wrote if needle in line], needle


def test_what_a_host_says_beside_the_log_is_plain_too(attempt, report):
    last = {**EXIT_OK, "exit_code": 1, "reason": "exit_nonzero"}
    last["last_lines"] = ["\x1b[31mred\x1b[0m", "user\u202enimda", "two\nlines", ""]
    report(("phase", {"name": "Trai\u202ening\n\x1b]0;title\x07now"}), ("exited", last))
    attempt.refresh_from_db()
    assert attempt.exit_record["last_lines"] == ["red", "user<U+202E>nimda", "two lines", ""]
    assert log_lines(attempt, limit=9)[0].text == "Trai<U+202E>ning now"


def test_an_unfinished_line_is_shown_once_and_an_open_one_stays(attempt, report):
    report(
        *[
            ("log", {"stream": stream, "text": text})
            for stream, text in [
                ("stderr", " 10 %"), ("stdout", "loading ..."), ("stderr", "\r 20 %"),
                ("stdout", "\rloading ......\n"), ("stderr", "\r 30 %"), ("stdout", "done\n"),
                ("stdout", "old agent"), ("stdout", "no return\n"),
            ]
        ]
    )  # fmt: skip
    lines = log_lines(attempt, limit=9)
    assert [line.text for line in lines] == [
        "loading ......", " 30 %", "done", "old agent", "no return",
    ]  # fmt: skip
    assert [line.text for line in log_of(attempt)] == [line.text for line in lines]
    assert [line.text for line in lines if line.is_open] == [" 30 %", "old agent"]
