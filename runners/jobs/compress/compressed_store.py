"""Compressed matrices and finished layers as they are stored, so that a killed job can resume."""

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from compressed_tensors.compressors.pack_quantized.helpers import (
    pack_to_int32,
    unpack_from_int32,
)
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from runners.jobs.compress.quantization import QuantizationGrid, QuantizedMatrix
from runners.jobs.inputs import check_unchanged
from runners.jobspec import CompressSpec

# Sparse storage of a pruned matrix: a bitmask and the nonzero values.


_BITS = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8)


def encode(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the mask (eight weights per byte) and the nonzero values, in row-major order."""
    flat = weight.flatten().cpu()
    mask = flat != 0
    padded = torch.nn.functional.pad(mask.to(torch.uint8), (0, -len(flat) % 8))
    packed = (padded.view(-1, 8) * _BITS).sum(dim=1).to(torch.uint8)
    return {"mask": packed, "values": flat[mask], "shape": torch.tensor(weight.shape)}


def decode(stored: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the matrix that ``encode`` stored, bit-exact."""
    rows, columns = stored["shape"].tolist()
    bits = stored["mask"][:, None].bitwise_and(_BITS[None, :]).ne(0).flatten()
    flat = torch.zeros(rows * columns, dtype=stored["values"].dtype)
    flat[bits[: rows * columns]] = stored["values"]
    return flat.view(rows, columns)


def stored_bytes(weight: torch.Tensor) -> int:
    """Return the bytes of mask and values."""
    nonzero_count = int(torch.count_nonzero(weight))
    return -(-weight.numel() // 8) + nonzero_count * weight.element_size()


# Compressed matrices and the tensors stored for them in a model folder.


Tensors = dict[str, torch.Tensor]
INT_QUANTIZED = "int-quantized"
TOKENS: Mapping[str, object] = {
    "num_bits": 8,
    "type": "int",
    "symmetric": True,
    "strategy": "token",
    "dynamic": True,
}


class CompressedMatrix(Protocol):
    """A compressed matrix."""

    def weight(self) -> torch.Tensor:
        """Return the dequantised matrix."""

    @property
    def stored_bytes(self) -> int:
        """Return the bytes of the compressed form."""


@dataclass(frozen=True)
class PrunedMatrix:
    """A pruned matrix; its compressed form is a bitmask and the nonzero values."""

    values: torch.Tensor

    def weight(self) -> torch.Tensor:
        """Return the matrix."""
        return self.values

    @property
    def stored_bytes(self) -> int:
        """Return the bytes of bitmask and values."""
        return stored_bytes(self.values)


def encoded_tensors(codes: QuantizedMatrix, spec: CompressSpec) -> Tensors:
    """Return the tensors of the spec's compressed-tensors format."""
    if format_of(spec) == INT_QUANTIZED:
        return {"weight": codes.values.cpu(), "weight_scale": codes.scales.cpu().contiguous()}
    return pack_quantized_tensors(codes)


def pack_quantized_tensors(codes: QuantizedMatrix) -> Tensors:
    """Return the tensors of the compressed-tensors format ``pack-quantized``."""
    return {
        "weight_packed": pack_to_int32(codes.values.cpu(), codes.grid.bits),
        "weight_scale": codes.scales.cpu().contiguous(),
        "weight_shape": torch.tensor(codes.values.shape),
    }


def decode_tensors(tensors: Tensors, bits: int) -> QuantizedMatrix:
    """Return the matrix stored by ``encoded_tensors``; the scales tell the group size."""
    scales = tensors["weight_scale"]
    if "weight" in tensors:
        values = tensors["weight"]
    else:
        shape = torch.Size(tensors["weight_shape"].tolist())
        values = unpack_from_int32(tensors["weight_packed"], bits, shape)
    return QuantizedMatrix(
        values, scales, QuantizationGrid(bits, -(-values.shape[1] // scales.shape[1]))
    )


def tensors_of(matrix: CompressedMatrix, spec: CompressSpec) -> Tensors:
    """Return the tensors stored under the module's name: codes, or a plain weight."""
    if isinstance(matrix, QuantizedMatrix):
        return encoded_tensors(matrix, spec)
    return {"weight": matrix.weight().cpu().contiguous()}


def format_of(spec: CompressSpec) -> str:
    """Return the compressed-tensors format of a spec's codes."""
    return "pack-quantized" if spec.has_groups else INT_QUANTIZED


def format_config(spec: CompressSpec, grids: Mapping[str, QuantizationGrid]) -> dict[str, object]:
    """Return config.json's ``quantization_config``; ``grids`` maps matrix names to grids."""
    inputs = {"input_activations": dict(TOKENS)} if spec.rounds_inputs else {}
    sizes = sorted({grid.group_size for grid in grids.values()}) if spec.has_groups else [0]
    groups: dict[str, object] = {}
    for number, size in enumerate(sizes):
        own = [name for name, grid in grids.items() if grid.group_size == size]
        groups[f"group_{number}"] = {
            "targets": own if len(sizes) > 1 else ["Linear"],
            "weights": _weights_config(spec, size),
            "format": format_of(spec),  # else inferred, as int8 with activations
            **inputs,
        }
    return {
        "quant_method": "compressed-tensors",
        "format": format_of(spec),
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": groups,
    }


def _weights_config(spec: CompressSpec, group_size: int) -> dict[str, object]:
    scales: dict[str, object] = {"strategy": "channel"}
    if spec.has_groups:
        scales = {"strategy": "group", "group_size": group_size}
    common = {"num_bits": spec.code_bits, "type": "int", "symmetric": True, "dynamic": False}
    return common | scales


INDEX = "model.safetensors.index.json"
AROUND = "around"  # tensors outside the layers: embeddings, final norm, output


class LayerStore:
    """A folder of finished layers; files written with other settings are ignored.

    ``inputs`` are digests by what the layers are made of; a layer made of others is refused.
    """

    def __init__(
        self, folder: Path, settings: str, inputs: Mapping[str, str] | None = None
    ) -> None:
        """Open an existing folder."""
        self.folder = folder
        self._settings = settings
        self._inputs = inputs or {}
        self.remark = ""  # about layers that say nothing of their inputs

    def write(self, key: str, tensors: Tensors, figures: Mapping[str, float]) -> None:
        """Write one layer's tensors and figures atomically, after fsync."""
        building = self.folder / f".{key}-building"
        metadata = {"settings": self._settings, "figures": json.dumps(dict(figures))}
        metadata["inputs"] = json.dumps(dict(self._inputs))
        save_file(tensors, building, metadata={"format": "pt", **metadata})
        with building.open("rb") as file:
            os.fsync(file.fileno())
        building.rename(self._path(key))

    def read(self, key: str) -> tuple[Tensors, dict[str, float]] | None:
        """Return one layer's tensors and figures; None if not finished with these settings.

        Raises:
            BadInputError: the layer is of another model or text.
        """
        try:
            with safe_open(self._path(key), framework="pt") as file:
                metadata = file.metadata()
                if metadata.get("settings") != self._settings:
                    return None
                before = json.loads(metadata.get("inputs", "{}"))
                where = f"the finished layer {key}"
                self.remark = check_unchanged(where, before, self._inputs) or self.remark
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
        except (FileNotFoundError, SafetensorError):
            return None
        return tensors, json.loads(metadata["figures"])

    def assemble(self, target: Path, keys: list[str]) -> None:
        """Move the layers to a model folder as indexed safetensors shards; delete the store."""
        target.mkdir(parents=True, exist_ok=True)
        places: dict[str, str] = {}
        total = 0
        for number, key in enumerate(keys, start=1):
            name = f"model-{number:05d}-of-{len(keys):05d}.safetensors"
            with safe_open(self._path(key), framework="pt") as file:
                tensors = {each: file.get_tensor(each) for each in file.keys()}  # noqa: SIM118 - no mapping
            save_file(tensors, target / name, metadata={"format": "pt"})
            places |= dict.fromkeys(tensors, name)
            total += sum(each.numel() * each.element_size() for each in tensors.values())
            self._path(key).unlink()
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (target / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True))
        shutil.rmtree(self.folder, ignore_errors=True)

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.safetensors"
