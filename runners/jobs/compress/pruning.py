"""Pruning, the methods of compression, and their stored results."""

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import torch
from compressed_tensors.compressors.pack_quantized.helpers import (
    pack_to_int32,
    unpack_from_int32,
)
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import PretrainedConfig, PreTrainedModel

from runners.jobs.compress.quantization import (
    BLOCK_COLUMNS,
    DAMPING,
    InputStatistics,
    LayerStatistics,
    Linears,
    QuantizationGrid,
    QuantizedMatrix,
    finequant,
    gptq,
    inverse_factor,
    level_by_logarithm,
    quantease,
    quantease_with_outliers,
    round_to_nearest,
    scale_for_rounding,
    smooth,
)
from runners.jobs.inputs import check_unchanged
from runners.jobs.runtime import BadInputError
from runners.jobspec import CompressSpec
from runners.jobspec.compress import PATTERN_BLOCK

# ---------------------------------------------------------------------------
# Pruning: by magnitude, Wanda, SparseGPT, and whole heads and channels (LLM-Pruner).
# ---------------------------------------------------------------------------


Pattern = Literal["unstructured", "2:4"]
BLOCK = PATTERN_BLOCK
KEPT_PER_BLOCK = 2


def magnitude(weight: torch.Tensor, sparsity: float, pattern: Pattern) -> torch.Tensor:
    """Set the smallest weights to zero, ranked over the whole matrix."""
    scores = weight.float().abs()
    if pattern == "2:4":
        return weight * two_of_four(scores)
    count = round(sparsity * scores.numel())
    dropped = torch.topk(scores.flatten(), count, largest=False).indices
    pruned = weight.flatten().clone()
    pruned[dropped] = 0
    return pruned.view_as(weight)


def wanda(
    weight: torch.Tensor, norms: torch.Tensor, sparsity: float, pattern: Pattern
) -> torch.Tensor:
    """Set the weights of smallest |weight| x input norm in each row to zero."""
    scores = weight.float().abs() * norms.float()[None, :]
    if pattern == "2:4":
        return weight * two_of_four(scores)
    count = round(sparsity * scores.shape[1])
    dropped = torch.topk(scores, count, dim=1, largest=False).indices
    return weight.scatter(1, dropped, 0.0)


def two_of_four(scores: torch.Tensor) -> torch.Tensor:
    """Return a mask that keeps the two highest of every four consecutive scores of a row.

    Raises:
        ValueError: the row length is no multiple of 4.
    """
    rows, columns = scores.shape
    if columns % BLOCK:
        msg = f"rows of {columns} weights do not divide into blocks of {BLOCK}"
        raise ValueError(msg)
    blocks = scores.view(rows, -1, BLOCK)
    kept = torch.topk(blocks, KEPT_PER_BLOCK, dim=2).indices
    mask = torch.zeros_like(blocks, dtype=torch.bool).scatter(2, kept, value=True)
    return mask.view(rows, columns)


# SparseGPT: prune block by block and compensate the error in the remaining columns.
#
# Source: Frantar and Alistarh 2023, arXiv:2301.00774, algorithm 1.


def sparsegpt(
    weight: torch.Tensor,
    gram: torch.Tensor,
    sparsity: float,
    pattern: Pattern,
    damping: float = DAMPING,
) -> torch.Tensor:
    """Prune a matrix to the pattern with least output error on the text of ``gram``.

    Unstructured pruning removes the share ``sparsity`` from each block of 128 columns.

    Raises:
        ValueError: the pattern is 2:4 and the row length is no multiple of 4.
    """
    remaining = weight.float().clone()
    remaining[:, gram.diagonal() == 0] = 0.0
    factor = inverse_factor(gram, damping)
    columns = remaining.shape[1]
    if pattern == "2:4" and columns % BLOCK:
        two_of_four(remaining)
    for begin in range(0, columns, BLOCK_COLUMNS):
        end = min(begin + BLOCK_COLUMNS, columns)
        saliency = _saliency(remaining[:, begin:end], factor[begin:end, begin:end])
        mask = _keep_mask(saliency, sparsity, pattern)
        errors = torch.zeros(len(remaining), end - begin, device=remaining.device)
        for column in range(begin, end):
            at = column - begin
            if pattern == "2:4" and at % BLOCK == 0:
                four = slice(column, column + BLOCK)
                mask[:, at : at + BLOCK] = two_of_four(
                    _saliency(remaining[:, four], factor[four, four])
                )
            pruned = torch.where(mask[:, at], remaining[:, column], 0.0)
            error = (remaining[:, column] - pruned) / factor[column, column]
            remaining[:, column + 1 : end] -= (
                error[:, None] * factor[column, column + 1 : end][None]
            )
            remaining[:, column] = pruned
            errors[:, at] = error
        remaining[:, end:] -= errors @ factor[begin:end, end:]
    return remaining.to(weight.dtype)


