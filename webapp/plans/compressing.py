"""Convert a compression to a job spec, and state its gains and losses."""

from typing import Any

from planner.specs.estimate import Estimate
from runners.jobspec import CompressSpec, ModelRef
from runners.jobspec.compress import CompressMethod, GgufType
from webapp.core.units import TIMES, memory, number, signed_percent
from webapp.plans.errors import DraftProblem
from webapp.plans.words import METHOD_WORDS

Draft = dict[str, Any]
USUAL_BITS = 4
PATTERN = "2:4"
USUAL_SPARSITY = "50"  # per cent
# The planner's method -> the job's method, if it can run.
COMPRESS_METHODS: dict[str, CompressMethod] = {
    "int8_weight_only": "int8",
    "int8_dynamic": "int8_dynamic",
    "fp8": "fp8",
    "gguf": "gguf",
    "int4_weight_only": "nf4",
    "nf4": "nf4",
    "gptq": "gptq",
    "norm_tweaking": "norm_tweaking",
    "quantease": "quantease",
    "awq": "awq",
    "finequant": "finequant",
    "fptq": "fptq",
    "sparsegpt": "sparsegpt",
    "llm_pruner": "llm_pruner",
    "sheared_llama": "sheared_llama",
    "qmoe": "qmoe",
}
# Methods with a configurable number of bits.
CODED_METHODS = ("gptq", "norm_tweaking", "quantease", "awq", "finequant", "fptq")
GGUF_TYPES: dict[int, GgufType] = {4: "Q4_K_M", 8: "Q8_0"}
GROUPED_METHODS = ("int4_weight_only", "nf4", *CODED_METHODS)  # weights share a scale
STRUCTURAL_METHODS = ("llm_pruner", "sheared_llama")
RECOVERED_METHODS = ("llm_pruner",)  # recovery training with a configurable number of steps
PRUNING_METHODS = ("sparsegpt", *STRUCTURAL_METHODS)


def compress_spec(draft: Draft, model: ModelRef) -> CompressSpec:
    """Return the job spec of a drafted compression.

    Raises:
        DraftProblem: no job runs the method, or it does not support the options.
    """
    values = draft["workload"]["compress"]
    method = COMPRESS_METHODS.get(values["method"])
    if method is None:
        runs = ", ".join(METHOD_WORDS[name] for name in COMPRESS_METHODS)
        raise DraftProblem(
            f"{METHOD_WORDS[values['method']]} is planned but does not run yet. Choose one that "
            f"does: {runs}.",
            "method",
        )
    fields: dict[str, Any] = {"method": method, "group_size": values["group_size"]}
    if values["method"] in CODED_METHODS:
        fields["bits"] = bits_of(values)
    if values["method"] in RECOVERED_METHODS:
        fields["recovery_steps"] = int(values.get("recovery_steps") or 0)
    if method == "gguf":
        fields["gguf_type"] = _gguf_type(bits_of(values))
    return CompressSpec.model_validate({"model": model, **fields, **_sparsity(values)})


def _gguf_type(bits: int) -> GgufType:
    if bits not in GGUF_TYPES:
        raise DraftProblem(
            f"GGUF files are written here with 4 bits (Q4_K_M) or 8 (Q8_0), not {bits}. Choose "
            "one of them.",
            "bits",
        )
    return GGUF_TYPES[bits]


def bits_of(values: dict[str, Any]) -> int:
    """Return the bits of a code; older drafts have no value."""
    return int(values.get("bits") or USUAL_BITS)


def _sparsity(values: dict[str, Any]) -> dict[str, Any]:
    """Return the sparsity of a pruning: a share, or a pattern."""
    chosen = values.get("sparsity") or USUAL_SPARSITY
    if chosen != PATTERN:
        return {"sparsity": int(chosen) / 100}
    if values["method"] in STRUCTURAL_METHODS:
        raise DraftProblem(
            f"{METHOD_WORDS[values['method']]} removes whole heads and channels, not two of each "
            "four weights. Choose a share.",
            "sparsity",
        )
    return {"pattern": PATTERN}


# Gains and losses of a compression as text: size, quality, speed.
#
# The same text is used for predicted values of plans and measured values of jobs.


NEARLY = 0.02  # smaller changes of speed or size count as none
MANY_TIMES = 1.5  # from here a change of speed is shown as a factor, below as per cent
SAME_QUALITY = 0.0005  # smaller changes of perplexity count as none
SAME_PERPLEXITY = "same perplexity"


def size_words(ratio: float) -> str:
    """Return a size ratio (after ÷ before) as text."""
    if abs(ratio - 1) < NEARLY:
        return "the same size"
    return f"{_whole_percent(ratio)} {'smaller' if ratio < 1 else 'larger'}"


def speed_words(ratio: float) -> str:
    """Return a speed ratio (after ÷ before) as text."""
    if not ratio or abs(ratio - 1) < NEARLY:
        return "as fast"
    side, factor = ("faster", ratio) if ratio > 1 else ("slower", 1 / ratio)
    if factor < MANY_TIMES:
        return f"{_whole_percent(ratio)} {side}"
    return f"{number(factor, 2)}{TIMES} {side}"


def perplexity_words(ratio: float) -> str:
    """Return a perplexity ratio (after ÷ before) as text."""
    if abs(ratio - 1) < SAME_QUALITY:
        return SAME_PERPLEXITY
    change = signed_percent(abs(ratio - 1) * 100).removeprefix("+")
    return f"{change} {'higher' if ratio > 1 else 'lower'} perplexity"


def planned_gains(best: Estimate, speed: str = "") -> str:
    """Return the gains of a planned compression; empty for other goals."""
    usage = best.memory
    if not usage.checkpoint_bytes or not usage.disk_bytes:
        return ""
    original = usage.disk_bytes - usage.checkpoint_bytes
    sizes = f"{memory(usage.checkpoint_bytes)} instead of {memory(original)}"
    parts = [f"{size_words(usage.checkpoint_bytes / original)} ({sizes})"]
    if best.quality and best.quality.perplexity_ratio:
        words = perplexity_words(best.quality.perplexity_ratio[1])
        parts.append(words if words == SAME_PERPLEXITY else f"about {words}")
    return ", ".join([*parts, *([speed] if speed else [])])


def _whole_percent(ratio: float) -> str:
    return f"{round(abs(ratio - 1) * 100)} %"
