"""Score strategies as columns: blocks with the workload's formulas, lists with single estimates.

``score`` runs the functions that cost one strategy once, on the whole grid of a block.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np

from planner.cost.equation import Unrecorded
from planner.errors import NotCoveredError, NotPossibleError, PlannerError
from planner.search.block import Block, Flags, Numbers
from planner.search.constraints import figure
from planner.search.percentiles import BlockPercentiles, Read
from planner.search.question import Question
from planner.search.rank import (
    UNKNOWN_PERPLEXITY_RATIO,
    Merit,
    merit_from,
    merit_of,
    plainness_columns,
)
from planner.search.rejection import family_numbers
from planner.search.subject import Subject
from planner.specs.estimate import Estimate
from planner.specs.strategy import Strategy
from planner.specs.workload import ServeWorkload
from planner.workload.estimator import (
    fits_of,
    paid_setting,
    quality_of,
    rented_devices,
    run,
)
from planner.workload.expense import expense
from planner.workload.inference_memory import usable_bytes
from planner.workload.resolve import resolve


@dataclass(frozen=True)
class Scores:
    """Strategies of one question with their figures, one row per strategy.

    ``figures`` reads any figure of an estimate by name. ``families`` holds family numbers,
    ``plainness`` the numbers of ``rank.plainness``, one column per strategy. ``subject`` caches
    exact estimates.
    """

    question: Question
    strategy: Callable[[int], Strategy]
    fits: Flags
    usable_bytes: Numbers
    merit: Merit
    figures: Read
    families: Numbers
    plainness: Numbers
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
    outcome = run(setting, Unrecorded())
    paid = paid_setting(setting)
    expenses = expense(paid, outcome, Unrecorded(), rented_devices(setting)).figures
    loss = _losses(block)
    own_figures = {
        "per_device_peak_bytes": np.rint(outcome.memory.peak_bytes),
        "quality_loss_ratio": loss,
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
        families=block.column(family_numbers(setting.strategy, setting.layout)),
        plainness=np.stack(
            [
                block.column(numbers)
                for numbers in plainness_columns(setting.strategy, setting.layout)
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


class Fitting:
    """Decides which blocks may hold a strategy that fits, by memory alone.

    Full recomputation needs the least memory: if it does not fit, nothing with less recomputation
    fits. Blocks are expected in increasing order of recomputation.
    """

    def __init__(self, blocks: Iterable[Block]) -> None:
        self._leanest = {_key_without_recomputation(block): block for block in blocks}
        self._known: dict[int, bool] = {}

    def anything(self, block: Block) -> bool:
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
        families=np.array([family_numbers(each.strategy, each.layout) for each in settings]),
        plainness=np.array([plainness_columns(each.strategy, each.layout) for each in settings]).T,
        subject=subject,
    )
