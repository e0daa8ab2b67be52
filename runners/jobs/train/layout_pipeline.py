"""Pipeline parallelism: stages and their schedule."""

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from transformers import PreTrainedModel

from runners.jobs.generate.stage_model import even_layer_ranges
from runners.jobs.runtime import BadInputError
from runners.jobs.train.layout import summed_loss
from runners.jobs.train.rows import Batch
from runners.jobspec.base import ENCODERS
from runners.jobspec.train import WOVEN, LayoutOptions

# ---------------------------------------------------------------------------
# A pipeline stage: consecutive layers of a model, or an encoder with its head.
# ---------------------------------------------------------------------------


# An encoder with its classification head as the only stage, for ZeRO and replicas.


class LabelledBatch(NamedTuple):
    """A micro-batch: ``input_ids`` and mask [rows, length], ``labels`` [rows]."""

    input_ids: torch.Tensor
    labels: torch.Tensor
    attention_mask: torch.Tensor

    @property
    def places(self) -> dict[str, torch.Tensor]:
        """Return the stage's arguments besides its input."""
        return {"attention_mask": self.attention_mask}


def labelled_batch(batch: Batch) -> LabelledBatch:
    """Return a micro-batch of labelled rows.

    Raises:
        BadInputError: the batch has no mask, so it is not labelled text.
    """
    if batch.attention_mask is None:
        raise BadInputError("an encoder reads rows with a mask; give labelled text")
    return LabelledBatch(batch.input_ids, batch.labels, batch.attention_mask)


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


def unsupported_encoder_sizes(options: LayoutOptions) -> Iterator[str]:
    """Yield an error message per parallel size that an encoder does not support."""
    for name in ("tensor", "pipeline", "context", "expert"):
        field = f"{name}_parallel_size"
        if (size := getattr(options, field)) > 1:
            yield (
                f"{field} is {size}, and an encoder is trained as copies or ZeRO's shards; leave "
                "it at 1"
            )


LLAMA_SHAPED = ("llama", "mistral", "qwen2", "qwen3", "mixtral")


class SequenceBatch(NamedTuple):
    """A micro-batch as stages take it; with context parallelism, this rank's piece of it.

    ``input_ids``, ``labels``, ``position_ids`` [rows, length]; ``queries`` [rows, length, 2] and
    ``keys`` [rows, whole length, 2]: each token's index in the row, and its document.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    position_ids: torch.Tensor
    queries: torch.Tensor
    keys: torch.Tensor

    @property
    def places(self) -> dict[str, torch.Tensor]:
        """Return every stage's arguments besides its input."""
        return {"position_ids": self.position_ids, "queries": self.queries, "keys": self.keys}


def sequences(batch: Batch, pieces: torch.Tensor | None = None, index: int = 0) -> SequenceBatch:
    """Return a micro-batch; with ``pieces``, only the tokens ``pieces[index]`` of each row.

    ``pieces`` [ranks, length]: the tokens of each rank, in its order.
    """
    rows, length = batch.input_ids.shape
    row = torch.arange(length, device=batch.input_ids.device).expand(rows, length)
    positions = row if batch.position_ids is None else batch.position_ids
    documents = torch.zeros_like(row)
    if batch.position_ids is not None:
        documents = (positions == 0).cumsum(dim=1)
    places = torch.stack([row, documents], dim=-1)
    if pieces is None:
        return SequenceBatch(batch.input_ids, batch.labels, positions, places, places)
    own_tokens = pieces[index].to(row.device)
    keys = places[:, pieces.flatten().to(row.device)]
    return SequenceBatch(
        batch.input_ids[:, own_tokens],
        batch.labels[:, own_tokens],
        positions[:, own_tokens],
        places[:, own_tokens],
        keys,
    )


def visible_key_mask(
    queries: torch.Tensor, keys: torch.Tensor, window: int | None
) -> torch.Tensor:
    """Return the mask [rows, 1, queries, keys]: causal, within documents, and the window."""
    distance = queries[:, :, None, 0] - keys[:, None, :, 0]
    mask = (distance >= 0) & (queries[:, :, None, 1] == keys[:, None, :, 1])
    if window is not None:
        mask &= distance < window
    return mask[:, None]


