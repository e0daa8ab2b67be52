"""Checks that a folder's weights are complete, finite and match its config.

The library initialises missing weights randomly and only logs a warning; here each of these
problems is an error that names it.
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
    """Return the library's model of a folder; ``is_plain``: its weights are not quantised.

    Raises:
        BadInputError: a file is truncated, a weight is NaN or infinite, or the weights do not
            match the config.
    """
    is_gguf = not any(folder.glob("*.safetensors"))
    if is_gguf:
        options["gguf_file"] = next((each.name for each in folder.glob("*.gguf")), None)
    check_files(folder)
    try:
        loaded_model: Any = AutoModelForCausalLM.from_pretrained(
            str(folder),
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported by name below
            **options,
        )
    except torch.OutOfMemoryError:
        raise
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        msg = f"cannot load {folder} as a causal language model: {first_line(error)}"
        raise BadInputError(msg) from error
    model: PreTrainedModel = loaded_model[0]
    if is_plain and not is_gguf:
        check_loaded(folder, loaded_model[1])
    check_finite(model)
    return model


def check_files(folder: Path) -> None:
    """Reject truncated safetensors files before allocating memory.

    Raises:
        BadInputError: names the file.
    """
    for path in sorted(folder.glob("*.safetensors")):
        open_weights(path)


def check_shapes(folder: Path, skeleton: PreTrainedModel) -> None:
    """Reject stored tensors whose shape differs from the model's.

    Raises:
        BadInputError: names the first ones.
    """
    expected_shapes = {name: list(tensor.shape) for name, tensor in skeleton.state_dict().items()}
    mismatches: list[tuple[str, Any, Any]] = []
    for path in sorted(folder.glob("*.safetensors")):
        file = open_weights(path)
        for name in file.keys():  # noqa: SIM118 - it is no dictionary
            stored = list(file.get_slice(name).get_shape())
            if stored != expected_shapes.get(name, stored):
                mismatches.append((name, stored, expected_shapes[name]))
    check_loaded(folder, {"mismatched_keys": mismatches})


def check_loaded(folder: Path, info: Mapping[str, Any]) -> None:
    """Reject weights that do not match the config, according to the loader's report.

    Raises:
        BadInputError: tensors are missing, unexpected, or of another shape.
    """
    mismatches = sorted(info.get("mismatched_keys") or ())
    shapes = [
        f"{name} as {list(stored)} instead of {list(expected)}"
        for name, stored, expected in mismatches
    ]
    problems = [
        *_listed("lack", info.get("missing_keys") or ()),
        *_listed("also hold", info.get("unexpected_keys") or ()),
        *([f"hold {some(shapes)}"] if shapes else []),
    ]
    if problems:
        msg = (
            f"the weights in {folder.name} do not match its config.json: they "
            f"{' and '.join(problems)}; give the config and the weights of one model"
        )
        raise BadInputError(msg)


def check_finite(model: PreTrainedModel) -> None:
    """Reject a model with NaN or infinity in weights or scales of packed weights.

    Raises:
        BadInputError: names the first such tensor.
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


def _listed(word: str, names: Collection[str]) -> list[str]:
    listed = sorted(name for name in names if not name.endswith(COMPUTED))
    return [f"{word} {some(listed)}"] if listed else []


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, at most 300 characters."""
    return str(error).strip().split("\n", 1)[0][:300]
