"""What else was possible: the runners-up, the frontier, and why the others lost."""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from planner.specs.plan import APPLICABILITY, PlanAnswer, PlannedStrategy, Rejection
from planner.techniques.registry import TECHNIQUES
from webapp.core.display import quantity
from webapp.core.units import DASH, memory, number, parameters
from webapp.core.wording import capitalised
from webapp.plans.verdict import GOAL_FIGURES, figure_values
from webapp.plans.words import strategy_words

Draft = dict[str, Any]
COLUMNS = 3
CHART_WIDTH, CHART_HEIGHT = 514.0, 252.0
LEFT, RIGHT, TOP, BOTTOM = 44.0, 506.0, 16.0, 218.0
TICKS = 4
HEADROOM = 1.08
KILO = 1000
FEWEST_OF_A_CURVE = 3  # points
TARGET_WORDS = {
    "ttft_seconds": "the first token takes",
    "tpot_seconds": "each further token takes",
}


class Column(NamedTuple):
    """One figure by which strategies are compared."""

    name: str
    label: str
    unit: str


@dataclass(frozen=True)
class Row:
    """One strategy of the comparison."""

    words: str
    cells: tuple[str, ...]
    memory: str
    why: str
    is_chosen: bool


def columns_for(answer: PlanAnswer, draft: Draft) -> tuple[Column, ...]:
    """Return the figures that a goal's strategies are compared by, those that any of them has."""
    columns = (Column(*entry) for entry in GOAL_FIGURES[draft["goal"]["goal"]])
    known = (one for one in columns if any(figure_values(plan, one.name) for plan in answer.plans))
    return tuple(known)[:COLUMNS]


def comparison(answer: PlanAnswer, draft: Draft) -> list[Row]:
    """Return the ranked strategies, the chosen one first, each with what decided."""
    columns = columns_for(answer, draft)
    best = answer.plans[0] if answer.plans else None
    return [
        Row(
            words=strategy_words(plan.strategy),
            cells=tuple(_cell(plan, column) for column in columns),
            memory=str(memory(plan.memory.per_device_peak_bytes)),
            why=_why(plan, best, columns[0]),
            is_chosen=plan is best,
        )
        for plan in answer.plans
    ]


def _cell(plan: PlannedStrategy, column: Column) -> str:
    found = figure_values(plan, column.name)
    return str(quantity(found[0], column.unit)) if found else DASH


def _why(plan: PlannedStrategy, best: PlannedStrategy | None, column: Column) -> str:
    """Return the search's own reason, else how it compares to the chosen one."""
    if plan.reasons:
        return capitalised("; ".join(plan.reasons))
    if best is None or plan is best:
        return "Best for this goal"
    mine, theirs = figure_values(plan, column.name), figure_values(best, column.name)
    if not mine or not theirs or not theirs[0]:
        return "Ranked lower"
    ratio = mine[0] / theirs[0]
    if round(ratio, 3) == 1:
        return f"{column.label}: the same"
    is_time = column.unit == "seconds"
    is_worse = ratio > 1 if is_time else ratio < 1
    change = f"{number(abs(ratio - 1) * 100, 2)} %"
    direction = "more" if ratio > 1 else "less"
    return f"{column.label}: {change} {direction}" + ("" if is_worse else ", but costs elsewhere")


class Lost(NamedTuple):
    """A family of strategies that was ruled out, with the numbers that decided."""

    family: str
    constraint: str
    required: str
    limit: str
    reason: str
    strategies: int


class Inapplicable(NamedTuple):
    """The techniques that do not apply for one and the same reason."""

    reason: str
    titles: str


def rejections(answer: PlanAnswer) -> list[Lost]:
    """Return the families that were ruled out, those nearest to their limit first."""
    lost = [item for item in answer.rejected.items() if item[1].constraint != APPLICABILITY]
    return [_lost(name, one) for name, one in sorted(lost, key=_miss)]


def inapplicable(answer: PlanAnswer) -> list[Inapplicable]:
    """Return the techniques that do not apply here, gathered by the reason that they share."""
    titles: dict[str, list[str]] = {}
    for key, one in answer.rejected.items():
        if one.constraint == APPLICABILITY:
            technique = TECHNIQUES.get(key)
            titles.setdefault(one.reason, []).append(technique.title if technique else key)
    return [Inapplicable(capitalised(why), " · ".join(each)) for why, each in titles.items()]


def _miss(entry: tuple[str, Rejection]) -> float:
    one = entry[1]
    return one.required / one.limit if one.required and one.limit else float("inf")


