"""Scores strategies as columns, with a cache of scores and estimates."""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from threading import Lock
from typing import cast

import numpy as np

from planner.cost.quantity import NullLedger
from planner.search.question import Question, figure, strategy_family_numbers
from planner.search.rank import (
    UNKNOWN_PERPLEXITY_RATIO,
    Merit,
    complexity_columns,
    merit_from,
    merit_of,
)
from planner.search.space import Block, Flags, Numbers
from planner.specs.base import NotCoveredError, NotPossibleError, PlannerError
from planner.specs.estimate import Estimate, Performance
from planner.specs.workload import ServeWorkload, Strategy
from planner.workload.arrivals import StepColumns
from planner.workload.costing import (
    Costing,
    cost_workload,
    fits_of,
    paid_setting,
    quality_of,
    rented_devices,
)
from planner.workload.generate import batch_limit
from planner.workload.inference_memory import usable_bytes
from planner.workload.outcome import Admission, expense
from planner.workload.resolve import resolve
from planner.workload.serve import saturation_rate
from planner.workload.setting import Setting
from planner.workload.under_load import Replica, percentiles

# Cache of scores and estimates, so that another target, objective or pin costs little.
#
# The cost of a strategy depends only on model, hardware and workload (the subject). Scores and
# estimates of a subject are cached in the process. Two subjects are equal only if every input of
# an estimate is equal.


# Enough for a question with its suggestions, and for a few concurrent users.
MAX_SUBJECTS = 64
MAX_STRATEGIES = 20_000  # scored strategies of all subjects: a few hundred bytes each
MAX_ESTIMATES = 512  # per kind and subject: some kilobytes each
MAX_COSTINGS = 32  # per recent subject: up to a hundred kilobytes each
LATEST = 16


class Subject:
    """The cached scores and estimates of one subject: a model, hardware and workload.

    ``plain`` holds estimates without percentiles, ``simulated`` with percentiles,
    ``explained_estimates`` with percentiles and terms. ``costings`` holds their common
    intermediate results, ``search_results`` the results of searches with the key, and the number
    of strategies, of each.
    """

    def __init__(self, key: tuple[object, ...] = ()) -> None:
        self.key = key
        self.plain: dict[Strategy, Estimate] = {}
        self.simulated: dict[Strategy, Estimate] = {}
        self.explained_estimates: dict[Strategy, Estimate] = {}
        self.costings: dict[Strategy, Costing] = {}
        self.search_results: list[tuple[tuple[object, ...], object, int]] = []

    @property
    def strategies(self) -> int:
        """Return the number of cached scored strategies."""
        return sum(rows for _, _, rows in self.search_results)

    def exact(self, question: Question, strategy: Strategy) -> Estimate:
        """Return the exact estimate of a strategy, without percentiles and terms."""
        return _cached_estimate(
            self.plain,
            strategy,
            lambda: self._costing(question, strategy).estimate(explain=False),
        )

    def with_percentiles(self, question: Question, strategy: Strategy) -> Estimate:
        """Return the exact estimate of a strategy, without terms."""

        def cost() -> Estimate:
            explained = self.explained_estimates.get(strategy)
            if explained is not None:
                return explained.model_copy(update={"terms": ()})
            return self._costing(question, strategy).estimate(explain=False, simulate=True)

        return _cached_estimate(self.simulated, strategy, cost)

    def explained(self, question: Question, strategy: Strategy) -> Estimate:
        """Return the exact estimate of a strategy, with every term."""
        return _cached_estimate(
            self.explained_estimates,
            strategy,
            lambda: self._costing(question, strategy).estimate(),
        )

    def _costing(self, question: Question, strategy: Strategy) -> Costing:
        """Return the cached costing of a strategy, or a new one."""
        costing = self.costings.get(strategy)
        if costing is None:
            costing = Costing(question.estimate_request(strategy))
            if len(self.costings) < MAX_COSTINGS:
                self.costings[strategy] = costing
        return costing


def _cached_estimate(
    estimates: dict[Strategy, Estimate], strategy: Strategy, cost: Callable[[], Estimate]
) -> Estimate:
    estimate = estimates.get(strategy)
    if estimate is None:
        estimate = cost()
        if len(estimates) < MAX_ESTIMATES:
            estimates[strategy] = estimate
    return estimate


