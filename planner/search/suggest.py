"""Small changes that make a request fit or meet its target, each verified by a search."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import combinations, islice
from typing import NamedTuple, Protocol

from planner.catalog.devices import list_devices
from planner.catalog.engines import AUTO, Engine, compared_engines, get_engine
from planner.catalog.topologies import get_topology, list_topologies
from planner.cost.weights import ELEMENT_BITS, WIDE
from planner.exports.export import OWN_METHODS
from planner.search.placement import placed_strategy
from planner.search.question import (
    clusters_of,
    constraints_of,
    memory_of,
    questions,
    value_words,
    words_of,
)
from planner.search.serving_space import HOST_SHARES
from planner.search.space import NEEDS_PEAK, SERVING_FORMATS, formats
from planner.specs.base import Dtype, JsonObject, PlannerError
from planner.specs.cluster import MAX_DEVICES, ClusterSpec, DeviceSpec
from planner.specs.estimate import Bound, Estimate, PlanRequest, Purpose, Suggestion
from planner.specs.workload import (
    GenerateWorkload,
    OffloadSpec,
    ServeWorkload,
    Strategy,
    TrainWorkload,
    Workload,
)
from planner.workload.cluster import SERVER_DEVICES, resolve_cluster, resolve_device

# Changes to a request that may make it feasible, each kind with its smallest step first.
#
# Kinds are ordered by their cost to the user: unpin the layout, offload data (of adapters after a
# cheaper method), use fewer bits, use a cheaper method, reduce the workload, add devices, replace
# the device, use several of another device, and drop a limit.


LEAST_PART = 64  # a smaller part of a workload's size is another workload
STEPS = {"input_tokens": 16, "sequence_length": 64}  # pages of a cache, blocks of a kernel
MAX_DOUBLINGS = 4
MAX_GUESSES = 4  # estimates of one strategy, before searches around the step that it tells
FEW = 8  # steps that are tried one by one: fewer devices need not be less demanding
MAX_FREED_TOGETHER = 4  # up to this many pins are freed in every combination
# Methods that hold less beside or of the weights, first those that change the result least.
# Adapters need pretrained weights.
CHEAPER_METHODS: dict[str, tuple[str, ...]] = {
    "full": ("lora", "lomo", "qlora"),
    "pretrain": ("adalomo",),
    "lora": ("qlora",),
    "lomo": ("lora", "qlora"),
    "qft": ("qlora",),
}
ROUNDING = 1e-6  # of a limit at the best that is reached
RATE = "requests_per_second"
CACHE_FORMATS: tuple[Dtype, ...] = ("fp8", "int8")
OFFLOADING_TRAINER = "deepspeed"
# Pins that are freed before the parallel sizes (0), and after them.
PIN_ORDER = {
    "zero_stage": -3, "micro_batch_size": -2, "activation_recomputation": -1, "offload": 1,
}  # fmt: skip
FORMATS = frozenset({"weight_dtype", "activation_dtype", "kv_cache_dtype", "quantization"})
# Largest number of full servers of another device, when no single change helps.
MOST_SERVERS = 128
FABRIC_BYTES_PER_SECOND = 1e11  # minimum bandwidth of a link faster than PCI Express


# The best value of a figure that any strategy of a request reaches without its limit, or None.
Reach = Callable[[PlanRequest, str, Bound], float | None]
# The figure over its limit of one strategy under a changed request: above 1, it misses.
Miss = Callable[[PlanRequest], float | None]


class RequestChange(NamedTuple):
    """One change of a request: its title and the request fields that it replaces."""

    title: str
    changes: JsonObject


class Ladder(Protocol):
    """Changes of one kind, each less demanding than the one before."""

    def __len__(self) -> int: ...

    def __getitem__(self, at: int, /) -> RequestChange: ...


def fewer_pins(request: PlanRequest) -> Iterator[RequestChange]:
    """Yield each set of layout pins to free, smallest sets first, then sets with formats.

    Settings of a trainer come before parallel sizes, and offload, which costs speed, after them.
    With more than four pins, yield only single pins and all pins together.
    """
    pinned = request.pins.stated
    names = sorted(pinned, key=lambda name: (name in FORMATS, PIN_ORDER.get(name, 0)))
    sizes: Sequence[int] = range(1, len(names) + 1)
    if len(names) > MAX_FREED_TOGETHER:
        sizes = (1, len(names))
    for size in sizes:
        for freed in combinations(names, size):
            if not FORMATS.issuperset(freed):
                yield _unpinned(pinned, freed)


def _unpinned(pinned: JsonObject, freed: Sequence[str]) -> RequestChange:
    rest = {name: value for name, value in pinned.items() if name not in freed}
    *before, last = [name.replace("_", " ") for name in freed]
    names = f"{', '.join(before)} and {last}" if before else last
    return RequestChange(f"{names} not pinned", {"pins": Strategy.model_validate(rest)})


def fewer_bits(request: PlanRequest) -> Iterator[RequestChange]:
    """Yield narrower formats for the pinned ones, widest first, then the formats unpinned.

    An 8-bit cache comes before narrower weights.
    """
    pinned = request.pins.stated
    cache: Dtype | None = pinned.get("kv_cache_dtype")
    for narrower in CACHE_FORMATS if cache else ():
        if ELEMENT_BITS[narrower] < ELEMENT_BITS[cache or narrower]:
            pins = {**pinned, "kv_cache_dtype": narrower}
            yield RequestChange(f"KV cache in {narrower}", {"pins": Strategy.model_validate(pins)})
    if pinned.get("weight_dtype") and not pinned.get("quantization"):
        offered = {pair for question in questions(request) for pair in formats(question)}
        for weight, activation in sorted(offered, key=lambda pair: (-ELEMENT_BITS[pair[0]], pair)):
            if ELEMENT_BITS[weight] < ELEMENT_BITS[pinned["weight_dtype"]]:
                pins = {**pinned, "weight_dtype": weight, "activation_dtype": activation}
                yield RequestChange(
                    f"weights in {weight}", {"pins": Strategy.model_validate(pins)}
                )
    freed = [name for name in pinned if name in FORMATS]
    if freed:
        yield _unpinned(pinned, freed)


def narrower_than_stored(request: PlanRequest) -> Iterator[RequestChange]:
    """Yield formats with fewer bits than a checkpoint that is stored narrow, widest first.

    A search starts such a checkpoint as it is; others make smaller ones of it, or publish them.
    """
    serves = isinstance(request.workload, ServeWorkload | GenerateWorkload)
    pinned = request.pins.stated
    if not serves or {"weight_dtype", "quantization"} & pinned.keys():
        return
    tried = {weight for question in questions(request) for weight, _ in formats(question)}
    if not tried or any(weight in WIDE for weight in tried):
        return
    narrowest = min(ELEMENT_BITS[weight] for weight in tried)
    for weight, activation in SERVING_FORMATS:
        if ELEMENT_BITS[weight] < narrowest and weight not in NEEDS_PEAK:
            pins = {**pinned, "weight_dtype": weight, "activation_dtype": activation}
            yield RequestChange(f"weights in {weight}", {"pins": Strategy.model_validate(pins)})


def host_shares(request: PlanRequest) -> Iterator[RequestChange]:
    """Yield growing shares of a served model's weights that an engine streams from host memory.

    An engine that computes them there searches the share itself, and so does ``auto`` with it.
    """
    workload, pins = request.workload, request.pins
    closed = pins.offload or pins.disaggregated or pins.speculative
    if not isinstance(workload, ServeWorkload) or not _on_gpus(request) or closed:
        return
    if request.engine == AUTO or _own_engine(request).computes_on_host:
        return
    for share in HOST_SHARES:
        yield RequestChange(
            f"{share:.0%} of the weights in host memory",
            {"pins": pins.model_copy(update={"offload": OffloadSpec(weights_cpu=share)})},
        )


def other_engines(request: PlanRequest) -> Iterator[RequestChange]:
    """Yield the other engines that sites run on GPUs: one may queue, pack or offload more.

    Runners hold a batch as a whole; the first engine that is yielded queues what does not fit.
    """
    serves = isinstance(request.workload, ServeWorkload | GenerateWorkload)
    if not serves or request.engine == AUTO or not _on_gpus(request):
        return
    own = _own_engine(request)
    for key in compared_engines("gpu", training=False):
        if key != own.key:
            engine = get_engine(key, "gpu")
            replaced = own.title.partition(",")[0]
            yield RequestChange(f"{engine.title} instead of {replaced}", {"engine": key})


def _on_gpus(request: PlanRequest) -> bool:
    kinds = {resolve_device(resolve_cluster(each).device).kind for each in clusters_of(request)}
    return kinds == {"gpu"}


def _own_engine(request: PlanRequest) -> Engine:
    """Return the engine of a request on GPUs, the usual one of several."""
    training = isinstance(request.workload, TrainWorkload)
    usual = compared_engines("gpu", training=training)[0]
    return get_engine(usual if request.engine == AUTO else request.engine, "gpu")


def placements(request: PlanRequest) -> Iterator[RequestChange]:
    """Yield the best placement over device, host memory and disk for a batch that does not fit."""
    if not isinstance(request.workload, GenerateWorkload) or request.pins.offload:
        return
    for cluster in clusters_of(request):
        placed = placed_strategy(request.estimate_request(cluster, request.pins))
        if placed is not None:
            title = "weights and cache placed over host memory and disk"
            yield RequestChange(title, {"pins": placed})


def other_trainers(request: PlanRequest) -> Iterator[RequestChange]:
    """Yield DeepSpeed, to which plans are exported and which offloads more than a runner."""
    workload = request.workload
    if not isinstance(workload, TrainWorkload) or workload.method in OWN_METHODS:
        return
    if workload.compares:  # DeepSpeed alone has no trainer for it
        return
    if _on_gpus(request) and request.engine != AUTO and _own_engine(request).role == "runner":
        title = "DeepSpeed with offload to host memory, exported to run outside Slipway"
        yield RequestChange(title, {"engine": OFFLOADING_TRAINER})


def reference_ahead(request: PlanRequest) -> Iterator[RequestChange]:
    """Yield a reference that answers all records before the first step, which changes no result.

    Adapters have none to let go.
    """
    workload = request.workload
    if not isinstance(workload, TrainWorkload) or not workload.has_reference:
        return
    if workload.method == "full" and not workload.generates:  # given records, not made in a step
        changed = workload.model_copy(update={"precompute_reference": True})
        yield RequestChange("reference computed before the first step", {"workload": changed})


def cheaper_methods(request: PlanRequest) -> Iterator[RequestChange]:
    """Yield optimisers, then methods, that need less memory in addition to the weights."""
    workload = request.workload
    if not isinstance(workload, TrainWorkload):
        return
    for optimizer in (
        ("adamw_8bit", "adafactor") if workload.method in {"full", "pretrain"} else ()
    ):
        if workload.optimizer != optimizer:
            changed = workload.model_copy(update={"optimizer": optimizer})
            yield RequestChange(f"optimiser {optimizer}", {"workload": changed})
    for method in CHEAPER_METHODS.get(workload.method, ()):
        if method not in workload.possible_methods:
            continue
        kept = workload.optimizer if workload.method == "lora" else None
        changed = workload.model_copy(update={"method": method, "optimizer": kept})
        changes: JsonObject = {"workload": changed}
        if method == "qlora" and "weight_dtype" in request.pins.stated:
            changes["pins"] = request.pins.model_copy(update={"weight_dtype": None})
        yield RequestChange(f"method {method}", changes)


def smaller_workloads(request: PlanRequest) -> Iterator[Ladder]:
    """Yield the smaller values of each size of the workload, the largest first."""
    workload = request.workload
    names: dict[type, tuple[str, ...]] = {
        ServeWorkload: ("concurrency", "input_tokens"),
        GenerateWorkload: ("batch_size", "input_tokens"),
        TrainWorkload: ("sequence_length",),
    }
    if isinstance(workload, TrainWorkload) and workload.length_schedule:
        return  # a shorter sequence would need another schedule of lengths
    prompt = 0
    if isinstance(workload, TrainWorkload) and workload.generates:
        prompt = workload.longest_prompt
    for name in names.get(type(workload), ()):
        size, step = getattr(workload, name) or 1, STEPS.get(name, 1)
        least = max((size - 1) // LEAST_PART, prompt)  # a policy's completions get shorter
        yield _Sizes(request, name, range((size - 1) // step * step, least, -step))


class _Sizes:
    """The changes of one size of a workload, made when they are tried."""

    def __init__(self, request: PlanRequest, name: str, sizes: Sequence[int]) -> None:
        self._workload, self._name, self._sizes = request.workload, name, sizes

    def __len__(self) -> int:
        return len(self._sizes)

    def __getitem__(self, at: int) -> RequestChange:
        size, workload = self._sizes[at], self._workload
        if isinstance(workload, TrainWorkload):
            changed: Workload = workload.with_sequences_of(size)
        else:
            changed = workload.model_copy(update={self._name: size})
        return RequestChange(f"{self._name.replace('_', ' ')} {size}", {"workload": changed})


def fewer_limits(request: PlanRequest, reach: Reach, purpose: Purpose) -> Iterator[RequestChange]:
    """Yield the request with each limit in turn at the best that is reached, or without it."""
    limits = dict(request.constraints)
    if purpose == "target":
        own_rate = isinstance(request.workload, ServeWorkload) and request.constraints.keys()
        stated = constraints_of(request).items()
        limits |= {
            name: bound for name, bound in stated if name != RATE or name in (own_rate or ())
        }
    for name, bound in limits.items():
        rest = {key: other for key, other in request.constraints.items() if key != name}
        words, value = words_of(name), reach(request, name, bound)
        if value is not None and (bound.min is None) != (bound.max is None):
            loose = value * (1 + ROUNDING if bound.min is None else 1 - ROUNDING)
            reached = Bound(max=loose) if bound.min is None else Bound(min=loose)
            title = f"{words} of {value_words(name, value)}, the best found"
            yield RequestChange(title, {"constraints": {**rest, name: reached}})
        yield RequestChange(f"no limit on {words}", {"constraints": rest})


# Hardware


def largest_option(request: PlanRequest) -> ClusterSpec:
    """Return the request's cluster, or the hardware option with the most memory.

    A rented instance is expanded to its devices, because a changed device or count is no longer
    that offer; a topology to its fields.
    """
    return max(map(_without_instance, clusters_of(request)), key=memory_of)


def _without_instance(cluster: ClusterSpec) -> ClusterSpec:
    if cluster.instance is None and cluster.topology is None:
        return cluster
    rented = resolve_cluster(cluster)
    device = resolve_device(rented.device).id
    return rented.model_copy(update={"device": device, "instance": None, "topology": None})


def _replaced_hardware(request: PlanRequest, cluster: ClusterSpec) -> JsonObject:
    """Return the change that replaces all hardware options by one cluster."""
    return {"cluster": cluster, **({"hardware_options": ()} if request.hardware_options else {})}


def more_devices(request: PlanRequest) -> list[RequestChange]:
    """Return more of the same device, fewest first; CPUs are not multiplied."""
    cluster = largest_option(request)
    if resolve_device(cluster.device).kind == "cpu":
        return []
    changes = []
    sizes = larger_sizes(cluster.devices_per_node, cluster.nodes)
    if cluster.nvlink_domain_devices:  # the nodes of a domain are built as they are
        most = cluster.nodes * 2**MAX_DOUBLINGS
        sizes = [(cluster.devices_per_node, each) for each in range(cluster.nodes + 1, most + 1)]
    for inside, nodes in sizes:
        if inside * nodes > MAX_DEVICES:
            break
        larger = cluster.model_copy(update={"devices_per_node": inside, "nodes": nodes})
        title = f"{larger.num_devices} devices instead of {cluster.num_devices}"
        changes.append(RequestChange(title, _replaced_hardware(request, larger)))
    return changes


def larger_sizes(inside: int, nodes: int) -> list[tuple[int, int]]:
    """Return larger (devices per server, servers) pairs, fewest devices first, up to 16 times.

    A server is filled first, device by device. Then there are more full servers, and servers of
    the stated size if that does not divide a full one.

    >>> larger_sizes(6, 1)[:5]
    [(7, 1), (8, 1), (6, 2), (8, 2), (6, 3)]
    """
    full = max(SERVER_DEVICES, inside)
    max_devices = inside * nodes * 2**MAX_DOUBLINGS
    servers = {full} if inside * 2 <= full else {full, inside}
    sizes = {(each, nodes) for each in range(inside + 1, full + 1)}
    sizes |= {(each, more) for each in servers for more in range(nodes, nodes * 16 + 1)}
    larger = (size for size in sizes if inside * nodes < size[0] * size[1] <= max_devices)
    return sorted(larger, key=lambda size: (size[0] * size[1], size[1]))


def other_devices(request: PlanRequest) -> list[tuple[DeviceSpec, RequestChange]]:
    """Return each other GPU in the same number, cheapest first, unpriced ones last.

    A topology is of one device: another has its own published NVLink domain, if it has one with
    nodes of the same size, and no pods or rates of the first.
    """
    cluster = largest_option(request)
    current, apart = resolve_device(cluster.device), _fields_of_topology(request)
    changes = []
    for device in sorted(_gpus(), key=_price_order):
        if device.id == current.id or is_no_better(device, current):
            continue
        joined = _joined_as(device, cluster) if apart else {}
        changed = cluster.model_copy(update={"device": device.id, **apart, **joined})
        title = f"{device.name} instead of {current.name or current.id}"
        changes.append((device, RequestChange(title, _replaced_hardware(request, changed))))
    return changes


def _fields_of_topology(request: PlanRequest) -> dict[str, None]:
    """Return, as None, the largest option's domain and other fields that its topology set."""
    given = max(clusters_of(request), key=lambda each: memory_of(_without_instance(each)))
    names = {"nvlink_domain_devices"} if given.nvlink_domain_devices else set()
    if given.topology:
        names |= get_topology(given.topology).cluster_fields.keys() - given.model_fields_set
    return dict.fromkeys(sorted(names - {"devices_per_node"}))