def _lost(name: str, one: Rejection) -> Lost:
    unit = {"B": "bytes", "s": "seconds"}.get(one.unit, one.unit)
    required = str(quantity(one.required, unit)) if one.required is not None else DASH
    limit = str(quantity(one.limit, unit)) if one.limit is not None else DASH
    constraint = one.constraint.replace("_", " ")
    reason = one.reason
    if one.constraint in TARGET_WORDS:
        reason = f"{TARGET_WORDS[one.constraint]} {required}, the target is {limit}"
    return Lost(
        one.family or name, constraint, required, limit, capitalised(reason), one.strategies
    )


# The frontier as a drawing


class Dot(NamedTuple):
    """One strategy in the drawing."""

    x: float
    y: float
    words: str


class Tick(NamedTuple):
    """One label on an axis."""

    at: float
    words: str


@dataclass(frozen=True)
class Frontier:
    """Strategies between two goods that exclude each other."""

    dots: tuple[Dot, ...]
    path: str
    chosen: Dot
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    x_name: str
    y_name: str
    words: str

    @property
    def is_right(self) -> bool:
        """Return whether the chosen dot's label must stand on its left."""
        return self.chosen.x > (LEFT + RIGHT) * 0.7


Axis = tuple[str, str, float]
AXES: dict[str, tuple[Axis, Axis]] = {  # across, up: figure name, words, divisor
    "serve": (
        ("tokens_per_second_per_person", "tokens/s for each person", 1.0),
        ("output_tokens_per_second", "tokens/s for all", 1.0),
    ),
    "generate": (
        ("peak_memory_bytes", "GiB on each device", 1024.0**3),
        ("output_tokens_per_second", "tokens/s", 1.0),
    ),
    "pretrain": (
        ("peak_memory_bytes", "GiB on each device", 1024.0**3),
        ("tokens_per_second", "tokens/s", 1.0),
    ),
}
AXES["finetune"] = AXES["pretrain"]


def frontier_of(answer: PlanAnswer, draft: Draft) -> Frontier | None:
    """Return the frontier's drawing, or nothing where there is no choice to draw."""
    axes = AXES.get(draft["goal"]["goal"])
    if axes is None or not answer.plans:
        return None
    (x_key, x_name, x_scale), (y_key, y_name, y_scale) = axes
    points: list[tuple[float, float, str]] = []
    for plan in (answer.plans[0], *answer.pareto):
        x, y = figure_values(plan, x_key), figure_values(plan, y_key)
        if x and y:
            points.append((x[0] / x_scale, y[0] / y_scale, strategy_words(plan.strategy)))
    if len({point[:2] for point in points}) < FEWEST_OF_A_CURVE:
        return None
    x_max = max(point[0] for point in points) * HEADROOM
    y_max = max(point[1] for point in points) * HEADROOM
    dots = [_dot(point, x_max, y_max) for point in points]
    line = sorted(set(dots[1:]))
    return Frontier(
        dots=tuple(line),
        path=" ".join(f"{'L' if at else 'M'}{dot.x} {dot.y}" for at, dot in enumerate(line)),
        chosen=dots[0],
        x_ticks=tuple(Tick(_x(value, x_max), _short(value)) for value in _steps(x_max)),
        y_ticks=tuple(Tick(_y(value, y_max), _short(value)) for value in _steps(y_max)),
        x_name=x_name,
        y_name=y_name,
        words=f"{y_name} against {x_name}: {len(line)} strategies that nothing beats in both",
    )


def _dot(point: tuple[float, float, str], x_max: float, y_max: float) -> Dot:
    return Dot(_x(point[0], x_max), _y(point[1], y_max), point[2])


def _short(value: float) -> str:
    """Return a label that fits beside an axis: ``200k`` rather than six digits."""
    if value < 10 * KILO:
        return number(value, 2)
    scaled = parameters(value)
    return f"{scaled.value}{scaled.unit.replace('K', 'k')}"


def _x(value: float, top: float) -> float:
    return round(LEFT + (RIGHT - LEFT) * value / top, 1)


def _y(value: float, top: float) -> float:
    return round(BOTTOM - (BOTTOM - TOP) * value / top, 1)


def _steps(top: float) -> list[float]:
    """Return round values from zero up to ``top``, about four of them."""
    raw = top / TICKS
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10, 20) if factor * power >= raw)
    return [step * at for at in range(int(top / step) + 1)]
