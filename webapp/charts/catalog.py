"""Which charts a job has: their titles, units and the metrics that they draw.

A metric's name is that of ``runners.messages.MetricPoint``; the name of the
prediction that a chart carries is the planner's.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

_GPU_MEMORY = re.compile(r"gpu(\d+)_memory_bytes")
_GPU_BUSY = re.compile(r"gpu(\d+)_utilization")
_MESSAGES = re.compile(r"(exposed_)?communication(?:_(\w+))?_ratio")
_SOURCE = re.compile(r"source(\d+)_(weight|loss|reference)")  # of a mixture of training data


@dataclass(frozen=True)
class ChartSpec:
    """One chart: what it draws, and in which unit.

    ``scale`` turns the metric's base unit into the axis unit; ``predicted`` names the figure of
    the prediction that is drawn as a dashed line with its band, empty where there is none.
    """

    key: str
    title: str
    unit: str  # base unit of the metric, for words
    axis: str  # unit on the axis
    metric: str
    scale: float = 1.0
    predicted: str = ""
    from_zero: bool = True


LOSS = ChartSpec(
    "loss", "Training loss", "nats per token", "nats per token", "loss", from_zero=False
)
TOKENS = ChartSpec(
    "tokens_per_second",
    "Tokens per second",
    "tokens_per_second",
    "tokens/s",
    "tokens_per_second",
    predicted="tokens_per_second",
)
VALIDATION = ChartSpec(
    "validation_loss", "Held-out loss", "", "nats", "validation_loss", from_zero=False
)
ACCURACY = ChartSpec("accuracy", "Held-out accuracy", "ratio", "%", "accuracy", 100.0)
F1 = ChartSpec("f1", "Held-out F1, mean of classes", "ratio", "%", "f1", 100.0)
PREFILL = ChartSpec(
    "prefill_tokens_per_second",
    "Prefill speed",
    "tokens_per_second",
    "prompt tokens/s",
    "prefill_tokens_per_second",
    predicted="prefill_tokens_per_second",
)
DECODE = ChartSpec(
    "decode_tokens_per_second",
    "Decode speed",
    "tokens_per_second",
    "output tokens/s",
    "decode_tokens_per_second",
    predicted="decode_tokens_per_second",
)
MEMORY = ChartSpec(
    "memory",
    "Memory of the job",
    "bytes",
    "GiB",
    "rss_bytes",
    scale=2.0**-30,
    predicted="peak_memory_bytes",
)
PROCESSOR = ChartSpec("cpu", "Processor", "cores", "cores busy", "cpu_utilization")

TTFT = ChartSpec(
    "ttft_seconds",
    "Time to first token",
    "seconds",
    "s",
    "ttft_seconds",
    predicted="ttft_seconds",
)
TPOT = ChartSpec(
    "tpot_seconds",
    "Time per output token",
    "seconds",
    "s",
    "tpot_seconds",
    predicted="tpot_seconds",
)
RUNNING = ChartSpec("running_requests", "Answers being written", "", "answers", "running_requests")
WAITING = ChartSpec("waiting_requests", "Waiting for a place", "", "answers", "waiting_requests")
KV_CACHE = ChartSpec(
    "kv_cache_used_ratio", "KV cache in use", "ratio", "%", "kv_cache_used_ratio", 100.0
)

BY_KIND: dict[str, tuple[ChartSpec, ...]] = {
    "train": (LOSS, TOKENS, MEMORY, PROCESSOR),
    "benchmark": (PREFILL, DECODE, MEMORY, PROCESSOR),
    "generate": (TOKENS, PREFILL, DECODE, MEMORY, PROCESSOR),
    "serve": (TOKENS, TTFT, TPOT, RUNNING, WAITING, KV_CACHE, MEMORY, PROCESSOR),
    "compress": (PREFILL, DECODE, MEMORY, PROCESSOR),
    "evaluate": (MEMORY, PROCESSOR),
    "drill": (LOSS, MEMORY, PROCESSOR),
}
_UNITS_BY_SUFFIX = (
    ("_seconds", "seconds", "s", 1.0),
    ("_bytes", "bytes", "GiB", 2.0**-30),
    ("_utilization", "ratio", "%", 100.0),
)
OPTIONAL = (LOSS, TOKENS, PREFILL, DECODE)
JUDGED = (VALIDATION, ACCURACY, F1)  # where classes are told apart, after the loss


def _gpu_charts(metrics: Iterable[str]) -> list[ChartSpec]:
    """Return a memory and a utilisation chart for each GPU that reported."""
    charts = []
    for metric in sorted(metrics):
        if found := _GPU_MEMORY.fullmatch(metric):
            title = f"GPU {found[1]} memory"
            charts.append(ChartSpec(metric, title, "bytes", "GiB", metric, 2.0**-30))
        elif found := _GPU_BUSY.fullmatch(metric):
            charts.append(ChartSpec(metric, f"GPU {found[1]} busy", "ratio", "%", metric, 100.0))
    return charts


def _source_charts(metrics: Iterable[str], drawn: str) -> list[ChartSpec]:
    """Return a chart for each source of a mixture that moves: of its ``weight``, or another."""
    found = sorted((int(of[1]), of[0]) for each in metrics if (of := _SOURCE.fullmatch(each)))
    titles = {
        "weight": "Share of rows from source {}",
        "loss": "Held-out loss on source {}",
        "reference": "Reference loss of source {}",
    }
    charts = []
    for number, metric in found:
        if not metric.endswith(f"_{drawn}"):
            continue
        title = titles[drawn].format(number)
        if drawn == "weight":
            charts.append(ChartSpec(metric, title, "ratio", "%", metric, 100.0))
        else:
            unit = "nats per token"
            charts.append(ChartSpec(metric, title, unit, unit, metric, from_zero=False))
    return charts


def charts_for(
    kind: str, metrics: Iterable[str] = (), *, is_complete: bool = False
) -> list[ChartSpec]:
    """Return the charts of a job kind, with those that its reported metrics add.

    ``is_complete`` adds a plain chart for every metric that no other one draws.
    """
    seen = set(metrics)
    charts = list(BY_KIND.get(kind, (MEMORY, PROCESSOR)))
    charts = [each for each in OPTIONAL if each.metric in seen and each not in charts] + charts
    if ACCURACY.metric in seen:
        charts[1:1] = [each for each in JUDGED if each.metric in seen]
    charts += [*_gpu_charts(seen), *_source_charts(seen, "weight")]
    if is_complete:
        charts += [*_source_charts(seen, "loss"), *_source_charts(seen, "reference")]
        drawn = {chart.metric for chart in charts}
        charts += [_plain(metric) for metric in sorted(seen - drawn)]
    return charts


def _message_chart(metric: str, *, is_exposed: bool, part: str) -> ChartSpec:
    """Return a chart of the share of a step in which messages between ranks pass.

    ``part``: of one kind, or along one axis; empty: all. A plan foresees all that nothing hides.
    """
    title = "Communication that nothing hides" if is_exposed else "Communication in a step"
    named = f"{title}: {part.replace('_', ' ')}" if part else title
    predicted = metric if is_exposed and not part else ""
    return ChartSpec(metric, named, "ratio", "%", metric, 100.0, predicted)


def _plain(metric: str) -> ChartSpec:
    """Return a chart for a metric that the catalog does not know by name."""
    if found := _MESSAGES.fullmatch(metric):
        return _message_chart(metric, is_exposed=bool(found[1]), part=found[2] or "")
    for suffix, unit, axis, scale in _UNITS_BY_SUFFIX:
        if metric.endswith(suffix):
            title = metric.removesuffix(suffix).replace("_", " ").capitalize()
            return ChartSpec(metric, title, unit, axis, metric, scale=scale)
    title = metric.replace("_", " ").capitalize()
    return ChartSpec(metric, title, "", "", metric, from_zero=False)
