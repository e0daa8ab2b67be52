"""A plan in words: terms, reasons and errors."""

import math
from typing import NamedTuple

from planner.catalog.devices import get_device
from planner.specs.base import PlannerError
from planner.specs.estimate import EquationInput, Estimate, Term
from planner.specs.units import DAY, HOUR, MINUTE
from planner.specs.workload import PAIRED_OBJECTIVES, Strategy
from runners.plans.document import GOALS, HardwareChoice, ModelChoice
from runners.plans.fields import Part
from runners.plans.methods import COMPRESSIONS
from runners.plans.workloads import (
    CompressWork,
    FinetuneWork,
    GenerateWork,
    PretrainWork,
    ServeWork,
)
from webapp.core import display
from webapp.core.display import (
    MINUS,
    NBSP,
    THIN,
    TIMES,
    clock,
    counted,
    number,
    quantity,
    tokens,
    whole,
)
from webapp.modelhub.models import DEMO_NAME

# ---------------------------------------------------------------------------
# Explanation of an estimate: every term with its equation, inputs and source.
# ---------------------------------------------------------------------------


UNITS = {"B": "bytes", "s": "seconds", "B/s": "bytes_per_second", "FLOP/s": "flops_per_second"}
READABLE = 1e9  # larger values use an exponent
GROUP_WORDS = {
    "memory": "Memory",
    "prefill": "Prefill",
    "decode": "Decode step",
    "serving": "Concurrent requests",
    "train_step": "One training step",
    "step": "One training step",
    "compress": "Compression",
    "rollout": "Completions, and the step that learns from them",
    "quality": "Quality",
    "cost": "Cost",
    "energy": "Energy",
    "failures": "Failures and checkpoints",
}


class Line(NamedTuple):
    """One term as displayed."""

    name: str
    key: str
    equation: str
    value: str
    inputs: tuple[str, ...]
    provenance: str
    source: str


class Group(NamedTuple):
    """The terms of one group."""

    name: str
    lines: tuple[Line, ...]


def explain(estimate: Estimate) -> list[Group]:
    """Return the terms of an estimate by group, in order of computation."""
    groups: dict[str, list[Term]] = {}
    for term in estimate.terms:
        groups.setdefault(term.group, []).append(term)
    return [
        Group(GROUP_WORDS.get(name, name.replace("_", " ").capitalize()), tuple(map(_line, terms)))
        for name, terms in groups.items()
    ]


def _line(term: Term) -> Line:
    return Line(
        name=term.name,
        key=term.key,
        equation=term.equation,
        value=with_unit(term.value, term.unit),
        inputs=tuple(_input(term_input) for term_input in term.inputs),
        provenance=term.provenance,
        source=term.source,
    )


def _input(term_input: EquationInput) -> str:
    value = (
        term_input.value
        if isinstance(term_input.value, str)
        else with_unit(float(term_input.value), term_input.unit)
    )
    return f"{term_input.symbol} = {value} ({term_input.name.replace('_', ' ')})"


def with_unit(value: float, unit: str) -> str:
    """Return a value of an equation for display."""
    if unit in {"FLOP", "parameters"}:
        scaled = display.flop(value) if unit == "FLOP" else display.parameters(value)
        return str(scaled)
    if unit in UNITS:
        return str(quantity(value, UNITS[unit]))
    if float(value).is_integer() and abs(value) < READABLE:
        return f"{whole(value)} {unit}".strip()
    text = number(value, 4) if abs(value) < READABLE else f"{value:.3e}"
    digits, e, exponent = text.partition("e")
    text = (digits.rstrip("0").rstrip(".") if "." in digits else digits) + e + exponent
    return f"{text} {unit}".strip()


# The operators of each phase's time; their seconds add up to the phase's figure.