def _joined_as(device: DeviceSpec, cluster: ClusterSpec) -> JsonObject:
    """Return what the published topology of a device with an NVLink domain sets, if nodes fit."""
    for topology in list_topologies():
        fields = topology.cluster_fields
        fits = fields.get("devices_per_node") == cluster.devices_per_node
        if topology.device == device.id and topology.nvlink_domain_devices and fits:
            return dict(fields)
    return {}


def clusters_of_other_devices(
    request: PlanRequest,
) -> Iterator[tuple[DeviceSpec, list[RequestChange]]]:
    """Yield each priced GPU with a fast server fabric, in growing numbers: then whole servers."""
    current = resolve_device(largest_option(request).device)
    for device in sorted(_gpus(), key=_price_order):
        link = device.intra_node_bandwidth_bytes_per_second or 0.0
        if device.price_usd_per_hour is None or link < FABRIC_BYTES_PER_SECOND:
            continue
        sizes = [(1, 1), *larger_sizes(1, 1)[: SERVER_DEVICES - 1]]
        sizes += [(SERVER_DEVICES, servers) for servers in range(2, MOST_SERVERS + 1)]
        named = current.name or current.id
        yield (
            device,
            [
                RequestChange(
                    f"{inside * nodes} \N{MULTIPLICATION SIGN} {device.name} instead of {named}",
                    _replaced_hardware(
                        request,
                        ClusterSpec(device=device.id, devices_per_node=inside, nodes=nodes),
                    ),
                )
                for inside, nodes in sizes
            ],
        )


