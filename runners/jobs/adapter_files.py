"""Reads an adapter's folder in peft's format and checks it against its base model.

Weights are read from safetensors only.
"""

# mypy: disable-error-code="no-untyped-call"
# safetensors has no types.

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from runners.jobs.adapter_config import (
    BASE_KEY,
    CONFIG_NAME,
    SIDES,
    WEIGHTS_NAME,
    place_of,
    refuse,
    scale_of,
)
from runners.jobs.adapters import weights_digest
from runners.jobs.loading import stored_quantisation
from runners.jobs.model_files import read_config
from runners.jobs.model_folders import opened_model
from runners.jobs.runtime import BadInputError
from runners.jobspec import ArtefactModel, FolderModel, ModelRef


def opened_adapter(ref: FolderModel | ArtefactModel, host_dir: Path) -> Path:
    """Return a private folder of the opened files of an adapter.

    Raises:
        MissingModelError: it is outside the roots, absent, or incomplete.
        BadInputError: a file is not a regular file.
    """
    return opened_model(ref, host_dir, (CONFIG_NAME, WEIGHTS_NAME))


def base_digest(ref: ModelRef, host_dir: Path) -> str | None:
    """Return the digest of a base's weights, or None if it cannot match an adapter's.

    Random and compressed weights are not those that an adapter was trained on.
    """
    if not isinstance(ref, FolderModel | ArtefactModel):
        return None
    folder = opened_model(ref, host_dir)
    return None if stored_quantisation(folder) else weights_digest(folder)


@dataclass(frozen=True)
class Pair:
    """The two matrices of one linear layer: W x + up (down x), with the scale in ``up``."""

    down: torch.Tensor  # [rank, inputs]
    up: torch.Tensor  # [outputs, rank]


@dataclass(frozen=True)
class Adapter:
    """One adapter that fits its base: a pair per adapted linear layer."""

    name: str
    pairs: Mapping[str, Pair]  # by the layer's name in the base


def read_adapter(name: str, folder: Path, model: torch.nn.Module, digest: str | None) -> Adapter:
    """Return the adapter of a folder; ``digest`` is the base's, or None if unknown.

    Raises:
        BadInputError: it is another kind of adapter, of another base or shape, or incomplete.
    """
    scale = scale_of(name, read_config(folder / CONFIG_NAME))
    tensors, base = _tensors(name, folder / WEIGHTS_NAME)
    if digest is not None and base not in {None, digest}:
        msg = (
            f"adapter {name} was trained on other weights (base {str(base)[:12]}, here is "
            f"{digest[:12]}); serve it on the model that it was trained on"
        )
        raise BadInputError(msg)
    sides: dict[str, dict[int, torch.Tensor]] = {}
    for key, tensor in tensors.items():
        module, side = place_of(name, key)
        sides.setdefault(module, {})[side] = tensor
    if not sides:
        refuse(name, "holds no matrix")
    pairs = {module: _pair(name, module, own, model) for module, own in sides.items()}
    return Adapter(
        name, {module: Pair(each.down, each.up * scale) for module, each in pairs.items()}
    )


def _tensors(name: str, path: Path) -> tuple[dict[str, torch.Tensor], str | None]:
    """Return every tensor, and the base digest in the file."""
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - no dict
            base = (file.metadata() or {}).get(BASE_KEY)
    except SafetensorError as error:
        refuse(name, f"is cut off or no safetensors file ({str(error)[:120]}); copy it again")
    for key, tensor in tensors.items():
        if not bool(tensor.isfinite().all()):
            refuse(name, f"has NaN or infinity in {key}; train it again")
    return tensors, base


def _pair(name: str, module: str, own: Mapping[int, torch.Tensor], model: torch.nn.Module) -> Pair:
    try:
        linear = model.get_submodule(module)
    except AttributeError:
        refuse(name, f"changes {module[:120]}, which this base does not have")
    inputs, outputs = getattr(linear, "in_features", None), getattr(linear, "out_features", None)
    if linear is getattr(model, "lm_head", None):
        refuse(name, f"changes {module}, the output layer, which is not applied here")
    if len(own) != len(SIDES):
        refuse(name, f"holds one of two matrices of {module}")
    down, up = own[0], own[1]
    rank = down.shape[0]
    if list(down.shape) != [rank, inputs] or list(up.shape) != [outputs, rank]:
        refuse(
            name,
            f"has matrices {list(down.shape)} and {list(up.shape)} for {module}, which has "
            f"{inputs} inputs and {outputs} outputs in this base",
        )
    return Pair(down, up)