class Stage(nn.Module):
    """Layers, with the embedding in the first stage and the output layer in the last."""

    def __init__(self, whole: PreTrainedModel, layers: range) -> None:
        """Use the model's layers and share their weights."""
        super().__init__()
        inner: Any = whole.model
        self.config = whole.config
        self.window = getattr(whole.config, "sliding_window", None)
        self.model = nn.Module()
        self.model.layers = nn.ModuleDict({str(at): inner.layers[at] for at in layers})
        self.model.rotary_emb = inner.rotary_emb
        if layers.start == 0:
            self.model.embed_tokens = inner.embed_tokens
        self.is_last = layers.stop == whole.config.num_hidden_layers
        if self.is_last:
            self.model.norm = inner.norm
            self.lm_head = whole.lm_head

    @property
    def blocks(self) -> dict[str, nn.Module]:
        """Return the layers by their number in the whole model."""
        return dict(self.model.layers.named_children())  # type: ignore[union-attr]  # torch types it as a tensor too

    def forward(
        self,
        given: torch.Tensor,
        position_ids: torch.Tensor,
        queries: torch.Tensor,
        keys: torch.Tensor,
    ) -> torch.Tensor:
        """Return logits or hidden states for token ids or hidden states."""
        model: Any = self.model
        hidden = model.embed_tokens(given) if hasattr(model, "embed_tokens") else given
        mask: torch.Tensor = visible_key_mask(queries, keys, self.window)
        if self.config._attn_implementation != "sdpa":  # noqa: SLF001 - no public name
            lowest = torch.finfo(hidden.dtype).min
            mask = torch.zeros_like(mask, dtype=hidden.dtype).masked_fill_(~mask, lowest)
        rotary = model.rotary_emb(hidden, position_ids=position_ids)
        for layer in model.layers.values():
            hidden = layer(
                hidden,
                attention_mask=mask,
                position_ids=position_ids,
                position_embeddings=rotary,
                use_cache=False,
            )
        return self.lm_head(model.norm(hidden)) if self.is_last else hidden


def stage_layers(options: LayoutOptions, num_layers: int) -> list[range]:
    """Return the layers of each stage.

    Raises:
        BadInputError: the number of layers does not match.
    """
    counts = options.pipeline_layers
    if counts is None:
        return even_layer_ranges(num_layers, options.num_stages)
    if sum(counts) != num_layers:
        msg = f"pipeline_layers names {sum(counts)} layers, and the model has {num_layers}"
        raise BadInputError(f"{msg}; the counts must sum to {num_layers}")
    starts = [sum(counts[:at]) for at in range(len(counts))]
    return [range(at, at + count) for at, count in zip(starts, counts, strict=True)]


def check_model(model: PreTrainedModel, options: LayoutOptions) -> None:
    """Check that the layout can divide the model.

    Raises:
        BadInputError: the layout cannot divide it; the message names the field.
    """
    config = model.config
    if is_encoder(config):
        faults = unsupported_encoder_sizes(options)
    else:
        faults = chain(_unsupported(config, options), _indivisible(config, options))
    for fault in faults:
        raise BadInputError(fault)


def _unsupported(config: Any, options: LayoutOptions) -> Iterator[str]:  # noqa: ANN401 - a config's fields depend on its architecture
    """Yield an error per setting that this architecture does not support."""
    experts = getattr(config, "num_local_experts", 0) or 0
    if config.model_type not in LLAMA_SHAPED:
        yield (
            f"a '{config.model_type}' model cannot be laid out so, as "
            f"{', '.join(LLAMA_SHAPED)} can; use whole copies (data_parallel_size) instead"
        )
    if config.tie_word_embeddings and options.num_stages > 1:
        yield (
            f"pipeline_parallel_size is {options.pipeline_parallel_size}, and the model's output "
            "is its embedding, which the first and the last stage would both hold; choose 1"
        )
    if options.expert_parallel_size > 1 and not experts:
        yield (
            f"expert_parallel_size is {options.expert_parallel_size}, and a "
            f"'{config.model_type}' model has no experts; leave it out"
        )
    if experts and (options.tensor_parallel_size > 1 or options.zero_stage > 1):
        yield (
            f"a model with {experts} experts is divided by expert_parallel_size or ZeRO stage 1; "
            f"tensor_parallel_size is {options.tensor_parallel_size} and zero_stage "
            f"{options.zero_stage}"
        )


def _indivisible(config: Any, options: LayoutOptions) -> Iterator[str]:  # noqa: ANN401 - as above
    """Yield an error per model size that the parallel sizes do not divide."""
    tensor = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size")
    fields = {
        **dict.fromkeys(tensor, "tensor_parallel_size"),
        "num_local_experts": "expert_parallel_size",
    }
    for name, field in fields.items():
        value, size = getattr(config, name, None) or 0, getattr(options, field)
        if value % size:
            yield f"{name} is {value}, not divisible by {field} {size}; choose a divisor"


