"""Ticked strategies of a plan side by side: what differs between them, and all their figures."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from planner.specs.estimate import PlanAnswer, PlannedStrategy
from planner.specs.workload import Strategy
from runners.plans.document import PlanDocument
from runners.plans.pins import FIELD_TITLES
from webapp.core.display import DASH, Figure, memory
from webapp.plans.alternatives import strategies_of
from webapp.plans.engine_words import engine_title
from webapp.plans.explanation import format_words, strategy_words
from webapp.plans.verdict import GOAL_FIGURES, Value, figure_values

MOST = 4  # as of jobs
ROLLOUT = "rollout: "  # before its fields


class SideBySide(NamedTuple):
    """Strategies as columns: their words, and rows of a label and a cell for each."""

    heads: tuple[str, ...]
    numbers: tuple[int, ...]
    rows: tuple[tuple[str, tuple[str, ...]], ...]


def side_by_side(
    answer: PlanAnswer, document: PlanDocument, chosen: Sequence[str]
) -> SideBySide | None:
    """Return the strategies of these numbers of ``strategies_of``; None of fewer than two."""
    strategies = strategies_of(answer)
    known = {str(number): number for number in range(len(strategies))}
    numbers = tuple(known[each] for each in dict.fromkeys(chosen) if each in known)[:MOST]
    if len(numbers) < 2:  # noqa: PLR2004 (two make a comparison)
        return None
    plans = [strategies[number] for number in numbers]
    rows = [*_settings(plans), *_figures(plans, document), *_memory(plans)]
    engines = {plan.engine for plan in plans}
    heads = tuple(
        f"{engine_title(plan.engine)} · {strategy_words(plan.strategy)}"
        if len(engines) > 1
        else strategy_words(plan.strategy)
        for plan in plans
    )
    return SideBySide(heads, numbers, tuple(rows))


Cells = tuple[str, tuple[str, ...]]


def _settings(plans: Sequence[PlannedStrategy]) -> list[Cells]:
    """Return the engine and the fields of the strategies that differ."""
    stated = [_flat(plan.strategy) for plan in plans]
    names = dict.fromkeys(name for each in stated for name in each)
    rows = [("Engine", tuple(engine_title(plan.engine) for plan in plans))]
    rows += [
        (_title(name), tuple(_setting(name, each.get(name)) for each in stated)) for name in names
    ]
    return [row for row in rows if len(set(row[1])) > 1]


def _flat(strategy: Strategy) -> dict[str, Any]:
    """Return the set fields of a strategy, those of its rollout by themselves."""
    fields = dict(strategy.stated)
    rollout = fields.pop("rollout", None)
    if rollout is not None:
        fields |= {f"{ROLLOUT}{name}": value for name, value in rollout.stated.items()}
    if ":" in (strategy.quantization or ""):  # the type of a packed file says it all
        fields["weight_dtype"] = fields.pop("quantization")
    return fields


def _title(name: str) -> str:
    words = FIELD_TITLES.get(name) or name.replace("_", " ")
    return f"{words[:1].upper()}{words[1:]}"


def _setting(name: str, value: Any) -> str:  # noqa: ANN401 -- of any field
    if value is None:
        return DASH
    if isinstance(value, bool):
        return "yes" if value else "no"
    return format_words(value) if name.endswith("_dtype") else str(value)


def _figures(plans: Sequence[PlannedStrategy], document: PlanDocument) -> list[Cells]:
    """Return the goal's figures that at least one strategy has, each with its 80 % interval."""
    rows = []
    for name, label, unit in GOAL_FIGURES[document.goal]:
        values = [figure_values(plan, name) for plan in plans]
        if any(values):
            rows.append((label, tuple(_range(each, unit) for each in values)))
    return rows


def _range(values: Value | None, unit: str) -> str:
    if values is None:
        return DASH
    found = Figure("", values[0], unit, *values[1:])
    words = found.interval_words
    return f"{found.shown} ({words})" if words else str(found.shown)


def _memory(plans: Sequence[PlannedStrategy]) -> list[Cells]:
    """Return the memory of each device, in total and by part."""
    parts = dict.fromkeys(part for plan in plans for part in plan.memory.breakdown_bytes)
    rows = [("Memory", tuple(str(memory(each.memory.per_device_peak_bytes)) for each in plans))]
    rows += [
        (
            _title(part),
            tuple(str(memory(each.memory.breakdown_bytes.get(part, 0))) for each in plans),
        )
        for part in parts
        if any(plan.memory.breakdown_bytes.get(part) for plan in plans)
    ]
    return rows