def _gpus() -> list[DeviceSpec]:
    return [each for each in list_devices() if each.kind == "gpu" and each.peak_flops_per_second]


def _price_order(device: DeviceSpec) -> tuple[bool, float, int, str]:
    price = device.price_usd_per_hour
    return price is None, price or 0.0, device.memory_bytes, device.id


def is_no_better(device: DeviceSpec, than: DeviceSpec) -> bool:
    """Return whether a device has at most the memory, bandwidths and peaks of another one."""
    link = device.intra_node_bandwidth_bytes_per_second or 0
    return (
        device.kind == than.kind
        and device.memory_bytes <= than.memory_bytes
        and device.memory_bandwidth_bytes_per_second <= than.memory_bandwidth_bytes_per_second
        and link <= (than.intra_node_bandwidth_bytes_per_second or 0)
        and all(
            peak <= than.peak_flops_per_second.get(dtype, 0)
            for dtype, peak in device.peak_flops_per_second.items()
        )
    )


MAX_SUGGESTIONS = 6
MOST_HOST_BYTES = 2 * 10**12  # of one server: NVIDIA DGX H100 and H200 data sheets
Best = Callable[[PlanRequest], Estimate | None]
Works = Callable[[PlanRequest], bool]


def suggestions(
    request: PlanRequest,
    best: Best,
    works: Works | None = None,
    *,
    reach: Reach = lambda *_: None,
    miss: Miss = lambda _: None,
    purpose: Purpose = "fit",
) -> tuple[Suggestion, ...]:
    """Return up to six changes, the smallest working one of each kind, cheapest kind first.

    For the purpose ``fit`` a change works if something fits, regardless of targets; for ``target``
    a plan must also meet the targets. ``works`` is a faster test than ``best`` for the existence
    of a plan. ``miss`` tells where to test first for a target, and decides nothing.
    """
    trial = _Trial(request, best, works or (lambda changed: best(changed) is not None), purpose)
    trial.reach = reach
    if purpose == "target":
        trial.miss = miss
    return tuple(islice(trial.smallest(), MAX_SUGGESTIONS))


