"""A serving plan as the command line of llama.cpp's server, with its GGUF file."""

import math

from planner.cost.parameters import count_parameters
from planner.exports.export import (
    ExportCase,
    Format,
    Notes,
    servers_notes,
    servers_text,
)
from planner.exports.vllm import serving_notes

# The GGUF type of each weight format, and whether it is exact or only the closest one.
GGUF = {
    "fp32": ("F32", True),
    "bf16": ("BF16", True),
    "fp16": ("F16", True),
    "int8": ("Q8_0", True),
    "fp8": ("Q8_0", False),
    "int4": ("Q4_K_M", False),
    "nf4": ("IQ4_NL", False),
    "nvfp4": ("IQ4_NL", False),
    "mxfp4": ("MXFP4_MOE", True),
    "ternary": ("TQ2_0", True),
}
CACHE_TYPES = {"fp32": "f32", "bf16": "bf16", "fp16": "f16", "fp8": "q8_0", "int8": "q8_0"}
CACHE_TYPES |= {"int4": "q4_0", "nf4": "iq4_nl"}
MOST_SLOTS = (
    256  # llama.cpp b11434, LLAMA_MAX_SEQ in src/llama-cparams.h: larger values are rejected
)
# Of a layer: shares of the weights are written with three decimals.
SHARE_SLACK = 0.06
SINGLE_WIDTH = frozenset({"f32", "bf16", "f16"})


def gguf_type(case: ExportCase) -> str:
    """Return the type of the GGUF file, as ``llama-quantize`` names it."""
    if case.gguf_type:
        return case.gguf_type
    return GGUF.get(case.strategy.weight_dtype or "bf16", ("BF16", False))[0]


def gguf_file(case: ExportCase) -> str:
    """Return the name of the GGUF file, in the usual form of published files."""
    return f"{case.model.rstrip('/').rsplit('/', 1)[-1]}-{gguf_type(case)}.gguf"


def llama_cpp_arguments(case: ExportCase) -> list[str]:
    """Return ``llama-server`` with only the flags that the plan decides."""
    command = ["llama-server", "--model", gguf_file(case)]
    if case.context_tokens and case.typical_tokens:
        slots = _slots(case)
        command += ["--ctx-size", str(_pool_tokens(case)), "--parallel", str(slots)]
        command += ["--kv-unified"] if slots > 1 else []
    if case.strategy.max_batch_tokens:
        command += ["--batch-size", str(case.strategy.max_batch_tokens)]
    return [*command, *_placement(case), *_cache(case), *_draft(case)]


def _slots(case: ExportCase) -> int:
    held = case.held_per_replica or MOST_SLOTS
    return min(case.sequences_per_replica or 1, held, MOST_SLOTS)


def _pool_tokens(case: ExportCase) -> int:
    """Return the tokens of the cache pool of all slots: a request may use any part of it."""
    return max(case.context_tokens or 0, (case.typical_tokens or 0) * _slots(case))


def _placement(case: ExportCase) -> list[str]:
    """Return where the layers lie: whole, in stages, or cut by tensor ranks.

    Source: llama.cpp docs/multi-gpu.md (``row`` is deprecated for ``tensor``, which needs flash
    attention and no ``--fit``).
    """
    if case.device.kind == "cpu":
        return ["--n-gpu-layers", "0"]
    # The output layer counts as one more layer.
    layers, (experts, rest) = case.shape.num_hidden_layers + 1, _offloaded(case)
    layers_on_device = int(layers * (1 - rest))
    flags = ["--n-gpu-layers", "all" if layers_on_device == layers else str(layers_on_device)]
    flags += ["--n-cpu-moe", str(experts)] if experts else []
    if case.size("tensor") > 1:
        flags += ["--split-mode", "tensor", "--fit", "off"]
    elif case.size("pipeline") > 1:
        flags += ["--split-mode", "layer"]
    return flags


