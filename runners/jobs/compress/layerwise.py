"""Compress a model folder layer by layer into a new folder."""

import json
import shutil
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from runners.compress_options import FOLDING_METHODS
from runners.jobs.artefacts import weight_file_bytes
from runners.jobs.assessment import held_out_ids
from runners.jobs.compress.engine import Compressed, Engine, settings_of
from runners.jobs.compress.folding import check_shape_known
from runners.jobs.compress.store import LayerStore
from runners.jobs.corpus import load_corpus
from runners.jobs.evaluation import Windows, windows_of
from runners.jobs.layers import LayerwiseModel
from runners.jobs.loading import (
    BASE_DTYPE,
    LoadedModel,
    load_tokenizer,
    pick_device,
    require_tokenizer,
)
from runners.jobs.memory import PeakMeter
from runners.jobs.runtime import BadInputError, Job, MissingModelError
from runners.jobs.stages import Stages
from runners.jobs.tokenizer import TokenIds, tokenized
from runners.jobspec import CompressSpec

COPIED = ("generation_config.json",)
SPARE_SHARE = 0.1  # spare disk space, as a share of the source's weights


def compress_folder(
    source: Path, target: Path, spec: CompressSpec, stages: Stages, job: Job
) -> Compressed:
    """Write the compressed model to ``target``; return its in-memory perplexity and figures.

    Raises:
        BadInputError: a weight is not a number.
    """
    stages = stages.via(job.emitter)
    device = pick_device()
    meter = PeakMeter(device)
    started = time.monotonic()
    tokenizer = load_tokenizer(source)
    model = LayerwiseModel(source, device, BASE_DTYPE)
    loaded = LoadedModel(model.model, tokenizer, device)
    windows, calibration = texts(job, loaded, spec)
    store = LayerStore(job.checkpoint_dir, settings_of(spec))
    engine = Engine(model, spec, store)

    def on_layer(done: int, count: int, figures: Mapping[str, float]) -> None:
        job.emitter.metric(figures, step=done)
        stages.advance(done / count)

    result = engine.run(calibration, windows, on_layer)
    store.assemble(target, engine.keys)
    (target / "config.json").write_text(json.dumps(engine.config(), indent=2, sort_keys=True))
    if loaded.tokenizer is not None:
        loaded.tokenizer.save_pretrained(str(target))
    for name in COPIED:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
    peak = meter.read()
    measured = {
        "compress_seconds": time.monotonic() - started,
        "compress_peak_memory_bytes": float(peak.bytes),
        "calibration_tokens": float(calibration.numel()),
    }
    return Compressed(result.perplexity, {**result.figures, **measured})


def check_folder(source: Path, spec: CompressSpec, job: Job) -> None:
    """Check that the model folder can be compressed.

    Raises:
        BadInputError: the folder's files are inconsistent, the row length is not a multiple of
            the group size, or the disk is too small.
        MissingModelError: the folder has no tokenizer for the calibration text.
    """
    check_disk(job.attempt_dir, weight_file_bytes(source))
    model = LayerwiseModel(source, torch.device("cpu"), BASE_DTYPE)
    loaded = LoadedModel(model.model, load_tokenizer(source), model.device)
    require_tokenizer(loaded, "the calibration text")
    if spec.method in FOLDING_METHODS:
        check_shape_known(model.config.model_type, f"{spec.method} moves scales into the norms of")
    divisor = spec.row_divisor
    for name, linear in model.linears(0).items():
        if linear.in_features % divisor:
            msg = (
                f"{model.name_of(0, name)} has rows of {linear.in_features} weights, which do "
                f"not divide into groups of {divisor}; choose another "
                f"{'group_size' if spec.has_groups else 'pattern'}"
            )
            raise BadInputError(msg)


def texts(job: Job, loaded: LoadedModel, spec: CompressSpec) -> tuple[Windows, torch.Tensor]:
    """Return the held-out windows and calibration samples of the same length."""
    corpus = load_corpus()
    tokenizer = require_tokenizer(loaded, "the calibration text")
    held_out = held_out_ids(job, loaded, corpus)
    if held_out is None:
        msg = "the model lost its tokenizer.json while the job ran; put it back"
        raise MissingModelError(msg)
    windows = windows_of(loaded.model.config, held_out, spec.evaluation_tokens)
    ids = tokenized(tokenizer, corpus.train, f"{corpus.digest}/train", job.cache_dir)
    return windows, calibration_samples(ids, windows.length, spec.calibration_tokens, spec.seed)


def calibration_samples(ids: TokenIds, length: int, num_tokens: int, seed: int) -> torch.Tensor:
    """Return samples [count, length] of the text at random positions."""
    count = max(1, num_tokens // length)
    starts = np.random.default_rng(seed).integers(0, len(ids) - length, size=count)
    return torch.from_numpy(np.stack([ids[at : at + length] for at in starts]).astype(np.int64))


def check_disk(folder: Path, needed_bytes: int) -> None:
    """Raise BadInputError if the folder's disk lacks ``needed_bytes`` plus ``SPARE_SHARE``."""
    free = shutil.disk_usage(folder).free
    needed = round(needed_bytes * (1 + SPARE_SHARE))
    if free < needed:
        msg = (
            f"the compressed model may take {needed} bytes and {folder} has {free} free; remove "
            "old attempts or put the host's folder on a larger disk"
        )
        raise BadInputError(msg)
