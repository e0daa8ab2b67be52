"""An encoder with its classification head as the only stage, for ZeRO and replicas."""

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
        """Return the stage's arguments besides its input."""
        return {"attention_mask": self.attention_mask}


def marked(batch: Batch) -> Marked:
    """Return a micro-batch of labelled rows.

    Raises:
        BadInputError: it has no mask, so it is not labelled text.
    """
    if batch.attention_mask is None:
        raise BadInputError("an encoder reads rows with a mask; give labelled text")
    return Marked(batch.input_ids, batch.labels, batch.attention_mask)


def is_encoder(config: Any) -> bool:  # noqa: ANN401 - a config's fields depend on its architecture
    """Return whether a model of this config is an encoder that takes a classification head."""
    return config.model_type in ENCODERS


class EncoderStage(nn.Module):
    """The whole model; its weights keep their names."""

    def __init__(self, whole: PreTrainedModel) -> None:
        """Use the model's parts and share their weights."""
        super().__init__()
        self.config = whole.config
        parts: Any = whole
        self.distilbert: nn.Module = parts.distilbert
        self.pre_classifier: nn.Linear = parts.pre_classifier
        self.classifier: nn.Linear = parts.classifier

    @property
    def blocks(self) -> dict[str, nn.Module]:
        """Return the layers by number."""
        inner: Any = self.distilbert
        return dict(inner.transformer.layer.named_children())

    def forward(self, given: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Return logits [rows, classes] of token ids [rows, length]."""
        hidden = self.distilbert(input_ids=given, attention_mask=attention_mask).last_hidden_state
        pooled = torch.relu(self.pre_classifier(hidden[:, 0]))
        logits: torch.Tensor = self.classifier(pooled)
        return logits


def undivided(options: LayoutOptions) -> Iterator[str]:
    """Yield an error message per parallel size that an encoder does not support."""
    for name in ("tensor", "pipeline", "context", "expert"):
        field = f"{name}_parallel_size"
        if (size := getattr(options, field)) > 1:
            yield (
                f"{field} is {size}, and an encoder is trained as copies or ZeRO's shards; leave "
                "it at 1"
            )
