"""Labelled text as rows: one padded sample per row, with an attention mask."""

# mypy: disable-error-code="no-untyped-call"
# transformers ships types, but leaves some of its functions untyped.

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedTokenizerFast

from runners.datasets.records import DataError, LabelledSample, Reader, Record, digest_of
from runners.jobs.corpus import TokenIds
from runners.jobs.runtime import BadInputError
from runners.jobs.train.rows import (
    Batch,
    DataBatches,
    Numbers,
    Stream,
    padded_length,
    padded_lengths,
)
from runners.jobs.train.samples import DataFile, Split, in_handfuls
from runners.jobspec import SampleOptions, TrainSpec
from runners.jobspec.base import MAX_CLASSES

LEAST_CLASSES = 2
JUDGED_SAMPLES = 256  # at most, spread evenly over the held-out samples


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


def blank(rows: int, length: int, padding_id: int) -> Batch:
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
        super().__init__([Stream(rows)], padded, padding_id)

    def _blank(self, rows: int, length: int) -> Batch:
        return blank(rows, length, self._padding_id)


class Quality(NamedTuple):
    """Classification quality: mean loss per sample in nats, accuracy and macro F1."""

    loss: float
    accuracy: float
    f1: float


class LabelEvaluator:
    """Evaluates a model on held-out labelled samples."""

    def __init__(self, samples: Samples, num_classes: int, batch_size: int, padding: int) -> None:
        """Evaluate at most ``JUDGED_SAMPLES`` samples, in batches."""
        self._rows, self._num_classes = LabelledRows(samples), num_classes
        evenly = np.linspace(0, len(samples) - 1, JUDGED_SAMPLES)
        self._row_numbers = np.unique(np.round(evenly).astype(np.int64))
        self._batch_size, self._padding = batch_size, padding
        self._lengths = padded_lengths(self._rows.width)

    def quality(self, model: torch.nn.Module) -> Quality:
        """Return the model's quality on the samples."""
        logits, labels = self._predictions(model)
        loss = torch.nn.functional.cross_entropy(logits, labels)
        predicted, expected = logits.argmax(dim=-1).numpy(), labels.numpy()
        accuracy = float((predicted == expected).mean())
        return Quality(float(loss), accuracy, macro_f1(expected, predicted, self._num_classes))

    def loss(self, model: torch.nn.Module) -> float:
        """Return the mean loss per sample, in nats."""
        return self.quality(model).loss

    def validation(self, model: torch.nn.Module) -> dict[str, float]:
        """Return the metrics charted during training."""
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
            batch = blank(len(rows), padded_length(longest, self._lengths), self._padding)
            for at, row in enumerate(rows.tolist()):
                self._rows.fill(row, batch, at)
            batch = batch.to(device)
            logits.append(model(**batch.inputs).logits.float().cpu())
            labels.append(batch.labels.cpu())
        torch.nn.Module.train(model, was_training)
        return torch.cat(logits), torch.cat(labels)


def macro_f1(wanted: Numbers, found: Numbers, num_classes: int) -> float:
    """Return the unweighted mean of the classes' F1 scores.

    A class that occurs in neither labels nor predictions is left out.
    """
    scores = []
    for each in range(num_classes):
        hits = int(((wanted == each) & (found == each)).sum())
        total = int((wanted == each).sum()) + int((found == each).sum())
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
    reader = Reader(data.name, "classification")
    counts: Counter[str] = Counter()
    split = Split(_counted(data.records(reader), counts), data.name)
    names = tuple(sorted(counts))
    _check_classes(data.name, names)
    number = {name: at for at, name in enumerate(names)}
    parts = {True: _Part(), False: _Part()}
    for handful in in_handfuls(data.records(Reader(data.name, "classification"))):
        samples = [each.sample for each in handful if isinstance(each.sample, LabelledSample)]
        for sample, ids in zip(samples, _token_ids(samples, tokenizer), strict=True):
            part = parts[split.is_held_out(digest_of(sample))]
            part.add(ids, number[sample.label], longest)
    num_cut = sum(part.num_cut for part in parts.values())
    return Classes(names, parts[False].made(), parts[True].made(), reader.num_empty, num_cut)


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
    return [each if each[:1] == [first] else [int(first), *each] for each in ids]


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
