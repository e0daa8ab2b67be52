"""Whether a folder's weights are whole, of the model that its config describes, and numbers.

A library fills what lacks with random numbers and warns in a log that nobody reads; here each of
these is an error that names what is wrong.
"""

# mypy: disable-error-code="no-untyped-call"
# transformers ships types, but leaves some of its functions without.

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, PreTrainedModel

from runners.jobs.memory import parts_of
from runners.jobs.runtime import BadInputError
from runners.jobs.weights import COMPUTED, open_weights, some

PLAIN_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def checked_model(folder: Path, options: dict[str, Any], *, is_plain: bool) -> PreTrainedModel:
    """Return the library's model of a folder; ``is_plain``: its weights are not quantised there.

    Raises:
        BadInputError: a file is cut off, a weight is no number, or the weights are not those of
            the config.
    """
    is_gguf = not any(folder.glob("*.safetensors"))
    if is_gguf:
        options["gguf_file"] = next((each.name for each in folder.glob("*.gguf")), None)
    check_files(folder)
    try:
        found: Any = AutoModelForCausalLM.from_pretrained(
            str(folder),
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # told by name below
            **options,
        )
    except torch.OutOfMemoryError:
        raise
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        msg = f"cannot load {folder} as a causal language model: {first_line(error)}"
        raise BadInputError(msg) from error
    model: PreTrainedModel = found[0]
    if is_plain and not is_gguf:
        check_loaded(folder, found[1])
    check_finite(model)
    return model


def check_files(folder: Path) -> None:
    """Refuse a safetensors file that is cut off, before memory is taken for it.

    Raises:
        BadInputError: with the file's name.
    """
    for path in sorted(folder.glob("*.safetensors")):
        open_weights(path)


def check_shapes(folder: Path, skeleton: PreTrainedModel) -> None:
    """Refuse stored tensors that have another shape than in the model, where both have them.

    Raises:
        BadInputError: with the first ones.
    """
    wanted = {name: list(tensor.shape) for name, tensor in skeleton.state_dict().items()}
    odd: list[tuple[str, Any, Any]] = []
    for path in sorted(folder.glob("*.safetensors")):
        file = open_weights(path)
        for name in file.keys():  # noqa: SIM118 - it is no dictionary
            stored = list(file.get_slice(name).get_shape())
            if stored != wanted.get(name, stored):
                odd.append((name, stored, wanted[name]))
    check_loaded(folder, {"mismatched_keys": odd})


def check_loaded(folder: Path, info: Mapping[str, Any]) -> None:
    """Refuse weights that are not those of the config, by what the loader found of them.

    Raises:
        BadInputError: tensors lack, are too many, or have another shape.
    """
    odd = sorted(info.get("mismatched_keys") or ())
    shapes = [
        f"{name} as {list(stored)} instead of {list(wanted)}" for name, stored, wanted in odd
    ]
    told = [
        *_told("lack", info.get("missing_keys") or ()),
        *_told("also hold", info.get("unexpected_keys") or ()),
        *([f"hold {some(shapes)}"] if shapes else []),
    ]
    if told:
        msg = (
            f"the weights in {folder.name} do not match its config.json: they "
            f"{' and '.join(told)}; give the config and the weights of one model"
        )
        raise BadInputError(msg)


def check_finite(model: PreTrainedModel) -> None:
    """Refuse a model with a weight, or a scale of packed weights, that is no number.

    Raises:
        BadInputError: with the first such tensor.
    """
    for name, parameter in model.named_parameters():
        for tensor in _numbers(parameter):
            if not all(bool(end.isfinite()) for end in torch.aminmax(tensor.detach())):
                msg = f"{name} holds NaN or infinity; train or download the model again"
                raise BadInputError(msg)


def _numbers(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    for part in parts_of(tensor):
        if part.dtype in PLAIN_DTYPES and part.numel() and part.device.type != "meta":
            yield part


def _told(word: str, names: Collection[str]) -> list[str]:
    kept = sorted(name for name in names if not name.endswith(COMPUTED))
    return [f"{word} {some(kept)}"] if kept else []


def first_line(error: Exception) -> str:
    """Return the first line of what an error says, at most 300 characters."""
    return str(error).strip().split("\n", 1)[0][:300]
