"""A plan as text: figures with interval and origin, alternatives, why the others lost."""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from planner.catalog.devices import find_device, find_instance
from planner.specs.cluster import ClusterSpec, DeviceSpec
from planner.specs.estimate import (
    APPLICABILITY,
    Estimate,
    PlanAnswer,
    PlannedStrategy,
    PlanRequest,
    Rejection,
)
from planner.specs.on_policy import GENERATED_BY
from planner.specs.workload import (
    AWAY_TITLES,
    CompressWorkload,
    GenerateWorkload,
    OffloadSpec,
    ServeWorkload,
    Strategy,
    TrainWorkload,
)
from runners.cli.errors import CliError, ExitCode
from runners.cli.output import (
    between,
    binary_size,
    bullets,
    capitalised,
    counted,
    number,
    percent,
    seconds,
    show,
    table,
    tokens,
    usd,
)

if TYPE_CHECKING:
    from rich.table import Table

# The figures of each goal: the field of Performance, and its label. Its unit is in its name.


FIGURES = {
    "serve": (
        ("tokens_per_second", "Output tokens/s"),
        ("requests_per_second", "Requests/s"),
        ("ttft_seconds", "TTFT"),
        ("ttft_p95_seconds", "TTFT p95"),
        ("tpot_seconds", "TPOT"),
        ("tpot_p95_seconds", "TPOT p95"),
        ("latency_seconds", "Latency"),
        ("max_concurrency", "Max. concurrency"),
    ),
    "generate": (
        ("tokens_per_second", "Output tokens/s"),
        ("latency_seconds", "Time of the batch"),
        ("ttft_seconds", "TTFT"),
        ("tpot_seconds", "TPOT"),
    ),
    "train": (
        ("tokens_per_second", "Tokens/s"),
        ("step_seconds", "Time of a step"),
        ("duration_seconds", "Time of the run"),
        ("trained_tokens", "Trained tokens"),
        ("rollout_idle_ratio", "Generating devices wait"),
        ("trainer_idle_ratio", "Training devices wait"),
        ("mfu", "MFU"),
    ),
    "compress": (("duration_seconds", "Time"),),
}
# Of a long training: what failures cost it.
OF_FAILURES = (
    ("mean_time_between_failures_seconds", "Time between failures"),
    ("checkpoint_interval_seconds", "Checkpoint every"),
    ("goodput_ratio", "Goodput"),
    ("wall_seconds", "Time with failures"),
)
# Figures of the comparison: the first of them that the plans have.
COMPARED = {
    "serve": ("tokens_per_second", "ttft_p95_seconds", "ttft_seconds", "tpot_seconds"),
    "generate": ("tokens_per_second", "latency_seconds"),
    "train": ("tokens_per_second", "step_seconds", "duration_seconds"),
    "compress": ("duration_seconds",),
}
MOST_COMPARED = 3
FORMS: dict[str, Callable[[float], str]] = {  # by the end of a figure's name
    "_bytes": binary_size,
    "_seconds": seconds,
    "_usd": usd,
    "_usd_per_million_tokens": usd,
    "_joules_per_token": lambda value: f"{number(value)} J",
    "_ratio": percent,
    "mfu": percent,
    "trained_tokens": tokens,
}
BOUND_WORDS = {
    "compute": "arithmetic",
    "memory_bandwidth": "memory bandwidth",
    "communication": "communication",
    "overhead": "the engine's own overhead",
    "memory": "memory size",
}
OF_FIT = frozenset({APPLICABILITY, "memory"})  # limits that a request without targets has
CONSTRAINT_WORDS = {APPLICABILITY: "Does not apply", "memory": "Memory"}
SHOWN_PER_GROUP = 3
PERCENTILE = re.compile(r"(\w+)_p\d+_seconds")
SIZES = (
    ("tensor_parallel_size", "TP"),
    ("pipeline_parallel_size", "PP"),
    ("data_parallel_size", "DP"),
    ("expert_parallel_size", "EP"),
    ("context_parallel_size", "CP"),
    ("attention_data_parallel_size", "attention DP"),
)


