"""The search: cost every candidate, keep what fits, rank it, explain the first, say why not."""

import time
from dataclasses import dataclass, field

from planner.catalog.engines import calibration_name, get_engine
from planner.errors import NotCoveredError, NotPossibleError, PlannerError
from planner.exports.registry import formats_for
from planner.search.constraints import broken, constraints_of
from planner.search.rank import devices_of, frontier, penalty, perplexity_ratio, speed
from planner.search.rejection import Rejections, family_of
from planner.search.space import Question, candidates
from planner.search.suggest import suggestions
from planner.search.tiers import advice_for, tier_of
from planner.specs.cluster import ClusterSpec
from planner.specs.estimate import Estimate, EstimateRequest
from planner.specs.plan import Bound, PlanAnswer, PlannedStrategy, PlanRequest, Searched
from planner.specs.strategy import Strategy
from planner.techniques.registry import inapplicable, used_by
from planner.workload.estimator import estimate_request
from planner.workload.resolve import (
    refuse_uncovered,
    resolve_cluster,
    resolve_device,
    resolve_model,
)

GIB = 1024**3
MAX_FRONTIER = 24


@dataclass
class Found:
    """What one search collected over all clusters."""

    feasible: list[tuple[Estimate, Question]] = field(default_factory=list)
    rejections: Rejections = field(default_factory=Rejections)
    tried: int = 0
    last_error: PlannerError | None = None


def search(request: PlanRequest) -> PlanAnswer:
    """Return the ranked plans of a request, the frontier, rejections and suggestions.

    Raises:
        PlannerError: a name is unknown, a constraint is no figure, or a pin is impossible.
    """
    started = time.perf_counter()
    refuse_uncovered(request.pins)
    if request.pins.disaggregated is not None:
        raise NotCoveredError(
            "a search does not split devices into pools yet: ask estimate for each split",
            "pins.disaggregated",
        )
    found = explore(request)
    plans = _plans(request, found)
    helpful = () if plans else suggestions(request, best_of)
    return PlanAnswer(
        id=request.id,
        request=request,
        plans=plans,
        pareto=_pareto(found),
        rejected=found.rejections.result(),
        suggestions=helpful,
        searched=Searched(strategies=found.tried, seconds=time.perf_counter() - started),
        calibration=_calibration(request),
    )


def best_of(request: PlanRequest) -> Estimate | None:
    """Return the best feasible estimate of a request, or nothing when nothing fits."""
    best = best_with_cluster(request, explore(request))
    return best[0] if best else None


def best_with_cluster(request: PlanRequest, found: Found) -> tuple[Estimate, ClusterSpec] | None:
    """Return the best feasible estimate among what was found, and the cluster that it is for."""
    if not found.feasible:
        return None
    estimate, question = min(found.feasible, key=lambda pair: penalty(pair[0], request.objective))
    return estimate, _shown_cluster(question)


def explore(request: PlanRequest) -> Found:
    """Return every candidate of every cluster, costed and sorted into feasible and rejected.

    Raises:
        NotPossibleError: no candidate could be costed at all; it is the last one's reason.
    """
    found = Found()
    limits = constraints_of(request)
    model = resolve_model(request.model)
    for cluster in request.hardware_options or (request.cluster,):
        located = resolve_cluster(cluster)
        device = resolve_device(located.device)
        question = Question(request, model, device, located)
        for key, reason in inapplicable(question.case).items():
            found.rejections.technique(key, reason)
        # A pinned layout that the space does not contain is costed as it is, or refused as it is.
        for strategy in tuple(candidates(question)) or (request.pins,):
            _try(question, strategy, limits, found)
    if not found.tried and found.last_error:
        raise found.last_error
    return found


def _try(question: Question, strategy: Strategy, limits: dict[str, Bound], found: Found) -> None:
    request = to_estimate_request(question, strategy)
    try:
        estimate = estimate_request(request, explain=False)
    except (NotPossibleError, NotCoveredError) as error:
        found.last_error = error
        return
    found.tried += 1
    if not estimate.fits:
        found.rejections.memory(estimate, usable_of(question))
        return
    miss = broken(estimate, limits)
    if miss is not None:
        found.rejections.constraint(estimate, miss)
        return
    found.rejections.accept(estimate.strategy)
    found.feasible.append((estimate, question))


def usable_of(question: Question) -> float:
    """Return the bytes of a device that the request's engine may fill."""
    device = question.device
    engine = get_engine(question.request.engine, device.kind)
    share = device.usable_memory_ratio
    share = engine.usable_memory_ratio if share is None else share
    return device.memory_bytes * min(share, engine.memory_utilisation)


