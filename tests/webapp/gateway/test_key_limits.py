"""Limits of keys by the tokens of a day and a month, at a gateway that counts beside requests."""

import asyncio
import tempfile
from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runners.shared.event_streams import TokensUsed
from tests.webapp.gateway.test_gateway import KEY, ROUTE, Client, Host, Response
from webapp.deployments import usage
from webapp.deployments.keys import KeyOptions, key_make
from webapp.deployments.models import Deployment, ServingKey, Usage
from webapp.gateway import key_limits
from webapp.gateway.journal import Answer, Journal, count_file
from webapp.gateway.key_limits import Limits
from webapp.gateway.refusals import Refusal
from webapp.gateway.routes import Routes, load_snapshot
from webapp.plans.models import Plan

pytestmark = pytest.mark.django_db(databases="__all__")
slow = settings(
    deadline=None, max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
LAST_OF_YEAR = datetime(2026, 12, 31, 23, 59, 30, tzinfo=UTC)


@pytest.fixture
def small(team, alice) -> Deployment:
    plan = Plan.objects.create(team=team, owner=alice)
    return Deployment.objects.create(team=team, owner=alice, name="small", plan=plan)


def made(team, alice, **options) -> ServingKey:
    return key_make(team=team, by=alice, options=KeyOptions(name="laptop", **options))[0]


def refusal_of(held, running: ExitStack | None = None) -> Refusal | None:
    try:
        (running or ExitStack()).enter_context(held)
    except Refusal as refusal:
        return refusal
    return None


@slow
@given(
    limit=st.integers(1, 60),
    unit=st.sampled_from(["tokens_per_day", "tokens_per_month"]),
    steps=st.lists(
        st.sampled_from(["ask", "ask", "end", "end", "count", "look", "count while looking"]),
        max_size=30,
    ),
    sizes=st.lists(st.integers(0, 40), min_size=30, max_size=30),
)
def test_a_limit_is_passed_by_no_more_than_the_answers_that_were_open(
    team, alice, small, limit, unit, steps, sizes
):
    key = made(team, alice, **{unit: limit})
    with tempfile.TemporaryDirectory() as folder, ExitStack() as running:
        journal, gate, open_answers, ended = Journal(Path(folder)), Limits(), [], 0
        is_exact = True

        def load(used):
            if step == "count while looking":
                journal.count()
            return load_snapshot(used)

        found = Routes(load=load)
        found.while_read = journal.settling
        step = "look"
        found.refresh()
        for step, size in zip(steps, sizes, strict=False):
            if step == "ask":
                held = gate.held(found.snapshot.keys[key.digest], journal.pending_tokens)
                refused = refusal_of(held, running)
                if refused is None:
                    assert ended < limit, steps
                    open_answers.append(journal.begin(key.pk, small.pk))
                else:
                    assert refused.code == unit
                    assert ended >= limit or not is_exact, steps
            elif step == "end" and open_answers:
                answer = open_answers.pop()
                answer.note(TokensUsed(size, 0, 1))
                answer.end(200, is_cut=False)
                ended += size + 1
            elif step == "count":
                journal.count()
            elif step != "end":
                found.refresh()
                is_exact = step == "look"
        journal.count()
        found.refresh()
        journal._close()
        used = found.snapshot.keys[key.digest].used
        assert set(used.values()) == ({ended} if ended else set())


@pytest.mark.asyncio
async def test_a_limit_is_that_of_the_moment_at_which_a_slow_body_has_come(tmp_path):
    key = replace(KEY, tokens_per_day=10)
    answer = Response(b"{}", x_slipway_usage="8 0 4")
    clients = [Client(tmp_path, Host(answer), ROUTE, key=key) for _ in range(5)]
    gateway, routes = clients[0].gateway, clients[0].routes
    sending = []
    for each in clients:
        each.gateway = gateway
        each.may_read.clear()
        sending.append(asyncio.ensure_future(each.send()))
        await each.reading.wait()
    used, journal = Counter(), gateway.journal
    for each, sent in zip(clients, sending, strict=True):
        each.may_read.set()
        await sent
        journal._counted.update(journal._pending)  # as its thread does
        with journal.settling():
            used += Counter({period: num for (_, period), num in journal._pending.items()})
            routes.set(ROUTE, key=replace(key, used=dict(used)))
    assert [each.status for each in clients] == [200, 429, 429, 429, 429]
    late = Client(tmp_path, Host(answer), ROUTE)
    late.may_read.clear()
    sending = asyncio.ensure_future(late.send())
    await late.reading.wait()
    late.routes.set(ROUTE, key=None)  # revoked meanwhile
    late.may_read.set()
    await sending
    assert (late.status, late.host.asked) == (401, [])


@slow
@given(
    answers=st.lists(
        st.tuples(st.integers(0, 2), st.integers(-40, 0), st.integers(0, 99)), max_size=30
    ),
    cuts=st.lists(st.integers(0, 4000), max_size=4),
)
def test_an_answer_counts_in_one_key_one_day_and_one_month(team, alice, small, answers, cuts):
    Usage.objects.all().delete()
    keys = [made(team, alice).pk for _ in range(3)]
    told = [
        Answer(
            str(number),
            keys[key],
            small.pk,
            (LAST_OF_YEAR + timedelta(days=day)).date().isoformat(),
            200,
            is_cut=False,
            used=TokensUsed(tokens, 0, 1),
        )
        for number, (key, day, tokens) in enumerate(answers)
    ]
    whole = b"".join(each.line for each in told)
    counted = Counter()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{made(team, alice).pk}.jsonl"
        for end in (*sorted(cuts), len(whole)):  # anywhere, also within a line
            path.write_bytes(whole[:end])
            counted.update(count_file(path))
    for name, length in (("day", 10), ("month", 7)):
        expected = Counter()
        for each in told:
            expected[each.key_id, each.day[:length]] += each.num_tokens
        stored = Counter()
        for row in Usage.objects.all():
            tokens = row.prompt_tokens + row.completion_tokens
            stored[row.key_id, row.day.isoformat()[:length]] += tokens
        assert stored == expected, name
        assert {key: counted[key] for key in expected} == dict(expected), name
    assert sum(row.requests for row in Usage.objects.all()) == len(told)


def test_the_headers_tell_the_limit_with_the_least_left_and_when_it_begins_anew(monkeypatch):
    monkeypatch.setattr(key_limits, "now", lambda: LAST_OF_YEAR)
    day, month = "2026-12-31", "2026-12"
    for used_day, used_month, left, seconds, code in (
        (10, 20, "80", 30, ""),
        (10, 150, "50", 30, ""),
        (100, 150, "0", 30, "tokens_per_day"),
        (0, 200, "0", 30, "tokens_per_month"),
    ):
        key = replace(
            KEY, tokens_per_day=90, tokens_per_month=200, used={day: used_day, month: used_month}
        )
        gate, none = Limits(), lambda *_: 0
        refused = refusal_of(gate.held(key, none))
        assert (refused.code if refused else "") == code
        if refused:
            headers = refused.headers
            assert (refused.status, headers["retry-after"]) == (429, str(seconds))
        else:
            with gate.held(key, none) as headers:
                pass
        assert headers["x-ratelimit-remaining-tokens"] == left, code
        assert headers["x-ratelimit-reset-tokens"] == f"{seconds}s", code
    for instant, first in (
        (datetime(2026, 1, 31, 12, tzinfo=UTC), datetime(2026, 2, 1, tzinfo=UTC)),
        (datetime(2028, 2, 1, tzinfo=UTC), datetime(2028, 3, 1, tzinfo=UTC)),
    ):
        assert key_limits._next_month(instant) == first


def test_a_new_day_and_a_new_month_begin_with_nothing_used(team, alice, small, monkeypatch):
    key = made(team, alice, tokens_per_day=5, tokens_per_month=9)
    for day, tokens in (("2026-12-30", 4), ("2026-12-31", 5), ("2026-11-30", 100)):
        Usage.objects.create(key=key, deployment=small, day=day, prompt_tokens=tokens)
    for instant, code in (
        (LAST_OF_YEAR, "tokens_per_month"),
        (LAST_OF_YEAR + timedelta(minutes=1), ""),
    ):
        for module in (key_limits, usage):
            monkeypatch.setattr(module, "now", lambda instant=instant: instant)
        snapshot = load_snapshot(usage.tokens_used())
        refused = refusal_of(Limits().held(snapshot.keys[key.digest], lambda *_: 0))
        assert (refused.code if refused else "") == code
