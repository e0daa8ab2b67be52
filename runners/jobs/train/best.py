"""The weights of a training with the lowest held-out loss, kept on disk until it ends.

They are stored next to the checkpoints, so that a restart and the job's next attempt find them.
Source: Prechelt 1998, Early Stopping - But When?, LNCS 1524.
"""

import json
import math
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from runners.jobs.train.checkpoint import (
    checkpoints,
    fill_weights,
    publish_checkpoint,
    trained_weights,
)
from runners.jobs.train.checkpoint_writing import CheckpointWriter, Staged, Tensors

FOLDER = "best"
WEIGHTS, FACTS = "model.safetensors", "loss.json"


@dataclass(frozen=True)
class EvaluatedStep:
    """The held-out loss of a step's weights, in nats."""

    step: int
    loss: float


class BestWeights:
    """The best weights of one training so far; used by the lead only."""

    def __init__(self, folder: Path) -> None:
        """Use a subfolder of the checkpoint folder."""
        self._folder = folder / FOLDER
        self.exported: EvaluatedStep | None = (
            None  # the step whose weights the training exports; set at the end
        )
        self.last: EvaluatedStep | None = None
        self._lowest: EvaluatedStep | None = None  # of all steps, on disk or being written

    def kept(self) -> EvaluatedStep | None:
        """Return the step on disk; None before the first validation."""
        return min(self._complete_folders().values(), key=lambda each: each.loss, default=None)

    def take(
        self, model: torch.nn.Module, judged: EvaluatedStep, writer: CheckpointWriter | None = None
    ) -> None:
        """Keep a model's weights if their loss is the lowest so far.

        With a writer they are copied and written in the background; the previous ones stay on disk
        until the new ones are complete.

        Raises:
            OSError: the write failed, for example on a full disk; the previous weights remain.
                A writer raises it at its next call.
        """
        self.last = judged
        self._lowest = previous = self._lowest or self.kept()
        if not math.isfinite(judged.loss) or (previous and previous.loss <= judged.loss):
            return

        def publish(parts: Mapping[str, Tensors]) -> None:
            self._publish(parts["weights"], judged)

        staged = Staged({"weights": trained_weights(model)}, publish)
        if writer is None:
            publish(staged.parts)
        else:
            writer.begin(staged)
        self._lowest = judged

    def _publish(self, weights: Tensors, evaluated: EvaluatedStep) -> None:
        from safetensors.torch import save_file

        def write(building: Path) -> None:
            tensors = {name: each.contiguous() for name, each in weights.items()}
            save_file(tensors, building / WEIGHTS)
            (building / FACTS).write_text(json.dumps(asdict(evaluated)))

        newest = publish_checkpoint(self._folder, evaluated.step, write)
        for other in checkpoints(self._folder):
            if other != newest:
                shutil.rmtree(other, ignore_errors=True)

    def put_back(self, model: torch.nn.Module, last: EvaluatedStep) -> None:
        """Load the weights with the lowest loss, counting the last step, into the model."""
        from safetensors.torch import load_file

        lowest = self.kept()
        self.last = self.exported = last
        if lowest is None or (math.isfinite(last.loss) and last.loss <= lowest.loss):
            return
        self.exported = lowest
        (folder,) = (
            each for each, evaluated in self._complete_folders().items() if evaluated == lowest
        )
        fill_weights(model, load_file(folder / WEIGHTS))

    def note(self) -> str:
        """Return a note on which step's weights are exported, and why."""
        if self.exported is None or self.last is None:
            return "the last step's: there was no evaluation before it"
        text = f"held-out loss {self.exported.loss:.4f} nats, the lowest of all evaluations"
        if self.exported == self.last:
            return f"the last step's: {text}"
        return (
            f"those of step {self.exported.step}: {text}; the last step's was {self.last.loss:.4f}"
        )

    def _complete_folders(self) -> dict[Path, EvaluatedStep]:
        """Return each complete step folder; an interrupted removal may have left partial ones."""
        return {
            folder: EvaluatedStep(**json.loads((folder / FACTS).read_text()))
            for folder in checkpoints(self._folder)
            if (folder / FACTS).exists() and (folder / WEIGHTS).exists()
        }
