"""The order of estimates for an objective, and the plan that is offered from them."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import exp

from planner.cost.parameters import count_parameters
from planner.cost.quantity import log, where
from planner.exports.export import formats_for
from planner.search.question import Question, figure
from planner.specs.estimate import Estimate, Objective, PlannedStrategy
from planner.specs.units import GIB
from planner.specs.workload import Strategy, TrainWorkload
from planner.techniques.registry import used_by
from planner.workload.layouts import Layout
from planner.workload.resolve import resolve
from planner.workload.rollouts import generator_reason
from planner.workload.topology import link_reasons
from planner.workload.training_memory import optimizer_of

# ---------------------------------------------------------------------------
# Rank strategies by an objective, as single estimates or columns, and compute the frontier.
# ---------------------------------------------------------------------------


# "Balanced" trades in logarithms: doubling the speed outweighs a 9 % higher perplexity, and four
# times the devices must add more than 40 % of speed.
QUALITY_WEIGHT = 8.0
DEVICE_WEIGHT = 0.25
UNKNOWN_PERPLEXITY_RATIO = 1.01
# Digits compared: smaller differences are rounding, and ties prefer the simpler strategy.
DIGITS = 10
DEVICE_SIZES = (
    "data_parallel_size",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "context_parallel_size",
    "attention_data_parallel_size",
)
PLAIN_FIELDS = (
    "pipeline_parallel_size",
    "context_parallel_size",
    "tensor_parallel_size",
    "expert_parallel_size",
    "zero_stage",
    "zero_shard_size",
    "virtual_pipeline_size",
)
RECOMPUTATIONS = (None, "none", "selective", "full")


@dataclass(frozen=True)
class Merit:
    """The figures that objectives use, scalar or column; unknown prices are NaN."""

    speed: float
    delay: float
    peak_bytes: float
    devices: float
    perplexity_ratio: float
    joules_per_token: float
    usd_per_million_tokens: float

    @property
    def held_bytes(self) -> float:
        """Return the peak bytes over all devices in use."""
        return self.peak_bytes * self.devices

    @property
    def device_seconds(self) -> float:
        """Return the device-seconds per unit of work, a substitute for an unknown price."""
        return self.devices / self.speed

    @property
    def imbalance(self) -> float:
        """Return quality loss and device count minus speed, in logarithms."""
        quality = QUALITY_WEIGHT * log(self.perplexity_ratio)
        return quality + DEVICE_WEIGHT * log(self.devices) - log(self.speed)

    @property
    def criteria(self) -> tuple[float, float, float, float]:
        """Return the figures that the frontier minimises: minus speed, delay, memory, quality."""
        return -self.speed, self.delay, self.held_bytes, self.perplexity_ratio


def merit_from(
    read: Callable[[str], float | None], devices: float, perplexity_ratio: float
) -> Merit:
    """Return the merit from the figures that ``read`` returns by name, None where inapplicable.

    Speed is in tokens per second, or compressions per second. Delay is the time of a request, a
    step or a compression.
    """
    tokens, duration = read("tokens_per_second"), read("duration_seconds")
    waits = (read("latency_seconds"), read("step_seconds"), duration)
    energy, cost = read("energy_joules_per_token"), read("cost_usd_per_million_tokens")
    peak = read("per_device_peak_bytes")
    if duration is None:
        duration = float("inf")
    return Merit(
        speed=1.0 / duration if tokens is None else tokens,
        delay=next((wait for wait in waits if wait is not None), float("inf")),
        peak_bytes=float("nan") if peak is None else peak,
        devices=devices,
        perplexity_ratio=perplexity_ratio,
        joules_per_token=float("nan") if energy is None else energy,
        usd_per_million_tokens=float("nan") if cost is None else cost,
    )


def merit_of(estimate: Estimate) -> Merit:
    """Return the merit of one estimate."""
    return merit_from(
        lambda name: figure(estimate, name), devices_of(estimate), perplexity_ratio(estimate)
    )


def devices_of(estimate: Estimate) -> int:
    """Return the number of devices of the estimate's strategy."""
    devices = 1
    for name in DEVICE_SIZES:
        devices *= getattr(estimate.strategy, name) or 1
    return devices


def perplexity_ratio(estimate: Estimate) -> float:
    """Return the expected perplexity ratio, slightly penalised if no table exists."""
    quality = estimate.quality
    if quality is None:
        return 1.0
    loss = quality.loss_ratio
    return UNKNOWN_PERPLEXITY_RATIO if loss is None else 1 + loss


LEAST_PENALTY = 1e-12  # of a figure that is 0, such as a cost without a price
PENALTIES: dict[Objective, Callable[[Merit], float]] = {
    "throughput": lambda merit: -merit.speed,
    "latency": lambda merit: merit.delay,
    "cost": lambda merit: where(
        merit.usd_per_million_tokens > 0, merit.usd_per_million_tokens, merit.device_seconds
    ),
    "energy": lambda merit: where(
        merit.joules_per_token > 0, merit.joules_per_token, merit.device_seconds
    ),
    "memory": lambda merit: merit.held_bytes,
    "quality": lambda merit: merit.perplexity_ratio,
    "balanced": lambda merit: merit.imbalance,
}


def order_of(
    estimate: Estimate, objective: Objective
) -> tuple[float, float, tuple[int, ...], str]:
    """Return the sort key of plans: the objective, then speed, then simplicity."""
    merit = merit_of(estimate)
    penalty = PENALTIES[objective](merit)
    return (
        _round_to_compared_digits(penalty),
        _round_to_compared_digits(-merit.speed),
        *complexity(estimate.strategy),
    )