def print_plan(answer: PlanAnswer, assumed: Sequence[str] = ()) -> None:
    """Print the best plan, the alternatives, why others lost, and the assumptions."""
    _print_head(answer)
    if answer.plans:
        best, kind = answer.plans[0], _kind_of(answer)
        on = f" on {cluster_words(best.cluster)}" if _has_choice(answer) else ""
        show(f"Best: {strategy_words(best)}{on}", style="bold")
        columns = ("Figure", "Predicted", "80 % interval", "Origin")
        show(table(columns, list(figure_rows(best, kind)), fixed=range(4)))
        show(f"Memory: {memory_words(best)}")
        if doubt := memory_doubt(best):
            show(doubt)
        bound = BOUND_WORDS.get(best.bound_by, best.bound_by)
        for reason in best.reasons:
            if reason.startswith(GENERATED_BY):
                show(capitalised(reason))
        show(f"Limited by: {bound}. Class of the modelled figures: {best.error_class}\n")
    if len(answer.plans) > 1:
        show(comparison(answer))
    print_suggestions(answer)
    _print_reasons(answer, most=SHOWN_PER_GROUP)
    if assumptions := list(_assumptions(answer, assumed)):
        show("\nAssumptions", style="bold")
        show(bullets(assumptions))


def print_ledger(answer: PlanAnswer) -> None:
    """Print every reason: of the ranked plans, then of each rejected strategy family."""
    _print_head(answer)
    for position, plan in enumerate(answer.plans, 1):
        show(f"{position}. {strategy_words(plan)}", style="bold")
        show(bullets(plan.reasons))
    print_suggestions(answer)
    _print_reasons(answer, most=None)
    if sources := list(_sources(answer)):
        show("\nSources", style="bold")
        show(bullets(sources))


def _print_head(answer: PlanAnswer) -> None:
    if answer.request is not None:
        show(question_line(answer.request))
    searched = counted(answer.searched.strategies, "strategy", "strategies")
    show(f"Plan {answer.id}: {searched} in {seconds(answer.searched.seconds)}\n")


def question_line(request: PlanRequest) -> str:
    """Return a request in one line: the work, the model, the hardware."""
    by_config = request.repository or "a model by its config"
    model = request.model if isinstance(request.model, str) else by_config
    clusters = request.hardware_options or (request.cluster,)
    hardware = " or ".join(cluster_words(each) for each in clusters)
    return f"{workload_words(request)}: {model} on {hardware}"


def workload_words(request: PlanRequest) -> str:
    """Return the work of a request in words."""
    match request.workload:
        case ServeWorkload() as work:
            load = "at the load that memory allows"
            if work.concurrency:
                load = counted(work.concurrency, "concurrent request")
            elif work.request_rate_per_second:
                load = f"{number(work.request_rate_per_second)} requests/s"
            elif work.burst_requests:
                load = f"a burst of {work.burst_requests:,} requests"
            return f"Serve {work.input_tokens:,} + {work.output_tokens:,} tokens, {load}"
        case GenerateWorkload() as work:
            lengths = f"{work.input_tokens:,} + {work.output_tokens:,} tokens"
            return f"Generate {work.batch_size:,} answers of {lengths}"
        case TrainWorkload() as work:
            length = f" for {tokens(work.tokens)} tokens" if work.tokens else ""
            rows = "pairs of 2 x" if work.sequences_per_record > 1 else "sequences of"
            batch = f"{work.global_batch_size:,} {rows} {work.sequence_length:,} tokens"
            how = f"{work.objective}, {work.method}" if work.compares else work.method
            return f"Train ({how}), {batch} a step{length}"
        case CompressWorkload() as work:
            bits = f" to {work.bits} bits" if work.bits else ""
            return f"Compress ({work.method}){bits}"


def cluster_words(cluster: ClusterSpec) -> str:
    """Return a cluster in words: nodes, devices per node, device."""
    if cluster.instance:
        return f"{cluster.nodes} x {cluster.instance}"
    device = device_of(cluster)
    name = (device.name or device.id) if device else str(cluster.device)
    nodes = f"{cluster.nodes} nodes of " if cluster.nodes > 1 else ""
    others = sum(group.num_devices for group in cluster.other_nodes)
    more = f" and {others} other devices" if others else ""
    return f"{nodes}{cluster.devices_per_node} x {name}{more}"


def device_of(cluster: ClusterSpec) -> DeviceSpec | None:
    """Return the device of a cluster with its figures, or None if the catalog lacks it."""
    if isinstance(cluster.device, DeviceSpec):
        return cluster.device
    return find_device(cluster.device)


