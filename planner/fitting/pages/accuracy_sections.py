"""Sections of the accuracy page on left-out rows: goals, errors, layout choices, plots."""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from html import escape
from typing import Any

from planner.catalog.reading import data_json
from planner.errors import PlannerError
from planner.fitting.evidence import Row
from planner.fitting.held_out import groups_of, summary
from planner.fitting.left_out import Z_80, LeftOut, kept_rows, spread_of
from planner.fitting.published_speeds import WITHIN, Choice, choices
from planner.fitting.serving.factors import SEEN
from planner.fitting.serving.throughput import (
    kind_of,
    layouts_of,
    left_out_parts,
    measured_of,
    throughput_rows,
)
from planner.specs.estimate import EstimateRequest
from planner.workload.estimator import estimate_request

# Plots of predicted against measured: small SVGs in the page's colours.
#
# Each plot has square logarithmic axes with the diagonal and the 80 % band, and one mark per row.
# Element classes are those of the product's charts, so that the plots follow light and dark mode.


WIDTH, HEIGHT = 460, 330
LEFT, RIGHT, TOP, BOTTOM = 62, 12, 12, 40
DECADE = 10.0
MARK = "h2.4"


def picture(title: str, unit: str, rows: Sequence[LeftOut], scale: float = 1.0) -> str:
    """Return rows as an SVG; ``scale`` converts the base unit to the unit of the axes."""
    values = [value / scale for row in rows for value in (row.measured, row.predicted)]
    low, high = bounds(values)

    def x(value: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * share(value, low, high)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * share(value, low, high)

    interval_factor = math.exp(Z_80 * spread_of(rows))
    corners = (
        (low, low * interval_factor),
        (high / interval_factor, high),
        (high, high),
        (high, high / interval_factor),
        (low * interval_factor, low),
        (low, low),
    )
    band = " ".join(f"{x(right):.0f},{y(up):.0f}" for right, up in corners)
    marks = "".join(
        f"M{x(row.measured / scale):.0f} {y(row.predicted / scale):.0f}{MARK}" for row in rows
    )
    label = f"{title}: {len(rows)} rows, predicted against measured, {unit}"
    return "\n".join(
        (
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label)}">',
            f'<polygon class="band" points="{band}" />',
            f'<path class="pred" d="M{x(low):.0f} {y(low):.0f}L{x(high):.0f} {y(high):.0f}" />',
            *(_tick_lines(tick, x(tick), y(tick)) for tick in ticks(low, high)),
            f'<path class="meas" d="{marks}" />',
            f'<text x="{LEFT}" y="{HEIGHT - 6}">measured, {escape(unit)}</text>',
            f'<text x="{LEFT + 8}" y="{TOP + 12}">predicted, {escape(unit)}</text>',
            "</svg>\n",
        )
    )


def bounds(values: Sequence[float]) -> tuple[float, float]:
    """Return the half-decade range that contains all values.

    >>> bounds([2.0, 40.0])
    (1.0, 100.0)
    """
    low = math.floor(2 * math.log10(min(values))) / 2
    high = math.ceil(2 * math.log10(max(values))) / 2
    return DECADE**low, DECADE ** max(high, low + 0.5)


def share(value: float, low: float, high: float) -> float:
    """Return the relative position of a value on a logarithmic axis."""
    return math.log(value / low) / math.log(high / low)


def ticks(low: float, high: float) -> list[float]:
    """Return the powers of ten on an axis.

    >>> ticks(0.5, 200.0)
    [1.0, 10.0, 100.0]
    """
    first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
    return [DECADE**power for power in range(first, last + 1)]


def _tick_lines(tick: float, right: float, up: float) -> str:
    floor = HEIGHT - BOTTOM
    return (
        f'<path class="axis" d="M{right:.0f} {TOP}V{floor}M{LEFT} {up:.0f}H{WIDTH - RIGHT}" />'
        f'<text x="{right:.0f}" y="{floor + 14}" text-anchor="middle">{tick:g}</text>'
        f'<text x="{LEFT - 6}" y="{up + 4:.0f}" text-anchor="end">{tick:g}</text>'
    )


# The accuracy page's section on published throughput tables.


GAP = "open loop"
TABLE_WORDS = """Output tokens per second of whole tables, each row asked as it was measured. Open
loops are compared by the gap between tokens, as their throughput is what was sent.
"""
ASSUMED = """What the tables do not say is assumed. TensorRT-LLM's runs sent 30,000 requests of
128 + 128 tokens and 1,000 to 3,000 longer ones; where its notes say attention data parallelism,
attention is whole on every rank and experts are spread over them. MLPerf's logs name neither
layout nor format: 8-bit weights and activations (4-bit on B200), 8-bit cache, and the fastest of
the tensor-parallel layouts. OpenVINO's prompts have 256 tokens, its answers what the lowest rate
implies. Left out are GPT-J and Mixtral in MLPerf (no lengths, four beams), rates at the edge of
an objective, and shared prefixes. Full batches and bursts took part in the fit; MLPerf, batches
sent at once to TensorRT-LLM, closed and open loops did not.
"""


