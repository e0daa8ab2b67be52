"""The compress job, and QMoE's codes."""

import math
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from runners.jobs.compress.compressed_store import format_of
from runners.jobs.compress.gguf import check_gguf, export_gguf
from runners.jobs.compress.layerwise import (
    CompressionResult,
    check_disk,
    check_folder,
    compress_folder,
    texts,
)
from runners.jobs.compress.quantization import inverse_factor
from runners.jobs.compress.shearing import check_shearable, prune_by_shearing
from runners.jobs.compress.whole_model import (
    check_structure,
    held_out_of,
    load_whole,
    prune_structure,
    quantize_with_library,
)
from runners.jobs.evaluation import (
    Assessment,
    Perplexity,
    Sampling,
    Workload,
    assess,
    evaluate,
    perplexity_ratio,
)
from runners.jobs.events import Stages
from runners.jobs.loading import (
    HOW_QUANTISED,
    SEQUENCES_AT_ONCE,
    pick_device,
    preload_library,
    require_tokenizer,
    shape_only,
    stored_quantisation,
)
from runners.jobs.memory import PeakMeter
from runners.jobs.model_files import opened_model
from runners.jobs.ratios import run_isolated
from runners.jobs.runtime import (
    BadInputError,
    Job,
    MissingModelError,
    card_text,
    job_telemetry,
    num_threads,
    publish_model,
    weight_file_bytes,
)
from runners.jobs.weights import Ternary, config_of, entropy_bits, save_ternary, tensors_of
from runners.jobspec import ArtefactModel, CompressSpec, FolderModel
from runners.jobspec.compress import (
    COMPRESSING,
    NF4_BLOCK,
    ORIGINAL,
    ORIGINAL_PREFIX,
    SAVED,
    WeightDtype,
)

# ---------------------------------------------------------------------------
# QMoE: ternary, entropy-coded experts of a mixture-of-experts model; all else is unchanged.
#
# Each row has three values: its minimum, zero and its maximum. Columns are quantised in turn as in
# GPTQ, on the tokens that the router sends to the expert. Layers are quantised in order, on the
# activations of the already quantised layers before them; the whole model is in memory.
# Source: Frantar and Alistarh 2023, arXiv:2310.16795, sections 3.1 and 4.
# ---------------------------------------------------------------------------


GATE_UP, DOWN = "gate_up_proj", "down_proj"
DAMPING = 0.1  # of the mean diagonal; few tokens reach an expert


class RoutedTokens(NamedTuple):
    """Input tokens [count, width] of a layer's experts, and the experts chosen for each token."""

    hidden: torch.Tensor
    experts: torch.Tensor


def quantize_to_ternary(
    source: Path, target: Path, spec: CompressSpec, stages: Stages, job: Job
) -> CompressionResult:
    """Quantise and code every expert, save the folder, and return the resulting perplexity."""
    loaded = load_whole(source, "bf16")
    model, tokenizer = loaded.model, require_tokenizer(loaded, "the calibration text")
    ids = held_out_of(job, loaded, source)
    _windows, calibration = texts(job, loaded, spec)
    blocks, stages = expert_blocks(model), stages.via(job.emitter)
    coded: dict[str, torch.Tensor] = {}
    totals = _SizeTotals()
    for at, (name, experts) in enumerate(blocks.items()):
        routed = routed_of(model, experts, calibration.to(loaded.device))
        for matrix_name, stack in quantise_experts(experts, routed).items():
            tensors, num_bytes = tensors_of(f"{name}.{matrix_name}", stack)
            coded |= tensors
            totals.add(stack, num_bytes)
        stages.advance((at + 1) / (len(blocks) + 1))
    save_ternary(target, model, coded)
    tokenizer.save_pretrained(str(target))
    perplexity = evaluate(model, ids, spec.evaluation_tokens)
    return CompressionResult(
        perplexity, {**totals.figures(), "calibration_tokens": float(calibration.numel())}
    )


def check_sparse(source: Path, _spec: CompressSpec, job: Job) -> None:
    """Check that the model has experts to compress.

    Raises:
        BadInputError: the model has no experts, or the disk is too small.
    """
    check_disk(job.attempt_dir, weight_file_bytes(source))
    config = config_of(source)
    if not expert_blocks(shape_only(config)):
        msg = (
            f"qmoe codes the experts of a sparse mixture-of-experts model, and this "
            f"'{config.model_type}' has none; choose gptq for a dense model"
        )
        raise BadInputError(msg)


def expert_blocks(model: PreTrainedModel) -> dict[str, torch.nn.Module]:
    """Return, by name, the modules that hold a layer's experts as two stacked matrices."""
    return {
        name: module
        for name, module in model.named_modules()
        if {each for each, _ in module.named_parameters(recurse=False)} == {GATE_UP, DOWN}
    }


