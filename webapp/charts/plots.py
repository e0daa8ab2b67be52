"""Charts: the catalog, and Plotly figures made from measured points."""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from runners.jobspec.compress import ORIGINAL_PREFIX
from webapp.core.display import deviation_words, number, percent, quantity, whole
from webapp.core.figures import LABELS, REGISTRY, definition_of

# ---------------------------------------------------------------------------
# The charts of each job kind: titles, units and metrics.
#
# Metric names are those of ``runners.shared.messages.MetricPoint``; names of predictions are the
# planner's.
# ---------------------------------------------------------------------------


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
MARGIN = ChartSpec("rewards/margins", LABELS["rewards/margins"], "", "", "rewards/margins")
RANKED = ChartSpec(
    "rewards/accuracies", LABELS["rewards/accuracies"], "ratio", "%", "rewards/accuracies", 100.0
)
REWARD = ChartSpec("reward", LABELS["reward"], "", "", "reward", figures=("final_reward",))
ANSWER_LENGTH = ChartSpec(
    "completions/mean_length",
    LABELS["completions/mean_length"],
    "tokens",
    "tokens",
    "completions/mean_length",
)
DIVERGENCE = ChartSpec("kl", LABELS["kl"], "nats", "nats", "kl")
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
PROCESSOR = ChartSpec("cpu", "Processor", "cores", "cores in use", "cpu_utilization")

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
RUNNING = ChartSpec("running_requests", "Running requests", "", "requests", "running_requests")
WAITING = ChartSpec("waiting_requests", "Waiting requests", "", "requests", "waiting_requests")
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
    "publish": (PROCESSOR,),
}
_UNITS_BY_SUFFIX = (
    ("_seconds", "seconds", "s", 1.0),
    ("_bytes", "bytes", "GiB", 2.0**-30),
    ("_utilization", "ratio", "%", 100.0),
)
DRAWN_IF_REPORTED = (LOSS, TOKENS, PREFILL, DECODE)
JUDGED = (VALIDATION, ACCURACY, F1)  # for classification, after the loss
COMPARED = (
    REWARD,
    ANSWER_LENGTH,
    MARGIN,
    RANKED,
    DIVERGENCE,
)  # for preferences and rewards, after the loss


def _gpu_charts(metrics: Iterable[str]) -> list[ChartSpec]:
    charts = []
    for metric in sorted(metrics):
        if match := _GPU_MEMORY.fullmatch(metric):
            title = f"GPU {match[1]} memory"
            charts.append(ChartSpec(metric, title, "bytes", "GiB", metric, 2.0**-30))
        elif match := _GPU_BUSY.fullmatch(metric):
            charts.append(
                ChartSpec(metric, f"GPU {match[1]} utilisation", "ratio", "%", metric, 100.0)
            )
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
    for index, metric in sources:
        if not metric.endswith(f"_{drawn}"):
            continue
        title = titles[drawn].format(index)
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
    charts = [
        each for each in DRAWN_IF_REPORTED if each.metric in reported and each not in charts
    ] + charts
    behind_loss = charts.index(LOSS) + 1 if LOSS in charts else 1
    follow = [*COMPARED, *(JUDGED if ACCURACY.metric in reported else ())]
    charts[behind_loss:behind_loss] = [each for each in follow if each.metric in reported]
    charts += [*_gpu_charts(reported), *_source_charts(reported, "weight")]
    if is_complete:
        charts += [*_source_charts(reported, "loss"), *_source_charts(reported, "reference")]
        drawn = {chart.metric for chart in charts}
        charts += [_plain(metric) for metric in sorted(reported - drawn)]
    return charts


SECTIONS = (
    "Quality",
    "Answers and rewards",
    "Speed",
    "Requests",
    "Memory",
    "Communication",
    "Checkpoints",
    "System",
    "Other",
)
_QUALITY = re.compile(
    r".*(loss|accuracy|f1|perplexity|learning_rate|grad_norm|scale)|source\d+_.*"
)
_COMPARED = re.compile(
    r"(rewards|logps|logits|completions|clip_ratio)/.*|reward(_std)?|frac_reward_zero_std"
    r"|log_odds_\w+|kl|entropy"
)
_SYSTEM = re.compile(r".*(utilization|energy|power|temperature|watts|joules).*")