# ---------------------------------------------------------------------------
# Pipeline parallelism with torch's schedules.
#
# Sources: Huang et al. 2019 (GPipe), arXiv:1811.06965; Narayanan et al. 2021, arXiv:2104.04473
# (1F1B, interleaved); Qi et al. 2023, arXiv:2401.10241 (zero bubble).
# ---------------------------------------------------------------------------


SINGLE: dict[str, Any] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
SEVERAL: dict[str, Any] = {
    "interleaved": ScheduleInterleaved1F1B,
    "zero_bubble": ScheduleInterleavedZeroBubble,
}
WORK = (
    "forward_one_chunk",
    "backward_one_chunk",
    "backward_weight_one_chunk",
)


class Pipeline:
    """This rank's stages and the schedule that runs them over a step's micro-batches."""

    def __init__(
        self,
        stages: Sequence[Stage],
        options: LayoutOptions,
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        self._options = options
        self._stages = stages
        self._group_and_device = (group, device)
        self._schedule: Any = None
        self._shape: tuple[int, ...] = ()
        self._scale = 1.0
        self._busy_seconds = 0.0
        self.idle_ratio = 0.0  # of the last step

    def run(self, batches: Sequence[SequenceBatch], scale: float) -> torch.Tensor:
        """Compute the gradients of the losses times ``scale``; return the sum of the losses.

        The sum is that of the last stage, 0 elsewhere. Every rank gets the same micro-batches.

        Raises:
            BadInputError: the schedule does not support this number of micro-batches.
        """
        shape = (len(batches), *batches[0].input_ids.shape)
        if any(each.input_ids.shape != shape[1:] for each in batches):
            msg = "a pipeline takes micro-batches of one shape, and this data's rows differ"
            raise BadInputError(f"{msg}; pack them, or choose pipeline_parallel_size 1")
        if shape != self._shape:
            self._schedule, self._shape = self._build_schedule(len(batches)), shape
        self._scale = scale
        joined = SequenceBatch(*(torch.cat(parts) for parts in zip(*batches, strict=True)))
        is_first = hasattr(self._stages[0].model, "embed_tokens")
        losses: list[torch.Tensor] = []
        began, self._busy_seconds = time.monotonic(), 0.0
        self._schedule.step(
            *([joined.input_ids] if is_first else []),
            target=joined.labels,
            losses=losses,
            return_outputs=False,
            **joined.places,
        )
        seconds = max(1e-9, time.monotonic() - began)
        self.idle_ratio = max(0.0, 1.0 - self._busy_seconds / seconds)
        loss_sum = torch.zeros((), dtype=torch.float64, device=self._group_and_device[1])
        for each in losses:
            loss_sum += each.detach()
        return loss_sum / scale

    def move_to(self, group: dist.ProcessGroup) -> None:
        """Use another process group of the same ranks from the next step on."""
        self._group_and_device = (group, self._group_and_device[1])
        self._schedule, self._shape = None, ()

    def _build_schedule(self, num_micro_batches: int) -> Any:  # noqa: ANN401 - torch's schedules share no public class
        group, device = self._group_and_device
        own, size = dist.get_rank(group), self._options.pipeline_parallel_size
        stages = [
            PipelineStage(stage, own + at * size, self._options.num_stages, device, group=group)
            for at, stage in enumerate(self._stages)
        ]
        for stage in stages:
            for name in WORK:
                setattr(stage, name, self._timed(getattr(stage, name)))
        name = self._options.pipeline_schedule
        fields = {"n_microbatches": num_micro_batches, "loss_fn": self._loss, "scale_grads": False}
        try:
            if name in WOVEN:
                return SEVERAL[name](stages, **fields)
            return SINGLE[name](stages[0], **fields)
        except ValueError as error:
            msg = f"pipeline_schedule {name} does not take {num_micro_batches} micro-batches"
            raise BadInputError(f"{msg} on {size} ranks: {error}") from error

    def _loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return summed_loss(logits, labels) * self._scale

    def _timed(self, work: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - passed on as they come
            began = time.monotonic()
            try:
                return work(*args, **kwargs)
            finally:
                self._busy_seconds += time.monotonic() - began

        return timed
