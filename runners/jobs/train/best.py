"""The weights with the lowest held-out loss of a training, kept on disk until it ends.

They lie beside the checkpoints, so that a restart and the job's next attempt have them too.
Source: Prechelt 1998, Early Stopping - But When?, LNCS 1524, for the model that is taken back.
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
class JudgedStep:
    """The held-out loss of a step's weights, in nats."""

    step: int
    loss: float


class BestWeights:
    """What one training has found so far; the lead alone asks."""

    def __init__(self, folder: Path) -> None:
        """Look for them below the folder of checkpoints."""
        self._folder = folder / FOLDER
        self.exported: JudgedStep | None = (
            None  # whose weights the training leaves, once it has ended
        )
        self.last: JudgedStep | None = None
        self._lowest: JudgedStep | None = None  # of all that were taken, on disk or on the way

    def kept(self) -> JudgedStep | None:
        """Return what is on disk; None before the first validation."""
        return min(self._whole().values(), key=lambda each: each.loss, default=None)

    def take(
        self, model: torch.nn.Module, judged: JudgedStep, writer: CheckpointWriter | None = None
    ) -> None:
        """Keep a model's weights, if no loss before was as low.

        With a writer they are copied, and written beside the next steps: until they are whole on
        disk, those before stand.

        Raises:
            OSError: they could not be written, as on a full disk; those before stand. A writer
                raises it when it is asked next.
        """
        self.last = judged
        self._lowest = before = self._lowest or self.kept()
        if not math.isfinite(judged.loss) or (before and before.loss <= judged.loss):
            return

        def publish(parts: Mapping[str, Tensors]) -> None:
            self._publish(parts["weights"], judged)

        staged = Staged({"weights": trained_weights(model)}, publish)
        if writer is None:
            publish(staged.parts)
        else:
            writer.begin(staged)
        self._lowest = judged

    def _publish(self, weights: Tensors, judged: JudgedStep) -> None:
        from safetensors.torch import save_file

        def write(building: Path) -> None:
            tensors = {name: each.contiguous() for name, each in weights.items()}
            save_file(tensors, building / WEIGHTS)
            (building / FACTS).write_text(json.dumps(asdict(judged)))

        newest = publish_checkpoint(self._folder, judged.step, write)
        for other in checkpoints(self._folder):
            if other != newest:
                shutil.rmtree(other, ignore_errors=True)

    def put_back(self, model: torch.nn.Module, last: JudgedStep) -> None:
        """Give the model the weights with the lowest loss, those of the last step included."""
        from safetensors.torch import load_file

        kept = self.kept()
        self.last = self.exported = last
        if kept is None or (math.isfinite(last.loss) and last.loss <= kept.loss):
            return
        self.exported = kept
        (folder,) = (each for each, judged in self._whole().items() if judged == kept)
        fill_weights(model, load_file(folder / WEIGHTS))

    def note(self) -> str:
        """Return in words which step's weights the training leaves, and why."""
        if self.exported is None or self.last is None:
            return "the last step's: nothing was judged on the way"
        said = f"held-out loss {self.exported.loss:.4f} nats, the lowest of all that were judged"
        if self.exported == self.last:
            return f"the last step's: {said}"
        return (
            f"those of step {self.exported.step}: {said}; the last step's was {self.last.loss:.4f}"
        )

    def _whole(self) -> dict[Path, JudgedStep]:
        """Return each step's folder; a removal that a kill cut short may have left less."""
        return {
            folder: JudgedStep(**json.loads((folder / FACTS).read_text()))
            for folder in checkpoints(self._folder)
            if (folder / FACTS).exists() and (folder / WEIGHTS).exists()
        }
