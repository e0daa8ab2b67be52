"""Sections of the accuracy page on left-out rows: goals, errors, layout choices, pictures."""

from typing import Any

from planner.catalog.reading import data_json
from planner.fitting.held_out import groups_of
from planner.fitting.layout_choice import WITHIN, Choice, choices
from planner.fitting.left_out import kept_rows
from planner.fitting.pages.scatter import picture
from planner.fitting.serving.factors import SEEN

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
