"""Inverse questions: the largest value of one quantity that has a plan, and what limits it."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

from planner.catalog.devices import Instance, list_instances
from planner.catalog.engines import AUTO, calibration_of
from planner.catalog.models import get_model, list_models
from planner.cost.parameters import count_parameters
from planner.cost.weights import element_bytes
from planner.search.engine import best_with_cluster, explore
from planner.search.question import clusters_of, figure, memory_of, questions
from planner.search.rank import order_of
from planner.search.space import formats
from planner.specs.base import BadRequestError, Dtype, PlannerError
from planner.specs.cluster import ClusterSpec
from planner.specs.estimate import (
    MEMORY,
    Bound,
    Estimate,
    FirstFailure,
    Interval,
    InverseAnswer,
    InverseRequest,
    Limit,
    PlanRequest,
    Rejection,
)
from planner.specs.workload import GenerateWorkload, ServeWorkload, TrainWorkload
from planner.workload.cluster import SERVER_DEVICES, resolve_cluster, resolve_device
from planner.workload.costing import estimate_request
from planner.workload.resolve import resolve_model

# Searches for single values of an inverse question, with the reasons for failures.


Answer = tuple[Estimate, ClusterSpec, PlanRequest]


@dataclass
class Probe:
    """Cached searches for single values; ``yes`` has the plans, ``no`` what explains a failure.

    Whether a value has a plan is asked of the strategies that may fit alone. Why it has none takes
    a search of all, which is made for the few values of which somebody reads it.
    """

    yes: dict[float | str, Answer] = field(default_factory=dict)
    no: dict[float | str, Callable[[], FirstFailure]] = field(default_factory=dict)

    @property
    def searches(self) -> int:
        """Return the number of searched values."""
        return len(self.yes) + len(self.no)

    def works(self, value: float | str, *requests: PlanRequest) -> bool:
        """Return whether any request with this value has a plan; cached per value."""
        if value not in self.yes and value not in self.no:
            answers = (_answer_of(request) for request in requests)
            found = next((answer for answer in answers if answer), None)
            if found:
                self.yes[value] = found
            else:
                self.no[value] = partial(_nearest_failure, value, requests)
        return value in self.yes

    def merge(self, other: "Probe", cluster: ClusterSpec) -> None:
        """Add another probe's results, which are of one cluster, under "value on cluster" keys."""
        self.yes |= {f"{value} on {cluster}": answer for value, answer in other.yes.items()}
        self.no |= {f"{value} on {cluster}": refused for value, refused in other.no.items()}

    def limit(self, value: float | str, unit: str, beyond: float | str | None) -> Limit:
        """Return the limit at a feasible value, with the failure at the next value."""
        estimate, cluster, request = self.yes[value]
        refused = None if beyond is None else self.no.get(beyond)
        verified = full_estimate_of(request, cluster, estimate)
        failure = refused() if refused else None
        return Limit(value=value, unit=unit, cluster=cluster, estimate=verified, beyond=failure)


def _answer_of(request: PlanRequest) -> Answer | None:
    """Return the best plan of a request, None if it has none."""
    try:
        exploration = explore(request, only_fitting=True)
    except PlannerError:
        return None
    best = best_with_cluster(request, exploration) if exploration.parts else None
    return (*best, request) if best else None


def _nearest_failure(value: float | str, requests: Sequence[PlanRequest]) -> FirstFailure:
    """Return why none of the requests with a value has a plan: the failure nearest to one."""
    return min((_failure_of(value, request) for request in requests), key=distance)


def _failure_of(value: float | str, request: PlanRequest) -> FirstFailure:
    try:
        rejected = explore(request).rejected
    except PlannerError as error:
        constraint = error.field or error.code
        return FirstFailure(value=value, reason=error.message, constraint=constraint)
    return closest_violation(value, list(rejected.values()))