class Price(NamedTuple):
    """The price of a cluster in US dollars per hour, and where it is from."""

    usd_per_hour: float
    source: str


def price_of(cluster: ClusterSpec) -> Price | None:
    """Return the price of a cluster: of its cloud offer, or of its devices; None if unknown."""
    if cluster.instance and (offer := find_instance(cluster.instance)) is not None:
        return Price(offer.price_usd_per_hour * cluster.nodes, offer.price_source)
    device = device_of(cluster)
    if device is None or not device.price_usd_per_hour or cluster.other_nodes:
        return None
    hourly = device.price_usd_per_hour * cluster.num_devices
    return Price(hourly, device.price_source or "given in the request")


def strategy_words(plan: Estimate) -> str:
    """Return a strategy in words: formats, layout, batches, offload, engine."""
    return " · ".join((*_format_words(plan.strategy), *_layout_words(plan.strategy), plan.engine))


def _format_words(strategy: Strategy) -> Iterator[str]:
    yield f"{strategy.quantization or strategy.weight_dtype} weights"
    if strategy.activation_dtype and strategy.activation_dtype not in {
        strategy.weight_dtype,
        "bf16",
        "fp16",
    }:
        yield f"{strategy.activation_dtype} activations"
    if strategy.kv_cache_dtype and strategy.kv_cache_dtype not in {"bf16", "fp16"}:
        yield f"{strategy.kv_cache_dtype} KV cache"


def _layout_words(strategy: Strategy) -> Iterator[str]:
    sizes = ((name, getattr(strategy, field)) for field, name in SIZES)
    yield from (f"{name} {size}" for name, size in sizes if size and size > 1)
    if strategy.zero_stage:
        yield f"ZeRO {strategy.zero_stage}"
    if strategy.micro_batch_size:
        steps = strategy.gradient_accumulation_steps or 1
        yield f"micro-batch {strategy.micro_batch_size}" + (f" x {steps}" if steps > 1 else "")
    if strategy.activation_recomputation in {"selective", "full"}:
        yield f"{strategy.activation_recomputation} recomputation"
    if strategy.rollout:
        yield strategy.rollout.words
    if strategy.speculative:
        yield f"speculative decoding with {strategy.speculative.draft_model}"
    if strategy.offload:
        yield from _offload_words(strategy.offload)


def _offload_words(offload: OffloadSpec) -> Iterator[str]:
    """Yield what is off the devices, each with its share if that is a part."""
    if offload.optimizer != "none":
        yield f"optimiser states on {offload.optimizer}"
    for name, title in AWAY_TITLES.items():
        share = getattr(offload, name)
        if share:
            yield f"{share:.0%} of the {title}" if share < 1 else title


class FigureRow(NamedTuple):
    """One row of the figures: label, value, 80 % interval, origin of the value."""

    label: str
    value: str
    interval: str
    origin: str


def figure_rows(plan: PlannedStrategy, kind: str) -> Iterator[FigureRow]:
    """Yield the figures of a kind of work that apply, then memory, quality, energy, prices."""
    modelled = "modelled"
    for name, label in FIGURES[kind]:
        value = getattr(plan.performance, name)
        if value is not None:
            yield FigureRow(label, shown(name, value), _interval(plan, name), modelled)
    if (found := plan.reliability) is not None:
        steps = counted(found.checkpoint_interval_steps, "step")
        bounds = {
            "checkpoint_interval_seconds": steps,
            "goodput_ratio": between(*(percent(end) for end in found.goodput_interval)),
            "wall_seconds": between(*(seconds(end) for end in found.wall_interval)),
        }
        for name, label in OF_FAILURES:
            value = shown(name, getattr(found, name))
            yield FigureRow(label, value, bounds.get(name, ""), modelled)
    memory = plan.memory
    peak = between(
        binary_size(memory.per_device_peak_bytes), binary_size(memory.capacity_bytes), " of "
    )
    yield FigureRow("Memory per device", peak, _interval(plan, "per_device_peak_bytes"), modelled)
    if plan.quality is not None and plan.quality.loss_ratio:
        kind, losses = plan.quality.losses
        low, middle, high = (percent(loss) for loss in losses)
        yield FigureRow(f"Loss of {kind}", middle, between(low, high), "published")
    if (hourly := price_of(plan.cluster)) is not None:
        yield FigureRow("Price", f"{usd(hourly.usd_per_hour)} an hour", "", "published")
    for name, label in (
        ("cost_usd_per_million_tokens", "Cost per 1M tokens"),
        ("run_cost_usd", "Cost of the run"),
        ("energy_joules_per_token", "Energy per token"),
    ):
        value = getattr(plan, name)
        if value is not None:
            yield FigureRow(label, shown(name, value), _interval(plan, name), modelled)


