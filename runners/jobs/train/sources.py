"""Training data: its sources, and labelled text."""

# mypy: disable-error-code="no-untyped-call"
# transformers ships types, but leaves some of its functions untyped.
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from runners.datasets.conversations import DataError
from runners.datasets.records import (
    LabelledSample,
    Record,
    digest_of,
    left_out_words,
    part_words,
)
from runners.jobs.chat_template import num_repeated_bos, repeated_bos_words
from runners.jobs.corpus import VALIDATION_SEQUENCES, TokenIds, updated_weights
from runners.jobs.data_files import DataFile, open_source
from runners.jobs.runtime import BadInputError, Job, MissingModelError
from runners.jobs.train.checkpoint import TrainState
from runners.jobs.train.rows import (
    BLOCK_ROWS,
    IGNORED,
    Batch,
    Batches,
    DataBatches,
    Numbers,
    Rows,
    Segments,
    TextBatches,
    WeightedRows,
    padded_length,
    padded_lengths,
    rows_of,
    segments_of,
    windows_of,
    with_growing_lengths,
)
from runners.jobs.train.tokenised_samples import (
    Documents,
    Split,
    TokenisedFile,
    batched_records,
    tokenised_file,
)
from runners.jobspec import (
    HostText,
    HubData,
    MixedData,
    SampleOptions,
    TrainSpec,
)
from runners.jobspec.base import MAX_CLASSES, sources_of, weights_of

# ---------------------------------------------------------------------------
# Labelled text as rows: one padded sample per row, with an attention mask.
# ---------------------------------------------------------------------------


LEAST_CLASSES = 2
EVALUATED_SAMPLES = 256  # at most, spread evenly over the held-out samples


class Samples(NamedTuple):
    """Tokenised samples, concatenated, each with its class.

    ``ids`` [tokens]; ``offsets`` [samples + 1]: start of each sample; ``labels`` [samples].
    """

    ids: TokenIds
    offsets: Numbers
    labels: Numbers

    def __len__(self) -> int:
        """Return how many samples there are."""
        return len(self.labels)


class Classes(NamedTuple):
    """A file of labelled text: its class names, and its training and held-out samples."""

    names: tuple[str, ...]
    train: Samples
    held_out: Samples
    num_empty: int
    left_out: Mapping[str, int]  # records by the field of them that is not read
    num_cut: int


class LabelledRows:
    """Rows of one sample each."""

    def __init__(self, samples: Samples) -> None:
        """Use one row per sample."""
        self._samples = samples
        self.lengths: Numbers = np.diff(samples.offsets)

    def __len__(self) -> int:
        """Return how many rows there are."""
        return len(self._samples)

    @property
    def width(self) -> int:
        """Return the tokens of the longest row."""
        return int(self.lengths.max(initial=0))

    def fill(self, row: int, batch: Batch, at: int) -> None:
        """Write a row's tokens, class and mask into row ``at`` of a blank batch."""
        begin, end = (int(each) for each in self._samples.offsets[row : row + 2])
        ids = np.asarray(self._samples.ids[begin:end], dtype=np.int64)
        batch.input_ids[at, : end - begin] = torch.from_numpy(ids)
        batch.labels[at] = int(self._samples.labels[row])
        if batch.attention_mask is not None:
            batch.attention_mask[at, : end - begin] = 1


def padding_batch(rows: int, length: int, padding_id: int) -> Batch:
    """Return a batch of padding: [rows, length] tokens and mask, [rows] classes."""
    return Batch(
        torch.full((rows, length), padding_id),
        torch.zeros(rows, dtype=torch.int64),
        attention_mask=torch.zeros((rows, length), dtype=torch.int64),
    )


class LabelledBatches(DataBatches):
    """Micro-batches of labelled rows, padded to the longest row in each."""

    def __init__(self, rows: LabelledRows, spec: TrainSpec, padding_id: int) -> None:
        """Walk the rows in orders given by the spec's seed; pad with ``padding_id``."""
        padded = spec.model_copy(update={"samples": SampleOptions(rows="padded")})
        super().__init__([WeightedRows(rows)], padded, padding_id)

    def _blank(self, rows: int, length: int) -> Batch:
        return padding_batch(rows, length, self._padding_id)


