"""Construction of the optimizers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from runners.jobs.runtime import BadInputError
from runners.jobs.train.fused_updates import AdaLomo, Lomo
from runners.jobs.train.integer_updates import Qft
from runners.jobs.train.integers import integer_matrices, learning
from runners.jobs.train.lion import Lion
from runners.jobs.train.offloaded_adamw import OffloadedAdamW
from runners.jobspec.training_memory import Away, Optimizer

BETAS = (0.9, 0.95)
LION_BETAS = (0.9, 0.99)
WEIGHT_DECAY = 0.1
Groups = list[dict[str, Any]]


def build_optimizer(
    model: torch.nn.Module,
    learning_rate: float,
    name: Optimizer = "adamw",
    states: tuple[Away, Path | None] = ("none", None),
) -> torch.optim.Optimizer:
    """Return an optimizer with weight decay for matrices only; frozen weights are left out.

    ``states`` are the location of its moments, and the folder of their file.

    Raises:
        BadInputError: the host's device or libraries do not support it.
    """
    trained = list(learning(model).values())
    groups = [
        {"params": [each for each in trained if each.ndim > 1], "weight_decay": WEIGHT_DECAY},
        {"params": [each for each in trained if each.ndim <= 1], "weight_decay": 0.0},
    ]
    where, folder = states
    if where != "none":
        _check_offload(where, trained)
        return OffloadedAdamW(groups, learning_rate, BETAS, folder if where == "disk" else None)
    nonempty = [each for each in groups if each["params"]]
    if name == "qft":
        return Qft(nonempty, learning_rate, LION_BETAS, integer_matrices(model).values())
    return BUILDERS[name](nonempty, learning_rate)


def _check_offload(where: Away, trained: list[torch.nn.Parameter]) -> None:
    if where == "cpu" and all(each.device.type == "cpu" for each in trained):
        msg = (
            "optimizer_offload cpu: this host computes on its CPU, so the optimiser's states are "
            "in its memory already; choose disk, or an optimizer with smaller states"
        )
        raise BadInputError(msg)


def _eight_bit(name: str, **options: Any) -> Callable[[Groups, float], torch.optim.Optimizer]:
    """Return a builder of a bitsandbytes optimizer; it keeps small tensors in 32 bits.

    Source: Dettmers et al. 2021, arXiv:2110.02861.
    """

    def build(groups: Groups, learning_rate: float) -> torch.optim.Optimizer:
        try:
            from bitsandbytes import optim
        except ImportError as error:
            msg = "8-bit states need bitsandbytes on this host: pip install 'slipway[gpu]'"
            raise BadInputError(msg) from error
        optimizer: torch.optim.Optimizer = getattr(optim, name)(
            groups, lr=learning_rate, **options
        )
        return optimizer

    return build


def _adamw(groups: Groups, learning_rate: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=learning_rate, betas=BETAS, fused=True)


def _adafactor(groups: Groups, learning_rate: float) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(groups, lr=learning_rate)


def _sgd(groups: Groups, learning_rate: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=learning_rate)


def _lion(groups: Groups, learning_rate: float) -> torch.optim.Optimizer:
    return Lion(groups, learning_rate, LION_BETAS)


BUILDERS: dict[Optimizer, Callable[[Groups, float], torch.optim.Optimizer]] = {
    "adamw": _adamw,
    "adamw_8bit": _eight_bit("AdamW8bit", betas=BETAS),
    "adafactor": _adafactor,
    "lion": _lion,
    "lion_8bit": _eight_bit("Lion8bit", betas=LION_BETAS),
    "sgd": _sgd,
    "lomo": Lomo,
    "adalomo": AdaLomo,
}
