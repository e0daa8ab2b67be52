"""Present a chosen strategy: its estimate with reasons, tier, techniques and exports."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from planner.cost.parameters import count_parameters
from planner.exports.format_support import formats_for
from planner.search.question import Question
from planner.search.rank import devices_of, merit_of, perplexity_ratio
from planner.specs.estimate import Estimate, PlannedStrategy
from planner.specs.workload import TrainWorkload
from planner.techniques.registry import used_by

# The deployment tier of a plan, and rules of thumb that its figures contradict.
#
# Each rule of thumb is stated with its source and its result. The planner's figure is shown next
# to it if the difference would lead to the wrong hardware choice.


GUIDE = "Ersoy & Ersahin 2024, Llama 3.1 hardware guide"
FOLKLORE = "common rule of thumb"
GB, BILLION = 1e9, 1e9
HALF_PRECISION_BYTES = 2
ADAM_BYTES = 16
CONTRADICTS = 1.25
CONSUMER_WORDS = ("geforce", "rtx 2", "rtx 3", "rtx 4", "rtx 5", "arc", "radeon rx")


@dataclass(frozen=True)
class Facts:
    """The facts that rules are checked against; sizes are in bytes over all devices."""

    parameters: int
    device_bytes: int
    devices: int
    nodes: int
    estimate: Estimate
    is_training: bool

    @property
    def held_bytes(self) -> float:
        """Return the peak bytes over all devices."""
        return float(self.estimate.memory.per_device_peak_bytes * self.devices)

    @property
    def half_precision_bytes(self) -> float:
        """Return the size of the weights in 16 bits."""
        return float(self.parameters * HALF_PRECISION_BYTES)


@dataclass(frozen=True)
class Rule:
    """A published rule of thumb: when it applies, and what the planner computes instead."""

    source: str
    says: str
    speaks: Callable[[Facts], bool]
    computed: Callable[[Facts], str]


def tier_of(question: Question) -> str:
    """Return the tier of a plan, a key of the technique registry."""
    device, cluster = question.device, question.cluster
    if cluster.num_nodes > 1:
        return "tier_hpc"
    if cluster.instance:
        return "tier_cloud"
    name = (device.name or device.id).lower()
    is_consumer = device.kind in {"uma", "cpu"} or any(word in name for word in CONSUMER_WORDS)
    return (
        "tier_local_machine" if is_consumer and cluster.num_devices == 1 else "tier_local_server"
    )


def advice_for(question: Question, estimate: Estimate) -> tuple[str, ...]:
    """Return the rules that a plan contradicts, each with its source and the computed figure."""
    cluster = question.cluster
    facts = Facts(
        parameters=count_parameters(question.model).total,
        device_bytes=question.device.memory_bytes,
        devices=cluster.num_devices,
        nodes=cluster.num_nodes,
        estimate=estimate,
        is_training=isinstance(question.request.workload, TrainWorkload),
    )
    return tuple(
        f"{rule.says} ({rule.source}); here {rule.computed(facts)}"
        for rule in RULES
        if rule.speaks(facts)
    )


def _small_card(facts: Facts) -> bool:
    fits_a_small_model = 6 * BILLION < facts.parameters < 9 * BILLION
    small = 12 * GB <= facts.device_bytes < facts.half_precision_bytes
    return fits_a_small_model and small and facts.devices == 1 and not facts.is_training


def _professional_card(facts: Facts) -> bool:
    large = 60 * BILLION < facts.parameters < 80 * BILLION
    card = 24 * GB <= facts.device_bytes < 52 * GB
    return large and card and facts.half_precision_bytes > facts.device_bytes * facts.devices


def _one_server_is_enough(facts: Facts) -> bool:
    huge = facts.parameters > 300 * BILLION
    return huge and facts.nodes == 1 and facts.estimate.fits and not facts.is_training


def _more_than_a_fifth(facts: Facts) -> bool:
    is_half_precision = facts.estimate.strategy.weight_dtype in {"bf16", "fp16"}
    rule = facts.half_precision_bytes * 1.2
    needed = facts.half_precision_bytes + _cache(facts)
    return is_half_precision and not facts.is_training and needed > rule * CONTRADICTS


def _states_per_parameter(facts: Facts) -> float:
    names = ("weights", "gradients", "optimizer_states", "adapters")
    state_bytes = sum(facts.estimate.memory.breakdown_bytes.get(name, 0) for name in names)
    return state_bytes * facts.devices / facts.parameters


def _not_sixteen_bytes(facts: Facts) -> bool:
    if not facts.is_training or facts.devices > 1:
        return False
    ratio = _states_per_parameter(facts) / ADAM_BYTES
    return ratio > CONTRADICTS or ratio < 1 / CONTRADICTS


RULES = (
    Rule(
        GUIDE,
        "a 7B to 8B model fits a 12 GB card in FP16",
        _small_card,
        lambda f: (
            f"its 16-bit weights are {f.half_precision_bytes / GB:.1f} GB of "
            f"{f.device_bytes / GB:.1f}: fewer bits or offloading are what makes it fit"
        ),
    ),
    Rule(
        GUIDE,
        "a 70B model runs on professional cards of 24 to 48 GB",
        _professional_card,
        lambda f: (
            f"its 16-bit weights are {f.half_precision_bytes / GB:.0f} GB against "
            f"{f.device_bytes * f.devices / GB:.0f} GB on {f.devices}: only fewer bits fit"
        ),
    ),
    Rule(
        GUIDE,
        "a 405B model needs a cluster of hundreds of devices",
        _one_server_is_enough,
        lambda f: f"{f.devices} devices of one server hold it: {f.held_bytes / GB:.0f} GB",
    ),
    Rule(
        FOLKLORE,
        "a model needs 2 GB per billion parameters and a fifth more",
        _more_than_a_fifth,
        lambda f: (
            f"that is {f.half_precision_bytes * 1.2 / GB:.0f} GB, and weights with cache come to "
            f"{(f.half_precision_bytes + _cache(f)) / GB:.0f} GB"
        ),
    ),
    Rule(
        FOLKLORE,
        "training takes 16 bytes per parameter before activations",
        _not_sixteen_bytes,
        lambda f: f"it takes {_states_per_parameter(f):.1f}",
    ),
)


def _cache(facts: Facts) -> float:
    return float(facts.estimate.memory.breakdown_bytes.get("kv_cache", 0) * facts.devices)


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