def section_of(chart: ChartSpec) -> str:
    """Return the section of ``SECTIONS`` in which a chart stands among all of a job."""
    name, found = chart.metric, "Other"
    if name.startswith("checkpoint"):
        found = "Checkpoints"
    elif _MESSAGES.fullmatch(name):
        found = "Communication"
    elif name.endswith("_requests") or chart is KV_CACHE:
        found = "Requests"
    elif _SYSTEM.fullmatch(name):
        found = "System"
    elif _COMPARED.fullmatch(name):
        found = "Answers and rewards"
    elif _QUALITY.fullmatch(name):
        found = "Quality"
    elif chart.unit == "bytes":
        found = "Memory"
    elif chart.unit in {"seconds", "tokens_per_second"} or name.endswith("_per_second"):
        found = "Speed"
    return found


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
            title = definition.label if is_listed or metric in LABELS else title
            return ChartSpec(metric, title, unit, axis, metric, scale, figures=figures)
    return ChartSpec(
        metric, definition.label, definition.unit, "", metric, from_zero=False, figures=figures
    )


# ---------------------------------------------------------------------------
# Plotly figures as plain dictionaries, and their rendering as small inline SVGs.
# ---------------------------------------------------------------------------


Figure = dict[str, Any]
Side = Literal["", "inside", "below", "above"]  # of the 80 % interval
SIDE_WORDS: dict[Side, str] = {
    "": "",
    "inside": ", inside the 80 % interval",
    "below": ", below the 80 % interval",
    "above": ", above the 80 % interval",
}
MAX_POINTS = 500
ORIGIN_MS = 946_684_800_000  # midnight, 1 January 2000 UTC


@dataclass(frozen=True)
class Series:
    """The measured values of one metric: times in ms since the epoch, values in base units.

    None marks a gap: the line breaks there.
    """

    metric: str
    t_ms: tuple[int, ...] = ()
    values: tuple[float | None, ...] = ()

    @property
    def known(self) -> tuple[float, ...]:
        """Return the measured values in base units, without the gaps (None)."""
        return tuple(value for value in self.values if value is not None)


@dataclass(frozen=True)
class Prediction:
    """A predicted value with the ends of its 80 % interval, in base units."""

    value: float
    low: float | None = None
    high: float | None = None

    def side_of(self, value: float) -> Side:
        """Return on which side of the interval a value lies; empty without an interval."""
        if self.low is None or self.high is None:
            return ""
        if value < self.low:
            return "below"
        return "above" if value > self.high else "inside"


def template() -> Figure:
    """Return the layout shared by all charts: fonts, colours and grid lines as tokens."""
    axis = {
        "gridcolor": "var(--line)",
        "zeroline": False,
        "linecolor": "var(--line)",
        "tickfont": {"color": "var(--ink-3)", "size": 11},
        "fixedrange": True,
        "automargin": False,
    }
    return {
        "font": {"family": "Inter Variable, system-ui, sans-serif", "color": "var(--ink-3)"},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "margin": {"l": 48, "r": 10, "t": 8, "b": 26},
        "showlegend": False,
        "hovermode": "x unified",
        "hoverlabel": {
            "bgcolor": "var(--raised)",
            "bordercolor": "var(--line-strong)",
            "font": {"color": "var(--ink)", "size": 12},
        },
        "dragmode": False,
        "xaxis": {
            **axis,
            "type": "date",
            "showgrid": False,
            "nticks": 5,
        },
        "yaxis": {**axis, "nticks": 5, "tickformat": ",~r", "separatethousands": True},
    }


def _measured(chart: ChartSpec, series: Series, start_ms: int) -> Figure:
    """Return the solid line of measured values."""
    return {
        "type": "scatter",
        "mode": "lines",
        "name": "measured",
        "x": [ORIGIN_MS + t - start_ms for t in series.t_ms],
        "y": [None if value is None else value * chart.scale for value in series.values],
        "line": {"color": "var(--measured)", "width": 1.75},
        "hovertemplate": f"measured: %{{y:,.4~r}} {chart.axis}<extra></extra>",
        "meta": {"metric": chart.metric, "scale": chart.scale},
    }


