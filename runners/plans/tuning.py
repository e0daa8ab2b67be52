"""A tuning of a plan: its options, the ways to run the plan that it may try, and one trial.

They are pure functions of the plan's document and of what the planner says of it.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from planner.specs.estimate import Estimate, PlannedStrategy
from planner.specs.units import MINUTE
from planner.specs.workload import Strategy
from runners.plans.document import PlanDocument
from runners.plans.fields import Part, field
from runners.plans.launch import Launch
from runners.plans.refusals import DraftProblem
from runners.plans.workloads import TRAINING_GOALS, PretrainWork, ServeWork

FigureKey = Literal[
    "tokens_per_second",
    "ttft_seconds",
    "tpot_seconds",
    "latency_seconds",
    "step_seconds",
    "peak_memory_bytes",
]
MORE_IS_BETTER = frozenset({"tokens_per_second"})
SERVED: tuple[FigureKey, ...] = (
    "tokens_per_second",
    "ttft_seconds",
    "tpot_seconds",
    "latency_seconds",
)
TRAINED: tuple[FigureKey, ...] = ("tokens_per_second", "step_seconds", "peak_memory_bytes")
FIGURES_OF: Mapping[str, tuple[FigureKey, ...]] = {
    "serve": (*SERVED, "peak_memory_bytes"),
    **dict.fromkeys(TRAINING_GOALS, TRAINED),
}
OF_OBJECTIVE: Mapping[str, FigureKey] = {  # else tokens per second
    "memory": "peak_memory_bytes",
    "latency": "latency_seconds",
}
STRATEGY = "strategy"  # another strategy of the planner's, as a whole
STEP_BUDGETS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
USUAL_STEP_BUDGET = 512  # of an endpoint whose plan has none
MOST_MICRO_BATCHES = 4  # sizes besides the planned one
MOST_STRATEGIES = 3  # of the planner's besides the first
MOST_TOGETHER = 3  # settings of one candidate
MOST_PLANNED = 120  # combinations of settings that are planned
MOST_CANDIDATES = 24
REPETITIONS = 3  # of a load test's level
LEAST_STEPS, MOST_STEPS = 10, 2000  # of a training
COMPILE_SECONDS = 300.0  # of compiled layers, beside the measured steps
LEAST_LIMIT_SECONDS = 36.0  # that a job may have
SLOWER = 5.0  # a training that is so much slower than planned ends before its last step
# Fields of a strategy that follow from its others.
DERIVED = frozenset({"gradient_accumulation_steps"})
FOLLOWS: Mapping[str, frozenset[str]] = {"compute_dtype": frozenset({"activation_dtype"})}


class TuningOptions(Part):
    """What a tuning may try and spend."""

    host: str = field("", "Host", "Name or id; left out: the plan's own", max_length=120)
    trials: int = field(
        12,
        "Trials",
        "Jobs at most. The plan's own choice comes first; four are kept to measure it and the "
        "best again, and fewer than six prove no gain.",
        ge=2,
        le=32,
    )
    max_seconds: float = field(
        60 * MINUTE,
        "Time limit, in minutes",
        "Of all trials together, without their waiting; none begins that is expected to end "
        "later.",
        factor=MINUTE,
        ge=MINUTE,
        le=24 * 60 * MINUTE,
    )
    trial_seconds: float = field(
        30.0,
        "Seconds to measure",
        "Of a trial, at the speed that the plan predicts; loading comes on top.",
        ge=5.0,
        le=3600.0,
    )
    figure: FigureKey | None = field(
        None,
        "Figure that decides",
        "Empty: by the plan's objective. A plan to serve must meet its latency target first.",
        choices={
            None: "By the plan's objective",
            "tokens_per_second": "Tokens per second",
            "ttft_seconds": "Time to first token",
            "tpot_seconds": "Time per output token",
            "latency_seconds": "Time of a whole answer",
            "step_seconds": "Time of a training step",
            "peak_memory_bytes": "Peak memory",
        },
    )
    formats: bool = field(
        default=False,
        title="Also try weights that lose more quality than the plan's own choice",
        help="By the planner's expectation",
    )


def figure_of(document: PlanDocument, options: TuningOptions) -> FigureKey:
    """Return the figure that decides a tuning.

    Raises:
        DraftProblem: no tuning exists for the goal, or its jobs do not measure the figure.
    """
    known = FIGURES_OF.get(document.goal)
    if known is None:
        raise DraftProblem(
            f"The plan's goal is {document.goal}, and plans to serve or to train are tuned. "
            "Launch it once per setting instead: slipway launch --sweep.",
            "goal",
        )
    of_objective = OF_OBJECTIVE.get(document.objective)
    usual = of_objective if of_objective in known else "tokens_per_second"
    figure: FigureKey = options.figure or usual
    if figure not in known:
        raise DraftProblem(
            f"“Figure that decides” is {figure}, which no job of the goal {document.goal} "
            f"measures. Choose one of {', '.join(known)}.",
            "figure",
        )
    return figure


def predicted_of(estimate: Estimate, figure: FigureKey) -> float | None:
    """Return what an estimate says of a figure, in its base unit; None if it says nothing."""
    if figure == "peak_memory_bytes":
        return float(estimate.memory.per_device_peak_bytes)
    value: float | None = getattr(estimate.performance, figure)
    return value


class Combination(NamedTuple):
    """Settings to plan together: their values by name, and what they change in the document."""

    settings: Mapping[str, Any]
    pins: Mapping[str, Any]
    workload: Mapping[str, Any]


class _Value(NamedTuple):
    value: Any
    pins: Mapping[str, Any]
    workload: Mapping[str, Any]


def combinations_of(
    document: PlanDocument, planned: Sequence[PlannedStrategy]
) -> Iterator[Combination]:
    """Yield what may be tried besides the plan's own choice, at most ``MOST_PLANNED`` of them.

    ``planned``: the planner's strategies, the plan's own choice first. Settings by themselves come
    before those that are combined. What the document pins stays as it is.
    """
    return itertools.islice(
        _combined(_levers(document, planned), planned[0].strategy), MOST_PLANNED
    )


def _combined(levers: Mapping[str, list[_Value]], own: Strategy) -> Iterator[Combination]:
    counts = range(1, MOST_TOGETHER + 1)
    for names in itertools.chain.from_iterable(itertools.combinations(levers, n) for n in counts):
        for values in itertools.product(*(levers[name] for name in names)):
            chosen = dict(zip(names, values, strict=True))
            whole = chosen.get(STRATEGY)
            pins = _stated(own) if whole is None else dict(whole.pins)
            single = [each for name, each in chosen.items() if name != STRATEGY]
            for each in single:
                for name in each.pins:
                    pins = {key: value for key, value in pins.items() if key not in _follow(name)}
                pins |= each.pins
            workload = {key: value for each in single for key, value in each.workload.items()}
            yield Combination({name: each.value for name, each in chosen.items()}, pins, workload)


def _follow(name: str) -> frozenset[str]:
    """Return the fields of a strategy that follow from one that is set anew."""
    return FOLLOWS.get(name, frozenset())


def _levers(document: PlanDocument, planned: Sequence[PlannedStrategy]) -> dict[str, list[_Value]]:
    """Return the values to try of each setting."""
    own, work = planned[0].strategy, document.workload
    levers: dict[str, list[_Value]] = {}
    if isinstance(work, ServeWork):
        levers["max_batch_tokens"] = [
            _Value(each, {"max_batch_tokens": each}, {}) for each in _step_budgets(work, own)
        ]
    if isinstance(work, PretrainWork):
        levers["micro_batch_size"] = [
            _Value(each, {"micro_batch_size": each}, {})
            for each in _micro_batches(work.global_batch_size, own)
        ]
        others = {"none", "selective", "full"} - {own.activation_recomputation or "none"}
        levers["activation_recomputation"] = [
            _Value(each, {"activation_recomputation": each}, {}) for each in sorted(others)
        ]
        if own.compute_dtype in {"bf16", "fp16"}:
            levers["compute_dtype"] = [_Value("fp32", {"compute_dtype": "fp32"}, {})]
        if not work.compiled:
            levers["compiled"] = [_Value(value=True, pins={}, workload={"compiled": True})]
    pinned = document.pins.stated.keys()
    levers = {name: values for name, values in levers.items() if values and name not in pinned}
    if strategies := _other_strategies(planned, levers):
        levers[STRATEGY] = strategies
    return levers


def _step_budgets(work: ServeWork, own: Strategy) -> list[int]:
    """Return the step budgets to try: those that limit a step, and one that limits none."""
    usual = own.max_batch_tokens or USUAL_STEP_BUDGET
    most = work.concurrency * work.input_tokens
    limiting = [each for each in STEP_BUDGETS if each < most]
    unlimited = [each for each in STEP_BUDGETS if each >= most][:1]
    reached = usual if usual < most else (unlimited or [usual])[0]
    values = [each for each in (*limiting, *unlimited) if each != reached]
    return sorted(values, key=lambda each: abs(math.log2(each / usual)))[:MOST_MICRO_BATCHES]


def _micro_batches(batch: int, own: Strategy) -> list[int]:
    """Return other sizes of a rank's pass that divide the batch of a step, the nearest first."""
    planned = own.micro_batch_size or batch
    sizes = [each for each in range(1, batch + 1) if batch % each == 0 and each != planned]
    return sorted(sizes, key=lambda each: abs(math.log2(each / planned)))[:MOST_MICRO_BATCHES]


