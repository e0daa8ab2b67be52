"""A model folder's tensors, read one at a time and held to the shape that the config promises."""

# mypy: disable-error-code="no-untyped-call"
# safetensors has no types.

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel

from runners.jobs.runtime import BadInputError

COMPUTED = ("rotary_emb.inv_freq", "masked_bias", "attn.bias")  # stored by old versions, unread
SHOWN = 3


class WeightReader:
    """The tensors of all safetensors files of a folder by name."""

    def __init__(self, folder: Path, model: PreTrainedModel) -> None:
        """Open the files and compare names and shapes with the model's.

        Raises:
            BadInputError: a file is cut off, or the tensors are not those of the config.
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
            BadInputError: it holds NaN or infinity.
        """
        tensor: torch.Tensor = self._files[name].get_tensor(name)
        if not bool(tensor.isfinite().all()):
            msg = f"{name} holds NaN or infinity; train or download the model again"
            raise BadInputError(msg)
        return tensor

    def _compare(self, model: PreTrainedModel) -> None:
        wanted = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
        tied = set(getattr(model, "all_tied_weights_keys", None) or {})
        missing = sorted(set(wanted) - set(self._files) - tied)
        unknown = sorted(set(self._files) - set(wanted))
        if missing or unknown:
            told = [
                f"{word} {some(names)}"
                for word, names in (("lack", missing), ("also hold", unknown))
                if names
            ]
            msg = (
                f"the weights do not match config.json: they {' and '.join(told)}; give the "
                "config and the weights of one model"
            )
            raise BadInputError(msg)
        for name, file in self._files.items():
            found = list(file.get_slice(name).get_shape())
            if found != wanted[name]:
                msg = (
                    f"{name} is {found} in the weights and {wanted[name]} by config.json; give "
                    "the config and the weights of one model"
                )
                raise BadInputError(msg)


def open_weights(path: Path) -> safe_open:
    """Return a safetensors file whose tensors can be read.

    Raises:
        BadInputError: it is cut off, or another kind of file.
    """
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        msg = f"{path.name} is no complete safetensors file ({error}); copy it again"
        raise BadInputError(msg) from error


def some(names: list[str]) -> str:
    """Return the first names, and how many more there are."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def _names(file: safe_open) -> list[str]:
    names: list[str] = file.keys()
    return names
