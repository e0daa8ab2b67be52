"""A live page changes as one: state line, cards, captions, tables and points of one answer."""

import json
import re

import pytest

from tests.webapp.conftest import batch_of
from webapp.core.clock import now_ms
from webapp.jobs.ingest import events_accept
from webapp.jobs.models import Job

pytestmark = pytest.mark.django_db(databases="__all__")
FRESH = re.compile(r'<script id="fresh-points" type="application/json">(.*?)</script>')
BASE_MS = 1_700_000_000_000


def refreshed(client, job: Job, tab: str = "", since: object = 0) -> str:
    address = f"/jobs/{job.pk}/{tab}?since={since}"
    return client.get(address, headers={"HX-Request": "true"}).content.decode()


def points(page: str) -> dict[str, list[list[float]]]:
    return json.loads(FRESH.search(page)[1])


def region(page: str, name: str) -> str:
    found = re.search(
        rf'data-region="{name}"[^>]*>(.*?)</(?:p|div|section|tbody)>', page, re.DOTALL
    )
    return " ".join(
        re.sub(r"<[^>]+>", " ", found[1]).replace("\N{NARROW NO-BREAK SPACE}", "").split()
    )


@pytest.fixture
def go_on(running, attempt):
    """Let the running job report more steps, each of another speed, and its progress."""

    def more(step: int, speed: float) -> None:
        values = {"loss": float(step), "tokens_per_second": speed}
        progress = {"done": float(step), "total": 120.0, "unit": "steps", "eta_seconds": 9.0}
        events = (
            ("metric", {"source": "job", "values": values, "step": step}),
            ("progress", progress),
        )
        attempt.refresh_from_db()
        batch = batch_of(attempt, *events, first=attempt.acked_seq + 1)
        events_accept(host=attempt.host, batch=batch)

    return more


def test_one_answer_carries_the_state_the_cards_the_captions_and_the_points(
    as_alice, running, go_on
):
    before = refreshed(as_alice, running)
    last = max(t for column in points(before).values() for t, _ in column)
    for step in range(50, 70):
        go_on(step, 9000.0)

    after = refreshed(as_alice, running, since=last)

    assert "69 of 120 steps" in after
    assert "9000 tok/s" in region(after, "words-tokens_per_second")
    assert "9000" in region(after, "table-tokens_per_second")
    assert re.search(r"<dt>Tokens per second</dt>\s*<dd class=\"value\">9.000<", after)
    speeds = [value for _, value in points(after)["tokens_per_second"]]
    assert speeds[-20:] == [9000.0] * 20


def test_a_card_follows_each_batch_of_the_stream(as_alice, running, go_on):
    shown = set()
    for step in range(50, 90, 10):
        for at in range(10):
            go_on(step + at, 100.0 * step)
        shown.add(region(refreshed(as_alice, running), "words-loss"))

    assert len(shown) == 4


def test_the_answer_says_of_which_instant_it_is(as_alice, running):
    before = now_ms()

    as_of = int(re.search(r'data-page-as-of="(\d+)"', refreshed(as_alice, running))[1])

    assert before <= as_of <= now_ms()


def test_points_that_the_page_has_are_not_sent_again(as_alice, running):
    everything = points(refreshed(as_alice, running))["loss"]

    rest = points(refreshed(as_alice, running, since=int(everything[2][0])))["loss"]

    assert rest == everything[2:]


def test_the_captions_of_the_metrics_tab_change_with_its_points(as_alice, running, go_on):
    for step in range(50, 70):
        go_on(step, 9000.0)

    page = refreshed(as_alice, running, "metrics/")

    assert "9000 tok/s" in region(page, "words-tokens_per_second")
    assert points(page)["tokens_per_second"][-1][1] == 9000.0


@pytest.mark.parametrize("since", ["", "x", "-1", "1e9", "9" * 16, "1;drop"])
def test_an_instant_that_is_none_brings_no_points(as_alice, running, since):
    page = refreshed(as_alice, running, since=since)

    assert FRESH.search(page) is None
    assert 'data-region="figures"' in page
