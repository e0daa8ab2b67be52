"""Predicted and measured step times of layouts: stored rows, ratios and docs page."""

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from runners.ratios import KeptRatio, Ratio
from webapp.core.benches.layouts import MODELS, Found

RAW = Path(__file__).parent / "data" / "layouts.jsonl"
DOCS = Path(__file__).parents[3] / "templates" / "docs" / "layout-times.md"
COMMAND = "manage.py bench layouts --keep"
GOAL = 0.95  # of the fastest layout's speed: a regret of at most 5 %
Kept = Mapping[str, Any]


def ratio_name(model: str) -> str:
    """Return the name under which a model's regret is stored."""
    return f"fastest other layout / planner's first choice, {model} model"


def regrets(found: Sequence[Found]) -> Iterator[Ratio]:
    """Yield, per model, the fastest other layout's step time / the first choice's."""
    for each in found:
        yield each.regret._replace(name=ratio_name(each.model))


def keep(found: Sequence[Found], load: float) -> None:
    """Replace the stored rows and the docs page."""
    lines = []
    for each in found:
        regret = KeptRatio.taken_now(each.regret, COMMAND, load).model_dump(mode="json")
        lines.append(json.dumps({**each._asdict(), "regret": regret}))
    RAW.write_text("".join(f"{line}\n" for line in lines))
    DOCS.write_text(page(stored()))


def stored() -> list[Kept]:
    """Return the stored results, one per model."""
    return [json.loads(line) for line in RAW.read_text().splitlines()]


def page(kept: Sequence[Kept]) -> str:
    """Return the docs page with the rows."""
    regret = kept[0]["regret"]
    versions = ", ".join(f"{name} {value}" for name, value in regret["versions"].items())
    return PAGE.format(
        rounds=max(len(seconds) for seconds in kept[0]["seconds"].values()) - regret["n"],
        finals=regret["n"],
        taken=f"{regret['date']}, {regret['machine']}; {versions}",
        verdicts="\n".join(_verdict(each) for each in kept),
        tables="\n".join(_section(each) for each in kept),
    )


def _verdict(row: Kept) -> str:
    regret = row["regret"]
    lost, low, high = (100 * max(0.0, 1 / regret[name] - 1) for name in ("value", "high", "low"))
    cells = (
        row["model"],
        row["first"],
        regret["name"],
        f"{lost:.1f} % ({low:.1f} to {high:.1f})",
        regret["n"],
        "yes" if regret["low"] > GOAL else "no" if regret["value"] <= GOAL else "not certain",
    )
    return "| " + " | ".join(map(str, cells)) + " |"


def _section(row: Kept) -> str:
    case = next(each for each in MODELS if each.name == row["model"])
    measured = {
        name: statistics.geometric_mean(seconds) for name, seconds in row["seconds"].items()
    }
    lines = [
        f"| {name} | {row['predicted'][name]:.2f} | {measured[name]:.2f} "
        f"| {min(seconds):.2f} to {max(seconds):.2f} | {len(seconds)} |"
        for name, seconds in sorted(row["seconds"].items(), key=lambda each: measured[each[0]])
    ]
    words = f"{case.words[0].upper()}{case.words[1:]}."
    factors = ", ".join(f"{name} {value:.2f}" for name, value in row["factors"].items())
    head = "| Layout | Predicted, s | Measured, s | Span, s | Rounds |\n|---|---|---|---|---|"
    title = f"## {case.name.capitalize()} model"
    note = f"The host's calibration factors after its two runs: {factors}."
    return "\n".join((title, "", words, note, "", head, *lines, ""))


PAGE = """\
# Step times of all layouts, predicted and measured

This page shows how well the planner ranks training layouts. `manage.py bench layouts` runs two
small trainings in every layout that the trainer supports on four ranks of this machine, and gets
the planner's predictions first. The planner has the data that it would have of any host: its
micro-benchmark, the time of an all-reduce and of a message between the ranks, and two finished
runs (one process; four data parallel copies), which give the host's calibration factors. Each
round runs all layouts one after another, every other round in reverse order, each layout in new
processes. Slow layouts are left out of later rounds. There were {rounds} such rounds, then
{finals} rounds of only the planner's first choice and its fastest competitor. Measured on
{taken}.

The ranks share two cores. So no communication overlaps with computation, a waiting rank frees its
core for another, and each collective waits until every rank has run. The planner counts all three
effects if ranks share a CPU.

| Model | Planner's first choice | Fastest other layout | Regret (95 %) | n | At most 5 % |
|---|---|---|---|---|---|
{verdicts}

*Regret* is how much longer a step of the planner's first choice takes than a step of the fastest
other layout; it is zero if the first choice is faster. The rounds of all layouts select the
fastest other one. The figure and its interval come from the pairs of the {finals} rounds after
them, so that one fast round does not bias it. *Not certain* means that the figure is within 5 %,
but other work on the machine moved the rounds by more.

Compare seconds only within a table. Predictions of tensor parallel layouts are too short: torch's
DTensor has more overhead per operator than the planner counts, in addition to communication.
Predictions of context parallel layouts are too long: the planner assumes a ring, and one
all-gather starts fewer messages. Both are far behind the first choice in either column.

{tables}"""
