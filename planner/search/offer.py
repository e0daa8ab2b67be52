"""Present a chosen strategy: its estimate with reasons, techniques and exports."""

from collections.abc import Iterator, Mapping

from planner.exports.format_support import formats_for
from planner.search.question import Question
from planner.search.rank import devices_of, merit_of, perplexity_ratio
from planner.search.tiers import advice_for, tier_of
from planner.specs.estimate import Estimate
from planner.specs.plan import PlannedStrategy
from planner.techniques.registry import used_by

GIB = 1024**3
# Differences below these are not shown: per cent of speed, and ratio of perplexity.
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

    On a mixed cluster, ``apart`` has the best estimate on each other subset of nodes, by name.
    """
    fields = {name: getattr(estimate, name) for name in Estimate.model_fields}
    return PlannedStrategy(
        **fields,
        rank=rank,
        cluster=question.shown,
        reasons=(*reasons(estimate, first), *_other_node_reasons(estimate, question, apart or {})),
        techniques=used_by(estimate.strategy, question.case),
        exports=formats_for(question.case, estimate.strategy, estimate.engine),
        tier=tier_of(question),
        advice=advice_for(question, estimate),
    )


def reasons(estimate: Estimate, first: Estimate | None) -> tuple[str, ...]:
    """Return the reasons for a plan, and its differences from the first plan."""
    memory = estimate.memory
    peak, capacity = memory.per_device_peak_bytes / GIB, memory.capacity_bytes / GIB
    own = (
        f"fits: {peak:.1f} of {capacity:.1f} GiB per device",
        f"bound by {estimate.bound_by.replace('_', ' ')}",
    )
    if first is None or first.strategy == estimate.strategy:
        return own
    return (*own, *_differences(estimate, first))


def _other_node_reasons(
    estimate: Estimate, question: Question, apart: Mapping[str, Estimate | None]
) -> Iterator[str]:
    """Yield the results on other subsets of nodes of a mixed cluster."""
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
    texts = []
    change = (merit_of(estimate).speed / merit_of(first).speed - 1) * 100
    if abs(change) >= LEAST_PER_CENT:
        word = "faster" if change > 0 else "slower"
        texts.append(f"{abs(change):.0f} % {word} than the first plan")
    else:
        texts.append("as fast as the first plan")
    saved = first.memory.per_device_peak_bytes - estimate.memory.per_device_peak_bytes
    if abs(saved) > GIB / 10:
        less = "less" if saved > 0 else "more"
        texts.append(f"{abs(saved) / GIB:.1f} GiB {less} per device")
    loss = perplexity_ratio(estimate) / perplexity_ratio(first) - 1
    if abs(loss) > LEAST_LOSS:
        texts.append(f"perplexity {loss * 100:+.1f} %".replace("-", MINUS))
    if devices_of(estimate) != devices_of(first):
        texts.append(f"{devices_of(estimate)} devices instead of {devices_of(first)}")
    return texts