def _kind_of(answer: PlanAnswer) -> str:
    """Return the kind of work of an answer, serving if it does not hold its request."""
    return answer.request.workload.kind if answer.request else "serve"


def shown(name: str, value: float) -> str:
    """Return a figure with the unit that its name carries."""
    return next((form for end, form in FORMS.items() if name.endswith(end)), number)(value)


def _interval(plan: Estimate, name: str) -> str:
    """Return a figure's 80 % interval; a percentile's is its mean's, scaled, without its own."""
    bounds, ratio = plan.interval.get(name), 1.0
    if bounds is None and (match := PERCENTILE.fullmatch(name)):
        mean, value = f"{match[1]}_seconds", getattr(plan.performance, name)
        bounds = plan.interval.get(mean)
        ratio = value / (getattr(plan.performance, mean) or value)
    if bounds is None:
        return ""
    return between(*(shown(name, ratio * bound) for bound in bounds))


def memory_words(plan: Estimate) -> str:
    """Return what the memory of the fullest device holds, the largest part first."""
    parts = sorted(plan.memory.breakdown_bytes.items(), key=lambda part: -part[1])
    words = [f"{name.replace('_', ' ')} {binary_size(size)}" for name, size in parts if size > 0]
    if plan.memory.host_bytes:
        # A trainer that moves nothing there holds a copy of each checkpoint while it is written.
        copies = plan.performance.step_seconds and not plan.strategy.offload_places
        held = ", for the copy of a checkpoint" if copies else ""
        words.append(f"and {binary_size(plan.memory.host_bytes)} in host memory{held}")
    return ", ".join(words)


def memory_doubt(plan: Estimate) -> str:
    """Return what to expect if the interval of the peak ends beyond a device's memory, or ""."""
    peak, capacity = plan.memory.per_device_peak_bytes, plan.memory.capacity_bytes
    _, high = plan.interval.get("per_device_peak_bytes", (peak, peak))
    if high <= capacity:
        return ""
    return (
        f"It may not fit: the interval of its memory ends at {binary_size(int(high))}, beyond the "
        f"{binary_size(capacity)} of a device"
    )


def comparison(answer: PlanAnswer) -> "Table":
    """Return the table of the ranked plans."""
    kind = _kind_of(answer)
    labels = dict(FIGURES[kind])
    names = [
        name
        for name in COMPARED[kind]
        if any(getattr(plan.performance, name) is not None for plan in answer.plans)
    ][:MOST_COMPARED]
    rows = []
    has_choice = _has_choice(answer)
    for position, plan in enumerate(answer.plans, 1):
        values = (getattr(plan.performance, name) for name in names)
        cells = [
            "" if value is None else shown(name, value)
            for name, value in zip(names, values, strict=True)
        ]
        memory = binary_size(plan.memory.per_device_peak_bytes)
        on = [cluster_words(plan.cluster)] if has_choice else []
        rows.append((str(position), strategy_words(plan), *on, *cells, memory))
    before = ("#", "Strategy", *(["Hardware"] if has_choice else []))
    columns = (*before, *(labels[name] for name in names), "Memory")
    return table(columns, rows, right=range(len(before), len(columns)))


def _has_choice(answer: PlanAnswer) -> bool:
    """Return whether the request has several clusters to choose among."""
    return answer.request is not None and len(answer.request.hardware_options) > 1


# Why others lost.


def print_suggestions(answer: PlanAnswer) -> None:
    """Print that an answer has no plan, and the changes that make its request feasible."""
    if answer.plans:
        return
    show(f"{capitalised(failure_words(answer))}.", style="bold")
    purposes = {"fit": "to fit", "target": "to meet the targets"}
    if answer.suggestions:
        lines = [f"{purposes[each.purpose]}: {each.title}" for each in answer.suggestions]
        show(bullets(lines))


