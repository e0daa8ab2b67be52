"""Alternatives of a plan: strategies, and offers of other hardware."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from planner.catalog.devices import get_device
from planner.catalog.engines import AUTO
from planner.specs.base import PlannerError
from planner.specs.cluster import ClusterSpec
from planner.specs.estimate import (
    APPLICABILITY,
    FirstFailure,
    PlanAnswer,
    PlannedStrategy,
    Purpose,
    Rejection,
    Suggestion,
)
from planner.specs.on_policy import GENERATED_BY
from planner.techniques.registry import TECHNIQUES
from runners.plans.document import PlanDocument
from runners.plans.latency_limits import figure_name
from runners.plans.methods import METHOD_NAMES
from runners.plans.pins import FIELD_TITLES
from runners.plans.tuning import DERIVED
from runners.plans.workloads import CompressWork
from webapp.core.display import (
    DASH,
    capitalised,
    memory,
    money_an_hour,
    number,
    parameters,
    quantity,
    whole,
)
from webapp.core.display import whole as whole_number
from webapp.plans.engine_words import family_words, with_engine
from webapp.plans.explanation import compression_words, strategy_words
from webapp.plans.targets import PERCENTILES
from webapp.plans.verdict import GOAL_FIGURES, Start, figure_values, start_of

# ---------------------------------------------------------------------------
# Alternatives to the chosen plan: runners-up, Pareto frontier, rejection reasons.
# ---------------------------------------------------------------------------


COLUMNS = 3
LEFT, RIGHT, TOP, BOTTOM = 54.0, 506.0, 16.0, 218.0
TICKS = 4
HEADROOM = 1.08
KILO = 1000
FEWEST_OF_A_CURVE = 3  # points
LOOKED_FOR = {  # what an objective optimises in addition to the axes
    "balanced": "a balance of speed, devices and quality",
    "throughput": "the most tokens per second within its targets",
    "latency": "the shortest wait",
    "cost": "the lowest cost per token",
    "memory": "the least memory over all devices",
    "quality": "the best quality",
    "energy": "the least energy per token",
}
# Reasons that every row has, and that columns or the strategy itself show.
SHARED = ("fits: ", "bound by ", GENERATED_BY)
UNKNOWN_LOSS = 0.01  # quality loss without a published value; the search uses the same
TARGET_WORDS = {
    figure_name(figure, percentile): f"{words} takes" + (f" at {name}" if name != "mean" else "")
    for figure, words in (("ttft", "the first token"), ("tpot", "each further token"))
    for percentile, name in PERCENTILES.items()
}


def target_words(failure: Rejection | FirstFailure) -> str:
    """Return the words of a missed target before its time; "" where the mean alone decided.

    Its numbers are then of the mean, and the reason says so.
    """
    is_of_mean = "the mean " in failure.reason
    return "" if is_of_mean else TARGET_WORDS.get(failure.constraint, "")


class Column(NamedTuple):
    """A figure in the comparison of strategies."""

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
    number: int = 0  # in ``strategies_of``

    @property
    def tick(self) -> str:
        """Return the number as a form sends it."""
        return str(self.number)


def strategies_of(answer: PlanAnswer) -> tuple[PlannedStrategy, ...]:
    """Return the ranked strategies, then the other Pareto-optimal ones, each once."""
    ranked = [each.strategy for each in answer.plans]
    others = (each for each in answer.pareto if each.strategy not in ranked)
    return (*answer.plans, *others)


def choice_of(
    answer: PlanAnswer, document: PlanDocument, number: int, *, is_whole: bool = False
) -> dict[str, Any]:
    """Return the changes of a draft by which its plan is a strategy of ``strategies_of``.

    Pinned is what differs from the chosen strategy; all of it with ``is_whole``, or if it lacks a
    part of the chosen one.
    """
    wanted = strategies_of(answer)[number]
    own, theirs = answer.plans[0].strategy.stated, wanted.strategy.stated
    differing = {name: x for name, x in theirs.items() if x != own.get(name)}
    is_partial = not is_whole and own.keys() <= theirs.keys()
    pins = {**document.pins.stated, **(differing if is_partial else theirs)}
    changes: dict[str, Any] = {"pins": {n: x for n, x in pins.items() if n not in DERIVED}}
    is_open = answer.request is not None and answer.request.engine == AUTO
    return {**changes, "engine": wanted.engine} if is_open else changes


def columns_for(answer: PlanAnswer, document: PlanDocument) -> tuple[Column, ...]:
    """Return the comparison figures of a goal that at least one strategy has."""
    columns = (Column(*entry) for entry in GOAL_FIGURES[document.goal])
    available = (
        column
        for column in columns
        if any(figure_values(plan, column.name) for plan in answer.plans)
    )
    return tuple(available)[:COLUMNS]


ON_THE_FRONT = "Nothing beats it in both figures of the chart"


def comparison(
    answer: PlanAnswer, document: PlanDocument, *, has_front: bool = False
) -> list[Row]:
    """Return the ranked strategies, the chosen one first, each with its reason.

    ``has_front``: then the other Pareto-optimal ones.
    """
    columns = columns_for(answer, document)
    plans = strategies_of(answer) if has_front else answer.plans
    starts = [start_of(answer, plan) for plan in plans]
    first = _first_words(starts)
    return [
        Row(
            words=with_engine(_row_words(plan, document), plan, answer),
            cells=tuple(_cell(plan, column) for column in columns),
            memory=str(memory(plan.memory.per_device_peak_bytes)),
            why=_with_need(
                (
                    _why(plan, answer.plans[0], columns[0])
                    if rank < len(answer.plans)
                    else ON_THE_FRONT
                )
                if rank
                else first,
                start,
            ),
            is_chosen=rank == 0,
            number=rank,
        )
        for rank, (plan, start) in enumerate(zip(plans, starts, strict=True))
    ]


def _first_words(starts: Sequence[Start | None]) -> str:
    """Return why the first plan is the first; the stored checkpoint precedes conversions."""
    is_stored = bool(starts) and starts[0] is not None and not starts[0].need
    if is_stored and any(start.need for start in starts if start):
        return "Best of those that start the checkpoint as it is stored"
    return "Best for this goal"


def _with_need(why: str, start: Start | None) -> str:
    """Return a reason with what its plan needs besides the checkpoint as it is stored."""
    return f"{why}; {start.need}" if start and start.need else why


def _row_words(plan: PlannedStrategy, document: PlanDocument) -> str:
    """Return a strategy's description; a compression is described by its output."""
    values = document.workload
    if not isinstance(values, CompressWork):
        return strategy_words(plan.strategy)
    copies = plan.strategy.data_parallel_size or 1
    shared = f" · text shared by {copies} devices" if copies > 1 else ""
    return compression_words(values) + shared


