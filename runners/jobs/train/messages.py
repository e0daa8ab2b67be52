"""Messages between ranks in a profile of one step: their kind, their axis, and what hides them.

torch's profiler records each exchange of every layout, in whatever thread it passes: sums of
copies and of matrices (all_reduce), gathered pieces, shards, tokens on their way to experts, what
stages and rings send. A kind is that of what really passes: gloo makes a reduce-scatter of an
all-reduce.
"""

import bisect
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch.autograd.profiler_util import FunctionEvent

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
    "agreement": "what all ranks agree on",
}
SENDERS = ("pipeline", "context")  # the axes along which one rank sends to another
# A waiting thread goes on when a message is done, and may have begun to compute by the time that
# the message's own thread has noted its end.
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
    """From when to when something was under way, in microseconds of one clock."""

    begin: float
    end: float


class Message(NamedTuple):
    """One exchange: its kind, when it was under way, and along which axis, where that is known."""

    kind: str
    span: Span
    axis: str = ""


class Recorded(NamedTuple):
    """An exchange as torch's flight recorder has it: its name, and its group's."""

    name: str
    group: str


class Timeline(NamedTuple):
    """What one rank did in a step: its messages, and when it computed."""

    messages: list[Message]
    computing: list[Span]
    on_device: bool  # the messages are kernels beside others; else threads wait for them

    def exposed(self, messages: Iterable[Message]) -> float:
        """Return the microseconds of these messages that no computing of this rank hides."""
        spans = [each.span for each in messages]
        if self.on_device:
            return covered([*spans, *self.computing]) - covered(self.computing)
        return covered(awaited(spans, merged(self.computing)))


def kind_of(name: str) -> str | None:
    """Return the kind of an exchange by its name in a profile; None where it is none."""
    found = _GLOO.match(name) or _NCCL.match(name)
    if found is None:
        return None
    said = found[1].lower()
    return next((kind for kind, words in _WORDS if any(x in said for x in words)), "other")


def merged(spans: Iterable[Span]) -> list[Span]:
    """Return the same time as spans that are apart, in order."""
    found: list[Span] = []
    for each in sorted(spans):
        if found and each.begin <= found[-1].end:
            found[-1] = Span(found[-1].begin, max(found[-1].end, each.end))
        else:
            found.append(each)
    return found


def covered(spans: Iterable[Span]) -> float:
    """Return the microseconds in which at least one of the spans was under way."""
    return sum(each.end - each.begin for each in merged(spans))


def awaited(messages: Iterable[Span], computing: Sequence[Span]) -> list[Span]:
    """Return how long each message kept its rank: the pause in computing in which it ended.

    A thread that computes again before a message has ended did not wait for it. ``computing``:
    spans that are apart, in order.
    """
    begins = [each.begin for each in computing]
    found = []
    for each in messages:
        at = bisect.bisect_right(begins, each.end) - 1
        if at >= 0 and each.end < computing[at].end and each.end - begins[at] < HANDOVER:
            at -= 1
        since = computing[at].end if at >= 0 else each.begin
        until = begins[at + 1] if at + 1 < len(begins) else each.end
        pause = Span(max(each.begin, since), min(each.end, until))
        if pause.begin < pause.end:
            found.append(pause)
    return found


def timeline_of(
    events: Iterable[FunctionEvent], axes: Mapping[str, str], recorded: Sequence[Recorded]
) -> Timeline:
    """Return what a rank did by the events of its profile.

    ``axes``: the axis of each group of ranks by the group's name. ``recorded``: the exchanges of
    the same time in the order in which they were asked for.
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
        messages.append(Message(kind, _span(each), axis))
    if kernels:
        computing = [_span(each) for each in kernels if _is_computing(each)]
        return Timeline(messages, computing, on_device=True)
    return Timeline(messages, _computing(every, exchanges), on_device=False)


def recorded_exchanges(since_ns: int) -> list[Recorded]:
    """Return what torch's flight recorder noted after an instant, in nanoseconds since 1970.

    It is on unless ``TORCH_FR_BUFFER_SIZE`` is 0; gloo notes no sends and receives there.
    """
    dump = getattr(torch._C._distributed_c10d, "_dump_fr_trace_json", None)  # noqa: SLF001 - torch has no public name for it
    entries = json.loads(dump()).get("entries", []) if dump else []
    found = sorted(
        (each["time_created_ns"], each["profiling_name"], each["process_group"][0])
        for each in entries
        if each["time_created_ns"] >= since_ns
    )
    return [Recorded(name, group) for _, name, group in found]


def _groups(exchanges: Sequence[FunctionEvent], recorded: Sequence[Recorded]) -> list[str]:
    """Return the name of the group that each exchange was in; nothing where it is not told.

    NCCL's events carry it. gloo's do not: they are told by the order among those of one name,
    and since each group has threads of its own, by what most messages of a thread are.
    """
    named: dict[str, list[str]] = defaultdict(list)
    for entry in recorded:
        named[entry.name].append(entry.group)
    seen: dict[str, list[FunctionEvent]] = defaultdict(list)
    for each in sorted(exchanges, key=lambda each: each.time_range.start):
        seen[each.name].append(each)
    votes: dict[int, Counter[str]] = defaultdict(Counter)
    for name, found in seen.items():
        if len(found) == len(named[name]):
            for each, group in zip(found, named[name], strict=True):
                votes[each.thread][group] += 1
    return [_told(each) or _most(votes[each.thread], each) for each in exchanges]


def _told(event: FunctionEvent) -> str:
    metadata = event.event_metadata
    return (metadata.process_group_name or "") if metadata else ""


def _most(votes: Counter[str], event: FunctionEvent) -> str:
    if not votes or kind_of(event.name) == "send_recv":
        return ""
    return votes.most_common(1)[0][0]


def _computing(events: Iterable[FunctionEvent], exchanges: Iterable[FunctionEvent]) -> list[Span]:
    """Return when a processor's threads computed: copies within a message are part of it."""
    within: dict[int, list[Span]] = defaultdict(list)
    for each in exchanges:
        if kind_of(each.name) != "send_recv":
            within[each.thread].append(_span(each))
    threads = {thread: merged(spans) for thread, spans in within.items()}
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
