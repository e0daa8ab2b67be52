"""The charts of each job kind: titles, units and metrics.

Metric names are those of ``runners.messages.MetricPoint``; names of predictions are the
planner's.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from runners.jobspec.benchmark import ORIGINAL_PREFIX
from webapp.figures.registry import REGISTRY, definition_of

_GPU_MEMORY = re.compile(r"gpu(\d+)_memory_bytes")
_GPU_BUSY = re.compile(r"gpu(\d+)_utilization")
_MESSAGES = re.compile(r"(exposed_)?communication(?:_(\w+))?_ratio")
_SOURCE = re.compile(r"source(\d+)_(weight|loss|reference)")  # of a mixture of training data


@dataclass(frozen=True)
class ChartSpec:
    """One chart: its metric, unit and related figures.

    ``scale`` converts the metric's base unit into the axis unit; ``predicted`` names the
    prediction drawn as a dashed line with its band, empty if there is none; ``figures`` are the
    registered figures of the caption.
    """

    key: str
    title: str
    unit: str  # base unit of the metric, for text
    axis: str  # unit on the axis
    metric: str
    scale: float = 1.0
    predicted: str = ""
    from_zero: bool = True
    figures: tuple[str, ...] = ()


LOSS = ChartSpec(
    "loss",
    "Training loss",
    "nats per token",
    "nats per token",
    "loss",
    from_zero=False,
    figures=("final_loss",),
)
TOKENS = ChartSpec(
    "tokens_per_second",
    "Tokens per second",
    "tokens_per_second",
    "tokens/s",
    "tokens_per_second",
    predicted="tokens_per_second",
    figures=("tokens_per_second",),
)
VALIDATION = ChartSpec(
    "validation_loss", "Held-out loss", "", "nats", "validation_loss", from_zero=False
)
ACCURACY = ChartSpec(
    "accuracy", "Held-out accuracy", "ratio", "%", "accuracy", 100.0, figures=("accuracy",)
)
F1 = ChartSpec("f1", "Held-out F1, mean of classes", "ratio", "%", "f1", 100.0, figures=("f1",))
PREFILL = ChartSpec(
    "prefill_tokens_per_second",
    "Prefill speed",
    "tokens_per_second",
    "prompt tokens/s",
    "prefill_tokens_per_second",
    predicted="prefill_tokens_per_second",
    figures=("prefill_tokens_per_second",),
)
DECODE = ChartSpec(
    "decode_tokens_per_second",
    "Decode speed",
    "tokens_per_second",
    "output tokens/s",
    "decode_tokens_per_second",
    predicted="decode_tokens_per_second",
    figures=("decode_tokens_per_second",),
)
ORIGINALS = tuple(
    replace(
        chart,
        key=f"{ORIGINAL_PREFIX}{chart.key}",
        title=f"{chart.title}, original",
        metric=f"{ORIGINAL_PREFIX}{chart.metric}",
        predicted=f"{ORIGINAL_PREFIX}{chart.predicted}",
        figures=tuple(f"{ORIGINAL_PREFIX}{name}" for name in chart.figures),
    )
    for chart in (PREFILL, DECODE)
)
MEMORY = ChartSpec(
    "memory",
    "Host memory of the job",
    "bytes",
    "GiB",
    "rss_bytes",
    scale=2.0**-30,
    predicted="peak_memory_bytes",
    figures=("peak_memory_bytes", "host_memory_bytes"),
)
PROCESSOR = ChartSpec("cpu", "Processor", "cores", "cores busy", "cpu_utilization")

TTFT = ChartSpec(
    "ttft_seconds",
    "Time to first token",
    "seconds",
    "s",
    "ttft_seconds",
    predicted="ttft_seconds",
    figures=("ttft_seconds", "ttft_p95_seconds"),
)
TPOT = ChartSpec(
    "tpot_seconds",
    "Time per output token",
    "seconds",
    "s",
    "tpot_seconds",
    predicted="tpot_seconds",
    figures=("tpot_seconds", "tpot_p95_seconds"),
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
    "compress": (*ORIGINALS, PREFILL, DECODE, MEMORY, PROCESSOR),
    "evaluate": (MEMORY, PROCESSOR),
    "drill": (LOSS, MEMORY, PROCESSOR),
    "prove": (MEMORY, PROCESSOR),
}
_UNITS_BY_SUFFIX = (
    ("_seconds", "seconds", "s", 1.0),
    ("_bytes", "bytes", "GiB", 2.0**-30),
    ("_utilization", "ratio", "%", 100.0),
)
OPTIONAL = (LOSS, TOKENS, PREFILL, DECODE)
JUDGED = (VALIDATION, ACCURACY, F1)  # for classification, after the loss


def _gpu_charts(metrics: Iterable[str]) -> list[ChartSpec]:
    """Return a memory and a utilisation chart for each reporting GPU."""
    charts = []
    for metric in sorted(metrics):
        if match := _GPU_MEMORY.fullmatch(metric):
            title = f"GPU {match[1]} memory"
            charts.append(ChartSpec(metric, title, "bytes", "GiB", metric, 2.0**-30))
        elif match := _GPU_BUSY.fullmatch(metric):
            charts.append(ChartSpec(metric, f"GPU {match[1]} busy", "ratio", "%", metric, 100.0))
    return charts


def _source_charts(metrics: Iterable[str], drawn: str) -> list[ChartSpec]:
    """Return a chart of ``drawn`` (such as ``weight``) for each source of a dynamic mixture."""
    sources = sorted((int(of[1]), of[0]) for each in metrics if (of := _SOURCE.fullmatch(each)))
    titles = {
        "weight": "Share of rows from source {}",
        "loss": "Held-out loss on source {}",
        "reference": "Reference loss of source {}",
    }
    charts = []
    for number, metric in sources:
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
    """Return the charts of a job kind, including those of its reported metrics.

    ``is_complete`` adds a plain chart for every other metric.
    """
    reported = set(metrics)
    charts = list(BY_KIND.get(kind, (MEMORY, PROCESSOR)))
    charts = [each for each in OPTIONAL if each.metric in reported and each not in charts] + charts
    if ACCURACY.metric in reported:
        charts[1:1] = [each for each in JUDGED if each.metric in reported]
    charts += [*_gpu_charts(reported), *_source_charts(reported, "weight")]
    if is_complete:
        charts += [*_source_charts(reported, "loss"), *_source_charts(reported, "reference")]
        drawn = {chart.metric for chart in charts}
        charts += [_plain(metric) for metric in sorted(reported - drawn)]
    return charts


def _message_chart(metric: str, *, is_exposed: bool, part: str) -> ChartSpec:
    """Return a chart of communication as a share of step time.

    ``part`` is one kind or one axis; empty: all. A plan predicts only the exposed total.
    """
    title = "Exposed communication" if is_exposed else "Communication in a step"
    named = f"{title}: {part.replace('_', ' ')}" if part else title
    predicted = metric if is_exposed and not part else ""
    figures = () if part else (metric,)
    return ChartSpec(metric, named, "ratio", "%", metric, 100.0, predicted, figures=figures)


def _plain(metric: str) -> ChartSpec:
    """Return a chart for a metric that is not in the catalog."""
    if match := _MESSAGES.fullmatch(metric):
        return _message_chart(metric, is_exposed=bool(match[1]), part=match[2] or "")
    definition = definition_of(metric)
    is_listed = definition.name in REGISTRY or metric.startswith(ORIGINAL_PREFIX)
    figures = (metric,) if is_listed else ()
    for suffix, unit, axis, scale in _UNITS_BY_SUFFIX:
        if metric.endswith(suffix):
            title = metric.removesuffix(suffix).replace("_", " ").capitalize()
            title = definition.label if is_listed else title
            return ChartSpec(metric, title, unit, axis, metric, scale, figures=figures)
    return ChartSpec(
        metric, definition.label, definition.unit, "", metric, from_zero=False, figures=figures
    )