def _offloaded(case: ExportCase) -> tuple[int, float]:
    """Return the first layers whose experts are in host memory, and the share of all else there.

    Experts leave the device first, those of as few layers as hold the plan's share of the weights.

    Source: llama.cpp common/arg.cpp (--n-cpu-moe counts all layers from the first, those without
    experts too).
    """
    shape, share = case.shape, case.offload.weights_cpu
    if not share or not shape.is_moe:
        return 0, share
    counts = count_parameters(shape)
    of_experts = counts.experts / counts.total
    moved = min(1.0, share / of_experts) * shape.num_moe_layers
    whole = min(shape.num_moe_layers, math.ceil(moved - SHARE_SLACK))
    rest = max(0.0, share - of_experts) / (1 - of_experts)
    return shape.num_dense_layers + whole, rest if rest > SHARE_SLACK else 0.0


# Types that llama.cpp's convert_hf_to_gguf.py writes with --outtype.
CONVERTED = frozenset({"F32", "F16", "BF16", "Q8_0"})


def _cache(case: ExportCase) -> list[str]:
    stored = CACHE_TYPES.get(case.strategy.kv_cache_dtype or "", "f16")
    flags = ["--cache-type-k", stored, "--cache-type-v", stored] if stored != "f16" else []
    needs_flash = stored not in SINGLE_WIDTH or case.size("tensor") > 1
    if case.strategy.attention == "flash" or needs_flash:
        flags += ["--flash-attn", "on"]
    return flags


def _draft(case: ExportCase) -> list[str]:
    draft = case.strategy.speculative
    if not draft:
        return []
    name = draft.draft_model.rsplit("/", 1)[-1]
    flags = ["--spec-type", "draft-simple", "--spec-draft-model", f"{name}.gguf"]
    return [*flags, "--spec-draft-n-max", str(draft.tokens)]


def _conversion(model: str, stored: str) -> str:
    """Return the commands that make a file of a type; the converter writes some types itself."""
    is_repository = "/" in model and not model.startswith(("/", "."))
    remote = "--remote " if is_repository else ""
    converter = f"convert_hf_to_gguf.py {remote}{model}"
    if stored in CONVERTED:
        return f"{converter} --outtype {stored.lower()}"
    return f"{converter}, then llama-quantize to {stored}"


def llama_cpp_notes(case: ExportCase) -> Notes:
    """Return notes on the file's source, and on settings that the command leaves to the user."""
    longest = min(_pool_tokens(case), case.shape.max_position_embeddings)
    notes = list(serving_notes(case, "llama_cpp", "llama.cpp", accepted_tokens=longest))
    dtype, stored = case.strategy.weight_dtype or "bf16", gguf_type(case)
    notes.append(f"the file: {_conversion(case.model, stored)}")
    if not (case.gguf_type or GGUF.get(dtype, ("", False))[1]):
        notes.append(f"GGUF has no {dtype}: {stored} is the closest, and a little larger")
    if case.size("tensor") > 1:
        notes.append(
            "--split-mode tensor is experimental, and fast with several NVIDIA GPUs and NCCL: if "
            "llama.cpp refuses the model, use --split-mode layer"
        )
        if CACHE_TYPES.get(case.strategy.kv_cache_dtype or "", "f16") not in SINGLE_WIDTH:
            notes.append(
                "a quantised cache with --split-mode tensor needs llama.cpp of 2026-06 or later "
                "(pull request 23792)"
            )
    requests = case.sequences_per_replica or 1
    if requests > MOST_SLOTS:
        queued = f"{requests - MOST_SLOTS} wait"
        notes.append(
            f"llama.cpp answers {MOST_SLOTS} requests at once, the plan {requests}: {queued}"
        )
    notes += servers_notes(case, case.size("data"))
    if case.nodes > 1 and case.size("data") < case.nodes:
        notes.append("several nodes: start rpc-server on the others and add --rpc with them")
    return tuple(notes)


def llama_cpp_text(case: ExportCase) -> str:
    """Return the command, one option per line."""
    return servers_text(case, llama_cpp_arguments(case), case.size("data"))


LLAMA_CPP = Format("llama_cpp", "llama.cpp", "serve-llama-cpp.sh", llama_cpp_text, llama_cpp_notes)
