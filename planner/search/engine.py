"""The search: score every strategy, keep what fits, cost the best exactly, say why not."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import cast

from planner.catalog.engines import calibration_name
from planner.cost.compression import RECIPES
from planner.errors import NotCoveredError, NotPossibleError, PlannerError
from planner.search.block import Block
from planner.search.ceiling import out_of_reach
from planner.search.constraints import broken, constraints_of, is_simulated
from planner.search.offer import offered
from planner.search.offloaded import offloaded
from planner.search.question import Question, questions
from planner.search.rank import frontier, order_of
from planner.search.rejection import MAX_FAMILIES, Rejections, family_of
from planner.search.scoring import Fitting, Scores, score, score_exactly
from planner.search.select import Table, best_rows, frontier_rows, lost_families, promises
from planner.search.serving_space import serving_blocks
from planner.search.space import FRUGAL
from planner.search.split_space import split_strategies
from planner.search.subject import RECENT, Subject
from planner.search.suggest import suggestions
from planner.search.training_space import training_blocks
from planner.search.unlike_space import unlike_strategies
from planner.specs.cluster import ClusterSpec
from planner.specs.estimate import Estimate
from planner.specs.plan import (
    Bound,
    PlanAnswer,
    PlannedStrategy,
    PlanRequest,
    Rejection,
    Searched,
    Suggestion,
)
from planner.specs.strategy import Strategy
from planner.specs.workload import (
    CompressWorkload,
    GenerateWorkload,
    ServeWorkload,
    TrainWorkload,
)
from planner.techniques.registry import inapplicable
from planner.workload.resolve import refuse_uncovered

MAX_FRONTIER = 24
Scored = tuple[list[Scores], PlannerError | None]
Choice = tuple[Estimate, Scores]
Enough = Callable[[Scores], bool]


@dataclass
class Found:
    """What one search scored over all clusters."""

    limits: dict[str, Bound]
    parts: list[Scores] = field(default_factory=list)
    rejections: Rejections = field(default_factory=Rejections)
    refused: PlannerError | None = None

    @cached_property
    def table(self) -> Table:
        """Return the scores of all parts under each other."""
        return Table(self.parts, self.limits)

    @cached_property
    def rejected(self) -> dict[str, Rejection]:
        """Return why each family lost, by the exact figures of the member that came closest."""
        for row, strategies in lost_families(self.table, MAX_FAMILIES):
            estimate, part = self.table.exact(row), self.table.part_of(row)[0]
            miss = broken(estimate, self.limits)
            if not estimate.fits:
                self.rejections.memory(estimate, part.usable_bytes, strategies)
            elif miss is not None:
                self.rejections.constraint(estimate, miss, strategies)
        return self.rejections.result()


def search(request: PlanRequest) -> PlanAnswer:
    """Return the ranked plans of a request, the frontier, rejections and suggestions.

    Raises:
        PlannerError: a name is unknown, a constraint is no figure, or a pin is impossible.
    """
    started = time.perf_counter()
    found = explore(request)
    table = found.table
    plans = _plans(request, table)
    helpful = () if plans else _suggestions(request, found)
    return PlanAnswer(
        id=request.id,
        request=request,
        plans=plans,
        pareto=_pareto(table),
        rejected=found.rejected,
        suggestions=helpful,
        searched=Searched(strategies=len(table), seconds=time.perf_counter() - started),
        calibration=_calibration(request),
    )


def best_of(request: PlanRequest) -> Estimate | None:
    """Return the best feasible estimate of a request, or nothing when nothing fits."""
    return _best_among(request, explore(request, only_fitting=True))


def _suggestions(request: PlanRequest, found: Found) -> tuple[Suggestion, ...]:
    """Return what would help where nothing was found, each change with its best plan."""

    def explored(changed: PlanRequest, enough: Enough | None = None) -> Found:
        # Strategies cost the same under other limits: they are not scored again.
        if request.model_copy(update={"constraints": changed.constraints}) == changed:
            return Found(constraints_of(changed), found.parts)
        return explore(changed, only_fitting=True, enough=enough)

    def works(changed: PlanRequest) -> bool:
        limits = constraints_of(changed)

        def enough(part: Scores) -> bool:
            return bool(len(Table([part], limits).feasible))

        # Of limits that columns decide one strategy is enough; others need the whole table.
        decided = not any(map(is_simulated, limits))
        return _is_hopeful(explored(changed, enough if decided else None))

    def best(changed: PlanRequest) -> Estimate | None:
        return _best_among(changed, explored(changed))

    return suggestions(request, best, works)


def _best_among(request: PlanRequest, found: Found) -> Estimate | None:
    best = best_with_cluster(request, found) if _is_hopeful(found) else None
    return best[0] if best else None


def _is_hopeful(found: Found) -> bool:
    return bool(found.parts) and promises(found.table)


def best_with_cluster(request: PlanRequest, found: Found) -> tuple[Estimate, ClusterSpec] | None:
    """Return the best feasible estimate among what was found, and the cluster that it is for."""
    for estimate, part in _best(request, found.table, 1):
        return estimate, part.question.shown
    return None


def explore(
    request: PlanRequest, *, only_fitting: bool = False, enough: Enough | None = None
) -> Found:
    """Return every strategy of every cluster, scored, and the techniques that do not apply.

    With ``only_fitting`` blocks are left out in which no strategy fits into memory, and
    clusters whose devices have not the arithmetic for a target. Nothing is scored any more after
    a part that is ``enough``.

    Raises:
        PlannerError: no strategy could be costed at all; it is the last one's reason.
    """
    refuse_uncovered(request.pins, training=isinstance(request.workload, TrainWorkload))
    found = Found(constraints_of(request))
    for question in questions(request):
        if only_fitting and out_of_reach(question, found.limits):
            continue
        for key, reason in inapplicable(question.case).items():
            found.rejections.technique(key, reason)
        parts, refused = scored(question, only_fitting=only_fitting, enough=enough)
        found.parts += parts
        found.refused = refused or found.refused
        if enough and any(map(enough, parts)):
            break
    if not found.parts and found.refused:
        raise found.refused
    return found


def scored(
    question: Question, *, only_fitting: bool = False, enough: Enough | None = None
) -> Scored:
    """Return the scores of a question's strategies, and why the last one refused was refused.

    They are kept for the next questions: neither a target nor most objectives change them. What
    ends at a part that is ``enough`` may lack others.
    """
    subject, request = RECENT.of(question), question.request
    under = (request.pins, _objective_read(question), only_fitting)
    found = cast("Scored | None", RECENT.scored(subject, under))
    if found is None:
        found = _scored(question, subject, only_fitting=only_fitting, enough=enough)
        if not (enough and any(map(enough, found[0]))):
            RECENT.keep(subject, under, found, sum(map(len, found[0])))
    return found


def _objective_read(question: Question) -> object:
    """Return what a space reads of the objective: to serve it may leave devices idle."""
    objective = question.request.objective
    if question.cluster.other_nodes:
        return objective
    return objective in FRUGAL and not isinstance(question.request.workload, TrainWorkload)


def _scored(
    question: Question, subject: Subject, *, only_fitting: bool, enough: Enough | None
) -> Scored:
    refused: PlannerError | None = None
    blocks: tuple[Block, ...] = ()
    if (listed := _one_by_one(question)) is not None:
        return score_exactly(question, listed, subject)
    try:
        blocks = blocks_of(question)
    except (NotPossibleError, NotCoveredError) as error:
        refused = error
    told: list[tuple[Block, bool]] = []
    parts: list[Scores] = []
    for block, part in _of_blocks(blocks, subject, only_fitting=only_fitting):
        if isinstance(part, PlannerError):
            refused = part
            continue
        told.append((block, part is not None and bool(part.fits.any())))
        parts += [] if part is None else [part]
        if enough and part is not None and enough(part):
            return parts, refused
    if not question.cluster.other_nodes:
        parts += score_exactly(question, offloaded(question, told), subject)[0]
    if not parts and not (only_fitting and blocks):
        # A pinned layout that the space does not contain is costed, or refused, as it is.
        parts, refused = score_exactly(question, _listed(question), subject)
    return parts, refused


def _one_by_one(question: Question) -> tuple[Strategy, ...] | None:
    """Return the strategies of a question that columns cannot cost, None where they can."""
    workload, split = question.request.workload, question.request.pins.disaggregated
    if question.cluster.other_nodes and isinstance(workload, TrainWorkload):
        return unlike_strategies(question, workload)
    if split is not None and isinstance(workload, ServeWorkload):
        return split_strategies(question, split)
    return None


def _of_blocks(
    blocks: Sequence[Block], subject: Subject, *, only_fitting: bool
) -> Iterator[tuple[Block, Scores | PlannerError | None]]:
    """Yield each block with its scores, nothing where nothing fits, or why it was refused."""
    fitting = Fitting(blocks)
    for block in blocks:
        try:
            fits = not only_fitting or fitting.anything(block)
            yield block, score(block, subject) if fits else None
        except (NotPossibleError, NotCoveredError) as error:
            yield block, error


def blocks_of(question: Question) -> tuple[Block, ...]:
    """Return the blocks of a question's strategies; a compression job has no choices."""
    match question.request.workload:
        case TrainWorkload() as workload:
            return training_blocks(question, workload)
        case ServeWorkload() | GenerateWorkload() as workload:
            return serving_blocks(question, workload)
        case CompressWorkload():
            return ()


