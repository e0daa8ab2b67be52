"""A trainer of a tiny model on numbers that repeat themselves, in this process."""

from collections.abc import Mapping

import numpy as np
import torch

from runners.jobs.loading import fresh_model
from runners.jobs.runtime import Job
from runners.jobs.train.evaluator import HeldOutData
from runners.jobs.train.rows import TextBatches
from runners.jobs.train.trainer import Trainer
from runners.jobspec import TrainSpec
from tests.runners.jobs.tiny import TINY_CONFIG

IDS = np.tile(np.arange(64, dtype=np.int32), 40)
# What is learnt says nothing of what is judged: every step makes the held-out loss worse.
HELD_OUT = np.random.default_rng(3).integers(64, 512, 4000).astype(np.int32)


def tiny_trainer(job: Job) -> Trainer:
    """Return a trainer of the job's spec; the same seed gives the same weights."""
    spec = job.spec_of(TrainSpec)
    torch.manual_seed(spec.seed)
    model = fresh_model(TINY_CONFIG, torch.float32)
    return Trainer(
        job, spec, model, TextBatches(IDS, spec), HeldOutData(IDS[:640]), torch.device("cpu")
    )


def linear(value: float) -> torch.nn.Linear:
    """Return a small module of weights that are all alike."""
    made = torch.nn.Linear(3, 2)
    for each in made.parameters():
        torch.nn.init.constant_(each, value)
    return made


def losses_of(trainer: Trainer) -> list[float]:
    """Train to the end and return the loss of each step, in nats."""
    found: list[float] = []
    step = trainer.make_step

    def noted() -> dict[str, float | torch.Tensor]:
        values = step()
        found.append(float(values["loss"]))
        return values

    trainer.make_step = noted
    trainer.run()
    return found


def stop_at(trainer: Trainer, step: int) -> None:
    """Have a stop asked for once a step is behind the trainer."""
    after = trainer._after_step

    def stop(values: Mapping[str, float], began: float) -> None:
        after(values, began)
        if trainer.state.step == step:
            trainer.job.stop_requested.set()

    trainer._after_step = stop