def predicted(row: Row) -> float | None:
    """Return the predicted rate of a row, None if there is no estimate."""
    rates = []
    for request in layouts_of(row):
        with suppress(PlannerError):
            answer = estimate_request(EstimateRequest.model_validate(request), explain=False)
            speed = answer.performance
            if kind_of(row).startswith(GAP):
                rates.append(1 / speed.tpot_seconds if speed.tpot_seconds else None)
            else:
                rates.append(speed.output_tokens_per_second)
    return max((rate for rate in rates if rate), default=None)


@cache
def table_errors() -> dict[tuple[str, str], list[float]]:
    """Return the relative errors of every usable row, by source and kind."""
    errors_by_kind: dict[tuple[str, str], list[float]] = defaultdict(list)
    for row in throughput_rows():
        rate = predicted(row)
        if rate:
            errors_by_kind[row["source_id"], kind_of(row)].append(rate / measured_of(row) - 1)
    return dict(sorted(errors_by_kind.items()))


def throughput_section() -> str:
    """Return the errors by source and kind, fitted and left out, as tables."""
    lines = [
        "## Throughput tables\n",
        TABLE_WORDS,
        "| Rows of | Kind | n | Mean | Median | 90th percentile |",
        "|---|---|---|---|---|---|",
        *_rows(table_errors()),
        "",
        "| Left out of the fit | Rows of | n | Mean | Median | 90th percentile |",
        "|---|---|---|---|---|---|",
        *_rows(_left_out()),
        "",
        ASSUMED,
    ]
    return "\n".join(lines)


def _left_out() -> dict[tuple[str, str], list[float]]:
    errors_by_part: dict[tuple[str, str], list[float]] = defaultdict(list)
    for part, errors in left_out_parts().items():
        for case, error in errors:
            errors_by_part[part, f"{case.source}, {case.engine}"].append(error)
    return dict(sorted(errors_by_part.items()))


def _rows(errors_by_key: dict[tuple[str, str], list[float]]) -> Iterator[str]:
    all_errors = [error for errors in errors_by_key.values() for error in errors]
    for (first, second), errors in [*errors_by_key.items(), (("all", ""), all_errors)]:
        s = summary(errors)
        shares = " | ".join(f"{s[key]:.1%}" for key in ("mean", "median", "p90"))
        yield f"| {first} | {second} | {s['n']} | {shares} |"


# Goals: figure on left-out rows, statistic, and upper limit.
GOALS = (
    ("training step, unseen model", "median", 0.06),
    ("training step, unseen source", "median", 0.12),
    ("training peak, unseen model", "median", 0.05),
    ("training peak, unseen model", "p90", 0.12),
    ("generation peak, unseen model", "median", 0.05),
    ("generation peak, unseen model", "p90", 0.12),
    *(
        (f"{figure}{kind}", "mean", goal)
        for figure, goal in (
            ("time per output token, unseen sweep", 0.07),
            ("time per output token, unseen pair", 0.15),
            ("time to first token, unseen sweep", 0.25),
            ("time to first token, unseen pair", 0.40),
        )
        for kind in ("", ", dense", ", sparse")
    ),
    ("throughput of full batches, unseen device", "median", 0.10),
    ("throughput of full batches, unseen model", "median", 0.10),
)
VERDICT_GOAL = ("training verdict, unseen model", 0.95)
COVERAGE_GOAL = (0.75, 0.85)
# Plot units of each figure: name, and size in base units.
UNITS = {
    "training step": ("seconds", 1.0),
    "training peak": ("gigabytes", 1e9),
    "generation peak": ("gigabytes", 1e9),
    "time per output token": ("milliseconds", 1e-3),
    "time to first token": ("milliseconds", 1e-3),
}
CHOOSING = """The layout that is predicted to be the fastest of a published sweep, its model
left out of the fit, against the fastest that was measured.
"""
DRAWN = """One mark per row left out, on logarithmic axes. The line is where both agree, the band
holds four of five rows.
"""
# The Megatron runs that validate Calculon, and the mean error that it reports.
EIGHT, CALCULON = "korthikanti2022", 0.035
WORDS = {"median": "median", "mean": "mean", "p90": "90th percentile"}


