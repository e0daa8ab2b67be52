"""Reads a model folder's tensors individually and checks them against the config."""

# mypy: disable-error-code="no-untyped-call"
# safetensors has no types.

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel

from runners.jobs.runtime import BadInputError

COMPUTED = ("rotary_emb.inv_freq", "masked_bias", "attn.bias")  # stored by old versions, ignored
SHOWN = 3


class WeightReader:
    """The tensors of all safetensors files of a folder by name."""

    def __init__(self, folder: Path, model: PreTrainedModel) -> None:
        """Open the files and compare names and shapes with the model's.

        Raises:
            BadInputError: a file is truncated, or the tensors do not match the config.
        """
        self._files: dict[str, safe_open] = {}
        for path in sorted(folder.glob("*.safetensors")):
            opened = open_weights(path)
            self._files |= dict.fromkeys(_names(opened), opened)
        self._files = {
            name: file for name, file in self._files.items() if not name.endswith(COMPUTED)
        }
        self._compare(model)

    @property
    def names(self) -> list[str]:
        """Return the names of all tensors."""
        return list(self._files)

    def read(self, name: str) -> torch.Tensor:
        """Return one tensor.

        Raises:
            BadInputError: it has NaN or infinity.
        """
        tensor: torch.Tensor = self._files[name].get_tensor(name)
        if not bool(tensor.isfinite().all()):
            msg = f"{name} holds NaN or infinity; train or download the model again"
            raise BadInputError(msg)
        return tensor

    def _compare(self, model: PreTrainedModel) -> None:
        expected = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
        tied = set(getattr(model, "all_tied_weights_keys", None) or {})
        missing = sorted(set(expected) - set(self._files) - tied)
        unknown = sorted(set(self._files) - set(expected))
        if missing or unknown:
            problems = [
                f"{word} {some(names)}"
                for word, names in (("lack", missing), ("also hold", unknown))
                if names
            ]
            msg = (
                f"the weights do not match config.json: they {' and '.join(problems)}; give the "
                "config and the weights of one model"
            )
            raise BadInputError(msg)
        for name, file in self._files.items():
            shape = list(file.get_slice(name).get_shape())
            if shape != expected[name]:
                msg = (
                    f"{name} is {shape} in the weights and {expected[name]} by config.json; give "
                    "the config and the weights of one model"
                )
                raise BadInputError(msg)


def open_weights(path: Path) -> safe_open:
    """Return an opened safetensors file.

    Raises:
        BadInputError: it is truncated, or another kind of file.
    """
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        msg = f"{path.name} is no complete safetensors file ({error}); copy it again"
        raise BadInputError(msg) from error


def some(names: list[str]) -> str:
    """Return the first names and the number of the remaining ones."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def _names(file: safe_open) -> list[str]:
    names: list[str] = file.keys()
    return names
