"""Which share of a step messages between ranks take, and which of it nothing hides.

One step in many is looked at by torch's profiler, on the lead; steps between two looks are not
touched. See ``messages`` for what is read from it.
"""

import contextlib
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch.profiler import ProfilerActivity, profile

from runners.jobs.ranks import Ranks
from runners.jobs.train.messages import (
    AXES,
    KINDS,
    Message,
    Timeline,
    covered,
    recorded_exchanges,
    timeline_of,
)

FIRST_LOOK = 4  # steps are behind it: the first ones allocate, and meet
EVERY_STEPS = 200  # a look takes up to twice a step: half a percent of them
TOTAL, EXPOSED = "communication_ratio", "exposed_communication_ratio"


class MessagesWatch:
    """Looks at one step in many on the lead, which waits for the others as they do for it."""

    def __init__(
        self, ranks: Ranks, axes: Callable[[], Mapping[str, str]] = dict[str, str]
    ) -> None:
        """Look where there are several ranks; ``axes`` names the axis of each group of theirs."""
        self._is_on = ranks.is_lead and not ranks.is_alone
        self._axes = axes
        self._num_steps = 0
        self._looks: list[dict[str, float]] = []
        self._news: dict[str, float] = {}

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Look at the step within the block, if it is time."""
        at, self._num_steps = self._num_steps, self._num_steps + 1
        if not self._is_on or at < FIRST_LOOK or (at - FIRST_LOOK) % EVERY_STEPS:
            yield
            return
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        with profile(activities=activities) as looked:
            began, since = time.perf_counter(), time.time_ns()
            yield
            microseconds = 1e6 * (time.perf_counter() - began)
        recorded = recorded_exchanges(since)
        found = timeline_of(looked.events() or (), self._axes(), recorded)
        self._news = shares_of(found, microseconds)
        self._looks.append(self._news)

    def news(self) -> dict[str, float]:
        """Return the shares of the step that was looked at last, once."""
        news, self._news = self._news, {}
        return news

    def figures(self) -> dict[str, float]:
        """Return the median shares of all steps that were looked at; nothing without one."""
        return {name: self._median(name) for name in (TOTAL, EXPOSED)} if self._looks else {}

    def notes(self) -> dict[str, str]:
        """Return in words how each figure was measured; nothing without one."""
        if not self._looks:
            return {}
        how = (
            f"as the first rank saw it: torch's profiler over {len(self._looks)} of "
            f"{self._num_steps} steps, the median"
        )
        return {
            TOTAL: "share of a step in which messages between ranks were under way, also beside "
            f"computing, {how}; {self._listed(KINDS, 'communication_{}_ratio')}",
            EXPOSED: "share of a step in which messages were under way and nothing was computed "
            "beside them (on processors: in which a thread waited for one), "
            f"{how}; {self._listed(AXES, 'exposed_communication_{}_ratio')}",
        }

    def _listed(self, words: Mapping[str, str], name: str) -> str:
        names = {key: name.format(key) for key in words}
        seen = {key: each for key, each in names.items() if any(each in x for x in self._looks)}
        shares = {key: self._median(each) for key, each in seen.items()}
        ordered = sorted(shares, key=lambda key: -shares[key])
        said = ", ".join(f"{words[key]} {100 * shares[key]:.1f} %" for key in ordered)
        return said or "along which axis they went is not told"

    def _median(self, name: str) -> float:
        return statistics.median(each.get(name, 0.0) for each in self._looks)


def shares_of(found: Timeline, microseconds: float) -> dict[str, float]:
    """Return the shares of a step's microseconds: in all, by kind and by axis."""
    kinds, axes = (_by(found.messages, key) for key in ("kind", "axis"))
    spans = {TOTAL: found.messages}
    spans |= {f"communication_{kind}_ratio": each for kind, each in kinds.items()}
    spans |= {f"communication_{axis}_ratio": each for axis, each in axes.items() if axis}
    told = {name: covered(each.span for each in those) for name, those in spans.items()}
    told[EXPOSED] = found.exposed(found.messages)
    told |= {
        f"exposed_communication_{axis}_ratio": found.exposed(each)
        for axis, each in axes.items()
        if axis
    }
    return {name: min(1.0, each / max(1.0, microseconds)) for name, each in told.items()}


def _by(messages: Iterable[Message], key: str) -> dict[str, list[Message]]:
    found: dict[str, list[Message]] = defaultdict(list)
    for each in messages:
        found[getattr(each, key)].append(each)
    return found