class ClassificationQuality(NamedTuple):
    """Classification quality: mean loss per sample in nats, accuracy and macro F1."""

    loss: float
    accuracy: float
    f1: float


class LabelEvaluator:
    """Evaluates a model on held-out labelled samples."""

    def __init__(self, samples: Samples, num_classes: int, batch_size: int, padding: int) -> None:
        """Evaluate at most ``EVALUATED_SAMPLES`` samples, in batches."""
        self._rows, self._num_classes = LabelledRows(samples), num_classes
        evenly = np.linspace(0, len(samples) - 1, EVALUATED_SAMPLES)
        self._row_numbers = np.unique(np.round(evenly).astype(np.int64))
        self._batch_size, self._padding = batch_size, padding
        self._lengths = padded_lengths(self._rows.width)

    def quality(self, model: torch.nn.Module) -> ClassificationQuality:
        """Return the model's quality on the samples."""
        logits, labels = self._predictions(model)
        loss = torch.nn.functional.cross_entropy(logits, labels)
        predicted, expected = logits.argmax(dim=-1).numpy(), labels.numpy()
        accuracy = float((predicted == expected).mean())
        return ClassificationQuality(
            float(loss), accuracy, macro_f1(expected, predicted, self._num_classes)
        )

    def loss(self, model: torch.nn.Module) -> float:
        """Return the mean loss per sample, in nats."""
        return self.quality(model).loss

    def validation(self, model: torch.nn.Module) -> dict[str, float]:
        """Return the validation metrics that are charted during training."""
        quality = self.quality(model)
        return {"validation_loss": quality.loss, "accuracy": quality.accuracy, "f1": quality.f1}

    def result(self, model: torch.nn.Module) -> dict[str, float]:
        """Return the metrics of the result."""
        quality = self.quality(model)
        return {"data_loss": quality.loss, "accuracy": quality.accuracy, "f1": quality.f1}

    @torch.no_grad()
    def _predictions(self, model: torch.nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits [samples, classes] and classes [samples], on the CPU in fp32."""
        was_training = model.training
        torch.nn.Module.eval(model)
        device = next(model.parameters()).device
        logits, labels = [], []
        for first in range(0, len(self._row_numbers), self._batch_size):
            rows = self._row_numbers[first : first + self._batch_size]
            longest = int(self._rows.lengths[rows].max())
            batch = padding_batch(len(rows), padded_length(longest, self._lengths), self._padding)
            for at, row in enumerate(rows.tolist()):
                self._rows.fill(row, batch, at)
            batch = batch.to(device)
            logits.append(model(**batch.inputs).logits.float().cpu())
            labels.append(batch.labels.cpu())
        torch.nn.Module.train(model, was_training)
        return torch.cat(logits), torch.cat(labels)


def macro_f1(labels: Numbers, predictions: Numbers, num_classes: int) -> float:
    """Return the unweighted mean of the classes' F1 scores.

    A class that occurs in neither labels nor predictions is left out.
    """
    scores = []
    for each in range(num_classes):
        hits = int(((labels == each) & (predictions == each)).sum())
        total = int((labels == each).sum()) + int((predictions == each).sum())
        if total:
            scores.append(2 * hits / total)
    return float(np.mean(scores)) if scores else 0.0


# From a file to samples


def read_classes(data: DataFile, tokenizer: PreTrainedTokenizerFast, longest: int) -> Classes:
    """Return a file of labelled text in tokens, each sample of at most ``longest``.

    Raises:
        BadInputError: the file, or one of its records, is invalid.
    """
    try:
        return _read(data, tokenizer, longest)
    except DataError as error:
        raise BadInputError(str(error)) from None


def _read(data: DataFile, tokenizer: PreTrainedTokenizerFast, longest: int) -> Classes:
    reader = data.reader("classification")
    counts: Counter[str] = Counter()
    split = Split(_counted(data.records(reader), counts), data.name)
    names = tuple(sorted(counts))
    _check_classes(data.name, names)
    number = {name: at for at, name in enumerate(names)}
    parts = {True: _Part(), False: _Part()}
    for handful in batched_records(data.records(data.reader("classification"))):
        samples = [each.sample for each in handful if isinstance(each.sample, LabelledSample)]
        for sample, ids in zip(samples, _token_ids(samples, tokenizer), strict=True):
            part = parts[split.is_held_out(digest_of(sample))]
            part.add(ids, number[sample.label], longest)
    num_cut = sum(part.num_cut for part in parts.values())
    return Classes(
        names, parts[False].made(), parts[True].made(), reader.num_empty, reader.left_out, num_cut
    )


def _counted(records: Iterator[Record], counts: Counter[str]) -> Iterator[bytes]:
    for record in records:
        if isinstance(record.sample, LabelledSample):
            counts[record.sample.label] += 1
        yield digest_of(record.sample)


def _check_classes(name: str, names: Sequence[str]) -> None:
    if len(names) < LEAST_CLASSES:
        raise DataError(
            f"{name}: every “label” is {names[0]!r}; give at least {LEAST_CLASSES} classes"
        )
    if len(names) > MAX_CLASSES:
        raise DataError(
            f"{name} has {len(names):,} different labels, and the most is {MAX_CLASSES:,}; a "
            "label is a class, not a name of each text"
        )


def _token_ids(
    samples: Sequence[LabelledSample], tokenizer: PreTrainedTokenizerFast
) -> list[list[int]]:
    """Return each text in tokens, starting with the token that the head reads, as BERT's [CLS]."""
    ids: list[list[int]] = tokenizer([each.text for each in samples], verbose=False)["input_ids"]
    first = tokenizer.cls_token_id
    if first is None:
        first = tokenizer.bos_token_id
    if first is None:
        return ids
    begun = (each[num_repeated_bos(each, first) :] for each in ids)
    return [each if each[:1] == [first] else [int(first), *each] for each in begun]


class _Part:
    """One part of a file while it is read."""

    def __init__(self) -> None:
        self.num_cut = 0
        self._ids: list[npt.NDArray[np.int32]] = [np.zeros(0, dtype=np.int32)]
        self._lengths: list[int] = []
        self._labels: list[int] = []

    def add(self, ids: list[int], label: int, longest: int) -> None:
        """Add a sample's beginning and its last token, which may be the tokenizer's end token."""
        if len(ids) > longest:
            ids = [*ids[: longest - 1], ids[-1]] if longest > 1 else ids[:1]
            self.num_cut += 1
        self._ids.append(np.asarray(ids, dtype=np.int32))
        self._lengths.append(len(ids))
        self._labels.append(label)

    def made(self) -> Samples:
        offsets = np.concatenate([[0], np.cumsum(self._lengths)]).astype(np.int64)
        return Samples(np.concatenate(self._ids), offsets, np.asarray(self._labels, np.int64))


# ---------------------------------------------------------------------------
# The data sources of a training, and the weights of their dynamic mixture.
# ---------------------------------------------------------------------------


HELD_OUT_ROWS = 64  # at most, of each file
ONE_A_ROW = SampleOptions(rows="padded")


@dataclass
class HeldOutRows:
    """Held-out rows, and a model's loss on their labels."""

    rows: list[Rows] = field(default_factory=list)

    @torch.no_grad()
    def loss(self, model: PreTrainedModel) -> float:
        """Return the mean loss per label, in nats."""
        was_training = model.training
        torch.nn.Module.eval(model)
        total = labels = 0.0
        for rows in self.rows:
            for row in range(len(rows)):
                row_loss, count = _loss(model, rows, row)
                total, labels = total + row_loss, labels + count
        torch.nn.Module.train(model, was_training)
        return total / labels

    def validation(self, model: PreTrainedModel) -> dict[str, float]:
        """Return the validation metrics that are charted during training."""
        return {"validation_loss": self.loss(model)}

    def result(self, model: PreTrainedModel) -> dict[str, float]:
        """Return the metrics of the result."""
        loss = self.loss(model)
        perplexity = math.exp(min(loss, 50.0))  # capped to avoid overflow
        return {"data_loss": loss, "data_perplexity": perplexity}


def _loss(model: PreTrainedModel, rows: Rows, row: int) -> tuple[float, int]:
    shape = (1, int(rows.lengths[row]))
    batch = Batch(torch.zeros(shape, dtype=torch.int64), torch.full(shape, IGNORED))
    rows.fill(row, batch, 0)
    batch = batch.to(model.device)
    logits = model(input_ids=batch.input_ids, use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(
        logits.float().flatten(0, 1), batch.labels.flatten(), ignore_index=IGNORED, reduction="sum"
    )
    return float(loss), batch.num_labels


@dataclass
class Data:
    """A training's batches, its held-out data, and figures and notes about both."""

    batches: Batches
    evaluated_on: HeldOutRows | LabelEvaluator | None = (
        None  # None: only the host's own text evaluates
    )
    digest: str = ""  # of all files; equal on all ranks
    measured: dict[str, float] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    classes: tuple[str, ...] = ()  # class names, in the order of the head's outputs
    by_source: list[tuple[str, HeldOutRows]] = field(
        default_factory=list
    )  # a few held-out rows of each source


class OwnText(NamedTuple):
    """The host's own text in tokens: training and held-out part."""

    train: TokenIds
    held_out: TokenIds


def read_data(job: Job, spec: TrainSpec, tokenizer: PreTrainedTokenizerFast, own: OwnText) -> Data:
    """Return a training's data.

    Raises:
        MissingModelError: a file does not exist.
        BadInputError: a file, or one of its records, is invalid.
    """
    if isinstance(spec.data, HostText):
        return Data(with_growing_lengths(spec, lambda each: TextBatches(own.train, each)))
    streams: list[WeightedRows] = []
    summary = _SourceSummary()
    for source, weight in zip(sources_of(spec.data), weights_of(spec.data), strict=True):
        if isinstance(source, HostText):
            streams.append(WeightedRows(summary.take_own(own, spec), weight))
            continue
        if isinstance(source, HubData):  # runners.jobs.fetch puts its files in its place
            raise MissingModelError(f"the data set {source.name} was not downloaded")
        with open_source(job, source) as file:
            digest = file.digest()
            tokenised = tokenised_file(file, digest, tokenizer, job.cache_dir)
        streams.append(WeightedRows(summary.take(file.name, digest, tokenised, spec), weight))
    padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    batches = DataBatches(streams, spec, int(padding))
    shares = batches.shares()
    summary.measured |= {"padding_share": shares.padding, "label_share": shares.labels}
    held_out = summary.evaluated_on if summary.evaluated_on.rows else None
    facts = summary.digest, summary.measured, summary.notes(spec)
    return Data(batches, held_out, *facts, by_source=summary.by_source)


@dataclass
class _SourceSummary:
    """Accumulates figures and held-out rows over a training's sources."""

    evaluated_on: HeldOutRows = field(default_factory=HeldOutRows)
    digest: str = ""
    names: list[str] = field(default_factory=list)
    by_source: list[tuple[str, HeldOutRows]] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    measured: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(
            ("data_documents", "data_held_out", "data_tokens", "data_cut", "data_left_out"), 0.0
        )
    )

    def take_own(self, own: OwnText, spec: TrainSpec) -> Rows:
        """Add the host's own text, and return its rows."""
        name = "the host's own text"
        self.names.append(name)
        self._hold_out(name, *windows_of(own.held_out, spec.sequence_length))
        return rows_of(*windows_of(own.train, spec.sequence_length), 0, ONE_A_ROW)

    def take(self, name: str, digest: str, tokenised: TokenisedFile, spec: TrainSpec) -> Rows:
        """Add a file's figures and return its rows.

        Raises:
            BadInputError: every sample is too long.
        """
        facts, longest = tokenised.facts, spec.sequence_length
        is_text = facts["format"] in {"text", "classification"}
        pieces = segments_of(tokenised.train, longest, spec.samples, is_text=is_text)
        held_out = segments_of(tokenised.held_out, longest, SampleOptions(), is_text=is_text)
        _check_left(name, pieces, spec)
        if len(held_out.lengths):
            held_out_rows = rows_of(tokenised.held_out, _first(held_out), longest, ONE_A_ROW)
            self.evaluated_on.rows.append(held_out_rows)
        self._hold_out(name, tokenised.held_out, held_out)
        self.digest += digest
        self.names.append(f"{name} ({facts['format']}, sha256 {digest[:12]})")
        self._remark(name, facts)
        for key, value in {
            "data_documents": len(tokenised.train),
            "data_held_out": len(tokenised.held_out),
            "data_tokens": int(pieces.lengths.sum()),
            "data_cut": pieces.num_cut,
            "data_left_out": pieces.num_left_out,
        }.items():
            self.measured[key] += value
        return rows_of(tokenised.train, pieces, longest, spec.samples)

    def _hold_out(self, name: str, documents: Documents, pieces: Segments) -> None:
        """Add evenly spread held-out pieces of a source as its own evaluation rows."""
        count = len(pieces.lengths)
        at = np.linspace(0, count - 1, min(VALIDATION_SEQUENCES, count)).astype(int)
        few = pieces._replace(begins=pieces.begins[at], lengths=pieces.lengths[at])
        self.by_source.append((name, HeldOutRows([rows_of(documents, few, 0, ONE_A_ROW)])))

    def _remark(self, name: str, facts: dict[str, Any]) -> None:
        if part := part_words(name):
            self.remarks.append(part)
        if facts["is_template_ours"]:
            self.remarks.append(
                f"{name}: the tokenizer has no chat template, so conversations are written in "
                "Slipway's own, like ChatML; the model keeps it"
            )
        if facts["num_last_only"]:
            self.remarks.append(
                f"{name}: of {facts['num_last_only']} conversations only some answers are learnt, "
                "as the chat template writes the others differently once more turns follow"
            )
        if words := repeated_bos_words(facts["num_repeated_bos"], "records", facts["bos"]):
            self.remarks.append(f"{name}: {words}")
        if facts["num_empty"]:
            self.remarks.append(
                f"{name}: {facts['num_empty']} records without an answer to learn are left out"
            )
        if facts["left_out"]:
            self.remarks.append(f"{name}: {left_out_words(facts['left_out'])}")
        if facts["not_rendered"]:
            self.remarks.append(
                f"{name}: not written by the model's chat template, "
                f"{left_out_words(facts['not_rendered'])}"
            )

    def notes(self, spec: TrainSpec) -> dict[str, str]:
        long = "cut" if spec.samples.too_long == "cut" else "left out"
        rows = "packed, none sees another" if spec.samples.rows == "packed" else "one a row"
        texts = {
            "data": "; ".join(self.names),
            "samples": f"{rows}; what is longer than {spec.sequence_length} tokens is {long}",
            "padding_share": "over the first epoch, or its first thousand micro-batches",
        }
        return texts | ({"data_remarks": "; ".join(self.remarks)} if self.remarks else {})


def _first(pieces: Segments) -> Segments:
    return pieces._replace(
        begins=pieces.begins[:HELD_OUT_ROWS], lengths=pieces.lengths[:HELD_OUT_ROWS]
    )


def _check_left(name: str, pieces: Segments, spec: TrainSpec) -> None:
    if len(pieces.lengths):
        return
    msg = (
        f"{name}: nothing is left to learn: all {pieces.num_left_out} samples are longer than "
        f"sequence_length, which is {spec.sequence_length}, or have no answer within it; raise "
        "sequence_length"
    )
    raise BadInputError(msg if pieces.num_left_out else f"{name}: no sample has two tokens")


# Dynamic mixture weights: sources further above their reference loss are drawn more often.
#
# Every few steps the lead evaluates the current weights on held-out text and broadcasts the
# losses. The resulting mixture is part of the training state, so that any number of ranks, and a
# resumed run, draw the same rows. Sheared LLaMA's pruning uses the same update. Source: Xia et al.
# 2023 (Sheared LLaMA), arXiv:2310.06694, section 2.2, algorithm 1.


LEAST_WEIGHT = 1 / BLOCK_ROWS  # a weight of zero could never grow again


@dataclass
class Mixture:
    """The sources of one training, their held-out rows, and the mixture settings."""

    batches: DataBatches
    evaluated_on: Sequence[HeldOutRows]
    data: MixedData
    rows_a_step: int

    def is_due(self, state: TrainState) -> bool:
        """Return whether the weights change before the next step."""
        last_row = state.mixture[-1][0] if state.mixture else -1.0
        is_new = last_row < state.step * self.rows_a_step
        return is_new and state.step % self.data.update_every_steps == 0

    def losses(self, model: PreTrainedModel) -> list[float]:
        """Return a model's mean loss per label on each source, in nats."""
        return [each.loss(model) for each in self.evaluated_on]

    def move(self, state: TrainState, losses: Sequence[float]) -> dict[str, float]:
        """Set new weights from the next step on; return the figures of each source."""
        if not state.mixture:
            references = (part.reference_loss for part in self.data.parts)
            pairs = zip(references, losses, strict=True)
            state.mixture_reference = tuple(
                loss if reference is None else reference for reference, loss in pairs
            )
        old_weights = state.mixture[-1][1:] if state.mixture else weights_of(self.data)
        excess = np.subtract(losses, state.mixture_reference).tolist()
        raw_weights = [max(LEAST_WEIGHT, each) for each in updated_weights(old_weights, excess)]
        weights = [each / sum(raw_weights) for each in raw_weights]
        first = state.step * self.rows_a_step
        state.mixture += ((float(first), *weights),)
        self.batches.move(first, weights)
        figures = {"weight": weights, "loss": losses, "reference": state.mixture_reference}
        return {
            f"source{at}_{name}": value
            for name, values in figures.items()
            for at, value in enumerate(values, start=1)
        }

    def restore_history(self, state: TrainState) -> None:
        """Restore the mixture from the state's history."""
        self.batches.follow(state.mixture)

    def note(self, state: TrainState) -> str:
        """Return a note on how often the weights changed, and their last values."""
        last = state.mixture[-1][1:] if state.mixture else weights_of(self.data)
        shares = " : ".join(f"{each:.1%}" for each in last)
        return (
            f"moved every {self.data.update_every_steps} steps, {len(state.mixture)} times, to "
            f"{shares}, by each source's held-out loss above its reference"
        )


def mixture_of(data: Data, spec: TrainSpec) -> Mixture | None:
    """Return the dynamic mixture of a training; None if the weights are fixed.

    Raises:
        BadInputError: a source has no held-out rows.
    """
    mixed, batches = spec.data, data.batches
    if not isinstance(mixed, MixedData) or mixed.weights == "fixed":
        return None
    if not isinstance(batches, DataBatches):
        raise TypeError(f"rows of several sources come from DataBatches, not {type(batches)}")
    for name, held_out in data.by_source:
        if not len(held_out.rows[0]):
            msg = (
                f"{name}: none of the samples that were kept back has an answer within "
                f"sequence_length, which is {spec.sequence_length}, and dynamic weights follow "
                "the loss on them; raise it, or choose weights fixed"
            )
            raise BadInputError(msg)
    rows_a_step = spec.micro_batch_size * spec.gradient_accumulation_steps
    return Mixture(batches, [held_out for _, held_out in data.by_source], mixed, rows_a_step)