@torch.no_grad()
def routed_of(
    model: PreTrainedModel, experts: torch.nn.Module, calibration: torch.Tensor
) -> RoutedTokens:
    """Return the tokens of the text that are routed to a layer's experts."""
    batches: list[RoutedTokens] = []

    def record(_module: torch.nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        values = [*given, *named.values()]
        batches.append(RoutedTokens(values[0].detach(), values[1].detach()))

    handle = experts.register_forward_pre_hook(record, with_kwargs=True)
    try:
        for ids in torch.split(calibration, SEQUENCES_AT_ONCE):
            model(ids, use_cache=False, logits_to_keep=1)
    finally:
        handle.remove()
    return RoutedTokens(*(torch.cat(each) for each in zip(*batches, strict=True)))


@torch.no_grad()
def quantise_experts(experts: torch.nn.Module, routed: RoutedTokens) -> dict[str, Ternary]:
    """Quantise each expert to ternary in place; return both stacked matrices."""
    up, down = experts.get_parameter(GATE_UP), experts.get_parameter(DOWN)
    act = experts.get_submodule("act_fn")
    parts: dict[str, list[Ternary]] = {GATE_UP: [], DOWN: []}
    for index in range(len(up)):
        inputs = routed.hidden[(routed.experts == index).any(dim=-1)]
        first = ternary(up[index], inputs)
        up[index] = first.weight()
        gate, value = torch.nn.functional.linear(inputs, up[index]).chunk(2, dim=-1)
        second = ternary(down[index], act(gate) * value)
        down[index] = second.weight()
        parts[GATE_UP].append(first)
        parts[DOWN].append(second)
    return {
        word: Ternary(
            torch.stack([each.symbols for each in own]), torch.stack([each.levels for each in own])
        )
        for word, own in parts.items()
    }


def ternary(weight: torch.Tensor, inputs: torch.Tensor) -> Ternary:
    """Quantise a matrix [out, in] to three values per row with GPTQ's error compensation."""
    remaining = weight.float().clone()
    levels = torch.stack(
        [remaining.amin(dim=1).clamp(max=0), remaining.amax(dim=1).clamp(min=0)], dim=1
    ).to(weight.dtype)
    values = torch.cat([torch.zeros_like(levels[:, :1]), levels], dim=1).float()
    tokens = inputs.float()
    factor = inverse_factor(tokens.T @ tokens, DAMPING)
    symbols = torch.zeros_like(remaining, dtype=torch.uint8)
    for column in range(remaining.shape[1]):
        nearest = (remaining[:, column : column + 1] - values).abs().argmin(dim=1)
        symbols[:, column] = nearest.to(torch.uint8)
        dequantised = values.gather(1, nearest[:, None])[:, 0]
        error = (remaining[:, column] - dequantised) / factor[column, column]
        remaining[:, column:] -= error[:, None] * factor[column, column:][None, :]
    return Ternary(symbols, levels)


class _SizeTotals:
    """Sizes of the experts before and after compression, summed over all layers."""

    def __init__(self) -> None:
        self.weights = self.bytes = self.zeros = 0
        self.entropy_bits = 0.0

    def add(self, stack: Ternary, num_bytes: int) -> None:
        count = stack.symbols.numel()
        self.weights += count
        self.bytes += num_bytes
        self.zeros += int((stack.symbols == 0).sum())
        self.entropy_bits += entropy_bits(stack.symbols.cpu().numpy()) * count

    def figures(self) -> dict[str, float]:
        return {
            "expert_bits_per_weight": 8 * self.bytes / self.weights,
            "expert_entropy_bits_per_weight": self.entropy_bits / self.weights,
            "expert_zeros_share": self.zeros / self.weights,
            "compressed_bytes": float(self.bytes),
            "original_matrix_bytes": 2.0 * self.weights,
        }


# ---------------------------------------------------------------------------
# Compression job: measure the original, compress and save it, measure the saved model.
#
# The measured model is loaded from the saved folder by a plain ``from_pretrained``; its perplexity
# on held-out text must equal that of the model in memory.
# ---------------------------------------------------------------------------


STAGE_SHARES = {ORIGINAL: 3.0, COMPRESSING: 2.0, SAVED: 4.0}
REPETITIONS = 5
RELOAD_TOLERANCE = 1e-3  # relative; equal weights through equal kernels agree to ~1e-6


@dataclass(frozen=True)
class Outcome:
    """The original and compressed folders and their measurements."""

    source: Path
    saved: Path
    original: Assessment
    after: Assessment
    compressed: CompressionResult

    def result_metrics(self) -> dict[str, float]:
        """Return the figures of the job's result."""
        return {
            **self.original.result_metrics(ORIGINAL_PREFIX),
            **self.after.result_metrics(),
            **_ratio(self.after, self.original),
            **self.compressed.figures,
            "disk_bytes": float(weight_file_bytes(self.saved)),
            "original_disk_bytes": float(weight_file_bytes(self.source)),
        }


Check = Callable[[Path, CompressSpec, Job], None]
Compress = Callable[[Path, Path, CompressSpec, Stages, Job], CompressionResult]
PROCEDURES: Mapping[str, tuple[Check | None, Compress]] = {
    "layerwise": (check_folder, compress_folder),
    "shear": (check_shearable, prune_by_shearing),
    "structure": (check_structure, prune_structure),
    "gguf": (check_gguf, export_gguf),
    "ternary": (check_sparse, quantize_to_ternary),
    "library": (None, quantize_with_library),
}


class ReloadError(Exception):
    """The saved model differs from the compressed model in memory."""


def work(job: Job) -> None:
    """Run one compression attempt: evaluate, compress, evaluate again and publish."""
    spec = job.spec_of(CompressSpec)
    source = source_folder(job, spec)
    preload_library(spec.weight_dtype, is_layerwise=spec.is_layerwise)
    saved = job.scratch_dir() / "compressed"
    try:
        with job_telemetry(job):
            _run(job, spec, source, saved)
    except BadInputError:  # not retried without a person: leave no partial files on the host
        shutil.rmtree(job.scratch_dir(), ignore_errors=True)
        shutil.rmtree(job.checkpoint_dir, ignore_errors=True)
        raise


def _run(job: Job, spec: CompressSpec, source: Path, saved: Path) -> None:
    check, compress = PROCEDURES[procedure_of(spec)]
    if check is not None:
        run_isolated(job, partial(check, source, spec))
    stages = Stages(job.emitter, STAGE_SHARES)
    stages.begin(ORIGINAL)
    original = run_isolated(job, partial(assess_folder, source, "bf16", stages, ORIGINAL_PREFIX))
    stages.begin(COMPRESSING)
    shutil.rmtree(saved, ignore_errors=True)
    compressed = run_isolated(job, partial(compress, source, saved, spec, stages))
    stages.begin(SAVED)
    after = run_isolated(job, partial(assess_folder, saved, spec.weight_dtype, stages, ""))
    check_reload(after.perplexity, compressed.perplexity)
    _publish(job, Outcome(source, saved, original, after, compressed))


def procedure_of(spec: CompressSpec) -> str:
    """Return the compression procedure of a method, a key of ``PROCEDURES``."""
    if spec.method == "sheared_llama":
        return "shear"
    if spec.is_structural:
        return "structure"
    if spec.is_ternary:
        return "ternary"
    if spec.is_exported:
        return "gguf"
    return "layerwise" if spec.is_layerwise else "library"


def source_folder(job: Job, spec: CompressSpec) -> Path:
    """Return the folder of the original model.

    Raises:
        MissingModelError: the model has no trained weights, or no folder on this host.
        BadInputError: the folder is already quantised.
    """
    if not isinstance(spec.model, FolderModel | ArtefactModel):
        msg = (
            f"a '{spec.model.source}' model has no trained weights on this host; run the "
            "training job first and choose the model that it leaves"
        )
        raise MissingModelError(msg)
    folder = opened_model(spec.model, job.host_dir)
    stored = stored_quantisation(folder)
    if stored is not None:
        msg = f"{folder} holds {stored} weights already; choose its original"
        raise BadInputError(msg)
    return folder


def check_reload(reloaded: Perplexity | None, in_memory: Perplexity) -> None:
    """Raise ReloadError unless saved and in-memory model have equal held-out perplexity."""
    if reloaded is None or not math.isclose(
        reloaded.value, in_memory.value, rel_tol=RELOAD_TOLERANCE
    ):
        value = "none" if reloaded is None else f"{reloaded.value:.4f}"
        msg = f"perplexity was {in_memory.value:.4f} before saving and is {value} after loading"
        raise ReloadError(msg)


def assess_folder(
    folder: Path, dtype: WeightDtype, stages: Stages, prefix: str, job: Job
) -> Assessment:
    """Measure the folder's model as ``dtype``; metric names get the prefix."""
    spec = job.spec_of(CompressSpec)
    meter = PeakMeter(pick_device())
    loaded = load_whole(folder, dtype)
    workload = Workload(1, spec.prompt_tokens, spec.output_tokens, spec.seed)
    sampling = Sampling(workload, REPETITIONS, spec.evaluation_tokens)
    return assess(job, loaded, sampling, meter, stages.via(job.emitter), prefix)


def _publish(job: Job, outcome: Outcome) -> None:
    spec = job.spec_of(CompressSpec)
    measured = outcome.result_metrics()
    notes = _notes(spec, outcome.after)
    settings = {"weight_dtype": spec.weight_dtype, "method": spec.method, "how": notes["method"]}
    settings |= spec.settings
    card = card_text(
        "Model compressed by Slipway",
        {"Settings": settings, "Evaluation": measured, "How it was measured": notes},
    )
    facts: Mapping[str, object] = {**settings, "perplexity": measured["perplexity"]}
    publish_model(job, lambda target: _move_files(outcome.saved, target), card, facts)
    job.emitter.result(measured, notes)


def _ratio(after: Assessment, original: Assessment) -> dict[str, float]:
    if after.perplexity is None or original.perplexity is None:
        return {}
    ratio, low, high = perplexity_ratio(after.perplexity, original.perplexity)
    return {
        "perplexity_ratio": ratio,
        "perplexity_ratio_low": low,
        "perplexity_ratio_high": high,
    }


HOW_LAYERWISE = {
    "rtn": "each weight to its nearest code",
    "gptq": "GPTQ (own code): columns in turn, the error passed on through the inverse Hessian",
    "quantease": "QuantEase (own code): coordinate descent over the columns",
    "awq": "AWQ (own code): scales of inputs searched by the outputs' error, then nearest codes",
    "smoothquant": "SmoothQuant (own code): a share of the activations' spread moved into rows of "
    "8-bit weights; activations rounded to 8 bits by token",
    "fptq": "FPTQ (own code): activations levelled by a logarithm, nearest codes in groups; "
    "activations rounded to 8 bits by token",
    "norm_tweaking": "GPTQ, then norms re-fitted to the float layer's outputs (own code)",
    "autoround": "AutoRound (own code): the offset of each code and the scale of each group "
    "learnt by signs of gradients, to the float layer's outputs",
    "finequant": "FineQuant (own code): nearest codes in groups as coarse as each matrix allows",
    "magnitude": "the smallest weights of each matrix set to zero",
    "wanda": "Wanda (own code): weights of least size times input norm set to zero, by row",
    "sparsegpt": "SparseGPT (own code): pruned by block, the error passed on",
}
HOW_STRUCTURE = {
    "llm_pruner": "LLM-Pruner (own code): the groups of heads and the channels of least |weight x "
    "gradient| removed, as many in each layer; {}",
    "sheared_llama": "Sheared LLaMA (own code): layers, heads, hidden units and channels removed "
    "by learnt masks, then trained on, with more text of the domains that are further behind",
}
HOW_TERNARY = (
    "QMoE (own code): each expert's rows to their least value, zero and their largest, the error "
    "passed on by column; rANS code on disk, decoded to bf16 when loaded; all else bf16"
)
HOW_GGUF = (
    "GGUF for llama.cpp: matrices, embedding and output {}; K-quants rounded by own code, other "
    "types by the gguf package"
)
PACKED = "; compressed-tensors {}, lm_head and embedding bf16"
PLAIN = "; plain bf16 tensors: compressed_bytes says what codes, or mask and values, would take"


def method_description(spec: CompressSpec) -> str:
    """Describe the compression method and the storage format of the weights."""
    if spec.is_layerwise:
        stored = PACKED.format(format_of(spec)) if spec.is_packed else PLAIN
        return HOW_LAYERWISE[spec.method] + stored
    if spec.is_structural:
        steps = spec.recovery_steps
        after = f"then a LoRA of {steps} steps, merged" if steps else "not tuned afterwards"
        return HOW_STRUCTURE[spec.method].format(after)
    if spec.is_ternary:
        return HOW_TERNARY
    if spec.is_exported:
        return HOW_GGUF.format(spec.gguf_type)
    description = HOW_QUANTISED.get(spec.method) or HOW_QUANTISED.get(spec.weight_dtype)
    return description or "plain bf16 weights"


def group_size_note(spec: CompressSpec) -> dict[str, str]:
    """Return a note if a block size was requested that nf4 does not support."""
    if spec.method != "nf4" or spec.group_size == NF4_BLOCK:
        return {}
    return {"group_size": f"nf4 has blocks of {NF4_BLOCK} weights; {spec.group_size} was asked"}


def _notes(spec: CompressSpec, after: Assessment) -> dict[str, str]:
    return {
        **group_size_note(spec),
        **after.notes(),
        "method": method_description(spec),
        "original": "the model as bf16, the dtype that stays around int8 and int4 matrices",
        "perplexity_ratio": "compressed / original on the same windows, pair by pair",
        "disk_bytes": "safetensors or GGUF files",
        "device": str(pick_device()),
        "threads": str(num_threads()),
    }


def _move_files(saved: Path, target: Path) -> None:
    for path in saved.iterdir():
        path.rename(target / path.name)
    saved.rmdir()