def _saliency(block: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    return block.square() / factor.diagonal().square()[None, :]


def _keep_mask(saliency: torch.Tensor, sparsity: float, pattern: Pattern) -> torch.Tensor:
    if pattern == "2:4":
        return torch.ones_like(saliency, dtype=torch.bool)
    count = round(sparsity * saliency.numel())
    mask = torch.ones(saliency.numel(), dtype=torch.bool, device=saliency.device)
    mask[torch.topk(saliency.flatten(), count, largest=False).indices] = False
    return mask.view_as(saliency)


# LLM-Pruner: remove whole heads and feed-forward channels, the same number in each layer.
#
# Coupled weights are removed together: a channel is a row of gate_proj and up_proj and a column of
# down_proj; query heads are removed with their shared key-value head. The importance of a group is
# the sum of |weight x gradient| over it on calibration text. All layers have the same shape, so
# any engine loads the folder. Source: Ma et al. 2023, arXiv:2305.11627, sections 3.1 and 3.2
# (element-wise, first order).


CHANNEL_MULTIPLE = 32  # for kernels and quantisation groups
Scores = dict[str, torch.Tensor]


@dataclass(frozen=True)
class PrunedSizes:
    """Channels and key-value heads kept in each layer."""

    channels: int
    key_value_heads: int


def pruned_sizes(config: PretrainedConfig, share: float) -> PrunedSizes:
    """Return the sizes kept when about ``share`` of heads and channels is removed.

    Raises:
        BadInputError: the share rounds to removing nothing.
    """
    channels, heads = int(config.intermediate_size), key_value_heads(config)
    multiple = min(CHANNEL_MULTIPLE, channels)
    sizes = PrunedSizes(
        max(multiple, round(channels * (1 - share) / multiple) * multiple),
        max(1, round(heads * (1 - share))),
    )
    if sizes == PrunedSizes(channels, heads):
        msg = (
            f"sparsity {share:g} removes nothing of {channels} channels (in steps of {multiple}) "
            f"and {heads} heads of keys; choose a larger share"
        )
        raise BadInputError(msg)
    return sizes


def taylor_scores(model: PreTrainedModel, calibration: torch.Tensor, at_once: int) -> Scores:
    """Return |weight x gradient| of every layer matrix; clear the gradients afterwards."""
    matrices = {n: p for n, p in model.named_parameters() if n.endswith("_proj.weight")}
    model.zero_grad(set_to_none=True)
    with torch.enable_grad():
        for ids in torch.split(calibration, at_once):
            model(ids, labels=ids, use_cache=False).loss.backward()
    scores = {
        name: (each.detach() * each.grad).abs()
        for name, each in matrices.items()
        if each.grad is not None
    }
    model.zero_grad(set_to_none=True)
    return scores


@torch.no_grad()
def prune(model: PreTrainedModel, scores: Scores, sizes: PrunedSizes) -> None:
    """Prune the model and its config to the groups of highest score, in place."""
    config = model.config
    heads, groups = int(config.num_attention_heads), key_value_heads(config)
    head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    for prefix, layer in _layers(model):
        own = {n.removeprefix(prefix): each for n, each in scores.items() if n.startswith(prefix)}
        _cut_channels(layer, own, sizes.channels)
        _cut_heads(layer, own, (groups, heads // groups, head_dim), sizes.key_value_heads)
    config.head_dim = head_dim
    config.intermediate_size = sizes.channels
    config.num_key_value_heads = sizes.key_value_heads
    config.num_attention_heads = sizes.key_value_heads * (heads // groups)


def _cut_channels(layer: torch.nn.Module, scores: Scores, count: int) -> None:
    gate, up, down = (scores[f"mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
    kept = _highest(gate.sum(dim=1) + up.sum(dim=1) + down.sum(dim=0), count)
    for name in ("gate", "up"):
        keep_slices(layer, f"mlp.{name}_proj", kept, 0)
    keep_slices(layer, "mlp.down_proj", kept, 1)


def _cut_heads(
    layer: torch.nn.Module, scores: Scores, shape: tuple[int, int, int], count: int
) -> None:
    groups, queries, head_dim = shape
    q, k, v = (scores[f"self_attn.{name}_proj.weight"].sum(dim=1) for name in "qkv")
    o = scores["self_attn.o_proj.weight"].sum(dim=0)
    kept = _highest(
        torch.stack([each.view(groups, -1).sum(dim=1) for each in (q, k, v, o)]).sum(dim=0), count
    )
    shared = group_indices(kept, head_dim)
    own = group_indices(kept, queries * head_dim)
    for name, places, side in (("q", own, 0), ("k", shared, 0), ("v", shared, 0), ("o", own, 1)):
        keep_slices(layer, f"self_attn.{name}_proj", places, side)


def keep_slices(layer: torch.nn.Module, name: str, places: torch.Tensor, side: int) -> None:
    """Keep some rows (side 0, with their bias) or columns (side 1) of a linear layer."""
    linear = layer.get_submodule(name)
    assert isinstance(linear, torch.nn.Linear)  # noqa: S101 - the names are those of the scores
    linear.weight = torch.nn.Parameter(linear.weight.index_select(side, places).contiguous())
    if side == 0 and linear.bias is not None:
        linear.bias = torch.nn.Parameter(linear.bias.index_select(0, places))
    linear.out_features, linear.in_features = linear.weight.shape


def _highest(scores: torch.Tensor, count: int) -> torch.Tensor:
    return torch.topk(scores, count).indices.sort().values


def group_indices(groups: torch.Tensor, width: int) -> torch.Tensor:
    """Return the element indices of the given groups of ``width`` elements."""
    return (groups[:, None] * width + torch.arange(width, device=groups.device)).flatten()


def _layers(model: PreTrainedModel) -> list[tuple[str, torch.nn.Module]]:
    count = int(model.config.num_hidden_layers)
    return [
        (f"model.layers.{at}.", model.get_submodule(f"model.layers.{at}")) for at in range(count)
    ]


def key_value_heads(config: PretrainedConfig) -> int:
    """Return the number of key-value heads; without GQA, the number of attention heads."""
    return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)


# ---------------------------------------------------------------------------
# Compressed matrices and finished layers as they are stored, so that a killed job can resume.
# ---------------------------------------------------------------------------


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


# ---------------------------------------------------------------------------
# Registry of the functions that compress a matrix or prepare a layer, by method name.
# ---------------------------------------------------------------------------


Prepare = Callable[[torch.nn.Module, Linears, LayerStatistics, CompressSpec], None]
Method = Callable[[torch.Tensor, InputStatistics, CompressSpec], CompressedMatrix]


def grid_of(spec: CompressSpec) -> QuantizationGrid:
    """Return the quantisation grid of a spec."""
    return QuantizationGrid(spec.code_bits, spec.group_size)


def _by_row(
    weight: torch.Tensor, _statistics: InputStatistics, spec: CompressSpec
) -> CompressedMatrix:
    return round_to_nearest(
        weight, QuantizationGrid(spec.code_bits, weight.shape[1]), weight.dtype
    )


def _nearest(
    weight: torch.Tensor, _statistics: InputStatistics, spec: CompressSpec
) -> CompressedMatrix:
    return round_to_nearest(weight, grid_of(spec), weight.dtype)


def _gptq(
    weight: torch.Tensor, statistics: InputStatistics, spec: CompressSpec
) -> CompressedMatrix:
    return gptq(
        weight,
        statistics.gram,
        grid_of(spec),
        weight.dtype,
        is_act_ordered=spec.is_act_ordered,
        damping=spec.damping,
    )


def _finequant(
    weight: torch.Tensor, _statistics: InputStatistics, spec: CompressSpec
) -> CompressedMatrix:
    return finequant(weight, grid_of(spec), weight.dtype, spec.least_gain)


def _quantease(
    weight: torch.Tensor, statistics: InputStatistics, spec: CompressSpec
) -> CompressedMatrix:
    grid, dtype = grid_of(spec), weight.dtype
    if spec.outlier_share:
        share = spec.outlier_share
        return quantease_with_outliers(weight, statistics.gram, grid, dtype, share=share)
    return quantease(weight, statistics.gram, grid, dtype)


def _magnitude(
    weight: torch.Tensor, _statistics: InputStatistics, spec: CompressSpec
) -> CompressedMatrix:
    return PrunedMatrix(magnitude(weight, spec.sparsity, spec.pattern))


def _wanda(
    weight: torch.Tensor, statistics: InputStatistics, spec: CompressSpec
) -> CompressedMatrix:
    return PrunedMatrix(wanda(weight, statistics.norms, spec.sparsity, spec.pattern))


def _sparsegpt(
    weight: torch.Tensor, statistics: InputStatistics, spec: CompressSpec
) -> CompressedMatrix:
    return PrunedMatrix(sparsegpt(weight, statistics.gram, spec.sparsity, spec.pattern))


def _awq(
    layer: torch.nn.Module, linears: Linears, statistics: LayerStatistics, spec: CompressSpec
) -> None:
    scale_for_rounding(layer, linears, statistics, grid_of(spec))


def _smoothed(
    layer: torch.nn.Module, linears: Linears, statistics: LayerStatistics, spec: CompressSpec
) -> None:
    smooth(layer, linears, statistics, spec.smoothing)


def _levelled(
    layer: torch.nn.Module, linears: Linears, statistics: LayerStatistics, _spec: CompressSpec
) -> None:
    level_by_logarithm(layer, linears, statistics)


METHODS: Mapping[str, Method] = {
    "rtn": _nearest,
    "gptq": _gptq,
    "quantease": _quantease,
    "magnitude": _magnitude,
    "wanda": _wanda,
    "sparsegpt": _sparsegpt,
    "awq": _nearest,
    "smoothquant": _by_row,
    "fptq": _nearest,
    "norm_tweaking": _gptq,
    "finequant": _finequant,
}
PREPARATIONS: Mapping[str, Prepare] = {
    "awq": _awq,
    "smoothquant": _smoothed,
    "fptq": _levelled,
}