LEAST_SHARE = 0.005  # of a headline: smaller parts are combined
DIGITS = 3  # of a total
# Unit of a total, by its minimum in seconds.
SCALES = (
    (2 * DAY, DAY, "days"),
    (2 * HOUR, HOUR, "h"),
    (2 * MINUTE, MINUTE, "min"),
    (1.0, 1.0, "s"),
)
OTHERS = "Everything else"
# Phase -> label of its sum, its headline figure, label of the figure's remainder.
PHASES = {
    "prefill": ("First token, mean", "ttft_seconds", "Queueing and admission"),
    "decode": ("Each further token, mean", "tpot_seconds", "Prefill of other requests"),
    "train_step": (
        "One training step",
        "step_seconds",
        "Pipeline bubble and exposed communication",
    ),
    "compress": ("The compression", "duration_seconds", "Not attributed"),
}
# The phases of a step that learns from completions of its own, in their order.
TIMELINE = {
    "rollout": "Completions",
    "reward": "Rewards",
    "reward_model": "Reward model",
    "teacher": "Teacher",
    "swap": "Trainer to the host and back",
    "log_probs": "Log-probabilities",
    "update": "Updates",
    "weight_sync": "Weights to the generating engine",
}
OF_A_BATCH = {"prefill": "Prefill", "decode": "Each further token"}  # all at once: no mean
SPENT_TWICE = "Overlapped with the others"


class OperatorTime(NamedTuple):
    """The time of one operator in a phase."""

    name: str
    value: str
    share: str
    seconds: float


INKS = 5  # colours of a bar; the smallest parts share the last one


class BarPart(NamedTuple):
    """A part of a phase's bar: start and width in per cent, the number of its colour from 1."""

    time: OperatorTime
    start: float
    width: float
    ink: int


class Phase(NamedTuple):
    """One phase: its headline and the parts that add up to it."""

    name: str
    total: str
    seconds: float
    parts: tuple[OperatorTime, ...]

    @property
    def bar(self) -> list[BarPart]:
        """Return the parts as one stacked bar; a part that overlaps others takes no width."""
        drawn, start = [], 0.0
        whole_seconds = sum(max(0.0, each.seconds) for each in self.parts)
        for at, each in enumerate(self.parts):
            width = 100 * max(0.0, each.seconds) / whole_seconds
            drawn.append(BarPart(each, round(start, 2), round(width, 2), min(at + 1, INKS)))
            start += width
        return drawn


def phases_of(estimate: Estimate, *, is_batch: bool = False) -> list[Phase]:
    """Return the phases that an estimate contains."""
    if timeline := _timeline(estimate):
        return [timeline]
    names = OF_A_BATCH if is_batch else {}
    phases = (_phase(estimate, key, names.get(key, PHASES[key][0])) for key in PHASES)
    return [phase for phase in phases if phase is not None]


def _timeline(estimate: Estimate) -> Phase | None:
    """Return a step that learns from completions of its own, its phases in their order."""
    spent, total = estimate.time_breakdown_seconds, estimate.performance.step_seconds
    if not total or not TIMELINE.keys() & spent.keys():
        return None
    seconds = {title: sum(spent.get(name, {}).values()) for name, title in TIMELINE.items()}
    twice = total - sum(seconds.values())
    if abs(twice) > LEAST_SHARE * total:
        seconds[SPENT_TWICE] = twice
    parts = tuple(_part(name, each, total) for name, each in seconds.items() if each)
    return Phase(PHASES["train_step"][0], _in_unit_of_total(total, total), total, parts)


def _phase(estimate: Estimate, key: str, name: str) -> Phase | None:
    _, figure, rest_name = PHASES[key]
    by_class = estimate.time_breakdown_seconds.get(key)
    total = getattr(estimate.performance, figure)
    if not by_class or not total:
        return None
    seconds = _operators(estimate, key, by_class)
    rest = total - sum(seconds.values())
    if abs(rest) > LEAST_SHARE * total:
        seconds[rest_name if rest > 0 else SPENT_TWICE] = rest
    small = sum(each for each in seconds.values() if abs(each) < LEAST_SHARE * total)
    shown = {
        operator: each for operator, each in seconds.items() if abs(each) >= LEAST_SHARE * total
    }
    remainder = total - sum(shown.values()) if small else 0.0
    if remainder:
        shown[OTHERS] = remainder
    parts = sorted(shown.items(), key=lambda item: (item[0] == OTHERS, -item[1]))
    return Phase(
        name, _in_unit_of_total(total, total), total, tuple(_part(*each, total) for each in parts)
    )


