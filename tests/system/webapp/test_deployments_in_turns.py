"""Deployments on the one device of a real site: every request is answered, in turns."""

import asyncio
import random
import statistics
import sys
import time
from collections import Counter

import httpx
import pytest

from tests.system.webapp.test_by_name import repositories, site  # noqa: F401 (fixtures)
from tests.system.webapp.test_deployments_by_name import MESSAGES, Deployed, client

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
KINDS = ("llama", "qwen3", "gemma3_text", "qwen3_moe")
REQUESTS, CLIENTS = 200, 100  # so many at once, that a turn answers many and few turns do
HOLD_SECONDS = 900.0
FORECAST = 1.5  # factor between a wait that is forecast and the true one
BUSY_LOADS = 2  # of each of two that always have requests: each has given way and come back


class Watch:
    """What the list of models says over time: loads, and their forecasts."""

    def __init__(self) -> None:
        self.loads: Counter[str] = Counter()
        self.forecasts: list[tuple[float, float]] = []  # the first one of a wake, and the truth
        self._woken: dict[str, tuple[float, float | None]] = {}

    async def keep(self, http: httpx.AsyncClient, deployed: Deployed) -> None:
        while True:
            answer = await http.get(f"{deployed.base}/models", headers=deployed.headers)
            for card in answer.json()["data"]:
                self._note(card["id"], card["state"], card.get("seconds_to_go"))
            await asyncio.sleep(0.25)

    def _note(self, name: str, state: str, seconds_to_go: float | None) -> None:
        if state == "loading":
            self._woken.setdefault(name, (time.monotonic(), seconds_to_go))
        elif state == "ready" and name in self._woken:
            since, forecast = self._woken.pop(name)
            self.loads[name] += 1
            if forecast is not None:
                self.forecasts.append((forecast, time.monotonic() - since))


def test_four_deployments_answer_every_request_on_one_device(site):
    waits, watch = asyncio.run(send_requests(deployed_of(site, *KINDS)[0]))
    assert len(waits) == REQUESTS
    sys.stderr.write(f"loads {watch.loads}, forecasts {watch.forecasts}\n")
    assert len(watch.loads) == len(KINDS)


def test_two_that_always_have_requests_change_after_their_turns(site):
    waits, watch = asyncio.run(hammered(deployed_of(site, *KINDS[:2])))
    assert max(waits) < HOLD_SECONDS
    sys.stderr.write(f"loads {watch.loads}, forecasts {watch.forecasts}\n")
    ratios = [seconds / forecast for forecast, seconds in watch.forecasts]  # from a second load on
    assert 1 / FORECAST <= statistics.median(ratios) <= FORECAST, watch.forecasts


def deployed_of(site, *kinds: str) -> list[Deployed]:
    return [
        Deployed(site, kind, f"tiny/{kind}", launch={"shared": False}, hold_seconds=HOLD_SECONDS)
        for kind in kinds
    ]


async def send_requests(deployed: Deployed) -> tuple[list[float], Watch]:
    """Send the requests, each client one after the other; return how long each took."""
    rng = random.Random(7)  # noqa: S311 -- an order, no secret
    names = [KINDS[at % len(KINDS)] for at in range(REQUESTS)]
    rng.shuffle(names)
    waits: list[float] = []
    watch = Watch()

    async def ask_on(http: httpx.AsyncClient) -> None:
        while names:
            body = {"model": names.pop(), "messages": MESSAGES, "max_tokens": 8}
            since = time.monotonic()
            answer = await deployed.ask(http, "/chat/completions", body)
            assert answer.status_code == 200, answer.text
            waits.append(time.monotonic() - since)

    async with client() as http:
        http.timeout = httpx.Timeout(HOLD_SECONDS)
        watching = asyncio.create_task(watch.keep(http, deployed))
        await asyncio.gather(*(ask_on(http) for _ in range(CLIENTS)))
        watching.cancel()
    return waits, watch


async def hammered(pair: list[Deployed]) -> tuple[list[float], Watch]:
    """Send requests and streams to each of two without a pause, until both have had some turns."""
    waits: list[float] = []
    watch = Watch()

    def is_over() -> bool:
        return min(watch.loads[each.name] for each in pair) >= BUSY_LOADS

    async def ask_on(http: httpx.AsyncClient, deployed: Deployed) -> None:
        while not is_over():
            since = time.monotonic()
            body = {"messages": MESSAGES, "max_tokens": 8}
            answer = await deployed.ask(http, "/chat/completions", body)
            assert answer.status_code == 200, answer.text
            waits.append(time.monotonic() - since)

    async def stream_on(http: httpx.AsyncClient, deployed: Deployed) -> None:
        while not is_over():
            lines = [line async for line in deployed.stream(http)]
            assert lines[-1] == "[DONE]", lines[-1]

    async with client() as http:
        http.timeout = httpx.Timeout(HOLD_SECONDS)
        watching = asyncio.create_task(watch.keep(http, pair[0]))
        kinds = [work for work in (ask_on, stream_on) for _ in range(2)]
        await asyncio.gather(*(work(http, each) for each in pair for work in kinds))
        watching.cancel()
    return waits, watch