def _other_strategies(
    planned: Sequence[PlannedStrategy], levers: Mapping[str, object]
) -> list[_Value]:
    """Return the planner's other strategies that differ by more than single settings."""
    own, found = _compared(planned[0].strategy, levers), []
    for rank, each in enumerate(planned[1:], 1):
        if _compared(each.strategy, levers) != own:
            found.append(_Value(rank, _stated(each.strategy), {}))
    return found[:MOST_STRATEGIES]


def _compared(strategy: Strategy, levers: Mapping[str, object]) -> dict[str, Any]:
    stated = _stated(strategy)
    return {name: value for name, value in stated.items() if name not in levers}


def _stated(strategy: Strategy) -> dict[str, Any]:
    stated = strategy.stated
    return {name: value for name, value in stated.items() if name not in DERIVED}


# One trial


class Trial(NamedTuple):
    """How much a trial measures, the same for each candidate.

    ``requests``: of each repetition of a load test. ``steps``: of a training. ``seconds``: how
    long the plan's own choice takes to measure it, as planned.
    """

    requests: int = 0
    steps: int = 0
    seconds: float = 0.0


def trial_of(document: PlanDocument, options: TuningOptions, best: PlannedStrategy) -> Trial:
    """Return how much a trial measures, by the speed that the plan's own choice has as planned."""
    said, work = best.performance, document.workload
    if isinstance(work, ServeWork):
        rate = (said.tokens_per_second or 1.0) / work.output_tokens
        count = math.ceil(options.trial_seconds * rate / REPETITIONS)
        requests = min(max(work.concurrency, count), 100_000)
        return Trial(requests=requests, seconds=REPETITIONS * requests / rate)
    step = said.step_seconds or 1.0
    steps = min(max(LEAST_STEPS, math.ceil(options.trial_seconds / step)), MOST_STEPS)
    return Trial(steps=steps, seconds=steps * step)


