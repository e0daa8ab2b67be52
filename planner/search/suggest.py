"""The smallest changes that would make an infeasible request fit, each proven by a search."""

from collections.abc import Callable, Iterator, Sequence

from planner.catalog.devices import list_devices
from planner.errors import PlannerError
from planner.search.placement import placed_strategy
from planner.search.question import clusters_of, memory_of
from planner.search.space import RUNNER_FORMATS
from planner.specs.base import JsonObject
from planner.specs.cluster import ClusterSpec
from planner.specs.estimate import Estimate, EstimateRequest
from planner.specs.plan import PlanRequest, Suggestion
from planner.specs.strategy import Strategy
from planner.specs.workload import GenerateWorkload, ServeWorkload, TrainWorkload, Workload
from planner.workload.resolve import resolve_cluster, resolve_device

MAX_SUGGESTIONS = 6
MAX_HALVINGS = 6
MAX_DOUBLINGS = 4
SERVER_DEVICES = 8  # servers hold up to eight devices: further ones are further servers
Best = Callable[[PlanRequest], Estimate | None]
Works = Callable[[PlanRequest], bool]
Change = tuple[str, JsonObject]


def suggestions(
    request: PlanRequest, best: Best, works: Works | None = None
) -> tuple[Suggestion, ...]:
    """Return up to six changes, of each kind the smallest one that works.

    ``works`` tells sooner than ``best`` whether a request has a plan.
    """
    found: list[Suggestion] = []
    for ladder in (
        *_smaller_workloads(request),
        list(_larger_device(request)),
    ):
        found += _smallest_step(request, ladder, best, works or _has(best))
    for attempts in (
        _offloaded(request),
        _cheaper_method(request),
        _fewer_pins(request),
        _fewer_constraints(request),
        _more_devices(request),
    ):
        found += _first_that_fits(request, attempts, best)
    return tuple(found[:MAX_SUGGESTIONS])


def _has(best: Best) -> Works:
    return lambda request: best(request) is not None


def _smallest_step(
    request: PlanRequest, ladder: Sequence[Change], best: Best, works: Works
) -> list[Suggestion]:
    """Return the first step of a ladder that fits, or nothing when its last one does not.

    Assumes that each step needs less than the one before it, which halves the searches. Only the
    step that is suggested is searched for its best plan.
    """

    def fits(step: int) -> bool:
        try:
            return works(_changed(request, ladder[step]))
        except PlannerError:
            return False

    low, high = 0, len(ladder) - 1
    if not ladder or not fits(high):
        return []
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle + 1, high)
    known = _verified(request, ladder[high], best)
    return [known] if known else []


def _changed(request: PlanRequest, change: Change) -> PlanRequest:
    return PlanRequest.model_validate({**dict(request), **change[1]})


def _first_that_fits(
    request: PlanRequest, attempts: Iterator[Change], best: Best
) -> list[Suggestion]:
    for change in attempts:
        suggestion = _verified(request, change, best)
        if suggestion:
            return [suggestion]
    return []


def _verified(request: PlanRequest, change: Change, best: Best) -> Suggestion | None:
    """Return the change with the best plan that it makes possible, if it makes one possible."""
    title, changes = change
    try:
        estimate = best(_changed(request, change))
    except PlannerError:
        return None
    if estimate is None:
        return None
    shown = {name: _json(value) for name, value in changes.items()}
    return Suggestion(title=title, changes=shown, estimate=estimate)


def _json(value: object) -> object:
    if isinstance(value, tuple):
        return [_json(each) for each in value]
    dump = getattr(value, "model_dump", None)
    return dump(mode="json") if dump else value


def _smaller_workloads(request: PlanRequest) -> Iterator[list[Change]]:
    workload = request.workload
    names: dict[type, tuple[str, ...]] = {
        ServeWorkload: ("concurrency", "input_tokens"),
        GenerateWorkload: ("batch_size", "input_tokens"),
        TrainWorkload: ("sequence_length",),
    }
    for name in names.get(type(workload), ()):
        sizes = [(getattr(workload, name) or 1) >> step for step in range(1, MAX_HALVINGS + 1)]
        yield [
            (f"{name.replace('_', ' ')} {size}", {"workload": _with(workload, name, size)})
            for size in sizes
            if size
        ]


def _with(workload: Workload, name: str, value: object) -> Workload:
    return workload.model_copy(update={name: value})


def _offloaded(request: PlanRequest) -> Iterator[Change]:
    """Yield the best placement over device, host memory and disk of a batch that does not fit."""
    if not isinstance(request.workload, GenerateWorkload) or request.pins.offload:
        return
    for cluster in clusters_of(request):
        asked = EstimateRequest(
            model=request.model,
            cluster=cluster,
            workload=request.workload,
            strategy=request.pins,
            engine=request.engine,
            host_calibration=request.host_calibration,
        )
        placed = placed_strategy(asked)
        if placed is not None:
            yield "weights and cache placed over host memory and disk", {"pins": placed}


