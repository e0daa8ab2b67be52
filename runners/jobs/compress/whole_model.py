"""Compress a model held in memory as a whole, and recover a pruned one with a LoRA."""

from pathlib import Path

import torch
from transformers import PreTrainedModel

from runners.jobs.adapters import Lora
from runners.jobs.compress.layerwise import CompressionResult, texts
from runners.jobs.compress.pruning import prune, pruned_sizes, taylor_scores
from runners.jobs.compress.quantization import check_shape_known
from runners.jobs.corpus import TokenIds
from runners.jobs.evaluation import evaluate, held_out_ids
from runners.jobs.events import Stages
from runners.jobs.loading import (
    BASE_DTYPE,
    SEQUENCES_AT_ONCE,
    LoadedModel,
    load_folder,
    load_tokenizer,
    pick_device,
    quantised_matrices,
    ready,
    require_tokenizer,
)
from runners.jobs.runtime import Job, MissingModelError
from runners.jobs.train.optimizers import build_optimizer
from runners.jobs.train.run_progress import learning_rate_ratio
from runners.jobs.train.trainer import MAX_GRAD_NORM
from runners.jobs.weights import config_of
from runners.jobspec import CompressSpec
from runners.jobspec.base import LoraOptions
from runners.jobspec.compress import WeightDtype

# Recovery after pruning: train a LoRA on the calibration text and merge it.
#
# Source: Ma et al. 2023 (LLM-Pruner), arXiv:2305.11627, section 3.3.


OPTIONS = LoraOptions(rank=8, alpha=16)
LEARNING_RATE = 1e-3


def recover(
    model: PreTrainedModel, calibration: torch.Tensor, steps: int, at_once: int
) -> PreTrainedModel:
    """Train a LoRA for ``steps`` batches of text [samples, length]; return the merged model."""
    lora = Lora(model, OPTIONS)
    optimizer = build_optimizer(model, LEARNING_RATE)
    batches = torch.split(calibration, at_once)
    with torch.enable_grad():
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = LEARNING_RATE * learning_rate_ratio(step / steps)
            ids = batches[step % len(batches)]
            model(ids, labels=ids, use_cache=False).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    return lora.merge()


def load_whole(folder: Path, dtype: WeightDtype, *, rounds_inputs: bool = False) -> LoadedModel:
    """Load a model folder with weights as ``dtype``."""
    device = pick_device()
    model = load_folder(folder, dtype, device, rounds_inputs=rounds_inputs)
    return LoadedModel(model, load_tokenizer(folder), device)


def quantize_with_library(
    source: Path, target: Path, spec: CompressSpec, stages: Stages, job: Job
) -> CompressionResult:
    """Quantise the weights with torchao or bitsandbytes and save them."""
    loaded = load_whole(source, spec.weight_dtype, rounds_inputs=spec.rounds_inputs)
    tokenizer = require_tokenizer(loaded, "perplexity")
    ids = held_out_of(job, loaded, source)
    # Save before any forward pass: with AVX-512, bitsandbytes 0.50 repacks nf4 at the first one
    # and then saves different weights (perplexity 205.49 became 206.88 on reload).
    loaded.model.save_pretrained(str(target))
    tokenizer.save_pretrained(str(target))
    stages = stages.via(job.emitter)
    return CompressionResult(
        evaluate(loaded.model, ids, spec.evaluation_tokens, stages.advance), {}
    )


def prune_structure(
    source: Path, target: Path, spec: CompressSpec, stages: Stages, job: Job
) -> CompressionResult:
    """Remove the heads and channels of least importance on the text; save the smaller model."""
    loaded = load_whole(source, "fp32")  # bf16 would lose small gradients
    model, tokenizer = loaded.model, require_tokenizer(loaded, "the calibration text")
    ids = held_out_of(job, loaded, source)
    _windows, calibration = texts(job, loaded, spec)
    before, matrices = model.num_parameters(), _matrix_bytes(loaded)
    calibration = calibration.to(loaded.device)
    scores = taylor_scores(model, calibration, SEQUENCES_AT_ONCE)
    prune(model, scores, pruned_sizes(model.config, spec.sparsity))
    recovered: dict[str, float] = {}
    if spec.recovery_steps:
        pruned_perplexity = evaluate(model, ids, spec.evaluation_tokens)
        recovered = {"unrecovered_perplexity": pruned_perplexity.value}
        model = recover(model, calibration, spec.recovery_steps, SEQUENCES_AT_ONCE)
    ready(model, dtype=BASE_DTYPE)
    model.config.dtype = BASE_DTYPE
    model.save_pretrained(str(target))
    tokenizer.save_pretrained(str(target))
    perplexity = evaluate(model, ids, spec.evaluation_tokens, stages.via(job.emitter).advance)
    figures = {
        "calibration_tokens": float(calibration.numel()),
        "removed_parameters_share": 1.0 - model.num_parameters() / before,
        "compressed_bytes": _matrix_bytes(loaded),
        "original_matrix_bytes": matrices,
        **recovered,
    }
    return CompressionResult(perplexity, figures)


def check_structure(source: Path, spec: CompressSpec, _job: Job) -> None:
    """Check that the model's structure can be pruned.

    Raises:
        BadInputError: the model type is not supported, or nothing would be removed.
    """
    config = config_of(source)
    check_shape_known(config.model_type, f"{spec.method} cuts heads and channels of")
    pruned_sizes(config, spec.sparsity)


def held_out_of(job: Job, loaded: LoadedModel, source: Path) -> TokenIds:
    """Return the held-out text as tokens.

    Raises:
        MissingModelError: the tokenizer in ``source`` was removed while the job ran.
    """
    ids = held_out_ids(job, loaded)
    if ids is None:
        msg = f"{source} lost its tokenizer.json while the job ran; put it back"
        raise MissingModelError(msg)
    return ids


def _matrix_bytes(loaded: LoadedModel) -> float:
    """Return the bytes of the linear layers' weights at 16 bits."""
    count = sum(each.numel() for each in quantised_matrices(loaded.model).values())
    return float(count * torch.finfo(BASE_DTYPE).bits // 8)
