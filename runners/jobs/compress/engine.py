"""Apply a method to a whole model, layer by layer, and compute its perplexity in the same pass.

Calibration and held-out activations pass through the layers in parallel: each layer gets both as
computed by the compressed layers before it.
"""

import json
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from runners.jobs.compress.activations import rounded_inputs
from runners.jobs.compress.grid import Codes, Grid
from runners.jobs.compress.methods import METHODS, PREPARATIONS
from runners.jobs.compress.norms import Passage, tweak_norms
from runners.jobs.compress.results import Tensors, decoded, format_config, tensors_of
from runners.jobs.compress.statistics import InputStatistics, output_error
from runners.jobs.compress.store import AROUND, LayerStore
from runners.jobs.evaluation import Perplexity, Windows, token_nlls
from runners.jobs.layers import SEQUENCES_AT_ONCE, Extra, Hidden, LayerwiseModel
from runners.jobspec import CompressSpec

OnLayer = Callable[[int, int, Mapping[str, float]], None]


@dataclass(frozen=True)
class Compressed:
    """Results of compressing a model, in addition to its files."""

    perplexity: Perplexity
    figures: dict[str, float]


@dataclass
class _Streams:
    """Activations of the calibration and held-out text at the current layer."""

    calibration: Hidden
    held_out: Hidden
    extras: list[Extra]
    held_out_extras: list[Extra]


