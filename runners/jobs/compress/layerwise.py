"""Compress a model layer by layer into a new folder."""

import json
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from runners.jobs.compress.compressed_store import (
    AROUND,
    CompressedMatrix,
    LayerStore,
    Tensors,
    decode_tensors,
    format_config,
    tensors_of,
)
from runners.jobs.compress.layer_methods import METHODS, PREPARATIONS
from runners.jobs.compress.layer_training import TUNED_METHODS, Passage
from runners.jobs.compress.quantization import (
    InputStatistics,
    LayerStatistics,
    QuantizationGrid,
    QuantizedMatrix,
    check_shape_known,
    output_error,
    quantised_inputs,
)
from runners.jobs.corpus import TokenIds, load_corpus, tokenize_documents
from runners.jobs.data_files import open_source
from runners.jobs.evaluation import Perplexity, Windows, held_out_ids, token_nlls, windows_of
from runners.jobs.events import Stages
from runners.jobs.inputs import model_digest
from runners.jobs.loading import (
    BASE_DTYPE,
    SEQUENCES_AT_ONCE,
    Extra,
    Hidden,
    LayerwiseModel,
    LoadedModel,
    load_tokenizer,
    pick_device,
    require_tokenizer,
)
from runners.jobs.memory import PeakMeter
from runners.jobs.named_text import check_long_enough, tokens_of
from runners.jobs.runtime import BadInputError, Job, MissingModelError, weight_file_bytes
from runners.jobspec import CompressSpec, DownloadedData, HostText
from runners.jobspec.compress import FOLDING_METHODS

OnLayer = Callable[[int, int, Mapping[str, float]], None]


@dataclass(frozen=True)
class CompressionResult:
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


class LayerwiseCompression:
    """The layer-by-layer compression of one model by a method such as GPTQ.

    Each layer is compressed on the outputs of the compressed layers before it, and written to the
    store when it is finished, so that a restarted run resumes after the last finished layer.
    """

    def __init__(self, model: LayerwiseModel, spec: CompressSpec, store: LayerStore) -> None:
        """Initialise a run without any compressed layer."""
        self.model = model
        self.spec = spec
        self.store = store
        self.grids: dict[str, QuantizationGrid] = {}  # of the quantised matrices, by full name

    def run(
        self, calibration: torch.Tensor, windows: Windows, on_layer: OnLayer
    ) -> CompressionResult:
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
        return CompressionResult(self._perplexity(streams.held_out, windows), totals)

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
        return quantised_inputs(self.model.linears(index).values())

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
        matrices, trained = self._matrices(index, statistics, passage)
        figures |= trained
        for name, matrix in matrices:
            linear = self.model.linears(index)[name]
            weight = linear.weight.data
            dequantised = matrix.weight().to(weight.dtype)
            figures["weight_error"] += output_error(weight, dequantised, statistics[name].gram)
            figures["compressed_bytes"] += matrix.stored_bytes
            figures["original_matrix_bytes"] += weight.numel() * weight.element_size()
            linear.weight.data = dequantised
            if isinstance(matrix, QuantizedMatrix):
                self.grids[self.model.name_of(index, name)] = matrix.grid
            own = tensors_of(matrix, self.spec)
            tensors |= {self.model.name_of(index, f"{name}.{key}"): t for key, t in own.items()}
        tensors |= self._uncompressed_tensors(index)
        figures["layer_seconds"] = time.monotonic() - started
        return tensors, figures

    def _matrices(
        self, index: int, statistics: LayerStatistics, passage: Passage | None
    ) -> tuple[Iterable[tuple[str, CompressedMatrix]], dict[str, float]]:
        """Return the layer's compressed matrices by name, and figures of a method that trains.

        A method by matrix compresses each when it is read, so that one is held at a time.
        """
        layer, linears, spec = self.model.layers[index], self.model.linears(index), self.spec
        if passage is not None:
            matrices, figures = TUNED_METHODS[spec.method](
                layer, linears, statistics, passage, spec
            )
            return matrices.items(), figures
        compress = METHODS[spec.method]
        each_matrix = (
            (name, compress(linear.weight.data, statistics[name], spec))
            for name, linear in linears.items()
        )
        return each_matrix, {}

    def _float_passage(self, index: int, streams: _Streams) -> Passage | None:
        """Return the float layer's inputs and outputs for a method that trains, else None."""
        if self.spec.method not in TUNED_METHODS:
            return None
        outputs = self._run(index, streams.calibration, streams.extras)
        return Passage(streams.calibration, streams.extras[index], outputs)

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
                codes = decode_tensors(parts, self.spec.code_bits)
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
    return json.dumps(spec.model_dump(mode="json", exclude={"resume_from"}), sort_keys=True)


# Compress a model folder layer by layer into a new folder.


COPIED = ("generation_config.json",)
SPARE_SHARE = 0.1  # spare disk space, as a share of the source's weights