def _cell(plan: PlannedStrategy, column: Column) -> str:
    values = figure_values(plan, column.name)
    return str(quantity(values[0], column.unit)) if values else DASH


def _why(plan: PlannedStrategy, best: PlannedStrategy, column: Column) -> str:
    """Return the difference from the chosen strategy, by the search's reasons if available."""
    if differences := [reason for reason in plan.reasons if not reason.startswith(SHARED)]:
        return capitalised("; ".join(differences)).replace("the first plan", "the chosen one")
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
    return f"{column.label}: {change} {direction}" + ("" if is_worse else ", ranked lower overall")


class RejectedFamily(NamedTuple):
    """A rejected strategy family, with the required value and the limit."""

    family: str
    constraint: str
    required: str
    limit: str
    reason: str
    strategies: int


class Inapplicable(NamedTuple):
    """Techniques that do not apply for the same reason."""

    reason: str
    titles: str


def rejections(answer: PlanAnswer) -> list[RejectedFamily]:
    """Return the rejected strategy families, the closest to their limit first."""
    lost = [item for item in answer.rejected.items() if item[1].constraint != APPLICABILITY]
    return [
        _rejected_family(name, rejection)
        for name, rejection in sorted(lost, key=_required_to_limit)
    ]


def inapplicable(answer: PlanAnswer) -> list[Inapplicable]:
    """Return the techniques that do not apply, grouped by reason."""
    titles: dict[str, list[str]] = {}
    for key, rejection in answer.rejected.items():
        if rejection.constraint == APPLICABILITY:
            technique = TECHNIQUES.get(key)
            titles.setdefault(rejection.reason, []).append(technique.title if technique else key)
    return [Inapplicable(capitalised(why), " · ".join(each)) for why, each in titles.items()]


def _required_to_limit(entry: tuple[str, Rejection]) -> float:
    """Return required / limit of a rejected family; infinity where either is unknown."""
    rejection = entry[1]
    return (
        rejection.required / rejection.limit
        if rejection.required and rejection.limit
        else float("inf")
    )


def _rejected_family(name: str, rejection: Rejection) -> RejectedFamily:
    unit = {"B": "bytes", "s": "seconds"}.get(rejection.unit, rejection.unit)
    required = str(quantity(rejection.required, unit)) if rejection.required is not None else DASH
    limit = str(quantity(rejection.limit, unit)) if rejection.limit is not None else DASH
    constraint = rejection.constraint.replace("_", " ")
    reason = rejection.reason
    if words := target_words(rejection):
        reason = f"{words} {required}, the target is {limit}"
    return RejectedFamily(
        family_words(rejection.family or name),
        constraint,
        required,
        limit,
        capitalised(reason),
        rejection.strategies,
    )


# The frontier as a drawing


