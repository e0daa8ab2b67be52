"""Scores strategies as columns: blocks by the workload's own formulas, lists by the exact door.

``score`` runs the same functions that cost one strategy, once, on the whole grid of a block.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np

from planner.cost.equation import Unrecorded
from planner.errors import NotCoveredError, NotPossibleError, PlannerError
from planner.search.block import Block, Flags, Numbers
from planner.search.constraints import figure
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
from planner.specs.estimate import Estimate, Performance
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

Read = Callable[[str], Numbers | None]
# What the percentiles of a load are drawn around, and how many requests it has room for.
MEANS = ("ttft_seconds", "tpot_seconds", "latency_seconds", "max_concurrency")


@dataclass(frozen=True)
class Scores:
    """Strategies of one question with their figures, one number a row.

    ``figures`` reads any figure of an estimate by name; ``families`` numbers the families;
    ``plainness`` has the numbers of ``rank.plainness``, a column for each strategy; the
    ``subject`` keeps what the exact door has costed.
    """

    question: Question
    strategy: Callable[[int], Strategy]
    fits: Flags
    usable_bytes: float
    merit: Merit
    figures: Read
    families: Numbers
    plainness: Numbers
    subject: Subject

    def __len__(self) -> int:
        return len(self.fits)

    def exact(self, row: int) -> Estimate:
        """Return one strategy as the exact door costs it, without the explanation."""
        return self.subject.exact(self.question, self.strategy(row))

    def simulated(self, row: int) -> Estimate:
        """Return one strategy as the exact door costs it, its percentiles included."""
        return self.subject.with_percentiles(self.question, self.strategy(row))

    def percentiles(self, row: int) -> dict[str, float] | None:
        """Return one strategy's percentiles, in s by name, around its means in the columns.

        This spares costing those again; nothing where the exact door alone can tell.
        """
        question, strategy = self.question, self.strategy(row)
        alike = not question.cluster.other_nodes and strategy.disaggregated is None
        if not alike or not isinstance(question.request.workload, ServeWorkload):
            return None
        found = {name: self.figures(name) for name in MEANS}
        known = {name: float(one[row]) for name, one in found.items() if one is not None}
        means = Performance.model_construct(**known)  # type: ignore[arg-type]  # figures of a row
        return self.subject.percentiles(question, strategy, means)

    def explained(self, estimate: Estimate) -> Estimate:
        """Return an estimate of one of the strategies again, with every term."""
        return self.subject.explained(self.question, estimate.strategy)

    def text(self, row: int) -> str:
        """Return one strategy as text, every default filled in."""
        known = self.subject.plain.get(self.strategy(row))
        if known is not None:
            return known.strategy.model_dump_json()
        setting = resolve(self.question.estimate_request(self.strategy(row)))
        return setting.strategy.model_dump_json()


def score(block: Block, subject: Subject | None = None) -> Scores:
    """Return the figures of every strategy of a block."""
    setting = block.setting
    outcome = run(setting, Unrecorded())
    paid = paid_setting(setting)
    spent = expense(paid, outcome, Unrecorded(), rented_devices(setting)).figures
    loss = _losses(block)
    own = {
        "per_device_peak_bytes": np.rint(outcome.memory.peak_bytes),
        "quality_loss_ratio": loss,
        **spent,
    }

    def read(name: str) -> Numbers | None:
        value = own[name] if name in own else getattr(outcome.performance, name, None)
        return None if value is None else block.column(value)

    perplexity = np.where(np.isnan(loss), UNKNOWN_PERPLEXITY_RATIO, 1 + loss)
    return Scores(
        question=block.question,
        strategy=block.strategy,
        fits=block.column(outcome.fits) > 0,
        usable_bytes=outcome.memory.usable_bytes,
        merit=_filled(
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
            [block.column(one) for one in plainness_columns(setting.strategy, setting.layout)]
        ),
        subject=subject or Subject(),
    )


class Fitting:
    """Tells which of some blocks hold a strategy that may fit, by its memory alone.

    What is recomputed is not kept: where nothing fits that recomputes all, nothing does that
    recomputes less. The blocks come in this order.
    """

    def __init__(self, blocks: Iterable[Block]) -> None:
        self._leanest = {_but_recomputation(block): block for block in blocks}
        self._known: dict[int, bool] = {}

    def anything(self, block: Block) -> bool:
        """Return whether any strategy of a block may fit."""
        leanest = self._leanest[_but_recomputation(block)]
        return self._fits(leanest) and self._fits(block)

    def _fits(self, block: Block) -> bool:
        if id(block) not in self._known:
            self._known[id(block)] = bool(block.column(fits_of(block.setting)).any())
        return self._known[id(block)]


def _but_recomputation(block: Block) -> str:
    """Return what the strategies of a block share, as text, but what they recompute."""
    shared = {**block.shared, "activation_recomputation": None}
    return str(sorted(shared.items()))


def _losses(block: Block) -> Numbers:
    """Return the quality lost under each format of the cache, nan where no table tells."""
    found = []
    for dtype in block.caches:
        strategy = block.setting.strategy
        if dtype is not None:
            strategy = strategy.model_copy(update={"kv_cache_dtype": dtype})
        quality = quality_of(replace(block.setting, strategy=strategy))
        loss = quality.loss_ratio if quality else 0.0
        found.append(np.nan if loss is None else loss)
    chosen = block.sizes.get("kv_cache_dtype", np.zeros(1))
    losses: Numbers = np.array(found)[chosen.astype(np.int64)]
    return losses


def _filled(merit: Merit, rows: int) -> Merit:
    """Return a merit whose every figure is a column of its own."""
    columns = {
        name: np.broadcast_to(np.asarray(value, dtype=np.float64), rows)
        for name, value in vars(merit).items()
    }
    return Merit(**cast("dict[str, float]", columns))


def score_exactly(
    question: Question, strategies: Iterable[Strategy], subject: Subject
) -> tuple[list[Scores], PlannerError | None]:
    """Return strategies that the exact door costs one by one, and why the last was refused."""
    kept: list[Strategy] = []
    refused: PlannerError | None = None
    for strategy in strategies:
        try:
            subject.exact(question, strategy)
        except (NotPossibleError, NotCoveredError) as error:
            refused = error
        else:
            kept.append(strategy)
    return [_listed(question, kept, subject)] if kept else [], refused


def _listed(question: Question, strategies: Sequence[Strategy], subject: Subject) -> Scores:
    estimates = [subject.exact(question, one) for one in strategies]
    merits = [vars(merit_of(estimate)) for estimate in estimates]
    settings = [resolve(question.estimate_request(one)) for one in strategies]

    def read(name: str) -> Numbers | None:
        values = [figure(estimate, name) for estimate in estimates]
        return np.array([np.nan if value is None else value for value in values])

    columns = {name: np.array([merit[name] for merit in merits]) for name in merits[0]}
    return Scores(
        question=question,
        strategy=strategies.__getitem__,
        fits=np.array([estimate.fits for estimate in estimates]),
        usable_bytes=usable_bytes(settings[0]),
        merit=Merit(**cast("dict[str, float]", columns)),
        figures=read,
        families=np.array([family_numbers(one.strategy, one.layout) for one in settings]),
        plainness=np.array([plainness_columns(one.strategy, one.layout) for one in settings]).T,
        subject=subject,
    )
