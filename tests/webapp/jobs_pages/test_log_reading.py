"""The log: lines as a terminal would leave them, the last ones first, any of them found."""

import pytest

from tests.webapp.conftest import EXIT_OK, STARTED
from webapp.jobs.logs import LINE_CHARACTERS, MOST_CHARACTERS, Line, lines_of, log_lines
from webapp.jobs.models import AttemptEvent

pytestmark = pytest.mark.django_db(databases="__all__")


def event(kind="log", seq=1, **body) -> AttemptEvent:
    body = {"stream": "stdout", **body} if kind == "log" else body
    return AttemptEvent(seq=seq, t_ms=1_700_000_000_000, kind=kind, body=body)


def texts(**body) -> list[str]:
    return [line.text for line in lines_of(event(**body))]


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("one\n", ["one"]),
        ("one\ntwo\n", ["one", "two"]),
        ("one", ["one"]),
        ("", []),
        ("\n", [""]),
        ("one\n\ntwo\n", ["one", "", "two"]),
        ("one\r\ntwo\r\n", ["one", "two"]),
        (" 10 %\r 20 %\r 30 %\n", [" 30 %"]),
        (" 10 %\r 20 %\r", [" 20 %"]),
        ("step 1\n 10 %\r 90 %\nstep 2\n", ["step 1", " 90 %", "step 2"]),
        ("form\x0cfeed\n", ["form\x0cfeed"]),
        ("a\u2028b\n", ["a\u2028b"]),
        ("unit\x1cseparator\x85\n", ["unit\x1cseparator\x85"]),
    ],
)
def test_text_becomes_the_lines_that_a_terminal_would_leave(text, lines):
    assert texts(text=text) == lines


@pytest.mark.parametrize(
    ("text", "level"),
    [
        ("Traceback (most recent call last):", "bad"),
        ("ValueError: no", "bad"),
        ("CRITICAL no disk", "bad"),
        ("UserWarning: slow", "warn"),
        ("warned and in error", "bad"),
        ("step 1 loss 8.1", ""),
        ("", ""),
    ],
)
def test_a_line_is_marked_by_its_own_words(text, level):
    (line,) = [*lines_of(event(text=f"{text}\n"))]

    assert line.level == level


@pytest.mark.parametrize(
    ("kind", "body", "words"),
    [
        ("started", STARTED, "process 7 started"),
        ("phase", {"name": "Training"}, "Training"),
        ("artefact", {"name": "model", "total_bytes": 3 * 1024**2}, "saved model, 3.00\u00a0MiB"),
        ("exited", EXIT_OK, "ended with exit code 0"),
        ("exited", EXIT_OK | {"exit_code": 137}, "ended with exit code 137"),
        ("exited", EXIT_OK | {"signal": 9, "exit_code": None}, "ended by signal 9"),
    ],
)
def test_what_the_supervisor_saw_is_a_line_of_its_own(kind, body, words):
    (line,) = lines_of(event(kind, **body))

    assert (line.stream, line.text) == ("supervisor", words)


def test_of_a_line_that_nobody_can_read_the_beginning_is_shown():
    whole, cut = "x" * LINE_CHARACTERS, "y" * 5000

    assert texts(text=f"{whole}\n{cut}\n") == [
        whole, f"{cut[:LINE_CHARACTERS]} … (a line of 5,000 characters)",
    ]  # fmt: skip


def test_a_line_knows_when_it_came():
    (line,) = lines_of(event(text="x\n"))

    assert line.at.isoformat() == "2023-11-14T22:13:20+00:00"


@pytest.fixture
def wrote(attempt):
    """Let the attempt write lines, one event each."""

    def write(count: int, first: int = 1) -> None:
        AttemptEvent.objects.bulk_create(
            AttemptEvent(
                attempt=attempt,
                seq=seq,
                t_ms=seq,
                kind="log",
                body={"stream": "stdout", "text": f"line {seq}\n"},
            )
            for seq in range(first, first + count)
        )

    return write


def numbers(lines: list[Line]) -> list[int]:
    return [int(line.text.split()[1]) for line in lines]


def test_the_last_lines_come_in_the_order_they_were_written(attempt, wrote):
    wrote(20)

    assert numbers(log_lines(attempt, limit=5)) == [16, 17, 18, 19, 20]


def test_a_limit_counts_lines_and_not_deliveries(attempt, report):
    report(*[("log", {"stream": "stdout", "text": f"line {n}\nline {n + 1}\n"}) for n in (1, 3)])

    assert numbers(log_lines(attempt, limit=3)) == [2, 3, 4]


def test_a_word_is_found_however_long_ago_it_was_written(attempt, wrote):
    wrote(500)

    assert numbers(log_lines(attempt, limit=50, needle="LINE 7")) == [7, *range(70, 80)]


def test_of_many_lines_with_the_word_the_last_ones_come(attempt, wrote):
    wrote(100)

    assert numbers(log_lines(attempt, limit=3, needle="line")) == [98, 99, 100]


def test_a_word_that_nobody_wrote_finds_nothing(attempt, wrote):
    wrote(10)

    assert log_lines(attempt, limit=5, needle="zebra") == []


def test_the_search_reads_what_the_supervisor_noted_too(attempt, report):
    report(("started", STARTED))

    assert [line.text for line in log_lines(attempt, limit=5, needle="started")]


def test_a_job_that_nobody_took_has_no_log():
    assert log_lines(None, limit=5) == []


def test_the_log_of_one_attempt_holds_nothing_of_another(attempt, wrote, team, alice, host):
    wrote(3)
    attempt.pk = "01J" + "0" * 23

    assert log_lines(attempt, limit=5) == []


def page(client, job, query="") -> str:
    response = client.get(f"/jobs/{job.pk}/logs/{query}")
    assert response.status_code == 200
    return response.content.decode()


@pytest.mark.parametrize("query", ["?q=%3Cscript%3E", "?q=%25", "?q=" + "x" * 3000])
def test_a_strange_search_is_answered(as_alice, running, query):
    assert "<script>" not in page(as_alice, running, query).split("</head>")[1].replace(
        "<script src", ""
    )


def test_the_search_keeps_the_word_in_its_field(as_alice, running):
    assert 'value="loss 7"' in page(as_alice, running, "?q=loss+7")


def test_the_log_page_escapes_what_a_job_writes(as_alice, running, report):
    report(("log", {"stream": "stdout", "text": "<img src=x onerror=alert(1)>\n"}))

    assert "<img src=x" not in page(as_alice, running)


def test_a_long_log_shows_its_end(as_alice, running, wrote):
    wrote(2100, first=100)
    html = page(as_alice, running)

    assert "line 2199" in html
    assert "line 100\n" not in html


def test_of_many_long_lines_the_newest_are_shown_and_the_page_says_so(as_alice, running):
    attempt, long = running.attempts.get(), "x" * 1500
    AttemptEvent.objects.bulk_create(
        AttemptEvent(
            attempt=attempt, seq=seq, t_ms=seq, kind="log", body={"text": f"{long} {seq}"}
        )
        for seq in range(1000, 1400)
    )
    num_shown = -(-MOST_CHARACTERS // 1505)

    html = page(as_alice, running)

    assert f"{long} 1399" in html
    assert html.count(long) == num_shown
    assert f"The newest {num_shown} lines" in html


def test_the_page_asks_no_more_of_the_database_for_a_long_log(
    as_alice, running, wrote, django_assert_max_num_queries
):
    wrote(1500, first=100)

    with django_assert_max_num_queries(16):
        page(as_alice, running)
