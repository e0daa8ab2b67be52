"""Inverse questions: the largest value of one thing that still has a plan, and what ends it.

Every probe is a whole search, so that the layout may change on the way; each answer carries the
estimate at the limit and the reason one step beyond it.
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

from planner.catalog.engines import calibration_name
from planner.catalog.instances import Instance, list_instances
from planner.catalog.models import get_model, list_models
from planner.cost.dtypes import element_bytes
from planner.cost.parameters import count_parameters
from planner.errors import BadRequestError
from planner.search.carried import limit_interval
from planner.search.probe import Probe, in_full, largest_step, shortfall
from planner.search.question import clusters_of, memory_of, questions
from planner.search.rank import order_of
from planner.search.space import formats
from planner.specs.base import Dtype
from planner.specs.cluster import ClusterSpec
from planner.specs.estimate import Estimate, Interval
from planner.specs.inverse import Beyond, InverseAnswer, InverseRequest, Limit
from planner.specs.plan import Bound, PlanRequest
from planner.specs.workload import GenerateWorkload, ServeWorkload, TrainWorkload
from planner.workload.resolve import resolve_cluster, resolve_device, resolve_model

# A cache is paged in blocks of 16 tokens; sequences are cut for kernels in blocks of 64.
CONTEXT_STEP, SEQUENCE_STEP = 16, 64
MAX_USERS, MAX_BATCH, MAX_DOUBLINGS = 2**17, 2**14, 12
# Accelerators in one server, where the cluster does not say.
SERVER_DEVICES = 8
TRAINED_LENGTH = "max_position_embeddings"


@dataclass(frozen=True)
class Scale:
    """A number that goes up in steps: its unit, how far it may go, and the request at a value."""

    unit: str
    step: int
    top: int
    at: Callable[[int], PlanRequest | list[PlanRequest]]
    top_reason: str | None = None


def answer_inverse(request: InverseRequest) -> InverseAnswer:
    """Return how far the asked thing goes, verified at the limit and one step beyond.

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
        smallest=None if limits else _end_of_the_way(request.question, probe),
        searches=probe.searches,
        seconds=time.perf_counter() - started,
        calibration=calibration_name(),
    )


def _end_of_the_way(question: str, probe: Probe) -> Beyond | None:
    """Return why not even the value that asks for the least works.

    Models go down and devices up, so that the last one tried asked for the least; offers are in
    the order of their prices, of which the one that missed by the least says most.
    """
    refused = list(probe.no.values())
    if question == "cheapest_instance":
        return min(refused, key=shortfall, default=None)
    if question in {"largest_model", "fewest_devices"}:
        refused.reverse()
    return next(iter(refused), None)


