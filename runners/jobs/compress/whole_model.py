"""Compress a model that is in memory as a whole: by a library, or by cutting its structure."""

from pathlib import Path

import torch
from transformers import AutoConfig

from runners.compress_options import WeightDtype
from runners.jobs.assessment import held_out_ids
from runners.jobs.compress.engine import Compressed
from runners.jobs.compress.folding import check_shape_known
from runners.jobs.compress.layerwise import texts
from runners.jobs.compress.recovery import recover
from runners.jobs.compress.structure import kept_of, prune, taylor_scores
from runners.jobs.evaluation import evaluate
from runners.jobs.layers import SEQUENCES_AT_ONCE
from runners.jobs.loading import (
    BASE_DTYPE,
    LoadedModel,
    load_folder,
    load_tokenizer,
    pick_device,
    quantised_matrices,
    ready,
    require_tokenizer,
)
from runners.jobs.runtime import Job, MissingModelError
from runners.jobs.stages import Stages
from runners.jobs.tokenizer import TokenIds
from runners.jobspec import CompressSpec


def load_whole(folder: Path, dtype: WeightDtype, *, rounds_inputs: bool = False) -> LoadedModel:
    """Return a folder's model with its weights held as ``dtype``."""
    device = pick_device()
    model = load_folder(folder, dtype, device, rounds_inputs=rounds_inputs)
    return LoadedModel(model, load_tokenizer(folder), device)


def by_library(
    source: Path, target: Path, spec: CompressSpec, stages: Stages, job: Job
) -> Compressed:
    """Let torchao or bitsandbytes hold the weights, and save them so."""
    loaded = load_whole(source, spec.weight_dtype, rounds_inputs=spec.rounds_inputs)
    tokenizer = require_tokenizer(loaded, "perplexity")
    ids = held_out_of(job, loaded, source)
    # Before any forward pass: with AVX-512 bitsandbytes 0.50 repacks nf4 at the first one, and
    # what it then writes is not what it held (perplexity 205.49 became 206.88 on reload).
    loaded.model.save_pretrained(str(target))
    tokenizer.save_pretrained(str(target))
    stages = stages.via(job.emitter)
    return Compressed(evaluate(loaded.model, ids, spec.evaluation_tokens, stages.advance), {})


def by_structure(
    source: Path, target: Path, spec: CompressSpec, stages: Stages, job: Job
) -> Compressed:
    """Remove the heads and channels that weigh least on the text, and save the smaller model."""
    loaded = load_whole(source, "fp32")  # gradients in bf16 would round small ones away
    model, tokenizer = loaded.model, require_tokenizer(loaded, "the calibration text")
    ids = held_out_of(job, loaded, source)
    _windows, calibration = texts(job, loaded, spec)
    before, matrices = model.num_parameters(), _matrix_bytes(loaded)
    calibration = calibration.to(loaded.device)
    scores = taylor_scores(model, calibration, SEQUENCES_AT_ONCE)
    prune(model, scores, kept_of(model.config, spec.sparsity))
    recovered: dict[str, float] = {}
    if spec.recovery_steps:
        cut = evaluate(model, ids, spec.evaluation_tokens)
        recovered = {"unrecovered_perplexity": cut.value}
        model = recover(model, calibration, spec.recovery_steps, SEQUENCES_AT_ONCE)
    ready(model, dtype=BASE_DTYPE)
    model.config.dtype = BASE_DTYPE
    model.save_pretrained(str(target))
    tokenizer.save_pretrained(str(target))
    found = evaluate(model, ids, spec.evaluation_tokens, stages.via(job.emitter).advance)
    figures = {
        "calibration_tokens": float(calibration.numel()),
        "removed_parameters_share": 1.0 - model.num_parameters() / before,
        "compressed_bytes": _matrix_bytes(loaded),
        "original_matrix_bytes": matrices,
        **recovered,
    }
    return Compressed(found, figures)


def check_structure(source: Path, spec: CompressSpec, _job: Job) -> None:
    """Refuse what cannot be cut before anything is measured.

    Raises:
        BadInputError: the layers are of another kind, or nothing would go.
    """
    config = AutoConfig.from_pretrained(str(source), local_files_only=True)
    check_shape_known(config.model_type, f"{spec.method} cuts heads and channels of")
    kept_of(config, spec.sparsity)


def held_out_of(job: Job, loaded: LoadedModel, source: Path) -> TokenIds:
    """Return the held-out text as tokens; ``source`` is where the tokenizer was."""
    ids = held_out_ids(job, loaded)
    if ids is None:
        msg = f"{source} lost its tokenizer.json while the job ran; put it back"
        raise MissingModelError(msg)
    return ids


def _matrix_bytes(loaded: LoadedModel) -> float:
    """Return the bytes of the linear layers' weights in 16 bit."""
    count = sum(each.numel() for each in quantised_matrices(loaded.model).values())
    return float(count * torch.finfo(BASE_DTYPE).bits // 8)
