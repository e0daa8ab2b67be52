"""Collectives in a step's profile: their kind, their mesh axis and their exposed time."""

import bisect
import contextlib
import json
import re
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

from runners.jobs.ranks import Ranks

# Collectives in a step's profile: their kind, their mesh axis and their exposed time.
#
# torch's profiler records the collectives of every layout: all-reduce of replicas and tensor
# slices, all-gathers, shards, all-to-all of experts, sends of pipeline stages and context rings.
# The kind is the one that actually runs: gloo implements reduce-scatter as all-reduce.


KINDS = {
    "all_reduce": "sums (all-reduce)",
    "all_gather": "gathered pieces (all-gather)",
    "reduce_scatter": "sums in shards (reduce-scatter)",
    "all_to_all": "tokens to their experts (all-to-all)",
    "send_recv": "stages and rings (send, receive)",
    "other": "other messages",
}
AXES = {
    "data": "copies and shards of the model",
    "tensor": "shares of matrices",
    "pipeline": "stages",
    "context": "pieces of a sequence",
    "expert": "experts",
    "agreement": "agreement among all ranks",
}
SENDERS = ("pipeline", "context")  # the axes with point-to-point messages
# A waiting thread may continue to compute before the communication thread has recorded the end of
# the message.
HANDOVER = 1000.0  # microseconds
_GLOO = re.compile(r"^gloo:(\w+)")
_NCCL = re.compile(r"^nccl(?:Dev)?Kernel_(AllReduce|AllGather|ReduceScatter|SendRecv|\w+)")
_WORDS = (
    ("all_to_all", ("all_to_all", "alltoall")),
    ("reduce_scatter", ("reduce_scatter", "reducescatter")),
    ("all_gather", ("all_gather", "allgather")),
    ("all_reduce", ("all_reduce", "allreduce")),
    ("send_recv", ("send", "recv")),
)


class Span(NamedTuple):
    """The start and end of an activity, in microseconds of one clock."""

    begin: float
    end: float


class Collective(NamedTuple):
    """One collective: its kind, its time span, and its mesh axis if known."""

    kind: str
    span: Span
    axis: str = ""


class RecordedCollective(NamedTuple):
    """A collective in torch's flight recorder: its name and its process group."""

    name: str
    group: str


class Timeline(NamedTuple):
    """One rank's step: its messages, and when it computed."""

    messages: list[Collective]
    computing: list[Span]
    on_device: bool  # messages are kernels next to others; otherwise threads wait for them

    def exposed_microseconds(self, messages: Iterable[Collective]) -> float:
        """Return the microseconds of these messages that no computation of this rank overlaps."""
        spans = [each.span for each in messages]
        if self.on_device:
            return covered_microseconds([*spans, *self.computing]) - covered_microseconds(
                self.computing
            )
        return covered_microseconds(blocked_microseconds(spans, merge_spans(self.computing)))


def kind_of(name: str) -> str | None:
    """Return the kind of a collective by its name in a profile; None for other events."""
    match = _GLOO.match(name) or _NCCL.match(name)
    if match is None:
        return None
    operation = match[1].lower()
    return next((kind for kind, words in _WORDS if any(x in operation for x in words)), "other")


def merge_spans(spans: Iterable[Span]) -> list[Span]:
    """Return the union of the spans as disjoint spans, in order."""
    disjoint: list[Span] = []
    for each in sorted(spans):
        if disjoint and each.begin <= disjoint[-1].end:
            disjoint[-1] = Span(disjoint[-1].begin, max(disjoint[-1].end, each.end))
        else:
            disjoint.append(each)
    return disjoint


def covered_microseconds(spans: Iterable[Span]) -> float:
    """Return the microseconds that at least one span covers."""
    return sum(each.end - each.begin for each in merge_spans(spans))


def blocked_microseconds(messages: Iterable[Span], computing: Sequence[Span]) -> list[Span]:
    """Return how long each message blocked its rank: the compute pause in which it ended.

    A thread that computes before a message has ended did not wait for it. ``computing``: disjoint
    spans, in order.
    """
    begins = [each.begin for each in computing]
    pauses = []
    for each in messages:
        at = bisect.bisect_right(begins, each.end) - 1
        if at >= 0 and each.end < computing[at].end and each.end - begins[at] < HANDOVER:
            at -= 1
        since = computing[at].end if at >= 0 else each.begin
        until = begins[at + 1] if at + 1 < len(begins) else each.end
        pause = Span(max(each.begin, since), min(each.end, until))
        if pause.begin < pause.end:
            pauses.append(pause)
    return pauses


def timeline_of(
    events: Iterable[FunctionEvent],
    axes: Mapping[str, str],
    recorded: Sequence[RecordedCollective],
) -> Timeline:
    """Return a rank's messages and compute spans from its profile.

    ``axes``: the mesh axis of each process group, by the group's name. ``recorded``: the
    collectives of the same time in call order.
    """
    every = list(events)
    kernels = [each for each in every if each.device_type.name != "CPU"]
    exchanges = [each for each in every if kind_of(each.name) is not None]
    groups = _groups(exchanges, [each for each in recorded if each.group in axes])
    senders = {each for each in axes.values() if each in SENDERS}
    sender = senders.pop() if len(senders) == 1 else ""
    messages = []
    for each, group in zip(exchanges, groups, strict=True):
        kind = kind_of(each.name) or "other"
        axis = axes.get(group, sender if kind == "send_recv" else "")
        messages.append(Collective(kind, _span(each), axis))
    if kernels:
        computing = [_span(each) for each in kernels if _is_computing(each)]
        return Timeline(messages, computing, on_device=True)
    return Timeline(messages, _computing(every, exchanges), on_device=False)


