"""Which share of a step messages between ranks take, by kind, from one step in many.

torch's profiler records each exchange of every layout, in whatever thread it passes: sums of
copies and of matrices (all_reduce), gathered pieces, shards, tokens on their way to experts, what
stages and rings send. A kind is that of what really passes: gloo makes a reduce-scatter of an
all-reduce. Steps between two looks are not touched.
"""

import contextlib
import re
import statistics
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from runners.jobs.ranks import Ranks

FIRST_LOOK = 4  # steps are behind it: the first ones allocate, and meet
EVERY_STEPS = 200  # a look takes up to twice a step: half a percent of them
KINDS = {
    "all_reduce": "sums (all-reduce)",
    "all_gather": "gathered pieces (all-gather)",
    "reduce_scatter": "sums in shards (reduce-scatter)",
    "all_to_all": "tokens to their experts (all-to-all)",
    "send_recv": "stages and rings (send, receive)",
    "other": "other messages",
}
_GLOO = re.compile(r"^gloo:(\w+)")
_NCCL = re.compile(r"^nccl(?:Dev)?Kernel_(AllReduce|AllGather|ReduceScatter|SendRecv|\w+)")
_WORDS = (
    ("all_to_all", ("all_to_all", "alltoall")),
    ("reduce_scatter", ("reduce_scatter", "reducescatter")),
    ("all_gather", ("all_gather", "allgather")),
    ("all_reduce", ("all_reduce", "allreduce")),
    ("send_recv", ("send", "recv")),
)


class Message(NamedTuple):
    """One exchange: its kind, and from when to when it was under way, in microseconds."""

    kind: str
    begin: float
    end: float


def kind_of(name: str) -> str | None:
    """Return the kind of an exchange by its name in a profile; None where it is none."""
    found = _GLOO.match(name) or _NCCL.match(name)
    if found is None:
        return None
    said = found[1].lower()
    return next((kind for kind, words in _WORDS if any(x in said for x in words)), "other")


def messages_of(events: Iterable[Any]) -> list[Message]:
    """Return the exchanges among a profile's events."""
    named = ((kind_of(each.name), each.time_range) for each in events)
    return [Message(kind, span.start, span.end) for kind, span in named if kind is not None]


def covered(messages: Iterable[Message]) -> float:
    """Return the microseconds in which at least one of the messages was under way."""
    total, until = 0.0, float("-inf")
    for each in sorted(messages, key=lambda each: each.begin):
        total += max(0.0, each.end - max(each.begin, until))
        until = max(until, each.end)
    return total


class MessagesWatch:
    """Looks at one step in many on the lead, which waits for the others as they do for it."""

    def __init__(self, ranks: Ranks) -> None:
        self._is_on = ranks.is_lead and not ranks.is_alone
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
            began = time.perf_counter()
            yield
            microseconds = 1e6 * (time.perf_counter() - began)
        self._take(messages_of(looked.events() or ()), microseconds)

    def news(self) -> dict[str, float]:
        """Return the shares of the step that was looked at last, once."""
        news, self._news = self._news, {}
        return {_name(kind): share for kind, share in news.items()}

    def figures(self) -> dict[str, float]:
        """Return the median share of all steps that were looked at; nothing without one."""
        if not self._looks:
            return {}
        return {_name("all"): statistics.median(each["all"] for each in self._looks)}

    def note(self) -> str:
        """Return in words how it was measured, and the kinds."""
        kinds = {kind for each in self._looks for kind in each} - {"all"}
        shares = {
            kind: statistics.median(each.get(kind, 0.0) for each in self._looks) for kind in kinds
        }
        ordered = sorted(shares, key=lambda kind: -shares[kind])
        said = ", ".join(f"{KINDS[kind]} {100 * shares[kind]:.1f} %" for kind in ordered)
        return (
            "share of a step in which messages between ranks were under way, also beside "
            f"computing, as the first rank saw it: torch's profiler over {len(self._looks)} of "
            f"{self._num_steps} steps, the median; {said or 'none passed'}"
        )

    def _take(self, messages: list[Message], microseconds: float) -> None:
        by_kind: dict[str, list[Message]] = defaultdict(list)
        for each in messages:
            by_kind[each.kind].append(each)
        spans = {"all": messages, **by_kind}
        self._news = {
            kind: min(1.0, covered(found) / max(1.0, microseconds))
            for kind, found in spans.items()
        }
        self._looks.append(self._news)


def _name(kind: str) -> str:
    return "communication_ratio" if kind == "all" else f"communication_{kind}_ratio"