def _cheaper_method(request: PlanRequest) -> Iterator[Change]:
    workload = request.workload
    if not isinstance(workload, TrainWorkload) or workload.method not in {"full", "pretrain"}:
        return
    for optimizer in ("adamw_8bit", "adafactor"):
        if workload.optimizer != optimizer:
            changed = workload.model_copy(update={"optimizer": optimizer})
            yield f"optimiser {optimizer}", {"workload": changed}
    # Adapters need weights that somebody has trained before.
    methods = ("lora", "lomo", "qlora") if workload.method == "full" else ("adalomo",)
    for method in methods:
        changed = workload.model_copy(update={"method": method, "optimizer": None})
        yield f"method {method}", {"workload": changed}


def _fewer_pins(request: PlanRequest) -> Iterator[Change]:
    pinned = {name: value for name, value in request.pins if value is not None}
    if "weight_dtype" in pinned:
        for weight, activation in RUNNER_FORMATS:
            pins = {**pinned, "weight_dtype": weight, "activation_dtype": activation}
            yield f"weights in {weight}", {"pins": Strategy.model_validate(pins)}
    for name in pinned:
        rest = {key: value for key, value in pinned.items() if key != name}
        title = f"{name.replace('_', ' ')} not pinned"
        yield title, {"pins": Strategy.model_validate(rest)}


def _fewer_constraints(request: PlanRequest) -> Iterator[Change]:
    for name in request.constraints:
        rest = {key: bound for key, bound in request.constraints.items() if key != name}
        yield f"no limit on {name.replace('_', ' ')}", {"constraints": rest}


def _largest_option(request: PlanRequest) -> ClusterSpec:
    """Return the cluster, or of several to choose among the one with the most memory.

    Its instance is spelt out: another device or number of them is no longer that offer.
    """
    return max(map(_spelt_out, clusters_of(request)), key=memory_of)


def _spelt_out(cluster: ClusterSpec) -> ClusterSpec:
    if cluster.instance is None:
        return cluster
    rented = resolve_cluster(cluster)
    device = resolve_device(rented.device).id
    return rented.model_copy(update={"device": device, "instance": None})


def _instead(request: PlanRequest, cluster: ClusterSpec) -> JsonObject:
    """Return the change to one cluster, which nothing else may be chosen beside."""
    return {"cluster": cluster, **({"hardware_options": ()} if request.hardware_options else {})}


def _more_devices(request: PlanRequest) -> Iterator[Change]:
    cluster = _largest_option(request)
    if resolve_device(cluster.device).kind == "cpu":
        return
    for inside, nodes in larger_sizes(cluster.devices_per_node, cluster.nodes):
        larger = cluster.model_copy(update={"devices_per_node": inside, "nodes": nodes})
        title = f"{larger.num_devices} devices instead of {cluster.num_devices}"
        yield title, _instead(request, larger)


def larger_sizes(inside: int, nodes: int) -> list[tuple[int, int]]:
    """Return devices per server and servers, the fewest devices first, up to sixteen times.

    A server is filled up first; full ones, and those that hold no whole multiple more, are
    doubled as they are.

    >>> larger_sizes(6, 1)[:5]
    [(8, 1), (6, 2), (8, 2), (6, 4), (8, 4)]
    """
    full = max(SERVER_DEVICES, inside)
    most = inside * nodes * 2**MAX_DOUBLINGS
    doubled = [inside * 2**step for step in range(1, MAX_DOUBLINGS) if inside * 2**step < full]
    servers = {full} if inside * 2 <= full else {full, inside}
    found = {(each, nodes) for each in (*doubled, full)}
    found |= {(each, nodes * 2**step) for each in servers for step in range(1, MAX_DOUBLINGS + 1)}
    larger = (size for size in found if inside * nodes < size[0] * size[1] <= most)
    return sorted(larger, key=lambda size: (size[0] * size[1], size[1]))


def _larger_device(request: PlanRequest) -> Iterator[Change]:
    cluster = _largest_option(request)
    current = resolve_device(cluster.device)
    larger = sorted(
        (
            device
            for device in list_devices()
            if device.kind == "gpu"
            and device.memory_bytes > current.memory_bytes
            and device.peak_flops_per_second
        ),
        key=lambda device: device.memory_bytes,
    )
    sizes: set[int] = set()
    for device in larger:
        if device.memory_bytes in sizes:
            continue
        sizes.add(device.memory_bytes)
        changed = cluster.model_copy(update={"device": device.id})
        title = f"{device.name} instead of {current.name or current.id}"
        yield title, _instead(request, changed)
