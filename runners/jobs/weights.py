"""Reads a model folder's tensors individually, and checks that they are complete and finite."""

import json
import os
import struct
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoModelForCausalLM, PreTrainedModel

from runners.jobs.memory import parts_of
from runners.jobs.pinned import host_copy
from runners.jobs.runtime import BadInputError

# mypy: disable-error-code="no-untyped-call"
# safetensors has no types.


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


# Checks that a folder's weights are complete, finite and match its config.
#
# The library initialises missing weights randomly and only logs a warning; here each of these
# problems is an error that names it.


# mypy: disable-error-code="no-untyped-call"
# transformers ships types, but leaves some of its functions without.


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


# Reads stored tensors into freeable memory instead of mapping their file.
#
# Mapped pages that were read count as the process's memory, which would break memory limits.


STORED_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
BYTES_TOO = {**STORED_DTYPES, "U8": torch.uint8}
HEADER_BYTES = struct.Struct("<Q")
Tensors = Mapping[str, torch.Tensor]


def in_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor in host memory, pinned if it was on a GPU."""
    return host_copy(tensor) if tensor.is_cuda else tensor


def check_finite_tensors(tensors: Tensors, prefix: str) -> None:
    """Raise BadInputError for a tensor with NaN or infinity."""
    for name, tensor in tensors.items():
        if not bool(tensor.isfinite().all()):
            msg = f"{prefix}{name} holds NaN or infinity; train or download the model again"
            raise BadInputError(msg)


class StoredTensors:
    """The tensors of a folder's safetensors files, each read into separate memory."""

    def __init__(self, folder: Path, dtypes: Mapping[str, torch.dtype] = STORED_DTYPES) -> None:
        """Open the files and read the tensors' positions.

        Raises:
            BadInputError: a tensor's dtype is not in ``dtypes`` (floats of 16 or 32 bits).
        """
        self._places: dict[str, _Place] = {}
        for path in sorted(folder.glob("*.safetensors")):
            self._places |= _places(path, dtypes)

    @property
    def names(self) -> list[str]:
        """Return the names of all tensors."""
        return list(self._places)

    def read(self, name: str, room: "Room | None" = None) -> torch.Tensor:
        """Return one tensor, in a buffer of ``room`` if given."""
        place = self._places[name]
        data = room.of(name, place.num_bytes) if room else bytearray(place.num_bytes)
        view = memoryview(data)
        done = 0
        while done < len(data):
            count = os.preadv(place.file, [view[done:]], place.offset + done)
            if not count:
                msg = f"the file of {name} became shorter while it was read; copy it again"
                raise BadInputError(msg)
            done += count
        return torch.frombuffer(data, dtype=place.dtype).reshape(place.shape)


class Room:
    """Reusable read buffers; a read overwrites the previous content.

    New memory is zeroed by the system page by page, which takes as long as reading into it.
    """

    def __init__(self, key: Callable[[str], str]) -> None:
        """``key`` maps tensor names to buffers; names with equal keys share one in turn."""
        self._key = key
        self._held: dict[str, bytearray] = {}

    def of(self, name: str, num_bytes: int) -> bytearray:
        """Return the buffer of a tensor."""
        key = self._key(name)
        if len(self._held.get(key, b"")) != num_bytes:
            self._held[key] = bytearray(num_bytes)
        return self._held[key]


@dataclass(frozen=True)
class _Place:
    file: int
    offset: int
    num_bytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]


def _places(path: Path, dtypes: Mapping[str, torch.dtype]) -> dict[str, _Place]:
    """Return the positions of a file's tensors; safetensors has already validated its header."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)  # whole tensors are read: no readahead
    length = HEADER_BYTES.unpack(os.pread(file, HEADER_BYTES.size, 0))[0]
    header = json.loads(os.pread(file, length, HEADER_BYTES.size))
    start = HEADER_BYTES.size + length
    places = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] not in dtypes:
            known = ", ".join(dtypes)
            msg = f"{name} is stored as {entry['dtype']}; layers are streamed from {known}"
            raise BadInputError(msg)
        begin, end = entry["data_offsets"]
        dtype, shape = dtypes[entry["dtype"]], tuple(entry["shape"])
        places[name] = _Place(file, start + begin, end - begin, dtype, shape)
    return places