def _operators(estimate: Estimate, key: str, by_class: dict[str, float]) -> dict[str, float]:
    """Return the seconds of each operator name.

    The terms of a class are per micro-batch: they are scaled to the total of the class. Classes
    fully overlapped by others take no time.
    """
    terms = [term for term in estimate.terms if term.group == key and term.unit == "s"]
    seconds: dict[str, float] = {}
    for kind, class_seconds in by_class.items():
        own = [term for term in terms if term.operator_class == kind and term.value > 0]
        term_seconds = sum(term.value for term in own)
        if not term_seconds and class_seconds:
            seconds[kind.replace("_", " ").capitalize()] = class_seconds
        for term in own:
            seconds[term.name] = (
                seconds.get(term.name, 0.0) + term.value / term_seconds * class_seconds
            )
    return seconds


def _part(name: str, seconds: float, total: float) -> OperatorTime:
    part = seconds / total
    percent = f"{whole(100 * part)} %" if abs(part) >= 1 / 100 else "< 1 %"
    return OperatorTime(name, _in_unit_of_total(seconds, total), percent, seconds)


def _in_unit_of_total(seconds: float, total: float) -> str:
    """Return a part in the unit and precision of its total, so that a column adds up."""
    size, unit = next(
        ((size, unit) for least, size, unit in SCALES if total >= least), (1 / 1000, "ms")
    )
    decimals = max(0, DIGITS - 1 - math.floor(math.log10(total / size)))
    value, least = seconds / size, 10.0**-decimals
    if abs(value) < least / 2:
        return f"< {least:g}{NBSP}{unit}"
    text = f"{value:,.{decimals}f}".replace("-", MINUS).replace(",", THIN)
    return f"{text}{NBSP}{unit}"


# ---------------------------------------------------------------------------
# Text for drafts and strategies: names, summaries, one line per strategy.
# ---------------------------------------------------------------------------


SLO_WORDS = {"chat": "chat", "code": "code", "none": "no target"}
DTYPE_WORDS = {
    "fp32": "FP32",
    "bf16": "BF16",
    "fp16": "FP16",
    "fp8": "FP8",
    "int8": "INT8",
    "int4": "INT4",
    "nf4": "NF4",
}
BOUND_WORDS = {
    "compute": "arithmetic",
    "memory_bandwidth": "memory bandwidth",
    "communication": "communication",
    "overhead": "the engine's own overhead",
    "memory": "memory size",
}
PARALLEL_NAMES = (
    ("tensor_parallel_size", "tensor parallel"),
    ("pipeline_parallel_size", "pipeline parallel"),
    ("data_parallel_size", "data parallel"),
    ("expert_parallel_size", "expert parallel"),
    ("context_parallel_size", "context parallel"),
)
OPTIMISER_WORDS: dict[str, tuple[str, ...]] = {
    "none": (),
    "cpu": ("optimiser in host memory",),
    "nvme": ("optimiser on disk",),
}


def dtype_words(dtype: str | None) -> str:
    """Return the display name of a dtype."""
    return DTYPE_WORDS.get(dtype or "", (dtype or "").upper())


def format_words(name: str) -> str:
    """Return the display name of a dtype or of the type of a packed file.

    >>> format_words("gguf:q6_k"), format_words("bf16")
    ('GGUF Q6_K', 'BF16')
    """
    return name.replace(":", " ").upper() if ":" in name else dtype_words(name)


def compression_words(values: CompressWork) -> str:
    """Return a compression's method with its output format."""
    method = COMPRESSIONS[values.method]
    if method.format == "fixed":
        return method.name
    if method.format == "kept":
        return f"{method.name}, weights in {dtype_words('bf16')}"
    return f"{method.name}, {values.bits}-bit weights in groups of {values.group_size}"


def strategy_words(strategy: Strategy) -> str:
    """Return a strategy in one line: its differences from one device with plain weights."""
    parts = [f"{weights_words(strategy)} weights"]
    parts += [
        f"{name} {TIMES} {getattr(strategy, field)}"
        for field, name in PARALLEL_NAMES
        if (getattr(strategy, field) or 1) > 1
    ]
    if strategy.kv_cache_dtype and strategy.kv_cache_dtype != strategy.activation_dtype:
        parts.append(f"{dtype_words(strategy.kv_cache_dtype)} KV cache")
    if strategy.zero_stage:
        parts.append(f"ZeRO-{strategy.zero_stage}")
    if (strategy.gradient_accumulation_steps or 1) > 1:
        parts.append(f"{strategy.gradient_accumulation_steps} accumulation steps")
    if strategy.activation_recomputation not in {None, "none"}:
        parts.append(f"{strategy.activation_recomputation} recomputation")
    if strategy.rollout:
        parts.append(strategy.rollout.words)
    return " · ".join(parts + _offload_words(strategy))


