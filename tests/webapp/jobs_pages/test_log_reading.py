"""The log as a terminal would leave it, its search, and logs and metrics of several hosts."""

import pytest
from django.urls import reverse

from runners.shared.log_text import LINE_CHARACTERS
from runners.shared.messages import MetricPoint
from tests.webapp.conftest import EXIT_OK, STARTED, batch_of, client_of
from tests.webapp.jobs.gangs import end, make_gang, make_hosts, members, silence, start, tell
from webapp.agents.live_messages import messages_of
from webapp.jobs.job_charts import draw
from webapp.jobs.logs import MOST_CHARACTERS, Line, lines_of, log_lines
from webapp.jobs.models import AttemptEvent, Job

pytestmark = pytest.mark.django_db(databases="__all__")


def event(kind="log", seq=1, **body) -> AttemptEvent:
    body = {"stream": "stdout", **body} if kind == "log" else body
    return AttemptEvent(seq=seq, t_ms=1_700_000_000_000, kind=kind, body=body)


def texts(**body) -> list[str]:
    return [line.text for line in lines_of(event(**body))]


def test_text_becomes_the_lines_that_a_terminal_would_leave():
    for text, lines in [
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
        ("form\x0cfeed\n", ["form^Lfeed"]),
        ("a\u2028b\n", ["a<U+2028>b"]),
        ("unit\x1cseparator\x85\n", ["unit^\\separator<U+0085>"]),
    ]:
        assert texts(text=text) == lines, (text, lines)


def test_a_line_is_marked_by_its_own_words():
    for text, level in [
        ("Traceback (most recent call last):", "bad"),
        ("ValueError: no", "bad"),
        ("CRITICAL no disk", "bad"),
        ("UserWarning: slow", "warn"),
        ("warned and in error", "bad"),
        ("step 1 loss 8.1", ""),
        ("", ""),
    ]:
        (line,) = [*lines_of(event(text=f"{text}\n"))]

        assert line.level == level, (text, level)


def test_what_the_supervisor_saw_is_a_line_of_its_own():
    for kind, body, words in [
        ("started", STARTED, "process 7 started"),
        ("phase", {"name": "Training"}, "Training"),
        ("artefact", {"name": "model", "total_bytes": 3 * 1024**2}, "saved model, 3.00\u00a0MiB"),
        ("exited", EXIT_OK, "ended with exit code 0"),
        ("exited", EXIT_OK | {"exit_code": 137}, "ended with exit code 137"),
        ("exited", EXIT_OK | {"exit_code": None}, "ended without an exit code"),
        ("exited", EXIT_OK | {"signal": 9, "exit_code": None}, "ended by signal 9"),
    ]:
        (line,) = lines_of(event(kind, **body))

        assert (line.stream, line.text) == ("supervisor", words), (kind, body, words)


def test_a_note_is_one_plain_line_that_is_no_longer_than_others():
    long = "x" * 5000
    for name, words in [
        ("two\nlines", "two lines"),
        ("\x1b[31mred\x1b[0m", "red"),
        ("turned \u202e", "turned <U+202E>"),
        (long, None),
        (["no", "text"], "['no', 'text']"),
    ]:
        for kind, before, after in [("phase", "", ""), ("artefact", "saved ", ", 0\u00a0B")]:
            (line,) = lines_of(event(kind, name=name))
            whole = f"{before}{long}{after}"
            cut = f"{whole[:LINE_CHARACTERS]} … (a line of {len(whole):,} characters)"
            assert line.text == (f"{before}{words}{after}" if words else cut), (kind, name)


def test_a_line_knows_when_it_came_and_of_an_endless_one_the_beginning_is_shown(attempt, report):
    (line,) = lines_of(event(text="x\n"))
    assert line.at.isoformat() == "2023-11-14T22:13:20+00:00"

    whole, cut = "x" * LINE_CHARACTERS, "y" * 4999 + "z"
    report(("log", {"stream": "stdout", "text": f"{whole}\n{cut}\n"}))
    shown = f"{cut[:LINE_CHARACTERS]} … (a line of 5,000 characters)"
    assert [line.text for line in log_lines(attempt, limit=9)] == [whole, shown]
    assert [line.text for line in log_lines(attempt, limit=9, needle="yz")] == [shown]


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


def test_the_last_lines_and_the_last_ones_with_a_word_come_in_their_order(attempt, wrote):
    wrote(500)
    assert numbers(log_lines(attempt, limit=5)) == [496, 497, 498, 499, 500]
    assert numbers(log_lines(attempt, limit=50, needle="LINE 7")) == [7, *range(70, 80)]
    assert numbers(log_lines(attempt, limit=3, needle="line")) == [498, 499, 500]
    assert log_lines(attempt, limit=5, needle="zebra") == []