def _predicted(chart: ChartSpec, prediction: Prediction, end: int) -> list[Figure]:
    """Return the band of the 80 % interval and the dashed line of the prediction."""
    value = prediction.value * chart.scale
    line = {
        "type": "scatter",
        "mode": "lines",
        "name": "predicted",
        "x": [ORIGIN_MS, end],
        "y": [value, value],
        "line": {"color": "var(--predicted)", "width": 1.5, "dash": "6px,4px"},
        "hovertemplate": f"predicted: %{{y:,.4~r}} {chart.axis}<extra></extra>",
        "meta": {"spans": "x"},
    }
    if prediction.low is None or prediction.high is None:
        return [line]
    low, high = prediction.low * chart.scale, prediction.high * chart.scale
    band = {
        "type": "scatter",
        "mode": "lines",
        "name": "80 % interval",
        "x": [ORIGIN_MS, end, end, ORIGIN_MS],
        "y": [low, low, high, high],
        "fill": "toself",
        "fillcolor": "var(--band)",
        "line": {"width": 0},
        "hoverinfo": "skip",
        "meta": {"spans": "x"},
    }
    return [band, line]


def figure(
    chart: ChartSpec,
    series: Series,
    *,
    start_ms: int,
    end_ms: int,
    prediction: Prediction | None = None,
) -> Figure:
    """Return one chart as Plotly's ``data`` and ``layout``.

    ``end_ms`` is the end of the time axis: the job's end, actual or expected.
    """
    last = max((t - start_ms for t in series.t_ms), default=0)
    length = max(end_ms - start_ms, last, 1000)
    data = [] if prediction is None else _predicted(chart, prediction, ORIGIN_MS + length)
    data.append(_measured(chart, series, start_ms))
    layout = template()
    layout["xaxis"]["range"] = [ORIGIN_MS, ORIGIN_MS + length]
    if chart.from_zero:
        tops = [y for trace in data for y in trace["y"] if y is not None]
        layout["yaxis"]["range"] = [0, max(tops, default=1.0) * 1.08 or 1.0]
    layout["uirevision"] = chart.key
    layout["meta"] = {"start_ms": start_ms, "origin_ms": ORIGIN_MS, "from_zero": chart.from_zero}
    return {"data": data, "layout": layout}


def comparison_words(chart: ChartSpec, value: float, prediction: Prediction) -> str:
    """Return a measured value with its deviation from the prediction, as a phrase.

    The deviation is in per cent; the phrase ends with the side of the 80 % interval.
    """
    predicted = f"the predicted {value_text(prediction.value, chart)}"
    deviation = deviation_words(value / prediction.value)
    side = SIDE_WORDS[prediction.side_of(value)]
    return f"{value_text(value, chart)}, {deviation} {predicted}{side}"


def value_text(value: float, chart: ChartSpec) -> str:
    """Return a value of a chart with its unit, for display."""
    if chart.unit == "ratio":
        return percent(value)
    is_count = not chart.unit and float(value).is_integer()
    return whole(value) if is_count else str(quantity(value, chart.unit))


# Render the figures as small inline SVGs, shown before and without JavaScript.


WIDTH, HEIGHT = 462, 158
LEFT, RIGHT, TOP, BOTTOM = 58, 10, 8, 26
MOST_STEPS = 5  # between the levels of the vertical axis
LEAST_STEP = 1e-300


class Frame(NamedTuple):
    """The data range of a plot, mapped to picture coordinates."""

    x0: float
    x1: float
    y0: float
    y1: float

    def x(self, value: float) -> float:
        """Return the x coordinate of a value."""
        inner = WIDTH - LEFT - RIGHT
        return LEFT + inner * (value - self.x0) / ((self.x1 - self.x0) or 1)

    def y(self, value: float) -> float:
        """Return the y coordinate of a value."""
        inner = HEIGHT - TOP - BOTTOM
        return HEIGHT - BOTTOM - inner * (value - self.y0) / ((self.y1 - self.y0) or 1)

    def path(self, trace: dict[str, Any]) -> str:
        """Return a trace as the ``d`` of a path; a missing value interrupts the line.

        A single value is a zero-length line, which a round cap draws as a dot.
        """
        parts, pen = [], "M"
        for x, y in zip(trace["x"], trace["y"], strict=True):
            if y is not None:
                parts.append(f"{pen}{self.x(x):.1f} {self.y(y):.1f}")
            pen = "M" if y is None else "L"
        return " ".join(parts) + (" h0" if len(parts) == 1 else "")


