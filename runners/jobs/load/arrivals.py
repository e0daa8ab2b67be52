"""Request arrivals: closed loop, Poisson process or burst; and the generator's own delay."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field

from runners.jobs.load.client import RequestOutcome
from runners.load_options import Arrivals, ClosedLoop, OpenLoop

TICK_SECONDS = 0.01
Prompt = Sequence[int]
Ask = Callable[[Prompt, float], Awaitable[RequestOutcome]]
Alive = Callable[[], bool]


@dataclass
class Repetition:
    """Results of one repetition of one load point."""

    began: float
    ended: float = 0.0
    answered: list[RequestOutcome] = field(default_factory=list)
    lags: list[float] = field(default_factory=list)  # delays of the event loop itself

    @property
    def seconds(self) -> float:
        """Return the duration in seconds."""
        return self.ended - self.began


async def repetition(
    arrivals: Arrivals, point: float, prompts: Sequence[Prompt], ask: Ask, alive: Alive, seed: str
) -> Repetition:
    """Send every prompt according to the arrivals and return the answers.

    Once ``alive`` returns False no more requests are sent; pending ones end with their connection.
    """
    result = Repetition(time.monotonic())
    watch = asyncio.ensure_future(_record_lags(result.lags))
    try:
        if isinstance(arrivals, ClosedLoop):
            result.answered = await _closed(prompts, round(point), ask, alive)
        elif isinstance(arrivals, OpenLoop):
            source = random.Random(seed)  # noqa: S311 - the same instants again, no secret
            result.answered = await _open(prompts, point, ask, alive, source)
        else:
            now = time.monotonic()
            result.answered = list(await asyncio.gather(*(ask(each, now) for each in prompts)))
    finally:
        watch.cancel()
    result.ended = time.monotonic()
    return result


async def _closed(
    prompts: Sequence[Prompt], clients: int, send: Ask, alive: Alive
) -> list[RequestOutcome]:
    shared_prompts, answered = iter(prompts), list[RequestOutcome]()

    async def client(queue: Iterator[Prompt]) -> None:
        for each in queue:  # shared by all clients: the next free client takes the next prompt
            answered.append(await send(each, time.monotonic()))
            if not alive():
                return

    await asyncio.gather(*(client(shared_prompts) for _ in range(clients)))
    return answered


async def _open(
    prompts: Sequence[Prompt], rate: float, send: Ask, alive: Alive, source: random.Random
) -> list[RequestOutcome]:
    due, pending = time.monotonic(), list[asyncio.Future[RequestOutcome]]()
    for each in prompts:
        due += source.expovariate(rate)
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        if not alive():
            break
        pending.append(asyncio.ensure_future(send(each, due)))
    return list(await asyncio.gather(*pending))


async def _record_lags(lags: list[float]) -> None:
    """Record how late the event loop wakes, which bounds the error of all its timestamps."""
    while True:
        due = time.monotonic() + TICK_SECONDS
        await asyncio.sleep(TICK_SECONDS)
        lags.append(max(0.0, time.monotonic() - due))
