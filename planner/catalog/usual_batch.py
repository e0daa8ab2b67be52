"""The usual context and batch of a training, where nobody states them.

A pre-training grows with its devices towards the batch of published runs; a fine-tuning is small.
"""

import csv
from functools import cache
from typing import NamedTuple

from planner.catalog.reading import data_text
from planner.cost.parameters import count_parameters
from planner.specs.model import ModelSpec

SEQUENCES_PER_DEVICE = 16  # of an update, until a published batch is reached
# Sequences of an update of fine-tuning: of one device (QLoRA's of 7B and 13B, arXiv:2305.14314),
# and at most (Alpaca, and Tulu 3, arXiv:2411.15124).
FEWEST_TUNED, MOST_TUNED = 16, 128
TUNED_TOKENS = 2048  # of a sequence of fine-tuning: longer than most answers to instructions
SIZE_ROUNDING = 1.02  # names of models round their parameters


class PublishedBatch(NamedTuple):
    """The largest batch of a published pre-training: tokens of an update, and of a sequence."""

    model: str
    kind: str
    parameters: float
    batch_tokens: int
    sequence_length: int
    source: str


class UsualSize(NamedTuple):
    """A size that nobody stated, and the reason for it in a few words, "" if there is none."""

    value: int
    reason: str


@cache
def published_batches() -> tuple[PublishedBatch, ...]:
    """Return the published pre-trainings, of each kind the smallest model first."""
    rows = csv.DictReader(data_text("training_batches.csv").splitlines())
    return tuple(
        PublishedBatch(
            each["model"],
            each["kind"],
            float(each["parameters"]),
            int(each["batch_tokens"]),
            int(each["sequence_length"]),
            each["source"],
        )
        for each in rows
    )


def published_batch(model: ModelSpec) -> PublishedBatch:
    """Return the published pre-training of the largest model that is no larger, else the smallest.

    Dense models are compared with dense ones, mixtures of experts with mixtures.
    """
    kind = "sparse" if model.is_moe else "dense"
    alike = [each for each in published_batches() if each.kind == kind]
    size = count_parameters(model).total * SIZE_ROUNDING
    return next((each for each in reversed(alike) if each.parameters <= size), alike[0])


def usual_length(model: ModelSpec, *, pretrains: bool) -> UsualSize:
    """Return the tokens of a sequence, within the model's context.

    A pre-training has those of the published one, a fine-tuning 2,048.
    """
    context = model.max_position_embeddings
    published = published_batch(model)
    usual = published.sequence_length if pretrains else TUNED_TOKENS
    if context < usual:
        return UsualSize(context, "the model's context")
    return UsualSize(usual, f"as {published.model} was trained" if pretrains else "")


def usual_batch(
    model: ModelSpec, sequence_length: int, devices: int, *, pretrains: bool
) -> UsualSize:
    """Return the sequences of one update on a number of devices, at least one.

    A pre-training has sixteen a device, and never more tokens than the published one; a
    fine-tuning one a device, between 16 and 128.
    """
    if not pretrains:
        batch = min(max(FEWEST_TUNED, devices), MOST_TUNED)
        return UsualSize(batch, "one a device, 128 at most" if batch > FEWEST_TUNED else "")
    published = published_batch(model)
    most = max(1, published.batch_tokens // sequence_length)
    grown = SEQUENCES_PER_DEVICE * devices
    words = f"{published.batch_tokens / 1e6:.2g}M tokens as {published.model}, {published.source}"
    if grown < most:
        return UsualSize(grown, f"{SEQUENCES_PER_DEVICE} a device, up to {words}")
    return UsualSize(most, words)
