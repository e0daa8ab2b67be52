"""The search: score all strategies, filter those that fit, estimate the best, explain the rest."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import cast

import numpy as np

from planner.catalog.engines import AUTO, calibration_of, get_engine, serving_engine
from planner.cost.weights import RECIPES
from planner.search.bounds import exceeds_peak
from planner.search.placement import offloaded_placements
from planner.search.question import (
    MAX_FAMILIES,
    Question,
    Rejections,
    constraints_of,
    figure,
    first_violation,
    is_simulated,
    questions,
    strategy_family_of,
)
from planner.search.rank import as_plan, frontier, order_of
from planner.search.scoring import ESTIMATES, FitCheck, Scores, Subject, score, score_exactly
from planner.search.select import (
    Table,
    best_rows,
    best_value,
    fastest_row,
    frontier_rows,
    has_feasible_row,
    infeasible_strategy_families,
)
from planner.search.serving_space import (
    HOST_SHARES,
    blocks_by_host_share,
    computes_on_host,
    heterogeneous_strategies,
    refused_layouts,
    serving_blocks,
    split_strategies,
    usual_host_bytes,
)
from planner.search.space import FRUGAL, Block, refused_formats
from planner.search.suggest import Best, Miss, Reach, Works, suggestions
from planner.search.training_space import training_blocks
from planner.specs.base import NotCoveredError, NotPossibleError, PlannerError
from planner.specs.cluster import ClusterSpec
from planner.specs.estimate import (
    Bound,
    Estimate,
    PlanAnswer,
    PlannedStrategy,
    PlanRequest,
    Rejection,
    SearchStats,
    Suggestion,
)
from planner.specs.workload import (
    CompressWorkload,
    GenerateWorkload,
    ServeWorkload,
    Strategy,
    TrainWorkload,
    Workload,
)
from planner.techniques.registry import inapplicable
from planner.workload.resolve import is_stored_as, refuse_unmodelled_fields

MAX_FRONTIER = 24
FEW_REQUESTS = 16  # of a load without a number of its own: fewer leave devices idle
ScoreResult = tuple[list[Scores], PlannerError | None]
Choice = tuple[Estimate, Scores]
Enough = Callable[[Scores], bool]
BlocksOfShare = tuple[Callable[[float], Block | None], ...]


@dataclass
class SearchState:
    """The scored strategies of one search over all clusters."""

    limits: dict[str, Bound]
    parts: list[Scores] = field(default_factory=list)
    questions: list[Question] = field(default_factory=list)
    # By engine: the last refusal of one of which no strategy was scored.
    refused: dict[str | None, PlannerError] = field(default_factory=dict)

    @cached_property
    def table(self) -> Table:
        """Return the concatenated scores of all parts."""
        return Table(self.parts, self.limits)

    @cached_property
    def rejected(self) -> dict[str, Rejection]:
        """Return why each strategy family was rejected, with the figures of its closest member.

        Techniques that do not apply, and what the engine refuses, come first.
        """
        engines = {question.request.engine for question in self.questions}
        rejections = Rejections(names_engines=len(engines) > 1)
        for question in self.questions:
            for key, reason in inapplicable(question.case).items():
                rejections.add_technique(key, reason)
            for key, reason in _refusals(question):
                rejections.add_technique(key, reason, question.request.engine)
        for engine, error in self.refused.items():
            rejections.add_technique(str(engine), error.message)
        for row, strategies in infeasible_strategy_families(self.table, MAX_FAMILIES):
            estimate, (part, own) = self.table.exact(row), self.table.part_of(row)
            miss = first_violation(estimate, self.limits)
            if not estimate.fits:
                rejections.add_memory(estimate, float(part.usable_bytes[own]), strategies)
            elif miss is not None:
                rejections.add_constraint(estimate, miss, strategies)
        return rejections.result()


def search(request: PlanRequest) -> PlanAnswer:
    """Return the ranked plans of a request, the frontier, rejections and suggestions.

    Raises:
        PlannerError: a name is unknown, a constraint is not a figure, or a pin is impossible.
    """
    started = time.perf_counter()
    exploration = explore(request)
    table = exploration.table
    plans = _plans(request, table)
    helpful = () if plans else _suggestions(request, exploration)
    return PlanAnswer(
        id=request.id,
        request=request,
        plans=plans,
        pareto=_pareto(table),
        rejected=exploration.rejected,
        suggestions=helpful,
        searched=SearchStats(strategies=len(table), seconds=time.perf_counter() - started),
        calibration=calibration_of(request.host_calibration),
    )


def search_best(request: PlanRequest) -> PlanAnswer:
    """Return the best plan only, explained; if nothing fits, return the rejections.

    If no plan meets the targets, the answer holds the best plan that fits, and its ``request`` has
    no targets. The frontier and the suggestions are skipped: they take most of the time of
    ``search``.

    Raises:
        PlannerError: as ``search``.
    """
    started = time.perf_counter()
    exploration, answered_request = explore(request), request
    plans = _plans(request.model_copy(update={"top": 1}), exploration.table)
    bare = request.without_targets()
    if not plans and bare != request:
        answered_request, exploration = bare, explore(bare)
        plans = _plans(bare.model_copy(update={"top": 1}), exploration.table)
    return PlanAnswer(
        id=request.id,
        request=answered_request,
        plans=plans,
        pareto=(),
        rejected={} if plans else exploration.rejected,
        suggestions=(),
        searched=SearchStats(
            strategies=len(exploration.table), seconds=time.perf_counter() - started
        ),
        calibration=calibration_of(request.host_calibration),
    )


def best_of(request: PlanRequest) -> Estimate | None:
    """Return the best feasible estimate of a request, or None if nothing fits."""
    return _best_among(request, explore(request, only_fitting=True))


def _suggestions(request: PlanRequest, exploration: SearchState) -> tuple[Suggestion, ...]:
    """Return the changes that would make an infeasible request feasible, each with its best plan.

    Fitting into memory and meeting the targets are searched separately: the first only if nothing
    fits, the second only if the request has targets.
    """
    best, works, reach = _searches(request, exploration)
    miss = _miss_of_fastest(exploration)
    bare = request.without_targets()
    fits = bool(exploration.parts) and has_feasible_row(
        Table(exploration.parts, constraints_of(bare))
    )
    helpful = () if fits else suggestions(request, best, works, reach=reach)
    if fits or constraints_of(bare) != exploration.limits:
        known_changes = [suggestion.changes for suggestion in helpful]
        more = suggestions(request, best, works, reach=reach, miss=miss, purpose="target")
        helpful += tuple(
            suggestion for suggestion in more if suggestion.changes not in known_changes
        )
    return helpful


def _searches(request: PlanRequest, exploration: SearchState) -> tuple[Best, Works, Reach]:
    """Return searches of changed requests: best plan, existence of one, best of one figure."""
    own = request.model_copy(update={"constraints": {}})
    # Several engines are too many to try layers on the host with each change of what fits without.
    on_host = request.engine != AUTO or not _fits_on_devices(exploration)

    def explored(changed: PlanRequest, enough: Enough | None = None) -> SearchState:
        # Limits do not change costs: the strategies are not scored again.
        if changed.model_copy(update={"constraints": {}}) == own:
            return SearchState(constraints_of(changed), exploration.parts)
        return explore(changed, only_fitting=True, enough=enough, on_host=on_host)

    def works(changed: PlanRequest) -> bool:
        limits = constraints_of(changed)

        def enough(part: Scores) -> bool:
            return bool(len(Table([part], limits).feasible))

        # One feasible strategy is enough for limits that columns decide; others need the whole
        # table.
        decided = not any(map(is_simulated, limits))
        return _has_promising_row(explored(changed, enough if decided else None))

    def best(changed: PlanRequest) -> Estimate | None:
        return _best_among(changed, explored(changed))

    def reach(asked: PlanRequest, name: str, bound: Bound) -> float | None:
        limits = {key: other for key, other in constraints_of(asked).items() if key != name}
        if not exploration.parts:
            return None
        return best_value(Table(exploration.parts, limits), name, least=bound.max is not None)

    return best, works, reach


def _fits_on_devices(exploration: SearchState) -> bool:
    """Return whether a strategy fits that leaves nothing on the host."""
    return any(part.fits.any() and part.strategy(0).offload is None for part in exploration.parts)


def _miss_of_fastest(exploration: SearchState) -> Miss:
    """Return the figure over its limit of a search's strategy of least delay, under changes.

    It is known for limits that need a simulation: for others, a search takes little more time.
    """

    @cache
    def fastest() -> tuple[tuple[str, ...], Strategy] | None:
        row = fastest_row(exploration.table) if exploration.parts else None
        if row is None:
            return None
        part, own = exploration.table.part_of(row)
        return part.question.compared, part.strategy(own)

    def miss(changed: PlanRequest) -> float | None:
        limits = constraints_of(changed)
        if not any(map(is_simulated, limits)) or (found := fastest()) is None:
            return None
        compared, strategy = found
        try:
            question = next(each for each in questions(changed) if each.compared == compared)
            estimate = ESTIMATES.of(question).with_percentiles(question, strategy)
        except (PlannerError, StopIteration):
            return None
        ratios = (
            ratio
            for name, bound in limits.items()
            for ratio in _ratios_to_limits(figure(estimate, name), bound)
        )
        return max(ratios, default=None) if estimate.fits else None

    return miss


def _ratios_to_limits(value: float | None, bound: Bound) -> Iterator[float]:
    """Yield a figure over its upper limit, and its lower limit over the figure."""
    if value and bound.max:
        yield value / bound.max
    if value and bound.min:
        yield bound.min / value


def _best_among(request: PlanRequest, exploration: SearchState) -> Estimate | None:
    best = best_with_cluster(request, exploration) if _has_promising_row(exploration) else None
    return best[0] if best else None


def _has_promising_row(exploration: SearchState) -> bool:
    return bool(exploration.parts) and has_feasible_row(exploration.table)


def best_with_cluster(
    request: PlanRequest, exploration: SearchState
) -> tuple[Estimate, ClusterSpec] | None:
    """Return the best feasible estimate found, and its cluster."""
    for estimate, part in _best_choices(request, exploration.table, 1):
        return estimate, part.question.shown
    return None


def explore(
    request: PlanRequest,
    *,
    only_fitting: bool = False,
    enough: Enough | None = None,
    on_host: bool = True,
) -> SearchState:
    """Return every scored strategy of every cluster.

    With ``only_fitting``, skip blocks in which no strategy fits into memory, and clusters whose
    peak arithmetic is below a target. Scoring stops after a part for which ``enough`` is true.
    Without ``on_host`` no layers are left to the host's cores where nothing else fits.

    Raises:
        PlannerError: no strategy could be costed; it is the last refusal.
    """
    refuse_unmodelled_fields(request.pins, training=isinstance(request.workload, TrainWorkload))
    exploration = SearchState(constraints_of(request))
    for question in questions(request):
        if only_fitting and exceeds_peak(question, exploration.limits):
            continue
        exploration.questions.append(question)
        parts, refused = score_question(
            question, only_fitting=only_fitting, enough=enough, on_host=on_host
        )
        exploration.parts += parts
        if refused:
            exploration.refused[question.request.engine] = refused
        if enough and any(map(enough, parts)):
            break
    if not exploration.parts and exploration.refused:
        raise _one_refusal(exploration.refused)
    for engine in {part.question.request.engine for part in exploration.parts}:
        exploration.refused.pop(engine, None)
    return exploration


def _one_refusal(refused: Mapping[str | None, PlannerError]) -> PlannerError:
    """Return the refusals of all engines as one error, each after its engine if they differ."""
    *_, last = refused.values()
    if len({error.message for error in refused.values()}) == 1:
        return last
    reasons = ". ".join(f"{engine}: {error.message}" for engine, error in refused.items())
    return type(last)(f"no engine of those compared can do this. {reasons}", last.field)


def _refusals(question: Question) -> Iterator[tuple[str, str]]:
    """Yield the formats and layouts that the engine refuses on these devices, with the reason."""
    workload = question.request.workload
    if not isinstance(workload, ServeWorkload | GenerateWorkload):
        return
    for dtype, reason in refused_formats(question).items():
        yield f"{dtype} weights", reason
    yield from refused_layouts(question, workload)


def score_question(
    question: Question,
    *,
    only_fitting: bool = False,
    enough: Enough | None = None,
    on_host: bool = True,
) -> ScoreResult:
    """Return the scores of a question's strategies, and the last refusal.

    Scores are cached by subject (model, hardware and workload), pinned fields and objective key,
    because targets and most objectives do not change them.
    A search that ``enough`` stopped early is not cached: it may lack parts.
    """
    subject, request = ESTIMATES.of(question), question.request
    pinned = tuple(request.pins.rollout.stated) if request.pins.rollout else None
    cache_key = (request.pins, pinned, _objective_key(question), only_fitting, on_host)
    result = cast("ScoreResult | None", ESTIMATES.find_scores(subject, cache_key))
    if result is None:
        result = _score_question(
            question, subject, only_fitting=only_fitting, enough=enough, on_host=on_host
        )
        if not (enough and any(map(enough, result[0]))):
            ESTIMATES.keep(subject, cache_key, result, sum(map(len, result[0])))
    return result


def _objective_key(question: Question) -> object:
    """Return the part of the objective that the strategy space depends on.

    Frugal serving objectives allow idle devices.
    """
    objective = question.request.objective
    if question.cluster.other_nodes:
        return objective
    return objective in FRUGAL and not isinstance(question.request.workload, TrainWorkload)


def _score_question(
    question: Question,
    subject: Subject,
    *,
    only_fitting: bool,
    enough: Enough | None,
    on_host: bool,
) -> ScoreResult:
    refused: PlannerError | None = None
    blocks: tuple[Block, ...] = ()
    if (strategies := _unblocked_strategies(question)) is not None:
        # If none divides the work, the pinned layout's refusal says why.
        return score_exactly(question, strategies or _listed_strategies(question), subject)
    try:
        blocks = blocks_of(question)
    except (NotPossibleError, NotCoveredError) as error:
        refused = error
    block_fits: list[tuple[Block, bool]] = []
    parts: list[Scores] = []
    for block, part in _score_with_last_resort(
        question, blocks, subject, only_fitting=only_fitting, on_host=on_host
    ):
        if isinstance(part, PlannerError):
            refused = part
            continue
        block_fits.append((block, part is not None and bool(part.fits.any())))
        parts += [] if part is None else [part]
        if enough and part is not None and enough(part):
            return parts, refused
    if not question.cluster.other_nodes:
        parts += score_exactly(question, offloaded_placements(question, block_fits), subject)[0]
    if not parts and not (only_fitting and blocks):
        # A pinned layout outside the space is costed, or refused, as it is.
        undivided = refused if getattr(question.request.workload, "generates", False) else None
        parts, refused = score_exactly(question, _listed_strategies(question), subject)
        refused = undivided or refused
    return parts, refused


def _unblocked_strategies(question: Question) -> tuple[Strategy, ...] | None:
    """Return the strategies that need exact estimates, None if columns can cost them.

    Columns cost all strategies of a block at once (vectorised evaluation with numpy).
    """
    workload, split = question.request.workload, question.request.pins.disaggregated
    if question.cluster.other_nodes and isinstance(workload, TrainWorkload):
        return heterogeneous_strategies(question, workload)
    if split is not None and isinstance(workload, ServeWorkload):
        return split_strategies(question, split)
    return None


def _score_with_last_resort(
    question: Question,
    blocks: Sequence[Block],
    subject: Subject,
    *,
    only_fitting: bool,
    on_host: bool,
) -> Iterator[tuple[Block, Scores | PlannerError | None]]:
    """Yield each scored block, and the last resort of a search that they leave open.

    That is a trainer's offload if nothing fits without it, smaller steps of a server if no
    strategy holds all requests at once, and layers on the host's cores if nothing fits.
    """
    workload, enough, fits = question.request.workload, False, False
    for block, part in _score_blocks(blocks, subject, only_fitting=only_fitting):
        enough = enough or (isinstance(part, Scores) and _holds_all(part, workload))
        fits = fits or (isinstance(part, Scores) and bool(part.fits.any()))
        yield block, part
    if enough or not blocks:
        return
    more: tuple[Block, ...] = ()
    if isinstance(workload, TrainWorkload):
        more = training_blocks(question, workload, last_resort=True)
    if isinstance(workload, ServeWorkload):
        more = serving_blocks(question, workload, last_resort=True)
    for block, part in _score_blocks(more, subject, only_fitting=only_fitting):
        fits = fits or (isinstance(part, Scores) and bool(part.fits.any()))
        yield block, part
    if on_host and not fits and isinstance(workload, ServeWorkload | GenerateWorkload):
        yield from _score_on_host(question, workload, subject)


def _score_on_host(
    question: Question, workload: ServeWorkload | GenerateWorkload, subject: Subject
) -> Iterator[tuple[Block, Scores]]:
    """Yield, per weight format, the strategies with the smallest host share that fits.

    A larger share on the host takes less device memory, which allows bisection.
    """
    if not computes_on_host(question):
        return
    for blocks in blocks_by_host_share(question, workload):

        def fitting(share: float, blocks: BlocksOfShare = blocks) -> list[tuple[Block, Scores]]:
            found = [block for of_share in blocks if (block := of_share(share)) is not None]
            parts = [(block, score(block, subject)) for block in found]
            return [(block, part) for block, part in parts if _fits_with_host(part)]

        low, high = 0, len(HOST_SHARES) - 1
        best = fitting(HOST_SHARES[high])
        while best and low < high:
            middle = (low + high) // 2
            if smaller := fitting(HOST_SHARES[middle]):
                best, high = smaller, middle
            else:
                low = middle + 1
        yield from best


def _fits_with_host(part: Scores) -> bool:
    """Return whether a strategy fits the devices, and its share on the host the host's memory.

    A host that is not described is taken for a usual one, see ``usual_host_bytes``.
    """
    rows = np.flatnonzero(part.fits)
    if not len(rows):
        return False
    cluster, device = part.question.cluster, part.question.device
    usual = usual_host_bytes(device.memory_bytes * cluster.devices_per_node)
    most = (cluster.host_memory_bytes or usual) * cluster.nodes
    return (part.exact(int(rows[0])).memory.host_bytes or 0) <= most


def _holds_all(part: Scores, workload: Workload) -> bool:
    """Return whether a strategy fits, and if it serves a load, holds its requests at once."""
    held = part.fits
    if isinstance(workload, ServeWorkload):
        rate, callers = workload.request_rate_per_second, workload.concurrency
        name = "max_concurrency" if rate is None else "requests_per_second"
        wanted = (callers or workload.burst_requests or FEW_REQUESTS) if rate is None else rate
        served = part.figures(name)
        held = held & (served is not None and served >= wanted)
    return bool(np.any(held))


def _score_blocks(
    blocks: Sequence[Block], subject: Subject, *, only_fitting: bool
) -> Iterator[tuple[Block, Scores | PlannerError | None]]:
    """Yield each block with its scores, None if nothing fits, or the error that refused it."""
    fitting = FitCheck(blocks)
    for block in blocks:
        try:
            fits = not only_fitting or fitting.may_fit(block)
            yield block, score(block, subject) if fits else None
        except (NotPossibleError, NotCoveredError) as error:
            yield block, error


def blocks_of(question: Question) -> tuple[Block, ...]:
    """Return the blocks of a question's strategies.

    A compression job has no choices and therefore no blocks.
    """
    match question.request.workload:
        case TrainWorkload() as workload:
            return training_blocks(question, workload)
        case ServeWorkload() | GenerateWorkload() as workload:
            return serving_blocks(question, workload)
        case CompressWorkload():
            return ()


def _listed_strategies(question: Question) -> tuple[Strategy, ...]:
    """Return strategies outside all blocks: the pins, or data-parallel copies for calibration."""
    workload, pins = question.request.workload, question.request.pins
    if not isinstance(workload, CompressWorkload) or pins.data_parallel_size:
        return (pins,)
    shared = RECIPES[workload.method].is_calibrated
    most = question.cluster.num_devices if shared else 1
    counts = [2**power for power in range(most.bit_length())]
    return tuple(pins.model_copy(update={"data_parallel_size": count}) for count in counts)


def _best_choices(request: PlanRequest, table: Table, top: int) -> list[Choice]:
    """Return the best strategy of each family by exact estimates, at most ``top`` families.

    The best plan of every compared engine comes before the second one of any.
    """
    chosen = _stored_first(request, table, top)
    engines = dict.fromkeys(part.question.request.engine for part in table.parts)
    if request.engine != AUTO or len(engines) <= 1 or not chosen or top == 1:
        return chosen
    best_by_engine = [
        choice
        for engine in engines
        for choice in _stored_first(request, _table_of_engine(table, engine), 1)
        if choice[0] is not chosen[0][0]
    ]
    best_by_engine.sort(key=lambda choice: order_of(choice[0], request.objective))
    leaders = [
        chosen[0],
        *(each for each in best_by_engine if each[0].engine != chosen[0][0].engine),
    ]
    shown = {id(estimate) for estimate, _ in leaders}
    rest = [choice for choice in chosen if id(choice[0]) not in shown]
    return [*leaders, *rest][:top]


def _table_of_engine(table: Table, engine: str | None) -> Table:
    parts = [part for part in table.parts if part.question.request.engine == engine]
    return Table(parts, table.limits)


def _stored_first(request: PlanRequest, table: Table, top: int) -> list[Choice]:
    """Return the best strategy of each family, at most ``top``.

    The first one starts the checkpoint as it is stored, unless the objective is to save: the
    others may need another checkpoint.
    """
    compares = len({part.question.request.engine for part in table.parts}) > 1
    stored = [part for part in table.parts if _starts_as_stored(part, compares=compares)]
    others = [part for part in table.parts if part not in stored]
    if not stored or not others or request.objective in FRUGAL:
        return _best_of_table(request, table, top)
    own = _best_of_table(request, Table(stored, table.limits), top)
    if own and top == 1:
        return own
    converted = _best_of_table(request, Table(others, table.limits), top)
    rest = sorted(
        (*own[1:], *converted), key=lambda choice: order_of(choice[0], request.objective)
    )
    return [*own[:1], *rest][:top]


def _starts_as_stored(part: Scores, *, compares: bool) -> bool:
    """Return whether a part's strategies start the checkpoint in the format of its files.

    Engines that quantise or convert on their own start any, and so does who pins a format. Among
    several engines (``compares``), one that
    needs files of its own does not, unless they hold the stored format. Weights that only fit
    with a share on the host are no reason to prefer their format.
    """
    question = part.question
    if computes_on_host(question) and part.strategy(0).offload is not None:
        return False
    engine = get_engine(question.request.engine, question.device.kind)
    pinned = {"weight_dtype", "quantization"} & question.pinned.keys()
    if pinned:
        return True
    if not serving_engine(engine.key).starts_as_stored:
        return not compares or question.model.weight_dtype in engine.file_formats
    return is_stored_as(question.model, part.strategy(0).weight_dtype)


def _best_of_table(request: PlanRequest, table: Table, top: int) -> list[Choice]:
    rows = best_rows(table, request.objective, top)
    choices = [(table.exact(row), table.part_of(row)[0]) for row in rows]
    choices.sort(key=lambda choice: order_of(choice[0], request.objective))
    best: dict[tuple[str, ...], Choice] = {}
    for estimate, part in choices:
        # Show only the best member of a family: its neighbours differ in details.
        family = (strategy_family_of(estimate.strategy), *part.question.compared)
        best.setdefault(family, (estimate, part))
    return list(best.values())[:top]


def _plans(request: PlanRequest, table: Table) -> tuple[PlannedStrategy, ...]:
    chosen = _best_choices(request, table, request.top)
    first = chosen[0][0] if chosen else None
    best_by_nodes = _best_by_nodes(request, table)
    return tuple(
        as_plan(rank, part.explained(estimate), part.question, first, best_by_nodes)
        for rank, (estimate, part) in enumerate(chosen, start=1)
    )


def _best_by_nodes(request: PlanRequest, table: Table) -> dict[str, Estimate | None]:
    """Return the best estimate on each subset of nodes of a mixed cluster, by name."""
    names = list(dict.fromkeys(part.question.hardware[0] for part in table.parts))
    if request.hardware_options or not request.cluster.other_nodes or len(names) <= 1:
        return {}
    best_by_nodes: dict[str, Estimate | None] = {}
    for name in names:
        parts = [part for part in table.parts if part.question.hardware[0] == name]
        best = _best_choices(request, Table(parts, table.limits), 1)
        best_by_nodes[name] = best[0][0] if best else None
    return best_by_nodes


def _pareto(table: Table) -> tuple[PlannedStrategy, ...]:
    rows = frontier_rows(table)[:MAX_FRONTIER]
    estimates = [
        table.exact(row) for row in rows
    ]  # a second call may return another object, so the estimates are kept
    parts = [table.part_of(row)[0] for row in rows]
    questions = {id(each): part.question for each, part in zip(estimates, parts, strict=True)}
    return tuple(
        as_plan(rank, estimate, questions[id(estimate)], None)
        for rank, estimate in enumerate(frontier(estimates), start=1)
    )