def distance(failure: Rejection | FirstFailure) -> tuple[bool, float]:
    """Return how far a failure is from a plan: whether it exceeds memory, then by how much.

    What fits and misses a target runs; what does not fit does not, by however little. The relative
    excess is infinite if no number decided.
    """
    if failure.required is None or not failure.limit:
        return True, math.inf
    return failure.constraint == MEMORY, abs(failure.required / failure.limit - 1)


def full_estimate_of(request: PlanRequest, cluster: ClusterSpec, found: Estimate) -> Estimate:
    """Return the full estimate of a found strategy on its engine, without terms."""
    engine = found.engine if request.engine == AUTO else request.engine
    named = request.estimate_request(cluster, found.strategy)
    estimate = estimate_request(named.model_copy(update={"engine": engine}))
    return estimate.model_copy(update={"terms": ()})


def closest_violation(value: float | str, rejections: Sequence[Rejection]) -> FirstFailure:
    """Return the rejection nearest to a plan as a failure; of one without numbers, all reasons."""
    numbered = [rejection for rejection in rejections if rejection.required is not None]
    if not numbered:
        reasons = "; ".join(rejection.reason for rejection in rejections) or "no strategy applies"
        return FirstFailure(value=value, reason=reasons, constraint="applicability")
    closest = min(numbered, key=distance)
    return FirstFailure(
        value=value,
        reason=f"{closest.family}: {closest.reason}",
        constraint=closest.constraint,
        family=closest.family,
        required=closest.required,
        limit=closest.limit,
        unit=closest.unit,
    )


def largest_step(works: Callable[[int], bool], top: int) -> int:
    """Return the largest number from 1 to ``top`` that works, 0 if 1 does not.

    Assumes that a number works if a larger one does. The search doubles and then bisects, so that
    a large ``top`` costs little.
    """
    works_at, fails_at = 0, 1
    while fails_at <= top and works(fails_at):
        works_at, fails_at = fails_at, fails_at * 2
    if fails_at > top:
        if works_at == top or works(top):
            return top
        fails_at = top
    while fails_at - works_at > 1:
        middle = (works_at + fails_at) // 2
        if works(middle):
            works_at = middle
        else:
            fails_at = middle
    return works_at


# Intervals of inverse limits: the interval of the limiting figure, propagated to the value.
#
# Near the limit, memory grows linearly with cache and activations, and a time grows by a power law
# that the figure at half of the value determines. Both relations convert the figure's interval
# into an interval of the limit.


GROWING = ("kv_cache", "activations")
MEMORY_LIMITS = frozenset({MEMORY, "max_concurrency"})
PEAK = "per_device_peak_bytes"


def limit_interval(
    value: int,
    constraint: str,
    estimate: Estimate,
    at_half: Callable[[], Estimate],
    half: int | None = None,
) -> Interval | None:
    """Return the 80 % interval of a limit, or None if no growing figure determines it.

    ``at_half`` estimates the same strategy at ``half`` of the value, or about half; it is called
    for times only.
    """
    if constraint in MEMORY_LIMITS:
        return _by_memory(value, estimate)
    interval = estimate.interval.get(constraint)
    half = value // 2 if half is None else half
    if interval is None or half < 1:  # 1 has no integer half
        return None
    here, there = figure(estimate, constraint), figure(at_half(), constraint)
    if not here or not there:
        return None
    return _by_time(value, interval, here, math.log(here / there) / math.log(value / half))


def _by_memory(value: int, estimate: Estimate) -> Interval | None:
    """Return the values at which the peak memory reaches the bounds of its interval."""
    interval = estimate.interval.get(PEAK)
    memory = estimate.memory
    growing = sum(memory.breakdown_bytes.get(part, 0) for part in GROWING)
    if interval is None or not growing:
        return None
    (low, high), peak = interval, memory.per_device_peak_bytes
    return max(0.0, value * (1 - (high - peak) / growing)), value * (1 + (peak - low) / growing)


def _by_time(value: int, interval: Interval, here: float, power: float) -> Interval | None:
    """Return the values at which a time, which grows by a power, reaches its interval's bounds."""
    low, high = interval
    if power <= 0 or low <= 0:
        return None
    return value * (here / high) ** (1 / power), value * (here / low) ** (1 / power)