def trial_document(document: PlanDocument, trial: Trial) -> PlanDocument:
    """Return a candidate's document as a trial runs it: a training ends after its steps."""
    work = document.workload
    if not isinstance(work, PretrainWork):
        return document
    changes = {
        "tokens": max(1000, trial.steps * work.sequences_per_step * work.sequence_length),
        "time_budget_seconds": SLOWER * trial.seconds + COMPILE_SECONDS,
        "length_schedule": "constant",
        "early_stop_validations": None,
        "text_samples_every_steps": None,
        "keep_best": False,
    }
    return document.model_copy(update={"workload": work.with_values(**changes)})


def trial_launch(document: PlanDocument, trial: Trial, seconds_left: float) -> Launch:
    """Return how a trial is launched; it ends with the time that is left of the tuning."""
    limit = max(LEAST_LIMIT_SECONDS, seconds_left)
    common: dict[str, Any] = {"max_duration_seconds": limit}
    if isinstance(document.workload, ServeWork):
        common |= {
            "run": "load",
            "points": [document.workload.concurrency],
            "requests_per_repetition": trial.requests,
            "repetitions": REPETITIONS,
        }
    return Launch.model_validate(common)


def with_settings(
    document: PlanDocument, pins: Mapping[str, Any], workload: Mapping[str, Any]
) -> PlanDocument:
    """Return a document with other pins and values of its workload.

    Raises:
        ValidationError: the values do not go together.
    """
    changed = document.workload.with_values(**workload) if workload else document.workload
    return document.model_copy(
        update={"pins": Strategy.model_validate(dict(pins)), "workload": changed}
    )