def failure_words(answer: PlanAnswer) -> str:
    """Return whether nothing fits, or what fits misses the targets."""
    fits = any(each.constraint not in OF_FIT for each in answer.rejected.values())
    return "no plan meets the targets" if fits else "nothing fits this request"


def _print_reasons(answer: PlanAnswer, *, most: int | None) -> None:
    """Print the rejected families by the limit that they miss, the closest misses first."""
    groups: dict[str, list[Rejection]] = {}
    for rejection in answer.rejected.values():
        groups.setdefault(rejection.constraint, []).append(rejection)
    if groups:
        show("\nWhy others lost", style="bold")
    order = sorted(groups, key=lambda name: name == APPLICABILITY)
    for constraint in order:
        rejections = groups[constraint]
        strategies = sum(each.strategies for each in rejections)
        what = counted(len(rejections), "technique or format", "techniques and formats")
        if constraint != APPLICABILITY:
            families = counted(len(rejections), "family", "families")
            what = f"{counted(strategies, 'strategy', 'strategies')} of {families}"
        show(f"{CONSTRAINT_WORDS.get(constraint, constraint)}: {what}")
        lines = [f"{each.family}: {each.reason}" for each in rejections[:most]]
        if left := len(rejections) - len(lines):
            lines.append(f"and {left} more: slipway explain {answer.id}")
        show(bullets(lines))


def closest_miss(answer: PlanAnswer) -> str:
    """Return the rejected family that is closest to its limit with its reason, or ""."""
    rejections = list(answer.rejected.values())
    numbered = [each for each in rejections if each.required is not None and each.limit]
    targets = [each for each in numbered if each.constraint not in OF_FIT]
    closest = min(
        targets or numbered,
        key=lambda each: abs((each.required or 0) / (each.limit or 1) - 1),
        default=next(iter(rejections), None),
    )
    return f"{closest.family}: {closest.reason}" if closest else ""


def nothing_fits(answer: PlanAnswer) -> CliError:
    """Return the error of an answer without a plan, with the closest miss and a way out."""
    missed, change = closest_miss(answer), next(iter(answer.suggestions), None)
    sentence = failure_words(answer) + (f": {missed}" if missed else "")
    way_out = f"; it would with: {change.title}" if change else ""
    return CliError(f"{sentence}{way_out}", code="nothing_fits", exit_code=ExitCode.NOTHING_FITS)


def _assumptions(answer: PlanAnswer, assumed: Sequence[str]) -> Iterator[str]:
    """Yield the defaults that were taken, the origin of the device's figures, warnings."""
    if assumed:
        yield f"not given: {'; '.join(assumed)}"
    if not answer.plans:
        return
    best = answer.plans[0]
    device = device_of(best.cluster)
    if device is not None:
        name = device.name or device.id
        sources = f"slipway explain {answer.id} names the sources"
        yield f"the rates of {name} are {device.provenance}: {sources}"
    if answer.request is not None:
        yield from _completion_words(answer.request)
    yield from best.warnings
    yield from best.advice


def _completion_words(request: PlanRequest) -> Iterator[str]:
    """Yield what a training counts of completions that its model generates itself."""
    work = request.workload
    if not isinstance(work, TrainWorkload) or not work.generates:
        return
    for kind, longest, mean in (
        ("completions", work.max_completion_length, work.mean_completion_length),
        ("prompts", work.longest_prompt, work.mean_prompt_length),
    ):
        how = (
            f"{mean:,} in the mean" if mean else f"all have the longest (mean_{kind[:-1]}_length)"
        )
        yield f"{kind} of up to {longest:,} tokens: {how}"
    if not work.is_distilled:
        yield f"{work.num_generations} completions of each prompt (num_generations)"


def _sources(answer: PlanAnswer) -> Iterator[str]:
    """Yield the sources of rates, prices, quality and factors, each once."""
    found: list[str] = []
    for plan in answer.plans:
        device, price = device_of(plan.cluster), price_of(plan.cluster)
        if device is not None:
            source = device.source or "given in the request"
            found.append(f"rates of {device.name or device.id}: {source}")
        if price is not None:
            found.append(f"price of {cluster_words(plan.cluster)}: {price.source}")
        found += [f"quality: {each}" for each in (plan.quality.evidence if plan.quality else ())]
    yield from dict.fromkeys([*found, f"factors: {answer.calibration}"])
