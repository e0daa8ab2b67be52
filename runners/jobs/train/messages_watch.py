"""The share of a step that communication takes, and its exposed part.

torch's profiler runs on the lead in one of many steps; the other steps are not affected. See
``messages`` for the evaluation.
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

FIRST_LOOK = 4  # after the steps that allocate and connect
EVERY_STEPS = 200  # a profiled step takes up to twice as long: 0.5 % in total
TOTAL, EXPOSED = "communication_ratio", "exposed_communication_ratio"


class MessagesWatch:
    """Profiles one of many steps on the lead; the other ranks wait for it in the collectives."""

    def __init__(
        self, ranks: Ranks, axes: Callable[[], Mapping[str, str]] = dict[str, str]
    ) -> None:
        """Profile if there are several ranks; ``axes`` returns the mesh axis per process group."""
        self._is_on = ranks.is_lead and not ranks.is_alone
        self._axes = axes
        self._num_steps = 0
        self._profiles: list[dict[str, float]] = []
        self._news: dict[str, float] = {}

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Profile the step within the block, if one is due."""
        at, self._num_steps = self._num_steps, self._num_steps + 1
        if not self._is_on or at < FIRST_LOOK or (at - FIRST_LOOK) % EVERY_STEPS:
            yield
            return
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        with profile(activities=activities) as profiler:
            began, since = time.perf_counter(), time.time_ns()
            yield
            microseconds = 1e6 * (time.perf_counter() - began)
        recorded = recorded_exchanges(since)
        timeline = timeline_of(profiler.events() or (), self._axes(), recorded)
        self._news = shares_of(timeline, microseconds)
        self._profiles.append(self._news)

    def news(self) -> dict[str, float]:
        """Return the shares of the last profiled step, once."""
        news, self._news = self._news, {}
        return news

    def figures(self) -> dict[str, float]:
        """Return the median shares of all profiled steps; empty without one."""
        return {name: self._median(name) for name in (TOTAL, EXPOSED)} if self._profiles else {}

    def notes(self) -> dict[str, str]:
        """Return a note on how each figure was measured; empty without one."""
        if not self._profiles:
            return {}
        method = (
            f"as the first rank saw it: torch's profiler over {len(self._profiles)} of "
            f"{self._num_steps} steps, the median"
        )
        return {
            TOTAL: "share of a step in which messages between ranks were under way, also beside "
            f"computing, {method}; {self._listed(KINDS, 'communication_{}_ratio')}",
            EXPOSED: "share of a step in which messages were under way and nothing was computed "
            "beside them (on processors: in which a thread waited for one), "
            f"{method}; {self._listed(AXES, 'exposed_communication_{}_ratio')}",
        }

    def _listed(self, words: Mapping[str, str], name: str) -> str:
        names = {key: name.format(key) for key in words}
        present = {
            key: each for key, each in names.items() if any(each in x for x in self._profiles)
        }
        shares = {key: self._median(each) for key, each in present.items()}
        ordered = sorted(shares, key=lambda key: -shares[key])
        text = ", ".join(f"{words[key]} {100 * shares[key]:.1f} %" for key in ordered)
        return text or "their axis is unknown"

    def _median(self, name: str) -> float:
        return statistics.median(each.get(name, 0.0) for each in self._profiles)


def shares_of(found: Timeline, microseconds: float) -> dict[str, float]:
    """Return the communication shares of a step: in total, by kind and by axis."""
    kinds, axes = (_by(found.messages, key) for key in ("kind", "axis"))
    spans = {TOTAL: found.messages}
    spans |= {f"communication_{kind}_ratio": each for kind, each in kinds.items()}
    spans |= {f"communication_{axis}_ratio": each for axis, each in axes.items() if axis}
    microseconds_by_name = {
        name: covered(each.span for each in those) for name, those in spans.items()
    }
    microseconds_by_name[EXPOSED] = found.exposed(found.messages)
    microseconds_by_name |= {
        f"exposed_communication_{axis}_ratio": found.exposed(each)
        for axis, each in axes.items()
        if axis
    }
    return {
        name: min(1.0, each / max(1.0, microseconds))
        for name, each in microseconds_by_name.items()
    }


def _by(messages: Iterable[Message], key: str) -> dict[str, list[Message]]:
    grouped: dict[str, list[Message]] = defaultdict(list)
    for each in messages:
        grouped[getattr(each, key)].append(each)
    return grouped