def weights_words(strategy: Strategy) -> str:
    """Return the format of a strategy's weights."""
    words, method = dtype_words(strategy.weight_dtype), strategy.quantization
    if method and ":" in method:
        return format_words(method)
    return f"{method.upper()} {words}" if method else words


def _offload_words(strategy: Strategy) -> list[str]:
    offload = strategy.offload
    if offload is None:
        return []
    shares = (
        (offload.weights_cpu, "weights in host memory"),
        (offload.weights_disk, "weights on disk"),
        (offload.kv_cpu, "KV cache in host memory"),
        (offload.kv_disk, "KV cache on disk"),
        (offload.activations_cpu, "activations in host memory"),
    )
    words = [f"{share:.0%} of {name}" for share, name in shares if share]
    return [*words, *OPTIMISER_WORDS[offload.optimizer]]


def model_words(chosen: ModelChoice, team_model_name: str = "") -> str:
    """Return the chosen model's short name."""
    if chosen.source == "demo":
        return DEMO_NAME
    if chosen.source == "team":
        return team_model_name or "a model of the team"
    if chosen.source == "catalog":
        return chosen.catalog_id.rsplit("/", 1)[-1].replace("-", " ")
    if chosen.source == "hub":
        return (chosen.repository or "repository").rsplit("/", 1)[-1]
    if chosen.source == "folder":
        return (chosen.path or "folder").rstrip("/").rsplit("/", 1)[-1]
    config = chosen.config or {}
    return str(config.get("_name_or_path") or config.get("model_type") or "pasted config")


def whole_model_words(chosen: ModelChoice, team_model_name: str = "") -> str:
    """Return the chosen model by its whole name, with the commit that is planned."""
    if chosen.source == "catalog":
        name = chosen.catalog_id
        own = chosen.repository
        words = f"{name}, weights of {own}" if own and own != name else name
    elif chosen.source == "hub":
        words = chosen.repository or "repository"
    else:
        return model_words(chosen, team_model_name)
    return f"{words}, commit {chosen.revision[:12]}" if chosen.revision else words


def hardware_words(hardware: HardwareChoice, host_name: str = "") -> str:
    """Return the hardware of a plan: a host's name, or a number of devices."""
    if host_name:
        return host_name
    count = hardware.devices_per_node * hardware.nodes
    name = device_words(hardware.device)
    return f"{count} {TIMES} {name}" if count > 1 else name


def device_words(device: str) -> str:
    """Return a catalog device's name without vendor prefixes."""
    try:
        name = get_device(device).name or device
    except PlannerError:
        return device
    return short_name(name)


def short_name(device_name: str) -> str:
    """Return a device's name without vendor prefixes."""
    return device_name.removeprefix("NVIDIA ").removeprefix("GeForce ")


def workload_words(values: Part) -> str:
    """Return the summary of the workload step, such as ``16 requests · 1,280 tokens each``."""
    if isinstance(values, ServeWork):
        each = values.input_tokens + values.output_tokens
        requests = counted(values.concurrency, "request")
        return f"{requests} · {whole(each)} tokens each"
    if isinstance(values, GenerateWork):
        return f"batch of {values.batch_size}"
    if isinstance(values, CompressWork):
        return COMPRESSIONS[values.method].name
    if not isinstance(values, PretrainWork):
        raise TypeError(values)
    end = values.time_budget_seconds
    length = clock(end) if end else str(tokens(values.tokens or 0))
    rows, row = values.global_batch_size, whole(values.sequence_length)
    if isinstance(values, FinetuneWork) and values.objective in PAIRED_OBJECTIVES:
        row = f"2 {TIMES} {row}"
    taught = ""
    if isinstance(values, FinetuneWork) and values.objective != "supervised":
        named = {"reward": "Reward model", "distillation": "Distillation"}
        taught = named.get(values.objective, values.objective.upper())
        teacher = values.teacher_model.strip().rpartition("/")[2]
        taught += (
            f" from {teacher} · " if values.objective == "distillation" and teacher else " · "
        )
    return f"{taught}{rows} {TIMES} {row} tokens · {length}"


def plan_title(goal: str, model: str, hardware: str) -> str:
    """Return a plan's derived title: goal, model, hardware."""
    return f"{GOALS[goal][0]} {model} on {hardware}"[:120]