def test_a_limit_counts_lines_and_not_deliveries(attempt, report):
    report(*[("log", {"stream": "stdout", "text": f"line {n}\nline {n + 1}\n"}) for n in (1, 3)])
    assert numbers(log_lines(attempt, limit=3)) == [2, 3, 4]


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


def test_a_strange_search_is_answered_and_a_word_kept_in_its_field(as_alice, running):
    for query in ["?q=%3Cscript%3E", "?q=%25", "?q=" + "x" * 3000]:
        assert "<script>" not in page(as_alice, running, query).split("</head>")[1].replace(
            "<script src", ""
        ), query
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


# Logs and metrics of a job on several hosts: one part_page, one host at a time.


@pytest.fixture
def gang(team, alice):
    """A training on two hosts, each of which has said something."""
    job = make_gang(team, alice, make_hosts(team, 2))
    for member in start(job):
        name = f"rank {member.node_rank}"
        point = MetricPoint(source="job", values={"loss": 3.0 + member.node_rank}, step=1)
        tell(
            member,
            ("log", {"stream": "stdout", "text": f"[{name}] step 1\n"}),
            ("metric", point.model_dump(mode="json")),
        )
    job.refresh_from_db()
    return job


def part_page(job, user, name: str, **query: str) -> str:
    return client_of(user).get(reverse(name, args=[job.pk]), query).content.decode()


def test_every_host_is_offered_with_how_it_stands(gang, alice):
    silence(members(gang)[1].host, minutes=4)
    text = part_page(gang, alice, "job-logs").replace("\N{NO-BREAK SPACE}", " ")
    assert 'Box 2 <span class="warn">unreachable for 4 min' in text
    end(members(gang)[1], "oom_gpu")
    for name in ("job-logs", "job-metrics"):
        text = part_page(gang, alice, name)
        assert 'aria-current="page">Box 1 <span>running</span>' in text, name
        assert 'Box 2 <span class="bad">oom gpu</span>' in text, name


def test_a_job_on_one_host_offers_no_choice(job, alice):
    assert 'aria-label="Host"' not in part_page(job, alice, "job-logs")


def test_the_log_is_that_of_the_chosen_host_or_of_the_first(gang, alice):
    first, second = (part_page(gang, alice, "job-logs", host=rank) for rank in ("0", "1"))
    assert "[rank 0] step 1" in first
    assert "[rank 1]" not in first
    assert "[rank 1] step 1" in second
    text = part_page(gang, alice, "job-logs", host="1", q="step")
    assert '<input type="hidden" name="host" value="1">' in text
    for asked in ("7", "-1", "x", "\u0661", "99999999999999999999"):
        refused = part_page(gang, alice, "job-logs", host=asked)
        assert "host" in refused, asked
        assert "[rank 0] step 1" not in refused, asked


def test_the_charts_are_those_of_the_chosen_host(gang):
    losses = [
        next(each for each in draw(gang, part=part) if each.chart.metric == "loss").series.values
        for part in members(gang)
    ]
    assert losses == [(3.0,), (4.0,)]


def test_only_the_first_host_is_held_against_the_prediction(gang):
    said = {"tokens_per_second": {"value": 5.0}}
    Job.objects.filter(pk=gang.pk).update(prediction=said)
    point = MetricPoint(source="job", values={"tokens_per_second": 9.0}, step=2)
    for part in members(gang):
        tell(part, ("metric", point.model_dump(mode="json")))
    first, second = (draw(gang, part=part) for part in members(gang))
    assert any(each.prediction for each in first)
    assert not any(each.prediction for each in second)


def test_a_script_reads_each_hosts_events_and_none_of_a_host_too_many(gang, alice):
    answer = client_of(alice).get(f"/api/v1/jobs/{gang.pk}/events", {"rank": 1, "kind": "log"})
    assert [event["body"]["text"] for event in answer.json()["events"]] == ["[rank 1] step 1\n"]
    answer = client_of(alice).get(f"/api/v1/jobs/{gang.pk}/series", {"rank": 2, "metrics": "loss"})
    assert answer.status_code == 422
    assert "the job runs on 2" in answer.json()["detail"]


def test_frames_say_which_host_speaks_and_only_the_first_moves_the_bar(gang):
    second = members(gang)[1]
    batch = batch_of(
        second, ("phase", {"name": "Training"}), ("log", {"stream": "stdout", "text": "x"})
    )
    sent = messages_of(second, gang.team_id, batch.events)
    assert [(kind, data["host"]) for _, kind, data in sent] == [("job.log", 1)]
