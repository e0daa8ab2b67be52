"""The smallest changes that would make an infeasible request fit, each proven by a search."""

from collections.abc import Callable, Iterator, Sequence

from planner.catalog.devices import list_devices
from planner.errors import PlannerError
from planner.search.placement import placed_strategy
from planner.search.space import RUNNER_FORMATS
from planner.specs.base import JsonObject
from planner.specs.estimate import Estimate, EstimateRequest
from planner.specs.plan import PlanRequest, Suggestion
from planner.specs.strategy import Strategy
from planner.specs.workload import GenerateWorkload, ServeWorkload, TrainWorkload, Workload
from planner.workload.resolve import resolve_cluster, resolve_device

MAX_SUGGESTIONS = 6
MAX_HALVINGS = 6
MAX_DOUBLINGS = 4
MAX_DEVICES_TRIED = 6
Best = Callable[[PlanRequest], Estimate | None]
Change = tuple[str, JsonObject]


def suggestions(request: PlanRequest, best: Best) -> tuple[Suggestion, ...]:
    """Return up to six changes, of each kind the smallest one that works."""
    found: list[Suggestion] = []
    for ladder in (
        *_smaller_workloads(request),
        list(_larger_device(request)),
    ):
        found += _smallest_step(request, ladder, best)
    for attempts in (
        _offloaded(request),
        _cheaper_method(request),
        _fewer_pins(request),
        _fewer_constraints(request),
        _more_devices(request),
    ):
        found += _first_that_fits(request, attempts, best)
    return tuple(found[:MAX_SUGGESTIONS])


def _smallest_step(request: PlanRequest, ladder: Sequence[Change], best: Best) -> list[Suggestion]:
    """Return the first step of a ladder that fits, or nothing when its last one does not.

    Assumes that each step needs less than the one before it, which halves the searches.
    """
    low, high = 0, len(ladder) - 1
    known = _verified(request, ladder[high], best) if ladder else None
    while known and low < high:
        middle = (low + high) // 2
        better = _verified(request, ladder[middle], best)
        if better:
            known, high = better, middle
        else:
            low = middle + 1
    return [known] if known else []


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
        estimate = best(PlanRequest.model_validate({**dict(request), **changes}))
    except PlannerError:
        return None
    if estimate is None:
        return None
    shown = {name: _json(value) for name, value in changes.items()}
    return Suggestion(title=title, changes=shown, estimate=estimate)


def _json(value: object) -> object:
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
    asked = EstimateRequest(
        model=request.model,
        cluster=request.cluster,
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


def _more_devices(request: PlanRequest) -> Iterator[Change]:
    cluster = resolve_cluster(request.cluster)
    if resolve_device(cluster.device).kind == "cpu":
        return
    for doubling in range(1, MAX_DOUBLINGS + 1):
        count = cluster.devices_per_node * 2**doubling
        nodes, inside = cluster.nodes, count
        if count > 8:  # noqa: PLR2004 - servers hold up to eight devices: further ones are nodes
            inside = max(8, cluster.devices_per_node)
            nodes = cluster.nodes * max(1, count // inside)
        larger = cluster.model_copy(update={"devices_per_node": inside, "nodes": nodes})
        title = f"{larger.num_devices} devices instead of {cluster.num_devices}"
        yield title, {"cluster": larger}


def _larger_device(request: PlanRequest) -> Iterator[Change]:
    current = resolve_device(resolve_cluster(request.cluster).device)
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
        if device.memory_bytes in sizes or len(sizes) == MAX_DEVICES_TRIED:
            continue
        sizes.add(device.memory_bytes)
        changed = request.cluster.model_copy(update={"device": device.id, "instance": None})
        yield f"{device.name} instead of {current.name or current.id}", {"cluster": changed}