def _along(scale: Scale, probe: Probe) -> tuple[Limit, ...]:
    """Return the limit of a scale, or nothing when not even its first step works."""

    def works(steps: int) -> bool:
        asked = scale.at(steps * scale.step)
        requests = asked if isinstance(asked, list) else [asked]
        return probe.works(steps * scale.step, *requests)

    found = largest_step(works, max(1, scale.top // scale.step)) * scale.step
    if not found:
        return ()
    limit = probe.limit(found, scale.unit, found + scale.step)
    if limit.beyond is not None:
        interval = _carried(limit, limit.beyond, found, scale)
        return (limit.model_copy(update={"interval": interval}),)
    if scale.top_reason:
        beyond = Beyond(
            value=found + scale.step,
            reason=scale.top_reason,
            constraint=TRAINED_LENGTH,
            required=found + scale.step,
            limit=scale.top,
            unit=scale.unit,
        )
        limit = limit.model_copy(update={"beyond": beyond})
    return (limit,)


def _carried(limit: Limit, beyond: Beyond, found: int, scale: Scale) -> Interval | None:
    """Return how sure a limit is; never beyond the end of its scale."""
    strategy = limit.estimate.strategy

    def at_half() -> Estimate:
        asked = scale.at(found // 2)
        request = asked[0] if isinstance(asked, list) else asked
        return in_full(request, limit.cluster, strategy)

    interval = limit_interval(found, beyond.constraint, limit.estimate, at_half)
    return interval and (interval[0], min(interval[1], float(scale.top)))


def _changed(request: PlanRequest, **fields: object) -> PlanRequest:
    """Return a request whose workload has some fields changed."""
    return request.model_copy(update={"workload": request.workload.model_copy(update=fields)})


def _all_at_once(request: PlanRequest, users: int) -> PlanRequest:
    """Return a serving request of which no user may wait for memory."""
    bound = {**request.constraints, "max_concurrency": Bound(min=users)}
    changed = _changed(request, concurrency=users, request_rate_per_second=None)
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
    base = request
    if isinstance(workload, ServeWorkload):
        base = _all_at_once(request, workload.concurrency or 1)

    def at(tokens: int) -> PlanRequest:
        output = min(workload.output_tokens, tokens - 1)
        return _changed(base, input_tokens=tokens - output, output_tokens=output)

    reason = f"the model was trained to {trained} tokens"
    return _along(Scale("tokens", CONTEXT_STEP, trained, at, reason), probe)


def _users(request: PlanRequest, probe: Probe) -> tuple[Limit, ...]:
    if not isinstance(request.workload, ServeWorkload):
        raise _unsuited(request, "most_users", "serve")
    return _along(Scale("users", 1, MAX_USERS, lambda n: _all_at_once(request, n)), probe)


def _batch(request: PlanRequest, probe: Probe) -> tuple[Limit, ...]:
    workload = request.workload
    if isinstance(workload, GenerateWorkload):
        scale = Scale("sequences", 1, MAX_BATCH, lambda n: _changed(request, batch_size=n))
        return _along(scale, probe)
    if not isinstance(workload, TrainWorkload):
        raise _unsuited(request, "largest_batch", "generate and train")
    each = (_on(request, cluster) for cluster in clusters_of(request))
    limits = [limit for one in each for limit in _trained_batch(one, probe)]
    return tuple(sorted(limits, key=lambda limit: -float(limit.value))[:1])


def _on(request: PlanRequest, cluster: ClusterSpec) -> PlanRequest:
    """Return a request on one cluster, which nothing else may be chosen beside."""
    return request.model_copy(update={"cluster": cluster, "hardware_options": ()})


def _trained_batch(request: PlanRequest, probe: Probe) -> tuple[Limit, ...]:
    """Return the whole batch at once, without accumulation, in multiples of all ranks."""
    step = resolve_cluster(request.cluster).num_devices
    pinned = request.pins.data_parallel_size
    replicas = [pinned] if pinned else [n for n in range(step, 0, -1) if step % n == 0]

    def at(sequences: int) -> list[PlanRequest]:
        return [_one_micro_batch(request, sequences, count) for count in replicas]

    own = Probe()
    limits = _along(Scale("sequences", step, MAX_BATCH * step, at), own)
    probe.absorb(own, request.cluster)
    return limits


def _one_micro_batch(request: PlanRequest, sequences: int, replicas: int) -> PlanRequest:
    """Return a training request that takes its whole batch in one pass of so many replicas."""
    whole = {"data_parallel_size": replicas, "gradient_accumulation_steps": 1}
    pins = {**whole, "micro_batch_size": sequences // replicas}
    changed = _changed(request, global_batch_size=sequences)
    return changed.model_copy(update={"pins": request.pins.model_copy(update=pins)})


def _sequence(request: PlanRequest, probe: Probe) -> tuple[Limit, ...]:
    if not isinstance(request.workload, TrainWorkload):
        raise _unsuited(request, "longest_sequence", "train")
    trained = resolve_model(request.model).max_position_embeddings

    def at(tokens: int) -> PlanRequest:
        return _changed(request, sequence_length=tokens)

    reason = f"the model was trained to {trained} tokens"
    return _along(Scale("tokens", SEQUENCE_STEP, trained, at, reason), probe)


def _model(request: PlanRequest, probe: Probe) -> tuple[Limit, ...]:
    """Return the largest model of the catalog for each format of the weights."""
    training = isinstance(request.workload, TrainWorkload)
    dtypes: list[Dtype | None] = [None] if training else [*_weight_dtypes(request)]
    found = (_largest_model(request, dtype, probe) for dtype in dtypes)
    limits = [limit for limit in found if limit]
    return tuple(sorted(limits, key=lambda one: -float(one.value)))


def _weight_dtypes(request: PlanRequest) -> Iterator[Dtype]:
    each = (weight for question in questions(request) for weight, _ in formats(question))
    yield from dict.fromkeys(each)


def _largest_model(request: PlanRequest, dtype: Dtype | None, probe: Probe) -> Limit | None:
    pins = request.pins.model_copy(update={"weight_dtype": dtype or request.pins.weight_dtype})
    memory = max(_room_for_weights(request, cluster) for cluster in clusters_of(request))
    smallest = element_bytes(dtype or "int4")
    larger: str | None = None
    for name, parameters in models_by_size():
        key = f"{name} {dtype or ''}".strip()
        if parameters * smallest > memory:
            # Its bare weights are more than devices and hosts hold: no search is needed.
            need = parameters * smallest
            reason = f"{need / 1e9:.0f} GB of weights on {memory / 1e9:.0f} GB of memory"
            probe.no[key] = Beyond(
                value=name,
                reason=reason,
                constraint="memory",
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
    """Return the bytes that devices and their hosts have together; no end with a disk."""
    offload = request.pins.offload
    if offload and offload.weights_disk:
        return math.inf
    return memory_of(cluster) + (resolve_cluster(cluster).host_memory_bytes or 0) * cluster.nodes


def models_by_size() -> list[tuple[str, int]]:
    """Return the models of the catalog with their parameters, the largest first."""
    sizes = [(entry.id, count_parameters(get_model(entry.id)).total) for entry in list_models()]
    return sorted(sizes, key=lambda row: -row[1])


def _devices(request: PlanRequest, probe: Probe) -> tuple[Limit, ...]:
    """Return the fewest devices, by doublings: layouts need sizes that divide."""
    counts = [2**doubling for doubling in range(MAX_DOUBLINGS + 1)]
    for fewer, count in pairwise([0, *counts]):
        sized = [_on(request, _sized(cluster, count)) for cluster in clusters_of(request)]
        if probe.works(count, *sized):
            return (probe.limit(count, "devices", fewer or None),)
    return ()


def _sized(cluster: ClusterSpec, count: int) -> ClusterSpec:
    """Return a cluster with so many of its devices, in servers as large as its own or usual."""
    found = resolve_cluster(cluster)
    device = cluster.device or resolve_device(found.device).id
    inside = min(count, max(found.devices_per_node, SERVER_DEVICES))
    size = {"devices_per_node": inside, "nodes": -(-count // inside)}
    return found.model_copy(update={"device": device, "instance": None, **size})


def _instance(request: PlanRequest, probe: Probe) -> tuple[Limit, ...]:
    """Return the cheapest firm offer: by the hour, or by the token when cost is the objective."""
    dearer: list[Limit] = []
    refused: str | None = None
    for offer in _offers_by_price():
        at = _on(request, ClusterSpec(device="", instance=offer.id))
        if not probe.works(offer.id, at):
            refused = offer.id
            continue
        limit = probe.limit(offer.id, "USD per hour", refused)
        dearer.append(
            limit.model_copy(update={"value": offer.price_usd_per_hour, "name": offer.id})
        )
        if request.objective != "cost":
            break
    best = sorted(dearer, key=lambda one: order_of(one.estimate, request.objective))
    return tuple(best[:1])


def _offers_by_price() -> list[Instance]:
    """Return of each kind of machine the cheapest firm offer, cheapest machine first."""
    firm = [one for one in list_instances() if one.device and not one.is_spot]
    kinds: dict[tuple[str | None, int], Instance] = {}
    for offer in sorted(firm, key=lambda one: one.price_usd_per_hour):
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