class Dot(NamedTuple):
    """A strategy in the drawing; good if its quality is at least the chosen one's."""

    x: float
    y: float
    words: str
    is_good: bool = True
    number: int = 0  # of the strategy in ``strategies_of``


class Tick(NamedTuple):
    """A label on an axis."""

    at: float
    words: str


@dataclass(frozen=True)
class Frontier:
    """Strategies by speed against latency or memory.

    ``dots`` are the Pareto-optimal strategies of the drawing, ``rest`` the others. Good ones
    match the chosen one's quality; ``good_path`` is the front of these alone.
    """

    dots: tuple[Dot, ...]
    rest: tuple[Dot, ...]
    path: str
    good_path: str
    chosen: Dot
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    x_name: str
    y_name: str
    words: str
    decided: str

    @property
    def is_right(self) -> bool:
        """Return whether the label belongs on the left of the chosen dot."""
        return self.chosen.x > (LEFT + RIGHT) * 0.7


Axis = tuple[str, str, float]
AXES: dict[str, tuple[Axis, Axis]] = {  # across, up: figure name, words, divisor
    "serve": (
        ("ttft_seconds", "seconds to the first token, mean", 1.0),
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


class Point(NamedTuple):
    """A strategy in axis units; ``loss`` is its share of lost quality."""

    x: float
    y: float
    words: str
    loss: float
    number: int = 0


def frontier_of(answer: PlanAnswer, document: PlanDocument) -> Frontier | None:
    """Return the frontier's drawing, or None if there are too few strategies to draw."""
    axes = AXES.get(document.goal)
    if axes is None or not answer.plans:
        return None
    (x_key, x_name, x_scale), (y_key, y_name, y_scale) = axes  # lower is better on the x axis
    points: list[Point] = []
    for at, plan in enumerate(strategies_of(answer)):
        x, y = figure_values(plan, x_key), figure_values(plan, y_key)
        if x and y:
            words = with_engine(strategy_words(plan.strategy), plan, answer)
            points.append(Point(x[0] / x_scale, y[0] / y_scale, words, _loss(plan), at))
    if len({point[:2] for point in points}) < FEWEST_OF_A_CURVE:
        return None
    drawing = draw_frontier(
        points, (x_name, y_name), answer.searched.strategies, less_is_more=True
    )
    looked_for = LOOKED_FOR[document.objective]
    return replace(drawing, decided=drawing.decided.format(looked_for=looked_for))


def _loss(plan: PlannedStrategy) -> float:
    loss = plan.quality.loss_ratio if plan.quality else 0.0
    return UNKNOWN_LOSS if loss is None else round(loss, 4)


def front(points: Sequence[Point], *, less_is_more: bool) -> list[Point]:
    """Return the Pareto-optimal points, left to right.

    Higher is better on the y axis; on the x axis too, unless ``less_is_more`` (as for memory).
    """
    sign = -1 if less_is_more else 1
    best, optimal = -math.inf, []
    for point in sorted(points, key=lambda each: (-sign * each.x, -each.y)):
        if point.y > best:
            best = point.y
            optimal.append(point)
    return sorted(optimal)


def draw_frontier(
    points: list[Point], names: tuple[str, str], searched: int, *, less_is_more: bool
) -> Frontier:
    """Return the drawing of points, the chosen one first."""
    chosen = points[0]
    whole = front(points, less_is_more=less_is_more)
    good = front([p for p in points if p.loss <= chosen.loss], less_is_more=less_is_more)
    x_max = max(point.x for point in points) * HEADROOM
    y_max = max(point.y for point in points) * HEADROOM

    def dot(point: Point) -> Dot:
        x, y = _x(point.x, x_max), _y(point.y, y_max)
        return Dot(x, y, point.words, point.loss <= chosen.loss, point.number)

    on_whole, on_good = chosen in whole, chosen in good
    where = "on it" if on_whole else "on the front of its quality" if on_good else "below it"
    counted = f"{len(points)} of {whole_number(searched)} strategies"
    return Frontier(
        dots=tuple(map(dot, whole)),
        rest=tuple(dot(point) for point in points if point not in whole),
        path=_path(map(dot, whole)),
        good_path=_path(map(dot, good)) if good != whole else "",
        chosen=dot(chosen),
        x_ticks=tuple(Tick(_x(value, x_max), _short(value)) for value in _steps(x_max)),
        y_ticks=tuple(Tick(_y(value, y_max), _short(value)) for value in _steps(y_max)),
        x_name=names[0],
        y_name=names[1],
        words=f"{names[1]} against {names[0]}: {counted} are drawn, nothing beats {len(whole)} of "
        f"them in both, and the chosen one lies {where}",
        decided=_decided(on_whole=on_whole, on_good=on_good),
    )


def _decided(*, on_whole: bool, on_good: bool) -> str:
    """Return what else decided, if the chosen strategy is not on the drawn front.

    ``{looked_for}`` is a placeholder for the plan's objective.
    """
    if on_whole:
        return ""
    if on_good:
        return "The points above the chosen one give up quality."
    return (
        "The chosen one lies below the front: this plan looks for {looked_for}, which the axes do "
        "not show."
    )


def _path(dots: Iterable[Dot]) -> str:
    return " ".join(f"{'L' if index else 'M'}{dot.x} {dot.y}" for index, dot in enumerate(dots))


def _short(value: float) -> str:
    """Return a short axis label: ``200k`` instead of six digits."""
    if value < 10 * KILO:
        return number(value, 2)
    scaled = parameters(value)
    return f"{scaled.value}{scaled.unit.replace('K', 'k')}"


def _x(value: float, top: float) -> float:
    return round(LEFT + (RIGHT - LEFT) * value / top, 1)


def _y(value: float, top: float) -> float:
    return round(BOTTOM - (BOTTOM - TOP) * value / top, 1)


def _steps(top: float) -> list[float]:
    """Return about four round values from zero up to ``top``."""
    raw = top / TICKS
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10, 20) if factor * power >= raw)
    return [step * at for at in range(int(top / step) + 1)]