class _Trial:
    """The trial of changes to one request for one purpose."""

    def __init__(self, request: PlanRequest, best: Best, works: Works, purpose: Purpose) -> None:
        self.request = request
        self.best = best
        self.works = works
        self.purpose = purpose
        self.reach: Reach = lambda *_: None
        self.miss: Miss = lambda _: None

    def smallest(self) -> Iterator[Suggestion]:
        """Yield the smallest working change of each kind, kinds ordered by cost."""
        request = self.request
        # If freeing all pins does not help, no subset does.
        if request.pins.stated and self._works(RequestChange("", {"pins": Strategy()})):
            yield from self._first_working(fewer_pins(request))
        engines = self._first_working(other_engines(request))
        whole = [each for each in engines if each.estimate.strategy.offload is None]
        yield from whole
        yield from self._first_working(placements(request))
        tunes_adapters = isinstance(request.workload, TrainWorkload) and (
            request.workload.method == "lora"
        )
        # A frozen base in 4 bits is quicker than one that is read from host memory in each pass.
        if tunes_adapters:
            yield from self._first_working(cheaper_methods(request))
        yield from self._first_working(other_trainers(request))
        yield from self._first_working(fewer_bits(request))
        yield from self._first_working(narrower_than_stored(request))
        yield from self._first_working(reference_ahead(request))
        if not tunes_adapters:
            yield from self._first_working(cheaper_methods(request))
        for ladder in smaller_workloads(request):
            yield from self._smallest_step(ladder)
        more = [*self._fewest_devices(), *self._cheapest_device()]
        yield from more or self._cheapest_cluster()
        # Weights in host memory cost most of a server's speed.
        if not whole:
            yield from engines
        if self.purpose == "fit":
            yield from self._smallest_step(list(host_shares(request)))
        yield from self._first_working(fewer_limits(request, self.reach, self.purpose))

    def _request_with(self, change: RequestChange) -> PlanRequest:
        changed = PlanRequest.model_validate({**dict(self.request), **change.changes})
        return changed.without_targets() if self.purpose == "fit" else changed

    def _works(self, change: RequestChange) -> bool:
        try:
            return self.works(self._request_with(change))
        except PlannerError:
            return False

    def _verified_suggestion(self, change: RequestChange) -> Suggestion | None:
        """Return the change with the best plan that it allows, or None."""
        try:
            estimate = self.best(self._request_with(change))
        except PlannerError:
            return None
        if estimate is None or ("engine" in change.changes and self._overfills_host(estimate)):
            return None
        shown = {name: _json(value) for name, value in change.changes.items()}
        title, offload = change.title, estimate.strategy.offload
        trains = isinstance(self.request.workload, TrainWorkload)
        if "engine" in change.changes and offload and offload.weights_cpu and not trains:
            title += f", with {offload.weights_cpu:.0%} of the weights in host memory"
        return Suggestion(title=title, changes=shown, estimate=estimate, purpose=self.purpose)

    def _overfills_host(self, estimate: Estimate) -> bool:
        """Return whether a suggested trainer leaves more to an unknown host than servers hold."""
        cluster = largest_option(self.request)
        most = (cluster.host_memory_bytes or MOST_HOST_BYTES) * cluster.nodes
        return (estimate.memory.host_bytes or 0) > most

    def _first_working(self, changes: Iterable[RequestChange]) -> list[Suggestion]:
        for change in changes:
            suggestion = self._verified_suggestion(change) if self._works(change) else None
            if suggestion:
                return [suggestion]
        return []

    def _smallest_step(self, ladder: Ladder) -> list[Suggestion]:
        """Return the first working step of a ladder, or nothing if the last step fails.

        Assumes that each step is less demanding than the one before, which allows bisection. Only
        the suggested step is searched for its best plan.
        """
        guess = self._guess(ladder)
        index = self._first_step(ladder) if guess is None else self._first_near(ladder, guess)
        suggestion = None if index is None else self._verified_suggestion(ladder[index])
        return [suggestion] if suggestion else []

    def _guess(self, ladder: Ladder) -> int | None:
        """Return the first step at which one strategy meets the limits, by the secant method.

        Delays grow about linearly with a workload, and the estimate of one strategy takes a
        fraction of a search.
        """
        last, before = len(ladder) - 1, -1
        missed = self.miss(self.request) if ladder else None
        if missed is None or missed <= 1:
            return None
        at = math.ceil(last * (1 - 1 / missed))  # as if the last step took no time
        for _ in range(MAX_GUESSES):
            now = self.miss(self._request_with(ladder[at]))
            if now is None or now in {missed, math.inf}:
                return None
            crossing = at + (1 - now) * (at - before) / (now - missed)
            following = min(max(math.ceil(crossing), 0), last)
            if abs(following - at) <= 1:
                return following
            before, missed, at = at, now, following
        return at

    def _first_near(self, ladder: Ladder, guess: int) -> int | None:
        """Return what ``_first_step`` returns, with few searches if the guess is close."""
        fails, works, stride = -1, len(ladder), 1
        at = guess
        while fails < at < works:
            if self._works(ladder[at]):
                works, at = at, max(at - stride, 0)
            else:
                fails, at = at, min(at + stride, len(ladder) - 1)
            if fails >= 0 and works < len(ladder):
                break
            stride *= 2
        return self._first_between(ladder, fails, works) if works < len(ladder) else None

    def _first_step(self, ladder: Ladder) -> int | None:
        last = len(ladder) - 1
        if last < 0 or not self._works(ladder[last]):
            return None
        return self._first_between(ladder, -1, last)

    def _first_between(self, ladder: Ladder, fails: int, works: int) -> int:
        """Return the first working step after one that fails, up to one that works."""
        while works - fails > 1:
            middle = (fails + works) // 2
            if self._works(ladder[middle]):
                works = middle
            else:
                fails = middle
        return works

    def _fewest_devices(self) -> list[Suggestion]:
        ladder = more_devices(self.request)
        at = self._first_count(ladder)
        suggestion = None if at is None else self._verified_suggestion(ladder[at])
        return [suggestion] if suggestion else []

    def _first_count(self, ladder: Ladder) -> int | None:
        """Return the first working step of a ladder of growing clusters.

        The counts are doubled until one works. Of those between it and the last that fails, a few
        are tried one by one: seven devices have fewer layouts than four. Many are bisected.
        """
        counts = [ladder[at].changes["cluster"].num_devices for at in range(len(ladder))]
        fails = -1
        while fails + 1 < len(ladder):
            at = 0
            if fails >= 0:
                within = [i for i, count in enumerate(counts) if count <= 2 * counts[fails]]
                at = max(fails + 1, within[-1])
            if not self._works(ladder[at]):
                fails = at
            elif at - fails > FEW:
                return self._first_between(ladder, fails, at)
            else:
                between = range(fails + 1, at)
                return next((each for each in between if self._works(ladder[each])), at)
        return None

    def _cheapest_device(self) -> list[Suggestion]:
        """Return the first device that works, skipping devices dominated by a failed one.

        Assumes that what fits on a smaller device fits on a larger one.
        """
        devices = other_devices(self.request)
        largest = max(devices, key=lambda each: each[0].memory_bytes, default=None)
        if largest is None or (self.purpose == "fit" and not self._works(largest[1])):
            return []
        failed: list[DeviceSpec] = []
        for device, change in devices:
            if any(self._is_dominated(device, than) for than in failed):
                continue
            suggestion = self._verified_suggestion(change) if self._works(change) else None
            if suggestion:
                return [suggestion]
            failed.append(device)
        return []

    def _is_dominated(self, device: DeviceSpec, failed_device: DeviceSpec) -> bool:
        if self.purpose == "fit":
            return device.memory_bytes <= failed_device.memory_bytes
        return is_no_better(device, failed_device)

    def _cheapest_cluster(self) -> list[Suggestion]:
        """Return the cheapest working count of any priced device, in US dollars per hour."""
        best: tuple[float, RequestChange] | None = None
        for device, ladder in clusters_of_other_devices(self.request):
            hourly = device.price_usd_per_hour or 0.0
            costs = [hourly * change.changes["cluster"].num_devices for change in ladder]
            cheaper = [
                change
                for change, cost in zip(ladder, costs, strict=True)
                if best is None or cost < best[0]
            ]
            index = self._first_step(cheaper)
            if index is not None and index < FEW:
                works = (at for at in range(index) if self._works(cheaper[at]))
                index = next(works, index)
            if index is not None:
                best = costs[index], cheaper[index]
        suggestion = self._verified_suggestion(best[1]) if best else None
        return [suggestion] if suggestion else []


def _json(value: object) -> object:
    if isinstance(value, tuple):
        return [_json(each) for each in value]
    if isinstance(value, dict):
        return {name: _json(each) for name, each in value.items()}
    dump = getattr(value, "model_dump", None)
    return dump(mode="json") if dump else value