def compress_folder(
    source: Path, target: Path, spec: CompressSpec, stages: Stages, job: Job
) -> CompressionResult:
    """Write the compressed model to ``target``; return its in-memory perplexity and figures.

    Raises:
        BadInputError: a weight is not a number.
    """
    stages = stages.via(job.emitter)
    device = pick_device()
    meter = PeakMeter(device)
    started = time.monotonic()
    tokenizer = load_tokenizer(source)
    model = LayerwiseModel(source, device, BASE_DTYPE)
    loaded = LoadedModel(model.model, tokenizer, device)
    windows, calibration = texts(job, loaded, spec)
    inputs = {"model": model_digest(source), "host's own text": load_corpus().digest}
    if isinstance(spec.calibration_data, DownloadedData):
        with open_source(job, spec.calibration_data) as file:
            inputs["calibration data"] = file.digest()
    store = LayerStore(job.checkpoint_dir, settings_of(spec), inputs)
    compression = LayerwiseCompression(model, spec, store)

    def on_layer(done: int, count: int, figures: Mapping[str, float]) -> None:
        job.emitter.metric(figures, step=done)
        stages.advance(done / count)

    result = compression.run(calibration, windows, on_layer)
    if store.remark:
        job.emitter.log(f"layers of an earlier attempt were used; {store.remark}")
    store.assemble(target, compression.keys)
    (target / "config.json").write_text(json.dumps(compression.config(), indent=2, sort_keys=True))
    if loaded.tokenizer is not None:
        loaded.tokenizer.save_pretrained(str(target))
    for name in COPIED:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
    peak = meter.read()
    measured = {
        "compress_seconds": time.monotonic() - started,
        "compress_peak_memory_bytes": float(peak.bytes),
        "calibration_tokens": float(calibration.numel()),
    }
    return CompressionResult(result.perplexity, {**result.figures, **measured})


def check_folder(source: Path, spec: CompressSpec, job: Job) -> None:
    """Check that the model folder can be compressed.

    Raises:
        BadInputError: the folder's files are inconsistent, the row length is not a multiple of
            the group size, or the disk is too small.
        MissingModelError: the folder has no tokenizer for the calibration text.
    """
    check_disk(job.attempt_dir, weight_file_bytes(source))
    model = LayerwiseModel(source, torch.device("cpu"), BASE_DTYPE)
    loaded = LoadedModel(model.model, load_tokenizer(source), model.device)
    require_tokenizer(loaded, "the calibration text")
    if spec.method in FOLDING_METHODS:
        check_shape_known(model.config.model_type, f"{spec.method} moves scales into the norms of")
    divisor = spec.row_divisor
    for name, linear in model.linears(0).items():
        if linear.in_features % divisor:
            msg = (
                f"{model.name_of(0, name)} has rows of {linear.in_features} weights, which do "
                f"not divide into groups of {divisor}; choose another "
                f"{'group_size' if spec.has_groups else 'pattern'}"
            )
            raise BadInputError(msg)


def texts(job: Job, loaded: LoadedModel, spec: CompressSpec) -> tuple[Windows, torch.Tensor]:
    """Return the held-out windows and calibration samples of the same length.

    Raises:
        MissingModelError: the tokenizer or the data set is not there.
        BadInputError: the data set cannot be read, or is too short.
    """
    corpus = load_corpus()
    tokenizer = require_tokenizer(loaded, "the calibration text")
    held_out = held_out_ids(job, loaded, corpus)
    if held_out is None:
        msg = "the model lost its tokenizer.json while the job ran; put it back"
        raise MissingModelError(msg)
    windows = windows_of(loaded.model.config, held_out, spec.evaluation_tokens)
    if isinstance(spec.calibration_data, HostText):
        ids = tokenize_documents(tokenizer, corpus.train, f"{corpus.digest}/train", job.cache_dir)
    else:
        named = tokens_of(job, spec.calibration_data, tokenizer)
        ids = named.ids
        check_long_enough(named.name, len(ids), windows.length + 1)
        job.emitter.log(f"calibrated on {named.words}")
    return windows, calibration_samples(ids, windows.length, spec.calibration_tokens, spec.seed)


def calibration_samples(ids: TokenIds, length: int, num_tokens: int, seed: int) -> torch.Tensor:
    """Return samples [count, length] of the text at random positions."""
    count = max(1, num_tokens // length)
    starts = np.random.default_rng(seed).integers(0, len(ids) - length, size=count)
    return torch.from_numpy(np.stack([ids[at : at + length] for at in starts]).astype(np.int64))


def check_disk(folder: Path, needed_bytes: int) -> None:
    """Raise BadInputError if the folder's disk lacks ``needed_bytes`` plus ``SPARE_SHARE``."""
    free = shutil.disk_usage(folder).free
    needed = round(needed_bytes * (1 + SPARE_SHARE))
    if free < needed:
        msg = (
            f"the compressed model may take {needed} bytes and {folder} has {free} free; remove "
            "old attempts or put the host's folder on a larger disk"
        )
        raise BadInputError(msg)
