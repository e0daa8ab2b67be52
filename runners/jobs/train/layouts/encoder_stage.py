"""A whole encoder with its classification head as the one stage of ranks that share its states."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from runners.classification import ENCODERS
from runners.jobs.runtime import BadInputError
from runners.jobs.train.batches import Batch
from runners.layout_options import LayoutOptions


class Marked(NamedTuple):
    """A micro-batch: ``input_ids`` and mask [rows, length], ``labels`` [rows]."""

    input_ids: torch.Tensor
    labels: torch.Tensor
    attention_mask: torch.Tensor

    @property
    def places(self) -> dict[str, torch.Tensor]:
        """Return what the stage is told beside its input."""
        return {"attention_mask": self.attention_mask}


def marked(batch: Batch) -> Marked:
    """Return a micro-batch of labelled rows.

    Raises:
        BadInputError: it has no mask, so that it is none.
    """
    if batch.attention_mask is None:
        raise BadInputError("an encoder reads rows with a mask; give labelled text")
    return Marked(batch.input_ids, batch.labels, batch.attention_mask)


def is_encoder(config: Any) -> bool:  # noqa: ANN401 - a config's fields depend on its architecture
    """Tell whether a classification head stands on a model of this config."""
    return config.model_type in ENCODERS


class EncoderStage(nn.Module):
    """The whole model; its weights keep the names that they have in it."""

    def __init__(self, whole: PreTrainedModel) -> None:
        """Take the parts out of the model; it shares their weights."""
        super().__init__()
        self.config = whole.config
        parts: Any = whole
        self.distilbert: nn.Module = parts.distilbert
        self.pre_classifier: nn.Linear = parts.pre_classifier
        self.classifier: nn.Linear = parts.classifier

    @property
    def blocks(self) -> dict[str, nn.Module]:
        """Return the layers by their number."""
        inner: Any = self.distilbert
        return dict(inner.transformer.layer.named_children())

    def forward(self, given: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Return logits [rows, classes] of token ids [rows, length]."""
        hidden = self.distilbert(input_ids=given, attention_mask=attention_mask).last_hidden_state
        pooled = torch.relu(self.pre_classifier(hidden[:, 0]))
        logits: torch.Tensor = self.classifier(pooled)
        return logits


def undivided(options: LayoutOptions) -> Iterator[str]:
    """Yield which parallel sizes an encoder is not divided by."""
    for name in ("tensor", "pipeline", "context", "expert"):
        field = f"{name}_parallel_size"
        if (size := getattr(options, field)) > 1:
            yield (
                f"{field} is {size}, and an encoder is trained as copies or ZeRO's shards; leave "
                "it at 1"
            )
