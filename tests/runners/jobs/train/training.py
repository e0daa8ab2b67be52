"""A trainer of a tiny model on numbers that repeat themselves, in this process."""

import numpy as np
import torch

from runners.jobs.loading import fresh_model
from runners.jobs.runtime import Job
from runners.jobs.train.batches import TextBatches
from runners.jobs.train.trainer import Trainer
from runners.jobspec import TrainSpec
from tests.runners.jobs.harness import TINY_CONFIG

IDS = np.tile(np.arange(64, dtype=np.int32), 40)


def tiny_trainer(job: Job) -> Trainer:
    """Return a trainer of the job's spec; the same seed gives the same weights."""
    spec = job.spec_of(TrainSpec)
    torch.manual_seed(spec.seed)
    model = fresh_model(TINY_CONFIG, torch.float32)
    return Trainer(job, spec, model, TextBatches(IDS, spec), IDS, torch.device("cpu"))