def frame(figure: Figure) -> Frame:
    """Return the ranges of a figure, from its layout if set there."""
    x0, x1 = figure["layout"]["xaxis"]["range"]
    if y_range := figure["layout"]["yaxis"].get("range"):
        return Frame(x0, x1, y_range[0], y_range[1])
    values = [y for trace in figure["data"] for y in trace["y"] if y is not None]
    values = values or [0.0, 1.0]
    pad = (max(values) - min(values)) * 0.06 or 0.5
    low = min(values) - pad
    if min(values) >= 0:  # what is never negative, such as a step, has no negative levels
        low = max(0.0, low)
    return Frame(x0, x1, low, max(values) + pad)


def levels_between(low: float, high: float) -> list[float]:
    """Return the round values in a range: multiples of 1, 2 or 5 times a power of ten.

    A range too wide or too narrow for such steps, next to its values, has its ends alone.
    """
    least = (high - low) / MOST_STEPS
    largest = max(abs(low), abs(high))
    if not math.isfinite(least) or least < max(LEAST_STEP, largest * 1e-12):
        return [low, high]
    power = 10.0 ** math.floor(math.log10(least))
    step = next(size * power for size in (1, 2, 5, 10) if size * power >= least * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


def level_text(value: float) -> str:
    """Return a level as ``0.5`` or ``1,200``: without the zeros that no round value needs."""
    text = number(value)
    return text.rstrip("0").rstrip(".") if "." in text else text


def clock(ms: float) -> str:
    """Return a time since the start as ``1:05``."""
    minutes, seconds = divmod(int(ms // 1000), 60)
    hours, minutes_left = divmod(minutes, 60)
    return f"{hours}:{minutes_left:02d} h" if hours else f"{minutes}:{seconds:02d}"


def drawing(figure: Figure) -> dict[str, Any]:
    """Return the context of the SVG template: paths with their class, ticks, sizes."""
    box = frame(figure)
    paths = [
        {
            "class": str(trace.get("meta", {}).get("class") or _CLASSES[trace["name"]]),
            "d": box.path(trace),
        }
        for trace in figure["data"]
        if trace["x"]
    ]
    is_timed = "origin_ms" in figure["layout"].get("meta", {"origin_ms": ORIGIN_MS})
    levels = levels_between(box.y0, box.y1)
    # Of a measured line without a point, time has not begun.
    has_begun = all(trace["x"] for trace in figure["data"] if trace["name"] == "measured")
    return {
        "width": WIDTH,
        "height": HEIGHT,
        "left": LEFT,
        "right": WIDTH - RIGHT,
        "label_x": LEFT - 6,
        "label_y": HEIGHT - 6,
        "paths": paths,
        "levels": [
            {"y": f"{box.y(v):.1f}", "text_y": f"{box.y(v) + 3.5:.1f}", "text": level_text(v)}
            for v in levels
        ],
        "times": [
            {"x": f"{box.x(v):.1f}", "text": clock(v - ORIGIN_MS) if is_timed else number(v)}
            for v in ((box.x0, (box.x0 + box.x1) / 2, box.x1) if has_begun else ())
        ],
    }


_CLASSES = {"measured": "meas", "predicted": "pred", "80 % interval": "band"}


# A chart with its figure, for any page that shows one.


@dataclass(frozen=True, kw_only=True)
class ChartFigure:
    """One chart with its figure and element id; it also works without JavaScript."""

    chart: ChartSpec
    figure: Figure

    @property
    def element_id(self) -> str:
        """Return the id of the JSON element with the figure."""
        return f"figure-{self.chart.key}"

    @property
    def picture(self) -> dict[str, Any]:
        """Return the parts of the inline SVG."""
        return drawing(self.figure)
