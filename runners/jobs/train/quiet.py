"""The trainer on a fresh model without reporting: for benchmarks and measurements."""

import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from runners.jobs.corpus import TokenIds
from runners.jobs.events import Emitter
from runners.jobs.loading import fresh_model, ready
from runners.jobs.ranks import ALONE, Ranks
from runners.jobs.runtime import Job
from runners.jobs.train.evaluator import HeldOut
from runners.jobs.train.rows import TextBatches, with_growing_lengths
from runners.jobs.train.trainer import Trainer
from runners.jobspec import RandomModel, TrainSpec
from runners.messages import RunRequest

RANDOM_TOKENS = 100_000


def quiet_trainer(
    fields: Mapping[str, Any],
    config: Mapping[str, Any],
    folder: Path,
    ranks: Ranks = ALONE,
    ids: TokenIds | None = None,
    model: PreTrainedModel | None = None,
    device: torch.device | None = None,
) -> Trainer:
    """Return a trainer with these spec ``fields`` that works in ``folder``, on random tokens.

    ``ids`` and ``model`` replace the random tokens and the fresh model. The same seed gives the
    same weights on every rank. ``device`` is where it trains; by default the CPU.
    """
    device = device or torch.device("cpu")
    spec = TrainSpec.model_validate({"model": RandomModel(config={}), **fields})
    torch.manual_seed(spec.seed)
    model = ready(model or fresh_model(dict(config), torch.float32), device=device)
    if device.type == "cpu":
        model.set_attn_implementation("eager")  # as the job does
    if ids is None:
        vocabulary = int(model.config.vocab_size)
        random_ids = np.random.default_rng(spec.seed).integers(0, vocabulary, RANDOM_TOKENS)
        ids = random_ids.astype(np.int32)
    text = ids
    request = RunRequest(attempt_id="quiet", job_id="quiet", number=1, fence="quiet", spec=spec)
    emitter = Emitter(os.open(os.devnull, os.O_WRONLY))
    job = Job(folder, folder, request, emitter, threading.Event())
    batches = with_growing_lengths(spec, lambda each: TextBatches(text, each))
    return Trainer(job, spec, model, batches, HeldOut(ids), device, ranks)