def penalty_of(estimate: Estimate, objective: Objective) -> float:
    """Return what an objective makes as small as it can, in its own unit."""
    return float(PENALTIES[objective](merit_of(estimate)))


def gap_of(estimate: Estimate, best: Estimate, objective: Objective) -> float:
    """Return by which share of the best one's merit an estimate is worse, 0 or more.

    The penalty of the balanced objective is a logarithm; of the others it is a figure.
    """
    lost = penalty_of(estimate, objective) - penalty_of(best, objective)
    if objective == "balanced":
        return max(0.0, 1.0 - exp(-lost))
    return max(0.0, lost) / max(abs(penalty_of(best, objective)), LEAST_PENALTY)


def _round_to_compared_digits(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def complexity(strategy: Strategy) -> tuple[tuple[int, ...], str]:
    """Return the complexity of a strategy, a tie-breaker that prefers simpler ones."""
    sizes = tuple(getattr(strategy, name) or 0 for name in PLAIN_FIELDS)
    return (*sizes, *_simple_choices(strategy)), strategy.model_dump_json()


def complexity_columns(strategy: Strategy, layout: Layout) -> tuple[float, ...]:
    """Return the numbers of ``complexity`` for a layout of columns, one row each."""
    sizes = (
        layout.pipeline,
        layout.context,
        layout.tensor,
        layout.expert,
        layout.zero_stage,
        layout.shard,
        layout.chunks,
    )
    return (*sizes, *_simple_choices(strategy))


def _simple_choices(strategy: Strategy) -> tuple[int, int]:
    recomputation = RECOMPUTATIONS.index(strategy.activation_recomputation)
    return recomputation, len(strategy.offload_places)


def criteria(estimate: Estimate) -> tuple[float, float, float, float]:
    """Return the figures that the frontier minimises: minus speed, delay, memory, quality."""
    return merit_of(estimate).criteria


def frontier(estimates: list[Estimate]) -> list[Estimate]:
    """Return the Pareto frontier: the estimates that no other estimate dominates."""
    by_criteria = sorted(
        ((criteria(each), complexity(each.strategy), each) for each in estimates),
        key=lambda item: item[:2],
    )
    nondominated: list[tuple[tuple[float, ...], Estimate]] = []
    for own, _, candidate in by_criteria:
        if not any(
            all(theirs <= mine for theirs, mine in zip(other, own, strict=True))
            for other, _ in nondominated
        ):
            nondominated.append((own, candidate))
    return [estimate for _, estimate in nondominated]


# ---------------------------------------------------------------------------
# Present a chosen strategy: its estimate with reasons, tier, techniques and exports.
# ---------------------------------------------------------------------------


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
    is_mixture: bool = False
    keeps_adam_states: bool = False

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


def plan_tier(question: Question) -> str:
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
    cluster, workload = question.cluster, question.request.workload
    keeps_adam_states = (
        isinstance(workload, TrainWorkload)
        and workload.method in {"full", "pretrain"}
        and optimizer_of(workload) == "adamw"
    )
    facts = Facts(
        parameters=count_parameters(question.model).total,
        device_bytes=question.device.memory_bytes,
        devices=cluster.num_devices,
        nodes=cluster.num_nodes,
        estimate=estimate,
        is_training=isinstance(workload, TrainWorkload),
        is_mixture=question.model.is_moe,
        keeps_adam_states=keeps_adam_states,
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
    huge = 380 * BILLION < facts.parameters < 430 * BILLION and not facts.is_mixture
    return huge and facts.nodes == 1 and facts.estimate.fits and not facts.is_training


def _more_than_a_fifth(facts: Facts) -> bool:
    is_half_precision = facts.estimate.strategy.weight_dtype in {"bf16", "fp16"}
    rule = facts.half_precision_bytes * 1.2
    needed = facts.half_precision_bytes + _cache(facts)
    return is_half_precision and not facts.is_training and needed > rule * CONTRADICTS


def _states_per_parameter(facts: Facts) -> float:
    names = ("weights", "reference_weights", "gradients", "optimizer_states", "adapters")
    state_bytes = sum(facts.estimate.memory.breakdown_bytes.get(name, 0) for name in names)
    return state_bytes * facts.devices / facts.parameters


def _not_sixteen_bytes(facts: Facts) -> bool:
    if not facts.keeps_adam_states or facts.devices > 1:
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


# Differences below these are not shown: per cent of speed, and ratio of perplexity.
LEAST_PER_CENT = 0.5
LEAST_LOSS = 1e-3
MINUS = "\N{MINUS SIGN}"


def as_plan(
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
    rollout, request = estimate.strategy.rollout, question.request
    generated = (generator_reason(rollout, request, question.device),) if rollout else ()
    others = _other_node_reasons(estimate, question, apart or {})
    links = _link_reasons(estimate, question)
    return PlannedStrategy(
        **fields,
        rank=rank,
        cluster=question.shown,
        reasons=(*reasons(estimate, first), *generated, *links, *others),
        techniques=used_by(estimate.strategy, question.case),
        exports=formats_for(question.case, estimate.strategy, estimate.engine),
        tier=plan_tier(question),
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


def _link_reasons(estimate: Estimate, question: Question) -> tuple[str, ...]:
    """Return which link each group of ranks uses, on a cluster with NVLink domains or pods."""
    cluster = question.cluster
    if cluster.pod_devices is None and cluster.domain_devices == cluster.devices_per_node:
        return ()
    return tuple(link_reasons(resolve(question.estimate_request(estimate.strategy))))


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