# ---------------------------------------------------------------------------
# Suggested changes of a plan, and the replan of a job that ran out of memory.
# ---------------------------------------------------------------------------


HEADINGS: dict[Purpose, str] = {
    "fit": "The smallest changes that make it fit",
    "target": "The smallest changes that meet the target",
}

SIZES = ("concurrency", "input_tokens", "batch_size", "sequence_length")  # fields of a workload


class Chip(NamedTuple):
    """One suggestion: its index in the answer, title and effect."""

    at: int
    title: str
    effect: str


class Offers(NamedTuple):
    """Suggestions for one purpose, the least costly for the user first."""

    heading: str
    chips: tuple[Chip, ...]


def offers_of(answer: PlanAnswer, document: PlanDocument) -> list[Offers]:
    """Return the suggestions that apply to the draft, by purpose."""
    offers = []
    for purpose, heading in HEADINGS.items():
        chips = tuple(
            Chip(index, _title(suggestion, document), suggestion_effect(suggestion))
            for index, suggestion in enumerate(answer.suggestions)
            if suggestion.purpose == purpose and _has_place(suggestion, document)
        )
        offers += [Offers(heading, chips)] if chips else []
    return offers


def _has_place(suggestion: Suggestion, document: PlanDocument) -> bool:
    """Return whether the draft has the suggested method, and the plan would meet its targets."""
    if suggestion.purpose == "target" and "constraints" in suggestion.changes:
        return False  # to lift a target is no way to meet it
    method = suggestion.changes.get("workload", {}).get("method")
    has_methods = hasattr(document.workload, "method")
    return has_methods or method in {None, "pretrain"}


def _title(suggestion: Suggestion, document: PlanDocument) -> str:
    """Return the title of a suggestion, with old and new value of a size or method."""
    now = document.workload.model_dump()
    then = suggestion.changes.get("workload") or {}
    for name in SIZES:
        if name in then and name in now and then[name] != now[name]:
            return f"{FIELD_TITLES[name]} {whole(then[name])} instead of {whole(now[name])}"
    method, before = str(then.get("method")), str(now.get("method"))
    if method in METHOD_NAMES and before in METHOD_NAMES and before != method:
        return f"{capitalised(METHOD_NAMES[method])} instead of {METHOD_NAMES[before]}"
    return capitalised(suggestion.title)


def suggestion_effect(suggestion: Suggestion) -> str:
    """Return the effect of a suggestion in short: spare memory, speed, price."""
    spare = suggestion.estimate.memory.capacity_bytes
    spare -= suggestion.estimate.memory.per_device_peak_bytes
    rate = suggestion.estimate.performance.tokens_per_second
    met = "meets it, " if suggestion.purpose == "target" else "fits, "
    words = [f"{met}{memory(max(0, spare))} to spare"]
    words += [str(quantity(rate, "tokens_per_second"))] if rate else []
    if suggestion.estimate.strategy.offload_places:  # else the host holds a checkpoint's copy
        words += [f"{memory(suggestion.estimate.memory.host_bytes or 0)} of host memory"]
    return ", ".join(words + _hourly(suggestion.changes.get("cluster")))


def _hourly(cluster: dict[str, Any] | None) -> list[str]:
    """Return the hourly price of other hardware, for all its devices."""
    if not cluster:
        return []
    try:
        spec = ClusterSpec.model_validate(cluster)
        device = get_device(spec.device) if isinstance(spec.device, str) else spec.device
    except PlannerError:
        return []
    if device.price_usd_per_hour is None:
        return []
    return [f"{money_an_hour(device.price_usd_per_hour * spec.num_devices)} in total"]


# Replan a failed job with its measured memory need as a limit.
