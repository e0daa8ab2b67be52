"""How a chosen strategy is offered: its estimate with reasons, techniques and exports."""

from collections.abc import Iterator, Mapping

from planner.exports.sayable import formats_for
from planner.search.question import Question
from planner.search.rank import devices_of, merit_of, perplexity_ratio
from planner.search.tiers import advice_for, tier_of
from planner.specs.estimate import Estimate
from planner.specs.plan import PlannedStrategy
from planner.techniques.registry import used_by

GIB = 1024**3
# Below these nobody can tell two plans apart: per cent of speed, and share of perplexity.
LEAST_PER_CENT = 0.5
LEAST_LOSS = 1e-3
MINUS = "\N{MINUS SIGN}"


def offered(
    rank: int,
    estimate: Estimate,
    question: Question,
    first: Estimate | None,
    apart: Mapping[str, Estimate | None] | None = None,
) -> PlannedStrategy:
    """Return an estimate as a plan; ``first`` is the plan that it is compared with.

    Where nodes are unlike, ``apart`` has the best on other nodes of them, by name.
    """
    fields = {name: getattr(estimate, name) for name in Estimate.model_fields}
    return PlannedStrategy(
        **fields,
        rank=rank,
        cluster=question.shown,
        reasons=(*reasons(estimate, first), *_elsewhere(estimate, question, apart or {})),
        techniques=used_by(estimate.strategy, question.case),
        exports=formats_for(question.case, estimate.strategy),
        tier=tier_of(question),
        advice=advice_for(question, estimate),
    )


def reasons(estimate: Estimate, first: Estimate | None) -> tuple[str, ...]:
    """Return why a plan is offered, and how it differs from the first one."""
    memory = estimate.memory
    peak, capacity = memory.per_device_peak_bytes / GIB, memory.capacity_bytes / GIB
    own = (
        f"fits: {peak:.1f} of {capacity:.1f} GiB per device",
        f"bound by {estimate.bound_by.replace('_', ' ')}",
    )
    if first is None or first.strategy == estimate.strategy:
        return own
    return (*own, *_differences(estimate, first))


def _elsewhere(
    estimate: Estimate, question: Question, apart: Mapping[str, Estimate | None]
) -> Iterator[str]:
    """Yield what the other nodes of an unlike cluster would do, alone or together."""
    for name, other in apart.items():
        if name == question.hardware[0]:
            continue
        where = f"{name} together" if " + " in name else f"{name} alone"
        if other is None:
            yield f"{where}: nothing fits"
            continue
        speed, delay = merit_of(other).speed, merit_of(other).delay
        change = (speed / merit_of(estimate).speed - 1) * 100
        figures = f"{speed:.4g} tokens/s ({change:+.0f} %), {delay:.3g} s each"
        yield f"{where}: {figures}".replace("(-", f"({MINUS}")


def _differences(estimate: Estimate, first: Estimate) -> list[str]:
    found = []
    change = (merit_of(estimate).speed / merit_of(first).speed - 1) * 100
    if abs(change) >= LEAST_PER_CENT:
        word = "faster" if change > 0 else "slower"
        found.append(f"{abs(change):.0f} % {word} than the first plan")
    else:
        found.append("as fast as the first plan")
    saved = first.memory.per_device_peak_bytes - estimate.memory.per_device_peak_bytes
    if abs(saved) > GIB / 10:
        less = "less" if saved > 0 else "more"
        found.append(f"{abs(saved) / GIB:.1f} GiB {less} per device")
    loss = perplexity_ratio(estimate) / perplexity_ratio(first) - 1
    if abs(loss) > LEAST_LOSS:
        found.append(f"perplexity {loss * 100:+.1f} %".replace("-", MINUS))
    if devices_of(estimate) != devices_of(first):
        found.append(f"{devices_of(estimate)} devices instead of {devices_of(first)}")
    return found
