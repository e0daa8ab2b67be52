"""Measures the planner's memory terms on real ranks (run with ``python -m``).

Prints a JSON line per case, for ``manage.py bench memory``. Terms are exact tensor bytes; the
process's peak also includes libraries, stacks and malloc caches.
"""

import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedModel

from runners.host.bench import CASES, CONFIG, Case, RankMemory
from runners.jobs.adapters import Lora
from runners.jobs.loading import fresh_model, load_folder
from runners.jobs.memory import PeakMeter, activations_counted, model_bytes, optimizer_bytes
from runners.jobs.ranks import Ranks
from runners.jobs.runtime import prepare_process
from runners.jobs.train.layout import StepLoss
from runners.jobs.train.local_ranks import load_what_training_loads, on_ranks
from runners.jobs.train.rows import Batch
from runners.jobs.train.trainer import Trainer, random_token_trainer
from runners.jobspec.base import LoraOptions

CPU = torch.device("cpu")
STEPS_BEFORE = 2


def held_by_ranks(cases: Sequence[Case] = CASES) -> Iterator[RankMemory]:
    """Yield the memory of each case's fullest rank in its third step.

    By then all optimiser states exist, and the gradient buckets have their final order.
    """
    load_what_training_loads(CONFIG)
    for case in cases:
        results = on_ranks(case.ranks, partial(_held, case))
        fullest = max(results, key=lambda each: sum(each[name] for name in RankMemory.TERMS))
        yield RankMemory(case=case.name, **{name: round(size) for name, size in fullest.items()})


def _held(case: Case, ranks: Ranks) -> dict[str, float]:
    meter = PeakMeter(CPU)
    with tempfile.TemporaryDirectory() as folder:
        model, adapters = _model(case, Path(folder))
        trainer = random_token_trainer(case.training, CONFIG, Path(folder), ranks, model=model)
        trainer.model.train()
        trainer.layout.begin()
        own = 0 if ranks.is_alone or case.is_unsharded else None
        weights = model_bytes(trainer.model) if own == 0 else trainer.layout.weight_bytes()
        for _ in range(STEPS_BEFORE):
            trainer.make_step()
        watched = _TensorCounter(trainer)
        trainer.make_step()
        peak = meter.read()
    return {
        "weights": weights - adapters,
        "adapters": adapters,
        "gradients": watched.gradients,
        "optimizer_states": optimizer_bytes(trainer.optimizer),
        "activations": watched.activations,
        "process_peak": peak.bytes,
        "process_start": peak.start_bytes,
    }


def _model(case: Case, folder: Path) -> tuple[PreTrainedModel | None, int]:
    """Return the case's adapted model, or None for a new one, and its adapter's bytes."""
    if case.adapter is None:
        return None, 0
    torch.manual_seed(0)
    fresh_model(dict(CONFIG), torch.float32).save_pretrained(str(folder / "base"))
    model = load_folder(folder / "base", "int4" if case.adapter == "nf4" else "bf16", CPU)
    lora = Lora(model, LoraOptions(rank=case.rank, alpha=2 * case.rank, base_dtype=case.adapter))
    return model, lora.bytes


class _TensorCounter:
    """Counts the tensors of a trainer's next step while gradients are computed."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer, self._compute = trainer, trainer.layout.gradients
        self.activations = self.gradients = 0
        trainer.layout.gradients = self._counted  # type: ignore[method-assign]  # one step alone

    def _counted(self, batches: Sequence[Batch]) -> StepLoss:
        layout = self._trainer.layout
        stages = getattr(layout, "stages", None)
        counted = torch.nn.ModuleList(stages) if stages else self._trainer.model
        with activations_counted(counted, follows_resizing=True) as live:
            loss = self._compute(batches)
        self.activations = live.peak
        self.gradients = self._trainer.gradients_held()
        return loss


def main() -> None:
    """Print the fullest rank's memory of each case, or of the named ones."""
    prepare_process()
    named = set(sys.argv[1:])
    for each in held_by_ranks([case for case in CASES if not named or case.name in named]):
        sys.stdout.write(each.model_dump_json() + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
