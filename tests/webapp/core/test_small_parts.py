"""Identifiers, assets, breaker, disk, refusals, sentences, the ticker, pace and logs."""

import io
import logging
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import structlog
from django.db import OperationalError
from hypothesis import given
from hypothesis import strategies as st

from tests.stack import ROOT
from webapp.core import outages, pace, problems
from webapp.core.display import TERMS, capitalised, memory_row, sentence
from webapp.core.ids import ULID_LENGTH, new_ulid
from webapp.core.outages import Breaker
from webapp.core.pace import BEAT, HOST, Limit, Pace
from webapp.core.problems import BusyProblem, Problem
from webapp.core.staticfiles import HashedStaticFilesStorage
from webapp.operations.ticker import Duty, Stopper, Ticker, all_duties, run_loop

# Identifiers, assets, the breaker before Redis, room on the disk, documents of refusals.


CLASSES = [name for _, _, names in TERMS for name in names]


def test_identifiers_differ_have_one_length_and_sort_by_when_they_were_made():
    made = {new_ulid() for _ in range(1000)}
    assert len(made) == 1000
    assert {len(one) for one in made} == {ULID_LENGTH}
    first = new_ulid()
    time.sleep(0.002)
    assert first < new_ulid()


def test_an_asset_has_its_hash_if_the_manifest_has_it_and_keeps_its_name_otherwise(tmp_path):
    storage = HashedStaticFilesStorage(location=tmp_path, base_url="/static/")
    assert storage.url("css/tokens.css") == "/static/css/tokens.css"
    storage.hashed_files = {"css/tokens.css": "css/tokens.0123456789ab.css"}
    assert storage.stored_name("css/tokens.css") == "css/tokens.0123456789ab.css"
    storage.hashed_files = {"other.css": "other.0.css"}
    assert storage.stored_name("css/new.css").startswith("css/new")


def test_a_breaker_lets_through_until_it_trips_and_closes_by_itself(monkeypatch):
    breaker = Breaker()
    assert not breaker.is_open()
    breaker.trip()
    assert breaker.is_open()
    monkeypatch.setattr(outages, "RETRY_AFTER_SECONDS", 0.01)
    breaker = Breaker()
    breaker.trip()
    time.sleep(0.02)
    assert not breaker.is_open()


def test_there_is_one_client_for_one_address_with_time_outs():
    options = outages.client("redis://127.0.0.1:1/0").connection_pool.connection_kwargs
    assert options["socket_timeout"] <= 2
    assert options["socket_connect_timeout"] <= 1
    assert outages.client("redis://127.0.0.1:1/0") is outages.client("redis://127.0.0.1:1/0")


def test_a_full_disk_says_when_to_come_again(tmp_path):
    assert outages.check_room(tmp_path, 1) is None
    with pytest.raises(BusyProblem) as caught:
        outages.check_room(tmp_path, 2**62)
    assert (caught.value.status, caught.value.facts) == (429, {"retry_after_seconds": 60})


def test_every_refusal_has_a_status_and_a_title_of_its_own():
    classes = [one for one in vars(problems).values() if isinstance(one, type)]
    kinds = [one for one in classes if issubclass(one, Problem)]
    assert len(kinds) >= 8
    of_the_server = {problems.UnavailableProblem, problems.UnexpectedProblem}
    for kind in kinds:
        assert 400 <= kind.status < 500 or kind in of_the_server, kind
        assert kind.title, kind
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


# Messages become sentences; names of the code stay as they are written.


def test_a_sentence_begins_with_a_capital():
    for text, shown in [
        ("needs 80.0 GiB per device", "Needs 80.0 GiB per device"),
        ("", ""),
        ("8-bit weights", "8-bit weights"),
        ("éclair", "Éclair"),
        ("infeasible.", "Infeasible."),
        ("one gate, expert_parallel_size 4", "One gate, expert_parallel_size 4"),
    ]:
        assert capitalised(text) == shown, text


def test_a_name_of_the_code_keeps_its_small_letter():
    for text in [
        "tpot_seconds is 0.2 s, the limit is 0.1 s",
        "longest_context is a question about serve and generate",
        "workload.kind is train",
        "pins.weight_dtype: no such format",
        "bf16 weights need more",
        "max_concurrency",
        "vLLM before 0.20 takes another flag",
        "llama.cpp is needed",
    ]:
        assert capitalised(text) == text, text


def test_a_sentence_ends_with_one_full_stop():
    for text in ["the model is unknown", "the model is unknown."]:
        assert sentence(text) == "The model is unknown.", text


# Duties, each at its time; loops that outlive what goes wrong.


class TickClock:
    at = 0.0

    def __call__(self) -> float:
        return self.at


def test_each_duty_is_done_at_its_own_period():
    done: list[str] = []
    clock = TickClock()
    duties = [Duty("a", 1.0, lambda: done.append("a")), Duty("b", 3.0, lambda: done.append("b"))]
    ticker = Ticker(duties, clock)
    for second in range(6):
        clock.at = float(second)
        ticker.step()
    assert (done.count("a"), done.count("b")) == (6, 2)


def test_a_duty_that_fails_does_not_stop_the_others():
    done: list[str] = []

    def fail() -> None:
        raise RuntimeError("no")

    ticker = Ticker([Duty("bad", 1.0, fail), Duty("good", 1.0, lambda: done.append("x"))])
    assert (ticker.step(), done) == (1, ["x"])


@pytest.mark.django_db(databases="__all__")
def test_every_real_duty_runs_on_an_empty_database():
    assert Ticker(all_duties()).step() == len(all_duties())


@pytest.mark.django_db
def test_a_loop_survives_what_a_round_raises():
    stop = Stopper()
    rounds: list[int] = []

    def step() -> None:
        rounds.append(1)
        if len(rounds) == 1:
            raise RuntimeError("once")
        stop.event.set()

    run_loop("test", step, 0.0, stop)
    assert len(rounds) == 2