def _listed(question: Question) -> tuple[Strategy, ...]:
    """Return strategies that no block holds: the pins, or copies that share calibration text."""
    workload, pins = question.request.workload, question.request.pins
    if not isinstance(workload, CompressWorkload) or pins.data_parallel_size:
        return (pins,)
    shared = RECIPES[workload.method].is_calibrated
    most = question.cluster.num_devices if shared else 1
    counts = [2**power for power in range(most.bit_length()) if 2**power <= most]
    return tuple(pins.model_copy(update={"data_parallel_size": count}) for count in counts)


def _best(request: PlanRequest, table: Table, top: int) -> list[Choice]:
    """Return the best strategies by the exact door's figures, of each family the best one."""
    rows = best_rows(table, request.objective, top)
    choices = [(table.exact(row), table.part_of(row)[0]) for row in rows]
    choices.sort(key=lambda choice: order_of(choice[0], request.objective))
    best: dict[tuple[str, ...], Choice] = {}
    for estimate, part in choices:
        # Of one family only its best member is shown: neighbours differ in details alone.
        family = (family_of(estimate.strategy), *part.question.hardware)
        best.setdefault(family, (estimate, part))
    return list(best.values())[:top]


def _plans(request: PlanRequest, table: Table) -> tuple[PlannedStrategy, ...]:
    chosen = _best(request, table, request.top)
    first = chosen[0][0] if chosen else None
    apart = _apart(request, table)
    return tuple(
        offered(rank, part.explained(estimate), part.question, first, apart)
        for rank, (estimate, part) in enumerate(chosen, start=1)
    )


def _apart(request: PlanRequest, table: Table) -> dict[str, Estimate | None]:
    """Return the best of each choice of nodes where a cluster has unlike ones that may part."""
    names = list(dict.fromkeys(part.question.hardware[0] for part in table.parts))
    if request.hardware_options or not request.cluster.other_nodes or len(names) <= 1:
        return {}
    found: dict[str, Estimate | None] = {}
    for name in names:
        parts = [part for part in table.parts if part.question.hardware[0] == name]
        best = _best(request, Table(parts, table.limits), 1)
        found[name] = best[0][0] if best else None
    return found


def _pareto(table: Table) -> tuple[PlannedStrategy, ...]:
    rows = frontier_rows(table)[:MAX_FRONTIER]
    questions_by_estimate = {id(table.exact(row)): table.part_of(row)[0].question for row in rows}
    return tuple(
        offered(rank, estimate, questions_by_estimate[id(estimate)], None)
        for rank, estimate in enumerate(frontier([table.exact(row) for row in rows]), start=1)
    )


def _calibration(request: PlanRequest) -> str:
    host = request.host_calibration
    return f"{calibration_name()}+{host.host}:{host.digest}" if host else calibration_name()
