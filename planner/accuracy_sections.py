"""The parts of the accuracy page that speak of rows left out: goals, errors, choices, pictures."""

from typing import Any

from planner.catalog.reading import data_json
from planner.held_out import groups_of
from planner.layout_choice import WITHIN, Choice, choices
from planner.left_out import kept_rows
from planner.scatter import picture
from planner.serving_factors import SEEN

# What each figure is to reach: on rows of what was left out, which share, and at most how much.
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
# What each figure is drawn in: the unit's name and its size in base units.
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
# The Megatron runs that Calculon is validated on, and the mean error that it reports for them.
EIGHT, CALCULON = "korthikanti2022", 0.035
WORDS = {"median": "median", "mean": "mean", "p90": "90th percentile"}


def held_out() -> dict[str, Any]:
    """Return what the last calibration found on rows left out."""
    found: dict[str, Any] = data_json("factors.json")["held_out"]
    return found


def goals() -> str:
    """Return each goal with what is reached, as a table; a miss stands as what it is."""
    kept = held_out()
    lines = ["## Goals\n", "| What | Goal | Reached | |", "|---|---|---|---|"]
    for name, share, goal in GOALS:
        reached = kept[name][share]
        met = "met" if reached <= goal else "missed"
        lines.append(f"| {name}, {WORDS[share]} | at most {goal:.0%} | {reached:.1%} | {met} |")
    name, right = VERDICT_GOAL
    reached = kept[name]["right"]
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
    for name, found in kept.items():
        if "covered" in found:
            met = "met" if low <= found["covered"] <= high else "missed"
            lines.append(
                f"| {name}, inside 80 % intervals | {low:.0%} to {high:.0%} "
                f"| {found['covered']:.1%} | {met} |"
            )
    return "\n".join(lines) + "\n"


def megatron_points() -> float:
    """Return the mean error on the runs of arXiv:2205.05198, table 5, their model left out."""
    rows = [row for row in kept_rows() if (row.source, row.error_class) == (EIGHT, SEEN)]
    return sum(abs(row.error) for row in rows) / len(rows)


def errors() -> str:
    """Return the errors of every kind of row left out, as a table."""
    lines = [
        "## Left out\n",
        "| What | n | Mean | Median | 90th percentile | Inside 80 % intervals |",
        "|---|---|---|---|---|---|",
    ]
    for name, kept in held_out().items():
        if "right" in kept:
            costly, cheap = kept["said_fits_ran_out"], kept["refused_ran"]
            wrong = f"said fits, ran out: {costly} | refused, ran: {cheap}"
            lines.append(f"| {name} | {kept['n']} | {kept['right']:.1%} right | {wrong} | |")
            continue
        shares = " | ".join(f"{kept[key]:.1%}" for key in ("mean", "median", "p90"))
        covered = f"{kept['covered']:.1%}" if "covered" in kept else ""
        lines.append(f"| {name} | {kept['n']} | {shares} | {covered} |")
    return "\n".join(lines) + "\n"


def layout_choices() -> list[Choice]:
    """Return our first choice in every published sweep of layouts."""
    return choices(kept_rows())


def layouts() -> str:
    """Return what our first choice of layout would have cost in every published sweep."""
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
    """Return the name of the picture of what was left out.

    >>> picture_name("training step, unseen model")
    'accuracy-training-step-unseen-model'
    """
    return "accuracy-" + title.replace(",", "").replace(" ", "-")


def pictures() -> dict[str, str]:
    """Return an SVG of predicted against measured for everything that was left out, by name."""
    found = {}
    for title, rows in groups_of(kept_rows()).items():
        unit, scale = UNITS[rows[0].figure]
        found[picture_name(title)] = picture(title, unit, rows, scale)
    return dict(sorted(found.items()))


def picture_section() -> str:
    """Return the pictures' places on the page."""
    parts = [
        "## Predicted against measured\n",
        DRAWN,
    ]
    for title in sorted(groups_of(kept_rows())):
        parts += [f"**{title.capitalize()}**\n", f"[[picture:{picture_name(title)}]]\n"]
    return "\n".join(parts)