# KV caches are paged in blocks of 16 tokens; kernels split sequences into blocks of 64.
CONTEXT_STEP, SEQUENCE_STEP = 16, 64
MAX_USERS, MAX_BATCH, MAX_DOUBLINGS = 2**17, 2**14, 12
TRAINED_LENGTH = "max_position_embeddings"


@dataclass(frozen=True)
class SteppedQuantity:
    """A stepped quantity: its unit, step, upper end, and the request at a value.

    Values are multiples of the step beyond ``origin``, a multiple itself.
    """

    unit: str
    step: int
    top: int
    at: Callable[[int], PlanRequest | list[PlanRequest]]
    top_reason: str | None = None
    origin: int = 0

    def value(self, steps: int) -> int:
        """Return the value after so many steps."""
        return self.origin + steps * self.step

    def half_of(self, value: int) -> int:
        """Return the value that is nearest below half, 0 if none is."""
        steps = (value // 2 - self.origin) // self.step
        return self.value(steps) if steps >= 1 else 0


def answer_inverse(request: InverseRequest) -> InverseAnswer:
    """Return the limit of the requested quantity, verified there and one step beyond.

    Raises:
        BadRequestError: the question does not suit the workload.
        PlannerError: a name is unknown.
    """
    started, probe = time.perf_counter(), Probe()
    fields = {name: getattr(request, name) for name in PlanRequest.model_fields}
    plain = PlanRequest.model_validate(fields)
    limits = QUESTIONS[request.question](plain, probe)
    return InverseAnswer(
        id=request.id,
        question=request.question,
        limits=limits,
        smallest=None if limits else _closest_failure(request.question, probe),
        searches=probe.searches,
        seconds=time.perf_counter() - started,
        calibration=calibration_of(request.host_calibration),
    )


def _closest_failure(question: str, probe: Probe) -> FirstFailure | None:
    """Return why not even the least demanding value works.

    Models are tried in descending and devices in ascending order, so the last failure is the least
    demanding one. Offers are ordered by price; among them the closest miss is the most
    informative.
    """
    refused = list(probe.no.values())
    if question == "cheapest_instance":
        return min((each() for each in refused), key=distance, default=None)
    if question in {"largest_model", "fewest_devices"}:
        refused.reverse()
    return refused[0]() if refused else None


def _limit_on_scale(scale: SteppedQuantity, probe: Probe) -> tuple[Limit, ...]:
    """Return the limit of a scale, or nothing if its first step already fails."""

    def works(steps: int) -> bool:
        request_at = scale.at(scale.value(steps))
        requests = request_at if isinstance(request_at, list) else [request_at]
        return probe.works(scale.value(steps), *requests)

    most = max(1, (scale.top - scale.origin) // scale.step)
    if not (steps := largest_step(works, most)):
        return ()
    largest = scale.value(steps)
    limit = probe.limit(largest, scale.unit, largest + scale.step)
    if limit.beyond is not None:
        interval = _limit_interval(limit, limit.beyond, largest, scale)
        return (limit.model_copy(update={"interval": interval}),)
    if scale.top_reason:
        beyond = FirstFailure(
            value=largest + scale.step,
            reason=scale.top_reason,
            constraint=TRAINED_LENGTH,
            required=largest + scale.step,
            limit=scale.top,
            unit=scale.unit,
        )
        limit = limit.model_copy(update={"beyond": beyond})
    return (limit,)


def _limit_interval(
    limit: Limit, beyond: FirstFailure, value: int, scale: SteppedQuantity
) -> Interval | None:
    """Return the interval of a limit, clipped to the end of its scale."""
    half, found = scale.half_of(value), limit.estimate

    def at_half() -> Estimate:
        request_at = scale.at(half)
        requests = request_at if isinstance(request_at, list) else [request_at]
        copies, strategy = found.strategy.data_parallel_size, found.strategy
        alike = (each for each in requests if each.pins.data_parallel_size == copies)
        request = next(alike, requests[0])
        if micro := request.pins.micro_batch_size:  # which the batch sets
            strategy = strategy.model_copy(update={"micro_batch_size": micro})
        smaller = found.model_copy(update={"strategy": strategy})
        return full_estimate_of(request, limit.cluster, smaller)

    interval = limit_interval(value, beyond.constraint, limit.estimate, at_half, half)
    return interval and (interval[0], min(interval[1], float(scale.top)))


def _changed(request: PlanRequest, **fields: object) -> PlanRequest:
    """Return a request whose workload has some fields changed."""
    return request.model_copy(update={"workload": request.workload.model_copy(update=fields)})


def _concurrent_request(request: PlanRequest, users: int) -> PlanRequest:
    """Return a serving request in which no user waits for memory."""
    bound = {**request.constraints, "max_concurrency": Bound(min=users)}
    changed = _changed(
        request, concurrency=users, request_rate_per_second=None, burst_requests=None
    )
    return changed.model_copy(update={"constraints": bound})


def _unsuited(request: PlanRequest, question: str, kinds: str) -> BadRequestError:
    return BadRequestError(
        f"{question} is a question about {kinds}; workload.kind is {request.workload.kind}",
        "workload.kind",
    )


def _context(request: PlanRequest, probe: Probe) -> tuple[Limit, ...]:
    workload = request.workload
    if not isinstance(workload, ServeWorkload | GenerateWorkload):
        raise _unsuited(request, "longest_context", "serve and generate")
    trained = resolve_model(request.model).max_position_embeddings
    base = request  # a batch may be queued, as a plan of it is, unless it is asked for at once
    if isinstance(workload, ServeWorkload):
        base = _concurrent_request(request, workload.concurrency or 1)

    def at(tokens: int) -> PlanRequest:
        output = min(workload.output_tokens, tokens - 1)
        sizes = {"input_tokens": tokens - output, "output_tokens": output}
        if isinstance(workload, ServeWorkload) and workload.max_request_tokens:
            sizes["max_request_tokens"] = max(workload.max_request_tokens, tokens)
        return _changed(base, **sizes)

    reason = f"the model was trained to {trained} tokens"
    return _limit_on_scale(SteppedQuantity("tokens", CONTEXT_STEP, trained, at, reason), probe)


def _users(request: PlanRequest, probe: Probe) -> tuple[Limit, ...]:
    if not isinstance(request.workload, ServeWorkload):
        raise _unsuited(request, "most_users", "serve")
    return _limit_on_scale(
        SteppedQuantity("users", 1, MAX_USERS, lambda n: _concurrent_request(request, n)), probe
    )


def _batch(request: PlanRequest, probe: Probe) -> tuple[Limit, ...]:
    workload = request.workload
    if isinstance(workload, GenerateWorkload):
        scale = SteppedQuantity(
            "sequences", 1, MAX_BATCH, lambda n: _changed(request, batch_size=n, at_once=True)
        )
        return _limit_on_scale(scale, probe)
    if not isinstance(workload, TrainWorkload):
        raise _unsuited(request, "largest_batch", "generate and train")
    if workload.generation_batch_size:
        raise BadRequestError(
            f"generation_batch_size is {workload.generation_batch_size}, of which batches are "
            "whole parts, so that largest_batch would change it too: leave it out, with which a "
            "generation has the completions of one update",
            "workload.generation_batch_size",
        )
    single_cluster_requests = (_on_cluster(request, cluster) for cluster in clusters_of(request))
    limits = [
        limit for single in single_cluster_requests for limit in _trained_batch(single, probe)
    ]
    return tuple(sorted(limits, key=lambda limit: -float(limit.value))[:1])


def _on_cluster(request: PlanRequest, cluster: ClusterSpec) -> PlanRequest:
    """Return a request restricted to one cluster."""
    return request.model_copy(update={"cluster": cluster, "hardware_options": ()})


def _trained_batch(request: PlanRequest, probe: Probe) -> tuple[Limit, ...]:
    """Return the largest batch without gradient accumulation, in multiples of all ranks."""
    pinned = request.pins.data_parallel_size
    step = math.lcm(resolve_cluster(request.cluster).num_devices, pinned or 1)
    if isinstance(request.workload, TrainWorkload) and request.workload.generates:
        step = math.lcm(step, request.workload.completions_per_prompt)
    replicas = [pinned] if pinned else [n for n in range(step, 0, -1) if step % n == 0]

    def at(sequences: int) -> list[PlanRequest]:
        return [_unaccumulated_request(request, sequences, count) for count in replicas]

    own_probe = Probe()
    limits = _limit_on_scale(SteppedQuantity("sequences", step, MAX_BATCH * step, at), own_probe)
    probe.merge(own_probe, request.cluster)
    return limits


def _unaccumulated_request(request: PlanRequest, sequences: int, replicas: int) -> PlanRequest:
    """Return a training request with one micro-batch per replica and step."""
    single_pass = {"data_parallel_size": replicas, "gradient_accumulation_steps": 1}
    pins = {**single_pass, "micro_batch_size": sequences // replicas}
    changed = _changed(request, global_batch_size=sequences)
    return changed.model_copy(update={"pins": request.pins.model_copy(update=pins)})


def _sequence(request: PlanRequest, probe: Probe) -> tuple[Limit, ...]:
    workload = request.workload
    if not isinstance(workload, TrainWorkload):
        raise _unsuited(request, "longest_sequence", "train")
    trained = resolve_model(request.model).max_position_embeddings

    def at(tokens: int) -> PlanRequest:
        return request.model_copy(update={"workload": workload.with_sequences_of(tokens)})

    reason = f"the model was trained to {trained} tokens"
    # A sequence has its prompt, and at least one token of a completion.
    prompt = workload.longest_prompt // SEQUENCE_STEP * SEQUENCE_STEP if workload.generates else 0
    scale = SteppedQuantity("tokens", SEQUENCE_STEP, trained, at, reason, prompt)
    return _limit_on_scale(scale, probe)


def _model(request: PlanRequest, probe: Probe) -> tuple[Limit, ...]:
    """Return the largest model of the catalog for each weight format."""
    training = isinstance(request.workload, TrainWorkload)
    weights = (weight for question in questions(request) for weight, _ in formats(question))
    dtypes: list[Dtype | None] = [None] if training else [*dict.fromkeys(weights)]
    limits_or_none = (_largest_model(request, dtype, probe) for dtype in dtypes)
    limits = [limit for limit in limits_or_none if limit]
    return tuple(sorted(limits, key=lambda each: -float(each.value)))


def _largest_model(request: PlanRequest, dtype: Dtype | None, probe: Probe) -> Limit | None:
    pins = request.pins.model_copy(update={"weight_dtype": dtype or request.pins.weight_dtype})
    memory = max(_room_for_weights(request, cluster) for cluster in clusters_of(request))
    smallest = element_bytes(dtype or "int4")
    larger: str | None = None
    for name, parameters in models_by_size():
        key = f"{name} {dtype or ''}".strip()
        if parameters * smallest > memory:
            # The weights alone exceed device and host memory: no search is needed.
            need = parameters * smallest
            reason = f"{need / 1e9:.0f} GB of weights on {memory / 1e9:.0f} GB of memory"
            probe.no[key] = partial(
                FirstFailure,
                value=name,
                reason=reason,
                constraint=MEMORY,
                required=need,
                limit=memory,
                unit="B",
            )
        elif probe.works(key, request.model_copy(update={"model": name, "pins": pins})):
            limit = probe.limit(key, "parameters", larger)
            title = f"{name} in {dtype}" if dtype else name
            return limit.model_copy(update={"value": parameters, "name": title})
        larger = key
    return None


def _room_for_weights(request: PlanRequest, cluster: ClusterSpec) -> float:
    """Return the bytes of device and host memory; infinite if weights go to disk."""
    offload = request.pins.offload
    if offload and offload.weights_disk:
        return math.inf
    return memory_of(cluster) + (resolve_cluster(cluster).host_memory_bytes or 0) * cluster.nodes


def models_by_size() -> list[tuple[str, int]]:
    """Return the catalog's models with their parameter counts, largest first."""
    sizes = [(entry.id, count_parameters(get_model(entry.id)).total) for entry in list_models()]
    return sorted(sizes, key=lambda row: -row[1])


def _devices(request: PlanRequest, probe: Probe) -> tuple[Limit, ...]:
    """Return the fewest devices: any number within a server, then whole servers.

    The counts are doubled until one works; then those between it and the last that fails are
    tried, the fewest first, because odd counts have fewer layouts.
    """

    def works(count: int) -> bool:
        return probe.works(
            count,
            *(
                _on_cluster(request, _resized_cluster(cluster, count))
                for cluster in clusters_of(request)
            ),
        )

    servers = [_devices_per_server(cluster) for cluster in clusters_of(request)]
    doubled = [2**doubling for doubling in range(MAX_DOUBLINGS + 1)]
    for fewer, count in pairwise([0, *doubled]):
        if not works(count):
            continue
        counts = range(fewer + 1, count)
        offered = [n for n in counts if all(n <= each or n % each == 0 for each in servers)]
        found = next((n for n in offered if works(n)), count)
        beyond = max((n for n in (fewer, *offered) if n < found), default=0)
        return (probe.limit(found, "devices", beyond or None),)
    return ()


def _devices_per_server(cluster: ClusterSpec) -> int:
    resolved = resolve_cluster(cluster)
    if resolved.nvlink_domain_devices:
        return resolved.devices_per_node  # the nodes of an NVLink domain are built as they are
    return max(resolved.devices_per_node, SERVER_DEVICES)


def _resized_cluster(cluster: ClusterSpec, count: int) -> ClusterSpec:
    """Return ``count`` of a cluster's first device, in servers of at least the usual size."""
    resolved = resolve_cluster(cluster)
    device = cluster.device or resolve_device(resolved.device).id
    per_node = min(count, _devices_per_server(cluster))
    size = {"devices_per_node": per_node, "nodes": -(-count // per_node)}
    return resolved.model_copy(
        update={"device": device, "instance": None, "other_nodes": (), **size}
    )


def _instance(request: PlanRequest, probe: Probe) -> tuple[Limit, ...]:
    """Return the cheapest firm offer: per hour, or per token if the objective is cost."""
    candidates: list[Limit] = []
    refused: str | None = None
    for offer in _offers_by_price():
        on_offer = _on_cluster(request, ClusterSpec(device="", instance=offer.id))
        if not probe.works(offer.id, on_offer):
            refused = offer.id
            continue
        found_limit = probe.limit(offer.id, "USD per hour", refused)
        candidates.append(
            found_limit.model_copy(update={"value": offer.price_usd_per_hour, "name": offer.id})
        )
        if request.objective != "cost":
            break
    best = sorted(candidates, key=lambda each: order_of(each.estimate, request.objective))
    return tuple(best[:1])


def _offers_by_price() -> list[Instance]:
    """Return the cheapest firm offer of each machine kind, cheapest first."""
    firm = [instance for instance in list_instances() if instance.device and not instance.is_spot]
    kinds: dict[tuple[str | None, int], Instance] = {}
    for offer in sorted(firm, key=lambda instance: instance.price_usd_per_hour):
        kinds.setdefault((offer.device, offer.devices), offer)
    return list(kinds.values())


QUESTIONS: dict[str, Callable[[PlanRequest, Probe], tuple[Limit, ...]]] = {
    "longest_context": _context,
    "largest_batch": _batch,
    "most_users": _users,
    "longest_sequence": _sequence,
    "largest_model": _model,
    "fewest_devices": _devices,
    "cheapest_instance": _instance,
}
