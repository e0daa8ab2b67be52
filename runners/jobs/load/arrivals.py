"""Who asks when: clients who ask again, requests at random instants, a burst; and how late."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field

from runners.jobs.load.client import Answered
from runners.load_options import Arrivals, ClosedLoop, OpenLoop

TICK_SECONDS = 0.01
Prompt = Sequence[int]
Ask = Callable[[Prompt, float], Awaitable[Answered]]
Alive = Callable[[], bool]


@dataclass
class Repetition:
    """One repetition of one point."""

    began: float
    ended: float = 0.0
    answered: list[Answered] = field(default_factory=list)
    lags: list[float] = field(default_factory=list)  # by how much the event loop itself was late

    @property
    def seconds(self) -> float:
        """Return how long it took."""
        return self.ended - self.began


async def repetition(
    arrivals: Arrivals, point: float, prompts: Sequence[Prompt], ask: Ask, alive: Alive, seed: str
) -> Repetition:
    """Send every prompt in its turn and return what came of them.

    Once ``alive`` says no, nobody asks any more; whoever waits hears from his connection.
    """
    found = Repetition(time.monotonic())
    watch = asyncio.ensure_future(_watch(found.lags))
    try:
        if isinstance(arrivals, ClosedLoop):
            found.answered = await _closed(prompts, round(point), ask, alive)
        elif isinstance(arrivals, OpenLoop):
            source = random.Random(seed)  # noqa: S311 - the same instants again, no secret
            found.answered = await _open(prompts, point, ask, alive, source)
        else:
            now = time.monotonic()
            found.answered = list(await asyncio.gather(*(ask(each, now) for each in prompts)))
    finally:
        watch.cancel()
    found.ended = time.monotonic()
    return found


async def _closed(
    prompts: Sequence[Prompt], clients: int, ask: Ask, alive: Alive
) -> list[Answered]:
    waiting, answered = iter(prompts), list[Answered]()

    async def client(mine: Iterator[Prompt]) -> None:
        for each in mine:  # one iterator for all: whoever is free takes the next
            answered.append(await ask(each, time.monotonic()))
            if not alive():
                return

    await asyncio.gather(*(client(waiting) for _ in range(clients)))
    return answered


async def _open(
    prompts: Sequence[Prompt], rate: float, ask: Ask, alive: Alive, source: random.Random
) -> list[Answered]:
    due, asked = time.monotonic(), list[asyncio.Future[Answered]]()
    for each in prompts:
        due += source.expovariate(rate)
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        if not alive():
            break
        asked.append(asyncio.ensure_future(ask(each, due)))
    return list(await asyncio.gather(*asked))


async def _watch(lags: list[float]) -> None:
    """Note how late this loop wakes: the error bar of every instant that it takes."""
    while True:
        due = time.monotonic() + TICK_SECONDS
        await asyncio.sleep(TICK_SECONDS)
        lags.append(max(0.0, time.monotonic() - due))
