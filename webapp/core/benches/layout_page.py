"""Layouts' predicted and measured step times: as kept rows, as ratios, as a docs page."""

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from runners.ratios import KeptRatio, Ratio
from webapp.core.benches.layout_cases import MODELS
from webapp.core.benches.layouts import Found

RAW = Path(__file__).parent / "data" / "layouts.jsonl"
DOCS = Path(__file__).parents[3] / "templates" / "docs" / "layout-times.md"
COMMAND = "manage.py bench layouts --keep"
GOAL = 0.95  # of the fastest layout's speed: a regret of at most 5 %
Kept = Mapping[str, Any]


def ratio_name(model: str) -> str:
    """Return under which name a model's regret is kept."""
    return f"fastest other layout / planner's first choice, {model} model"


def regrets(found: Sequence[Found]) -> Iterator[Ratio]:
    """Yield each model's fastest other layout's step time as a share of the first choice's."""
    for each in found:
        yield each.regret._replace(name=ratio_name(each.model))


def keep(found: Sequence[Found], load: float) -> None:
    """Put rows and page in the place of the kept ones."""
    lines = []
    for each in found:
        taken = KeptRatio.taken_now(each.regret, COMMAND, load).model_dump(mode="json")
        lines.append(json.dumps({**each._asdict(), "regret": taken}))
    RAW.write_text("".join(f"{line}\n" for line in lines))
    DOCS.write_text(page(stored()))


def stored() -> list[Kept]:
    """Return what was kept of a run: a model a line."""
    return [json.loads(line) for line in RAW.read_text().splitlines()]


def page(kept: Sequence[Kept]) -> str:
    """Return the docs page of the rows."""
    regret = kept[0]["regret"]
    versions = ", ".join(f"{name} {value}" for name, value in regret["versions"].items())
    return PAGE.format(
        rounds=max(len(own) for own in kept[0]["seconds"].values()) - regret["n"],
        finals=regret["n"],
        taken=f"{regret['date']}, {regret['machine']}; {versions}",
        verdicts="\n".join(_verdict(each) for each in kept),
        tables="\n".join(_section(each) for each in kept),
    )


def _verdict(kept: Kept) -> str:
    regret = kept["regret"]
    lost, low, high = (100 * max(0.0, 1 / regret[name] - 1) for name in ("value", "high", "low"))
    cells = (
        kept["model"],
        kept["first"],
        regret["name"],
        f"{lost:.1f} % ({low:.1f} to {high:.1f})",
        regret["n"],
        "yes" if regret["low"] > GOAL else "no" if regret["value"] <= GOAL else "not certain",
    )
    return "| " + " | ".join(map(str, cells)) + " |"


def _section(kept: Kept) -> str:
    case = next(each for each in MODELS if each.name == kept["model"])
    measured = {name: statistics.geometric_mean(own) for name, own in kept["seconds"].items()}
    lines = [
        f"| {name} | {kept['predicted'][name]:.2f} | {measured[name]:.2f} "
        f"| {min(own):.2f} to {max(own):.2f} | {len(own)} |"
        for name, own in sorted(kept["seconds"].items(), key=lambda each: measured[each[0]])
    ]
    words = f"{case.words[0].upper()}{case.words[1:]}."
    factors = ", ".join(f"{name} {value:.2f}" for name, value in kept["factors"].items())
    head = "| Layout | Predicted, s | Measured, s | Span, s | Rounds |\n|---|---|---|---|---|"
    title = f"## {case.name.capitalize()} model"
    told = f"The host's factors after its two runs: {factors}."
    return "\n".join((title, "", words, told, "", head, *lines, ""))


PAGE = """\
# Step times of all layouts, predicted and measured

`manage.py bench layouts` lays two small trainings out in every way that the trainer has on four
ranks of this machine, and asks the planner first. The planner knows what it would know of a host:
its micro-benchmark, what an all-reduce and a message among the ranks take, and two finished runs
(one process; four plain copies), from which the host's factors follow. Then each layout runs,
layout after layout, round after round, every other round backwards, and each time in processes of
its own. Layouts that stay behind the fastest are left out of later rounds, of which there were
{rounds}; then {finals} rounds of the planner's first and its fastest rival alone. Measured on
{taken}.

The ranks share two cores. So an exchange hides behind nothing, a rank that waits leaves its core
to another, and each collective waits until every rank had its turn; the planner counts all three
where ranks share a processor.

| Model | Planner's first | Fastest other | Regret (95 %) | n | At most 5 % |
|---|---|---|---|---|---|
{verdicts}

*Regret* is how much longer a step of the planner's first choice takes than one of the fastest
other layout, none where the first choice is faster. The rounds of all pick that other one; the
figure and its interval are of the pairs in the {finals} rounds after them, so that it owes nothing
to a lucky round. *Not certain*: the figure is within 5 %, but other work on the machine moved the
rounds by more.

Compare seconds within a table. Predictions of tensor parallel layouts are too short: torch's
DTensor spends more on each operator than the planner counts, on top of the exchanges. Those of
context parallel are too long: the planner expects a ring, and one gathering takes fewer starts.
Both are far behind the first in either column.

{tables}"""