def to_estimate_request(question: Question, strategy: Strategy) -> EstimateRequest:
    """Return the request that costs one strategy of a question."""
    request = question.request
    return EstimateRequest.model_construct(
        id=request.id,
        model=question.model,
        cluster=question.cluster,
        workload=request.workload,
        strategy=strategy,
        engine=request.engine,
        host_calibration=request.host_calibration,
    )


def _ranked(request: PlanRequest, found: Found) -> list[tuple[Estimate, Question]]:
    return sorted(found.feasible, key=lambda pair: penalty(pair[0], request.objective))


def _plans(request: PlanRequest, found: Found) -> tuple[PlannedStrategy, ...]:
    ranked = _ranked(request, found)
    chosen: list[tuple[Estimate, Question]] = []
    families: set[tuple[str, str, str | None]] = set()
    for estimate, question in ranked:
        # Of one family only its best member is shown: neighbours differ in details alone.
        hardware = (question.device.id, question.cluster.instance)
        family = (family_of(estimate.strategy), *hardware)
        if family not in families:
            families.add(family)
            chosen.append((estimate, question))
        if len(chosen) == request.top:
            break
    best = chosen[0][0] if chosen else None
    return tuple(
        _planned(rank, _explained(question, estimate), question, best)
        for rank, (estimate, question) in enumerate(chosen, start=1)
    )


def _explained(question: Question, estimate: Estimate) -> Estimate:
    return estimate_request(to_estimate_request(question, estimate.strategy))


def _planned(
    rank: int, estimate: Estimate, question: Question, best: Estimate | None
) -> PlannedStrategy:
    fields = {name: getattr(estimate, name) for name in Estimate.model_fields}
    return PlannedStrategy(
        **fields,
        rank=rank,
        cluster=_shown_cluster(question),
        reasons=_reasons(estimate, best),
        techniques=used_by(estimate.strategy, question.case),
        exports=formats_for(question.case, estimate.strategy),
        tier=tier_of(question),
        advice=advice_for(question, estimate),
    )


def _shown_cluster(question: Question) -> ClusterSpec:
    """Return the cluster as it was asked for: a catalog id stays an id."""
    options = question.request.hardware_options or (question.request.cluster,)
    for option in options:
        if resolve_cluster(option) != question.cluster:
            continue
        if option.instance is None:
            return option
        return question.cluster.model_copy(update={"device": question.device.id})
    return question.cluster


def _reasons(estimate: Estimate, best: Estimate | None) -> tuple[str, ...]:
    memory = estimate.memory
    peak, capacity = memory.per_device_peak_bytes / GIB, memory.capacity_bytes / GIB
    reasons = [
        f"fits: {peak:.1f} of {capacity:.1f} GiB per device",
        f"bound by {estimate.bound_by.replace('_', ' ')}",
    ]
    if best is None or best.strategy == estimate.strategy:
        return tuple(reasons)
    ratio = speed(estimate) / speed(best)
    word = "faster" if ratio > 1 else "slower"
    reasons.append(f"{abs(ratio - 1) * 100:.0f} % {word} than the first plan")
    saved = best.memory.per_device_peak_bytes - memory.per_device_peak_bytes
    if abs(saved) > GIB / 10:
        less = "less" if saved > 0 else "more"
        reasons.append(f"{abs(saved) / GIB:.1f} GiB {less} per device")
    loss = perplexity_ratio(estimate) / perplexity_ratio(best) - 1
    if abs(loss) > 1e-3:  # noqa: PLR2004 - below a tenth of a per cent nobody can tell
        reasons.append(f"perplexity {loss * 100:+.1f} %")
    if devices_of(estimate) != devices_of(best):
        reasons.append(f"{devices_of(estimate)} devices instead of {devices_of(best)}")
    return tuple(reasons)


def _pareto(found: Found) -> tuple[PlannedStrategy, ...]:
    by_identity = {id(estimate): question for estimate, question in found.feasible}
    kept = frontier([estimate for estimate, _ in found.feasible])[:MAX_FRONTIER]
    return tuple(
        _planned(rank, estimate, by_identity[id(estimate)], None)
        for rank, estimate in enumerate(kept, start=1)
    )


def _calibration(request: PlanRequest) -> str:
    host = request.host_calibration
    return f"{calibration_name()}+{host.host}:{host.digest}" if host else calibration_name()