class Engine:
    """One run of a method over a model folder."""

    def __init__(self, model: LayerwiseModel, spec: CompressSpec, store: LayerStore) -> None:
        """Initialise a run without any compressed layer."""
        self.model = model
        self.spec = spec
        self.store = store
        self.grids: dict[str, Grid] = {}  # of the quantised matrices, by full name

    def run(self, calibration: torch.Tensor, windows: Windows, on_layer: OnLayer) -> Compressed:
        """Compress every unfinished layer; return the perplexity on the windows and totals."""
        held_out_ids = torch.from_numpy(windows.ids)
        inputs, extras = self.model.embed(calibration)
        held_out, held_out_extras = self.model.embed(held_out_ids)
        streams = _Streams(inputs, held_out, extras, held_out_extras)
        count = len(self.model.layers)
        totals: dict[str, float] = {}
        for index in range(count):
            figures = self._process_layer(index, streams)
            totals = {name: totals.get(name, 0.0) + value for name, value in figures.items()}
            on_layer(index + 1, count, figures)
        around = {name: self.model.read(name) for name in self.model.names_around()}
        self.store.write(AROUND, around, {})
        return Compressed(self._perplexity(streams.held_out, windows), totals)

    @property
    def keys(self) -> list[str]:
        """Return the store's keys in model order."""
        return [AROUND, *(_key(index) for index in range(len(self.model.layers)))]

    def config(self) -> dict[str, Any]:
        """Return config.json of the compressed model."""
        config: dict[str, Any] = self.model.config.to_dict()
        config["dtype"] = str(self.model.dtype).removeprefix("torch.")
        if self.spec.is_packed:
            config["quantization_config"] = format_config(self.spec, self.grids)
        return config

    # One layer

    def _process_layer(self, index: int, streams: _Streams) -> dict[str, float]:
        self.model.load_layer(index)
        done = self.store.read(_key(index))
        if done is None:
            tensors, figures = self._compress(index, streams)
            self.store.write(_key(index), tensors, figures)
        else:
            tensors, figures = done
            self._load_compressed(index, tensors)
        with self._quantised_inputs(index):
            streams.calibration = self._run(index, streams.calibration, streams.extras)
            streams.held_out = self._run(index, streams.held_out, streams.held_out_extras)
        self.model.drop_layer(index)
        return figures

    def _run(self, index: int, hidden: Hidden, extras: list[Extra]) -> Hidden:
        return self.model.run(index, hidden, extras[index])

    def _quantised_inputs(self, index: int) -> AbstractContextManager[None]:
        """Return a context that quantises the layer's inputs if the spec requires it."""
        if not self.spec.rounds_inputs:
            return nullcontext()
        return rounded_inputs(self.model.linears(index).values())

    @torch.no_grad()
    def _compress(self, index: int, streams: _Streams) -> tuple[Tensors, dict[str, float]]:
        """Compress the loaded layer's matrices in place; return its tensors and figures."""
        started = time.monotonic()
        statistics = self._statistics(index, streams)
        figures = {"weight_error": 0.0, "compressed_bytes": 0.0, "original_matrix_bytes": 0.0}
        tensors: Tensors = {}
        passage = self._float_passage(index, streams)
        prepare = PREPARATIONS.get(self.spec.method)
        if prepare is not None:
            prepare(self.model.layers[index], self.model.linears(index), statistics, self.spec)
        for name, linear in self.model.linears(index).items():
            weight = linear.weight.data
            matrix = METHODS[self.spec.method](weight, statistics[name], self.spec)
            dequantised = matrix.weight().to(weight.dtype)
            figures["weight_error"] += output_error(weight, dequantised, statistics[name].gram)
            figures["compressed_bytes"] += matrix.stored_bytes
            figures["original_matrix_bytes"] += weight.numel() * weight.element_size()
            linear.weight.data = dequantised
            if isinstance(matrix, Codes):
                self.grids[self.model.name_of(index, name)] = matrix.grid
            own = tensors_of(matrix, self.spec)
            tensors |= {self.model.name_of(index, f"{name}.{key}"): t for key, t in own.items()}
        if passage is not None:
            figures |= self._tweak(index, passage)
        tensors |= self._uncompressed_tensors(index)
        figures["layer_seconds"] = time.monotonic() - started
        return tensors, figures

    def _float_passage(self, index: int, streams: _Streams) -> Passage | None:
        """Return the float layer's inputs and outputs for norm tweaking, else None."""
        if self.spec.method != "norm_tweaking":
            return None
        outputs = self._run(index, streams.calibration, streams.extras)
        return Passage(streams.calibration, streams.extras[index], outputs)

    def _tweak(self, index: int, passage: Passage) -> dict[str, float]:
        return tweak_norms(
            self.model.layers[index],
            passage,
            passes=self.spec.tweak_passes,
            learning_rate=self.spec.tweak_learning_rate,
        )

    def _statistics(self, index: int, streams: _Streams) -> dict[str, InputStatistics]:
        linears = self.model.linears(index)
        statistics = {name: InputStatistics(each.in_features) for name, each in linears.items()}

        def hook_of(name: str) -> Callable[..., None]:
            return lambda _module, inputs: statistics[name].add(inputs[0])

        with ExitStack() as hooks:
            for name, linear in linears.items():
                hooks.callback(linear.register_forward_pre_hook(hook_of(name)).remove)
            for batch in torch.split(streams.calibration, SEQUENCES_AT_ONCE):
                self.model.run(index, batch, streams.extras[index])
        return statistics

    def _uncompressed_tensors(self, index: int) -> Tensors:
        """Return the layer's norms and biases under their full names."""
        rest = self._select_uncompressed(index, self.model.layers[index].state_dict())
        return {
            self.model.name_of(index, name): each.detach().cpu().contiguous()
            for name, each in rest.items()
        }

    def _select_uncompressed(self, index: int, tensors: Mapping[str, torch.Tensor]) -> Tensors:
        matrices = {f"{name}.weight" for name in self.model.linears(index)}
        known = set(self.model.layers[index].state_dict()) - matrices
        return {name: each for name, each in tensors.items() if name in known}

    def _load_compressed(self, index: int, tensors: Tensors) -> None:
        """Load the weights that an earlier run of this job compressed into the layer."""
        prefix = self.model.name_of(index, "")
        own = {name.removeprefix(prefix): each for name, each in tensors.items()}
        for name, linear in self.model.linears(index).items():
            parts = {
                key.removeprefix(f"{name}."): each
                for key, each in own.items()
                if key.startswith(f"{name}.")
            }
            if self.spec.is_packed:
                codes = decoded(parts, self.spec.code_bits)
                self.grids[self.model.name_of(index, name)] = codes.grid
                dequantised = codes.weight()
            else:
                dequantised = parts["weight"]
            linear.weight.data = dequantised.to(linear.weight.device, linear.weight.dtype)
        plain = self._select_uncompressed(index, own)
        self.model.layers[index].load_state_dict(plain, strict=False)

    def _perplexity(self, hidden: Hidden, windows: Windows) -> Perplexity:
        ids = torch.from_numpy(windows.ids)
        parts = [
            token_nlls(
                self.model.logits(hidden[at : at + 1], ids[at : at + 1], windows.stride + 1),
                ids[at : at + 1],
                windows.stride,
            )
            for at in range(len(ids))
        ]
        means = torch.cat(parts).mean(dim=1).numpy()
        return Perplexity(means, means.size * windows.stride, windows.length)


def _key(index: int) -> str:
    return f"layer-{index:05d}"


def settings_of(spec: CompressSpec) -> str:
    """Return the settings that must match for reusing a finished layer."""
    return json.dumps(spec.model_dump(mode="json"), sort_keys=True)