def held_out() -> dict[str, Any]:
    """Return the errors on left-out rows of the last calibration."""
    stored: dict[str, Any] = data_json("factors.json")["held_out"]
    return stored


def goals() -> str:
    """Return a table of goals and reached figures, each marked as met or missed."""
    errors_by_title = held_out()
    lines = ["## Goals\n", "| What | Goal | Reached | |", "|---|---|---|---|"]
    for name, share, goal in GOALS:
        reached = errors_by_title[name][share]
        met = "met" if reached <= goal else "missed"
        lines.append(f"| {name}, {WORDS[share]} | at most {goal:.0%} | {reached:.1%} | {met} |")
    name, right = VERDICT_GOAL
    reached = errors_by_title[name]["right"]
    met = "met" if reached >= right else "missed"
    lines.append(f"| {name} | at least {right:.0%} right | {reached:.1%} | {met} |")
    reached = megatron_points()
    met = "met" if reached <= CALCULON else "missed"
    lines.append(
        f"| the eight Megatron runs that Calculon is validated on (its own mean: 3.65%), their "
        f"model left out, mean | at most {CALCULON:.1%} | {reached:.1%} | {met} |"
    )
    close = layout_choices()
    near = sum(choice.is_close for choice in close)
    met = "met" if near == len(close) else "missed"
    lines.append(
        f"| layout choice, sweeps within {WITHIN:.0%} of the best | all {len(close)} | {near} "
        f"| {met} |"
    )
    low, high = COVERAGE_GOAL
    for name, title_errors in errors_by_title.items():
        if "covered" in title_errors:
            met = "met" if low <= title_errors["covered"] <= high else "missed"
            lines.append(
                f"| {name}, inside 80 % intervals | {low:.0%} to {high:.0%} "
                f"| {title_errors['covered']:.1%} | {met} |"
            )
    return "\n".join(lines) + "\n"


def megatron_points() -> float:
    """Return the mean error on the runs of arXiv:2205.05198, table 5, with the model left out."""
    rows = [row for row in kept_rows() if (row.source, row.error_class) == (EIGHT, SEEN)]
    return sum(abs(row.error) for row in rows) / len(rows)


def errors() -> str:
    """Return a table of the errors of every kind of left-out row."""
    lines = [
        "## Left out\n",
        "| What | n | Mean | Median | 90th percentile | Inside 80 % intervals |",
        "|---|---|---|---|---|---|",
    ]
    for name, title_errors in held_out().items():
        if "right" in title_errors:
            costly, cheap = title_errors["said_fits_ran_out"], title_errors["refused_ran"]
            wrong = f"predicted fit, out of memory: {costly} | predicted misfit, ran: {cheap}"
            lines.append(
                f"| {name} | {title_errors['n']} | {title_errors['right']:.1%} right | {wrong} | |"
            )
            continue
        shares = " | ".join(f"{title_errors[key]:.1%}" for key in ("mean", "median", "p90"))
        covered = f"{title_errors['covered']:.1%}" if "covered" in title_errors else ""
        lines.append(f"| {name} | {title_errors['n']} | {shares} | {covered} |")
    return "\n".join(lines) + "\n"


def layout_choices() -> list[Choice]:
    """Return the planner's first choice in every published sweep of layouts."""
    return choices(kept_rows())


def layouts() -> str:
    """Return a table of the planner's first choice in every published sweep of layouts."""
    lines = [
        "## Choosing a layout\n",
        CHOOSING,
        "| Source | Model | Devices | Runs | Our first | Slower than the best |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {c.source} | {c.model} | {c.devices} | {c.runs} | {c.chosen} | {c.lost:.1%} |"
        for c in layout_choices()
    ]
    return "\n".join(lines) + "\n"


def picture_name(title: str) -> str:
    """Return the file name of a picture, from the title of its rows.

    >>> picture_name("training step, unseen model")
    'accuracy-training-step-unseen-model'
    """
    return "accuracy-" + title.replace(",", "").replace(" ", "-")


def pictures() -> dict[str, str]:
    """Return one SVG of predicted against measured per group of left-out rows, by name."""
    drawn = {}
    for title, rows in groups_of(kept_rows()).items():
        unit, scale = UNITS[rows[0].figure]
        drawn[picture_name(title)] = picture(title, unit, rows, scale)
    return dict(sorted(drawn.items()))


def picture_section() -> str:
    """Return the page section that embeds the pictures."""
    parts = [
        "## Predicted against measured\n",
        DRAWN,
    ]
    for title in sorted(groups_of(kept_rows())):
        parts += [f"**{title.capitalize()}**\n", f"[[picture:{picture_name(title)}]]\n"]
    return "\n".join(parts)