def recorded_exchanges(since_ns: int) -> list[RecordedCollective]:
    """Return torch's flight recorder entries after an instant, in nanoseconds since 1970.

    It is on unless ``TORCH_FR_BUFFER_SIZE`` is 0; gloo records no sends and receives.
    """
    dump = getattr(torch._C._distributed_c10d, "_dump_fr_trace_json", None)  # noqa: SLF001 - torch has no public name for it
    entries = json.loads(dump()).get("entries", []) if dump else []
    records = sorted(
        (each["time_created_ns"], each["profiling_name"], each["process_group"][0])
        for each in entries
        if each["time_created_ns"] >= since_ns
    )
    return [RecordedCollective(name, group) for _, name, group in records]


def _groups(
    exchanges: Sequence[FunctionEvent], recorded: Sequence[RecordedCollective]
) -> list[str]:
    """Return the process group of each collective; empty where unknown.

    NCCL's events contain it. gloo's do not: they are matched by their order among those of one
    name, and since each group has its own threads, by the majority of a thread's messages.
    """
    named: dict[str, list[str]] = defaultdict(list)
    for entry in recorded:
        named[entry.name].append(entry.group)
    events_by_name: dict[str, list[FunctionEvent]] = defaultdict(list)
    for each in sorted(exchanges, key=lambda each: each.time_range.start):
        events_by_name[each.name].append(each)
    votes: dict[int, Counter[str]] = defaultdict(Counter)
    for name, same_name in events_by_name.items():
        if len(same_name) == len(named[name]):
            for each, group in zip(same_name, named[name], strict=True):
                votes[each.thread][group] += 1
    return [_process_group(each) or _most(votes[each.thread], each) for each in exchanges]


def _process_group(event: FunctionEvent) -> str:
    metadata = event.event_metadata
    return (metadata.process_group_name or "") if metadata else ""


def _most(votes: Counter[str], event: FunctionEvent) -> str:
    if not votes or kind_of(event.name) == "send_recv":
        return ""
    return votes.most_common(1)[0][0]


def _computing(events: Iterable[FunctionEvent], exchanges: Iterable[FunctionEvent]) -> list[Span]:
    """Return when CPU threads computed; copies within a message belong to the message."""
    within: dict[int, list[Span]] = defaultdict(list)
    for each in exchanges:
        if kind_of(each.name) != "send_recv":
            within[each.thread].append(_span(each))
    threads = {thread: merge_spans(spans) for thread, spans in within.items()}
    return [
        _span(each)
        for each in events
        if each.name.startswith("aten::") and not _is_within(_span(each), threads.get(each.thread))
    ]


def _is_within(span: Span, others: Sequence[Span] | None) -> bool:
    if not others:
        return False
    at = bisect.bisect_right(others, (span.begin, float("inf"))) - 1
    return at >= 0 and span.end <= others[at].end


def _is_computing(kernel: FunctionEvent) -> bool:
    is_copy = kernel.name.startswith(("Memcpy", "Memset"))
    return not (is_copy or kind_of(kernel.name) or kernel.is_user_annotation)


def _span(event: FunctionEvent) -> Span:
    return Span(event.time_range.start, event.time_range.end)


# The share of a step that communication takes, and its exposed part.
#
# torch's profiler runs on the lead in one of many steps; the other steps are not affected. See
# ``messages`` for the evaluation.


FIRST_LOOK = 4  # after the steps that allocate and connect
EVERY_STEPS = 200  # a profiled step takes up to twice as long: 0.5 % in total
TOTAL, EXPOSED = "communication_ratio", "exposed_communication_ratio"


class CollectiveProfiler:
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
        self._news = communication_ratios(timeline, microseconds)
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


def communication_ratios(timeline: Timeline, microseconds: float) -> dict[str, float]:
    """Return the communication shares of a step: in total, by kind and by axis."""
    kinds, axes = (_by(timeline.messages, key) for key in ("kind", "axis"))
    spans = {TOTAL: timeline.messages}
    spans |= {f"communication_{kind}_ratio": each for kind, each in kinds.items()}
    spans |= {f"communication_{axis}_ratio": each for axis, each in axes.items() if axis}
    microseconds_by_name = {
        name: covered_microseconds(each.span for each in those) for name, those in spans.items()
    }
    microseconds_by_name[EXPOSED] = timeline.exposed_microseconds(timeline.messages)
    microseconds_by_name |= {
        f"exposed_communication_{axis}_ratio": timeline.exposed_microseconds(each)
        for axis, each in axes.items()
        if axis
    }
    return {
        name: min(1.0, each / max(1.0, microseconds))
        for name, each in microseconds_by_name.items()
    }


def _by(messages: Iterable[Collective], key: str) -> dict[str, list[Collective]]:
    grouped: dict[str, list[Collective]] = defaultdict(list)
    for each in messages:
        grouped[getattr(each, key)].append(each)
    return grouped
