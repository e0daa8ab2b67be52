"""What a model is given: passes and positions, which every run finds the same."""

from collections.abc import Callable
from dataclasses import dataclass

from transformers import PreTrainedModel


@dataclass
class Work:
    """Passes through a model, and the positions that they computed."""

    passes: int = 0
    positions: int = 0


def work_of(model: PreTrainedModel, run: Callable[[], object]) -> Work:
    """Return what a run gives the model to do."""
    work = Work()

    def watch(_module, args, options):
        ids = options["input_ids"] if "input_ids" in options else args[0]
        work.passes += 1
        work.positions += ids.numel()

    handle = model.register_forward_pre_hook(watch, with_kwargs=True)
    try:
        run()
    finally:
        handle.remove()
    return work