@pytest.mark.django_db
def test_a_loop_ends_while_it_rests():
    stop = Stopper()
    thread = threading.Thread(target=run_loop, args=("test", lambda: None, 60.0, stop))
    thread.start()
    stop.event.set()
    thread.join(5)
    assert not thread.is_alive()


# How often one caller may call, by a clock that the test moves.


SMALL = Limit("One caller", 2.0, 4)


class Clock:
    def __init__(self) -> None:
        self.at = 100.0

    def __call__(self) -> float:
        return self.at


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def kept(clock) -> Pace:
    return Pace(clock)


def count(kept: Pace, limit: Limit, tries: int, caller: str = "a") -> int:
    """Return how many of some calls at once are taken."""
    taken = 0
    for _ in range(tries):
        try:
            kept.keep(limit, caller)
        except BusyProblem:
            continue
        taken += 1
    return taken


def test_a_burst_is_taken_and_what_goes_beyond_it_is_not(kept):
    assert count(kept, SMALL, 10) == 4
    count(kept, SMALL, 10)
    assert count(kept, SMALL, 10, caller="b") == 4
    assert count(kept, HOST, 10) == 10


def test_the_refusal_names_the_limit_and_the_wait_after_which_one_more_is_taken(kept, clock):
    count(kept, SMALL, 4)
    with pytest.raises(BusyProblem) as refused:
        kept.keep(SMALL, "a")
    assert "2 times a second, and 4 times at once" in refused.value.detail
    assert refused.value.facts == {"retry_after_seconds": 1}
    clock.at += 1
    assert count(kept, SMALL, 10) == 2


def test_refused_calls_do_not_lengthen_the_wait(kept, clock):
    count(kept, SMALL, 1000)
    clock.at += 0.5
    assert count(kept, SMALL, 1) == 1


def test_the_rate_holds_over_time(kept, clock):
    taken = 0
    for _ in range(1000):
        taken += count(kept, SMALL, 3)
        clock.at += 0.1
    assert 200 <= taken <= 204


def test_a_host_that_beats_a_hundred_times_too_often_is_not_limited(kept, clock):
    for _ in range(1000):
        kept.keep(BEAT, "host")
        clock.at += 0.1


def test_names_without_end_take_no_memory_without_end(kept, clock, monkeypatch):
    monkeypatch.setattr(pace, "MOST_KNOWN", 100)
    for number in range(1000):
        kept.keep(SMALL, f"caller {number}")
        clock.at += 0.001
    assert sum(map(len, kept._free_at.values())) <= 101


def test_a_flood_of_invented_names_forgets_neither_the_busiest_nor_another_kind(
    kept, clock, monkeypatch
):
    monkeypatch.setattr(pace, "MOST_KNOWN", 100)
    assert count(kept, SMALL, 9) == SMALL.burst
    assert count(kept, HOST, HOST.burst, "host") == HOST.burst
    for number in range(1000):
        kept.count(SMALL, f"invented {number}")
        clock.at += 0.0001
    assert kept.rest(SMALL, "a")[0] == 0
    assert kept.rest(HOST, "host")[0] < HOST.burst / 2


def test_threads_together_get_no_more_than_one(kept):
    taken: list[int] = []
    threads = [
        threading.Thread(target=lambda: taken.append(count(kept, HOST, 500))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(taken) == HOST.burst


# What is logged of a failure names it, and holds nothing of what variables held.


def fail(credential: str) -> None:
    raise ValueError(f"refused a credential of {len(credential)} letters")


IN_UTC = re.compile(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d\.\d+Z")


def test_a_traceback_names_the_failure_and_no_variables(capsys):
    try:
        fail("canary-credential")
    except ValueError:
        structlog.get_logger("test").warning("round failed", exc_info=True)
    told = capsys.readouterr().out
    assert "ValueError: refused a credential of 17 letters" in told
    assert IN_UTC.match(told.removeprefix("\x1b[2m"))
    assert "canary-credential" not in told.replace('fail("canary-credential")', "")


LOGS = """
import structlog, sys
from webapp.core.logs import configure_logs
configure_logs()
for _ in range(3):
    structlog.get_logger("test").warning("round failed")
sys.stderr.write("still alive")
"""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
def test_a_full_disk_behind_the_log_ends_no_process():
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-c", LOGS],
            env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert (done.returncode, done.stderr) == (0, "still alive")


@pytest.fixture
def told_of_requests(monkeypatch) -> io.StringIO:
    """What the web process writes of requests that it could not answer."""
    text = io.StringIO()
    for handler in logging.getLogger("django.request").handlers:
        monkeypatch.setattr(handler, "stream", text)
    return text


@pytest.mark.parametrize(
    ("error", "is_traced"),
    [(ZeroDivisionError("no such speed"), True), (OperationalError("database is locked"), False)],
    ids=["fault", "outage"],
)
def test_a_page_that_fails_leaves_its_traceback_and_an_outage_one_line(
    client, alice, monkeypatch, told_of_requests, error, is_traced
):
    def failing(*_args: object, **_kwargs: object) -> None:
        raise error

    client.force_login(alice)
    client.raise_request_exception = False
    monkeypatch.setattr("webapp.pages.home.render", failing)

    answer = client.get("/")

    told = told_of_requests.getvalue()
    assert answer.status_code == (500 if is_traced else 503)
    assert ("Internal Server Error: /" if is_traced else "Service Unavailable: /") in told
    assert ("Traceback" in told, "ZeroDivisionError: no such speed" in told) == (is_traced,) * 2
    assert is_traced or len(told.splitlines()) == 1
    assert IN_UTC.match(told)