class EstimateCache:
    """The most recently used subjects, latest last; thread-safe."""

    def __init__(self) -> None:
        self.subjects: list[Subject] = []
        self._lock = Lock()

    def of(self, question: Question) -> Subject:
        """Return the cached or a new subject of a question."""
        key = subject_key(question)
        with self._lock:
            subject = next((cached for cached in self.subjects if cached.key == key), None)
            if subject is None:
                subject = Subject(key)
            else:
                self.subjects.remove(subject)
            self.subjects.append(subject)
            for older in self.subjects[-2 * LATEST : -LATEST]:
                older.costings.clear()
            self._evict_oldest()
        return subject

    def find_scores(self, subject: Subject, under: tuple[object, ...]) -> object:
        """Return a subject's cached search result for a key, None if there is none.

        The key holds all that the result depends on besides the subject, such as the pins.
        """
        return next((scores for key, scores, _ in subject.search_results if key == under), None)

    def keep(self, subject: Subject, under: tuple[object, ...], scores: object, rows: int) -> None:
        """Cache the scores of a subject, unless they are too many."""
        if rows > MAX_STRATEGIES:
            return
        with self._lock:
            subject.search_results.append((under, scores, rows))
            self._evict_oldest()

    def clear(self) -> None:
        """Clear the cache."""
        with self._lock:
            self.subjects.clear()

    def _evict_oldest(self) -> None:
        while len(self.subjects) > MAX_SUBJECTS or (
            sum(subject.strategies for subject in self.subjects) > MAX_STRATEGIES
        ):
            del self.subjects[0]


def subject_key(question: Question) -> tuple[object, ...]:
    """Return all inputs of a question's estimates except the strategy."""
    request = question.request
    return (
        request.workload,
        question.cluster,
        question.shown,
        question.model,
        request.engine,
        request.host_calibration,
        request.id,
    )


ESTIMATES = EstimateCache()


# Percentiles of single strategies of a block, from costs that the block computes at once.
#
# Each strategy is simulated as in ``planner.workload.under_load``. The engine steps, which
# dominate the work, are costed for the whole block at once.


# Means that the simulation is centred on, and the number of requests that fit in memory.
MEANS = ("ttft_seconds", "tpot_seconds", "latency_seconds", "max_concurrency")
Read = Callable[[str], Numbers | None]


class BlockPercentiles:
    """The strategies of a serving block, with the means that ``read`` returns."""

    def __init__(self, block: Block, workload: ServeWorkload, read: Read) -> None:
        self._block, self._workload, self._read = block.compact, workload, read
        self._cache: dict[tuple[int, frozenset[str]], dict[str, float]] = {}

    def percentiles(self, row: int, names: Collection[str]) -> dict[str, float]:
        """Return the named percentiles of one strategy, in s; empty if it has none.

        Names are those of ``under_load.ALL_PERCENTILES``, such as ``ttft_p95_seconds``.
        """
        key = row, frozenset(names)
        if key not in self._cache:
            self._cache[key] = self._simulated(row, names)
        return self._cache[key]

    def _simulated(self, row: int, names: Collection[str]) -> dict[str, float]:
        max_requests, rate = int(self._max_requests[row]), self._workload.request_rate_per_second
        if max_requests < 1 or (rate is not None and rate >= self._saturation[row]):
            return {}
        row_means = {name: float(column[row]) for name, column in self._means.items()}
        means = Performance.model_construct(**row_means)  # type: ignore[arg-type]  # figures of a row
        replica = Replica(
            number=int(self._data[row]),
            budget_tokens=float(self._budgets[row] or self._workload.input_tokens),
            costs=lambda slots, budget: self._steps.costs(row, slots, budget),
        )
        in_flight = (rate or 0.0) / replica.number * (means.latency_seconds or 0.0)
        simulated = replica.serve(self._workload, max_requests, in_flight)
        admission = Admission(*(float(column[row]) for column in self._admission))
        return percentiles(means, simulated, NullLedger(), admission, names)

    @property
    def _setting(self) -> Setting:
        return self._block.setting

    @cached_property
    def _means(self) -> dict[str, Numbers]:
        columns = {name: self._read(name) for name in MEANS}
        return {name: column for name, column in columns.items() if column is not None}

    @cached_property
    def _data(self) -> Numbers:
        return self._block.column(self._setting.layout.data)

    @cached_property
    def _budgets(self) -> Numbers:
        return self._block.column(self._setting.layout.batch_tokens)

    @cached_property
    def _max_requests(self) -> Numbers:
        """Return the most requests that one replica of each strategy runs at once."""
        room = self._means.get("max_concurrency")
        if room is None:
            return np.zeros(len(self._data))
        limit = self._block.column(batch_limit(self._setting, self._workload))
        return np.minimum(room // self._data, limit)

    @cached_property
    def _saturation(self) -> Numbers:
        max_requests = np.maximum(self._max_requests, 1.0)
        return self._block.column(saturation_rate(self._setting, self._workload, max_requests))  # type: ignore[arg-type]  # a column

    @cached_property
    def _admission(self) -> tuple[Numbers, ...]:
        """Return what passes before a step reads a prompt, as columns of the strategies."""
        read = (self._read(name) for name in Admission._fields)
        return tuple(self._block.column(0.0 if column is None else column) for column in read)

    @cached_property
    def _steps(self) -> StepColumns:
        """Return the step costs up to the largest batch of any strategy."""
        return StepColumns(self._setting, self._workload, int(self._max_requests.max()))


@dataclass(frozen=True)
class Scores:
    """Strategies of one question with their figures, one row per strategy.

    ``figures`` reads any figure of an estimate by name. ``families`` holds family numbers,
    ``complexity`` the numbers of ``rank.complexity``, one column per strategy. ``subject`` caches
    exact estimates.
    """

    question: Question
    strategy: Callable[[int], Strategy]
    fits: Flags
    usable_bytes: Numbers
    merit: Merit
    figures: Read
    families: Numbers
    complexity: Numbers
    subject: Subject
    simulation: BlockPercentiles | None = None

    def __len__(self) -> int:
        return len(self.fits)

    def exact(self, row: int) -> Estimate:
        """Return the exact estimate of one strategy, without the explanation."""
        return self.subject.exact(self.question, self.strategy(row))

    def simulated(self, row: int) -> Estimate:
        """Return the exact estimate of one strategy, with its percentiles."""
        return self.subject.with_percentiles(self.question, self.strategy(row))

    def percentiles(self, row: int, names: Collection[str]) -> dict[str, float] | None:
        """Return the named percentiles of one strategy, in s, based on its means in the columns.

        This avoids recomputing the means; None if the percentiles need an exact estimate.
        """
        return None if self.simulation is None else self.simulation.percentiles(row, names)

    def explained(self, estimate: Estimate) -> Estimate:
        """Return the estimate of a strategy again, with every term."""
        return self.subject.explained(self.question, estimate.strategy)

    def text(self, row: int) -> str:
        """Return one strategy as JSON with all defaults filled in."""
        cached = self.subject.plain.get(self.strategy(row))
        if cached is not None:
            return cached.strategy.model_dump_json()
        setting = resolve(self.question.estimate_request(self.strategy(row)))
        return setting.strategy.model_dump_json()


def score(block: Block, subject: Subject | None = None) -> Scores:
    """Return the figures of every strategy of a block."""
    setting = block.setting
    outcome = cost_workload(setting, NullLedger())
    paid = paid_setting(setting)
    expenses = expense(paid, outcome, NullLedger(), rented_devices(setting)).figures
    loss = _losses(block)
    own_figures = {
        "per_device_peak_bytes": np.rint(outcome.memory.peak_bytes),
        "quality_loss_ratio": loss,
        **outcome.admission._asdict(),
        **expenses,
    }

    def read(name: str) -> Numbers | None:
        value = (
            own_figures[name] if name in own_figures else getattr(outcome.performance, name, None)
        )
        return None if value is None else block.column(value)

    perplexity = np.where(np.isnan(loss), UNKNOWN_PERPLEXITY_RATIO, 1 + loss)
    return Scores(
        question=block.question,
        strategy=block.strategy,
        fits=block.column(outcome.fits) > 0,
        usable_bytes=block.column(outcome.memory.usable_bytes),
        merit=_broadcast_merit(
            merit_from(
                cast("Callable[[str], float | None]", read),
                cast("float", block.column(setting.layout.devices)),
                cast("float", block.column(perplexity)),
            ),
            len(block.cells),
        ),
        figures=read,
        families=block.column(strategy_family_numbers(setting.strategy, setting.layout)),
        complexity=np.stack(
            [
                block.column(numbers)
                for numbers in complexity_columns(setting.strategy, setting.layout)
            ]
        ),
        subject=subject or Subject(),
        simulation=_simulation(block, read),
    )


def _simulation(block: Block, read: Read) -> BlockPercentiles | None:
    """Return the percentile simulator of a block, None for mixed or disaggregated serving."""
    workload, setting = block.question.request.workload, block.setting
    is_alike = not block.question.cluster.other_nodes and setting.strategy.disaggregated is None
    if not is_alike or not isinstance(workload, ServeWorkload):
        return None
    return BlockPercentiles(block, workload, read)


class FitCheck:
    """Decides which blocks may hold a strategy that fits, by memory alone.

    Full recomputation needs the least memory: if it does not fit, nothing with less recomputation
    fits. Blocks are expected in increasing order of recomputation.
    """

    def __init__(self, blocks: Iterable[Block]) -> None:
        self._leanest = {_key_without_recomputation(block): block for block in blocks}
        self._known: dict[int, bool] = {}

    def may_fit(self, block: Block) -> bool:
        """Return whether any strategy of a block may fit."""
        leanest = self._leanest[_key_without_recomputation(block)]
        return self._fits(leanest) and self._fits(block)

    def _fits(self, block: Block) -> bool:
        if id(block) not in self._known:
            self._known[id(block)] = bool(block.column(fits_of(block.setting)).any())
        return self._known[id(block)]


def _key_without_recomputation(block: Block) -> str:
    """Return a block's shared fields except recomputation, as text."""
    shared = {**block.shared, "activation_recomputation": None}
    return str(sorted(shared.items()))


def _losses(block: Block) -> Numbers:
    """Return the quality loss under each cache format, NaN if no table has it."""
    losses_by_format = []
    for dtype in block.caches:
        strategy = block.setting.strategy
        if dtype is not None:
            strategy = strategy.model_copy(update={"kv_cache_dtype": dtype})
        quality = quality_of(replace(block.setting, strategy=strategy))
        loss = quality.loss_ratio if quality else 0.0
        losses_by_format.append(np.nan if loss is None else loss)
    chosen = block.sizes.get("kv_cache_dtype", np.zeros(1))
    losses: Numbers = np.array(losses_by_format)[chosen.astype(np.int64)]
    return losses


def _broadcast_merit(merit: Merit, rows: int) -> Merit:
    """Return a merit with every figure broadcast to a column."""
    columns = {
        name: np.broadcast_to(np.asarray(value, dtype=np.float64), rows)
        for name, value in vars(merit).items()
    }
    return Merit(**cast("dict[str, float]", columns))


def score_exactly(
    question: Question, strategies: Iterable[Strategy], subject: Subject
) -> tuple[list[Scores], PlannerError | None]:
    """Return scores from one exact estimate per strategy, and the last refusal."""
    accepted: list[Strategy] = []
    refused: PlannerError | None = None
    for strategy in strategies:
        try:
            subject.exact(question, strategy)
        except (NotPossibleError, NotCoveredError) as error:
            refused = error
        else:
            accepted.append(strategy)
    return [_scores_of_list(question, accepted, subject)] if accepted else [], refused


def _scores_of_list(
    question: Question, strategies: Sequence[Strategy], subject: Subject
) -> Scores:
    estimates = [subject.exact(question, each) for each in strategies]
    merits = [vars(merit_of(estimate)) for estimate in estimates]
    settings = [resolve(question.estimate_request(each)) for each in strategies]

    def read(name: str) -> Numbers | None:
        values = [figure(estimate, name) for estimate in estimates]
        return np.array([np.nan if value is None else value for value in values])

    columns = {name: np.array([merit[name] for merit in merits]) for name in merits[0]}
    return Scores(
        question=question,
        strategy=strategies.__getitem__,
        fits=np.array([estimate.fits for estimate in estimates]),
        usable_bytes=np.array([usable_bytes(each) for each in settings]),
        merit=Merit(**cast("dict[str, float]", columns)),
        figures=read,
        families=np.array(
            [strategy_family_numbers(each.strategy, each.layout) for each in settings]
        ),
        complexity=np.array(
            [complexity_columns(each.strategy, each.layout) for each in settings]
        ).T,
        subject=subject,
    )
