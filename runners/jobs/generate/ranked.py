"""Generation over ranks: tensor, expert or pipeline parallel.

The lead runs the generation; before each pass it broadcasts a header, and the other ranks compute
their part until it broadcasts the end.
"""

# mypy: disable-error-code="no-untyped-call"
# transformers ships types, but leaves some of its functions untyped.

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.distributed.tensor import DTensor
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.distributed.configuration_utils import DistributedConfig

from runners.jobs.generate.caches import cache_size
from runners.jobs.generate.stage_model import Call, Chain, Ends, Layers, divided, divisible_config
from runners.jobs.loading import TORCH_DTYPES, load_tokenizer, pick_device
from runners.jobs.memory import tensor_bytes
from runners.jobs.model_files import opened_model
from runners.jobs.ranks import RankFailedError, Ranks, joined_ranks, naming_rank_failures
from runners.jobs.runtime import BadInputError, Job
from runners.jobspec import ArtefactModel, DataParallel, FolderModel, GenerateSpec
from runners.jobspec.generate import ExpertSplit, PipelineSplit, TensorSplit

STEP, FORGET, END, STOP = range(4)
HEADS = ("num_attention_heads", "num_key_value_heads")
WIDTHS = ("intermediate_size", "moe_intermediate_size")
Answer = Callable[[Callable[[], Chain]], bool]  # the lead's work; returns whether it was stopped


class Part(Protocol):
    """One rank's part of the model."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerFast | None
    weight_bytes: int

    def compute(self, call: Call, ids: torch.Tensor) -> torch.Tensor:
        """Compute this rank's part of a pass; the lead's returns each row's next token."""

    def forget(self, session: int) -> None:
        """Drop a session's KV cache."""

    @property
    def cache_bytes(self) -> int:
        """Return the bytes of this rank's KV caches."""


def work_on_ranks(job: Job, spec: GenerateSpec, answer: Answer) -> bool:
    """Run this rank's part of a generation; return whether it was stopped.

    Raises:
        BadInputError: the model cannot be divided so, or over this number of ranks.
    """
    try:
        with joined_ranks(job, spec.parallel) as ranks:
            if ranks.is_lead:
                return answer(lambda: RankChain(ranks, part_of(job, spec, ranks), spec))
            return follow(ranks, part_of(job, spec, ranks), spec.parallel)
    except RankFailedError as error:
        sys.exit(f"RANK_LOST: {error}")


def part_of(job: Job, spec: GenerateSpec, ranks: Ranks) -> Part:
    """Load this rank's part of the job's model."""
    split = spec.split
    if not isinstance(split, TensorSplit | ExpertSplit | PipelineSplit):
        raise BadInputError("the job requests no split over ranks")
    if split.size != ranks.size:
        msg = f"split {split.method} has size {split.size}, but {ranks.size} ranks were started"
        raise BadInputError(f"{msg}; launch it on as many devices as the size says")
    if not isinstance(spec.model, FolderModel | ArtefactModel):
        msg = f"ranks read their part from a model folder; source {spec.model.source} has none"
        raise BadInputError(msg)
    folder, dtype = opened_model(spec.model, job.host_dir), TORCH_DTYPES[spec.weight_dtype]
    if isinstance(split, PipelineSplit):
        return PipelinePart(folder, dtype, ranks)
    return TensorPart(folder, dtype, ranks.size, by_experts=split.method == "expert")


class RankChain(Chain):
    """All ranks, as used by the lead."""

    def __init__(self, ranks: Ranks, part: Part, spec: GenerateSpec) -> None:
        super().__init__()
        self._ranks, self._part, self._parallel = ranks, part, spec.parallel
        self.model, self.weight_bytes = part.model, part.weight_bytes
        self.tokenizer, self.device = part.tokenizer, pick_device()
        method = spec.split.method if spec.split else ""
        self.where = f"{method} parallel over {ranks.size} ranks; the figures are the lead's"
        self._is_settled = False

    def next_tokens(self, call: Call, ids: torch.Tensor) -> torch.Tensor:
        """Run a pass on every rank; return the next token of each row."""
        masks = [] if call.mask is None else [call.mask]
        self._send(STEP, call.session, *ids.shape, *(each.shape[1] for each in masks))
        self._ranks.copy_from_lead([ids, call.positions, *masks])
        with naming_rank_failures(self._ranks):
            tokens = self._part.compute(call, ids)
        if not self._is_settled:
            self._ranks.settle(self._parallel)
            self._is_settled = True
        return tokens

    def forget(self, session: int) -> None:
        """Drop a session's KV cache on every rank."""
        self._send(FORGET, session)
        self._part.forget(session)

    @property
    def cache_bytes(self) -> int:
        """Return the bytes of the lead's KV caches."""
        return self._part.cache_bytes

    def finish(self, *, is_stopped: bool) -> None:
        """Stop the other ranks."""
        self._send(STOP if is_stopped else END)

    def _send(self, *words: int) -> None:
        header = [*words, 0, 0, 0, 0][:5]
        self._ranks.copy_from_lead([torch.tensor(header)])


def follow(ranks: Ranks, part: Part, parallel: DataParallel) -> bool:
    """Run the passes that the lead broadcasts; return whether it ended by a stop.

    Raises:
        RankFailedError: the lead or another rank did not respond in time.
    """
    is_settled = False
    while True:
        (header,) = _received(ranks, (5,))
        order, session, rows, new, width = header.tolist()
        if order in (END, STOP):
            return bool(order == STOP)
        if order == FORGET:
            part.forget(session)
            continue
        shapes = [(rows, new), (rows, new), *([(rows, width)] if width else [])]
        ids, positions, *mask = _received(ranks, *shapes)
        with naming_rank_failures(ranks):
            part.compute(Call(session, positions, mask[0] if mask else None), ids)
        if not is_settled:
            ranks.settle(parallel)
            is_settled = True


def _received(ranks: Ranks, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    tensors = [torch.zeros(shape, dtype=torch.long) for shape in shapes]
    ranks.copy_from_lead(tensors)
    return tensors


class PipelinePart:
    """Pipeline parallel: consecutive layers; the lead also has the embedding and the head."""

    def __init__(self, folder: Path, dtype: torch.dtype, ranks: Ranks) -> None:
        """Load this rank's layers."""
        self._config = divisible_config(folder)
        device = pick_device()
        self._ranks, self._device, self._dtype = ranks, device, dtype
        self._place = (ranks.rank - ranks.lead) % ranks.size
        which = divided(self._config.num_hidden_layers, ranks.size)[self._place]
        self.tokenizer = load_tokenizer(folder)
        self._layers = Layers(folder, which, device, dtype)
        self._ends = Ends(folder, device, dtype) if ranks.is_lead else None
        self.model = self._ends.model if self._ends else self._layers.model
        self.weight_bytes = self._layers.weight_bytes
        if self._ends:
            self.weight_bytes += sum(map(tensor_bytes, self._ends.model.parameters()))

    def compute(self, call: Call, ids: torch.Tensor) -> torch.Tensor:
        """Receive hidden states from the previous rank, run the layers, and send on."""
        rows, new = ids.shape
        previous = (self._ranks.rank - 1) % self._ranks.size
        following = (self._ranks.rank + 1) % self._ranks.size
        hidden = self._ends.embed(ids) if self._ends else self._received(previous, rows, new)
        hidden = self._layers.run(call, hidden)
        is_last = self._place == self._ranks.size - 1
        self._ranks.send(hidden[:, -1:] if is_last else hidden, following)
        return self._ends.choose(self._received(previous, rows, 1)) if self._ends else ids

    def forget(self, session: int) -> None:
        """Drop a session's KV cache."""
        self._layers.forget(session)

    @property
    def cache_bytes(self) -> int:
        """Return the bytes of this rank's KV caches."""
        return self._layers.cache_bytes

    def _received(self, sender: int, rows: int, new: int) -> torch.Tensor:
        shape = (rows, new, self._config.hidden_size)
        hidden = torch.empty(shape, dtype=self._dtype, device=self._device)
        self._ranks.receive(hidden, sender)
        return hidden


class TensorPart:
    """Tensor parallel by transformers' plan for the architecture.

    ``by_experts``: expert parallel; all other matrices are divided as before.
    """

    def __init__(
        self, folder: Path, dtype: torch.dtype, size: int, *, by_experts: bool = False
    ) -> None:
        """Load this rank's shards.

        Raises:
            BadInputError: the ranks do not divide the model, or it has no plan.
        """
        check_divides(divisible_config(folder), size, by_experts=by_experts)
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            str(folder),
            dtype=dtype,
            distributed_config=DistributedConfig(tp_size=size, ep_size=size if by_experts else 1),
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
        )
        torch.nn.Module.eval(self.model)
        self.tokenizer = load_tokenizer(folder)
        self.weight_bytes = sum(tensor_bytes(_local(each)) for each in self.model.parameters())
        self._caches: dict[int, DynamicCache] = {}

    @torch.inference_mode()
    def compute(self, call: Call, ids: torch.Tensor) -> torch.Tensor:
        """Run the model; its layers communicate with the other ranks."""
        cache = self._caches.setdefault(call.session, DynamicCache(config=self.model.config))
        device = pick_device()
        output = self.model(
            input_ids=ids.to(device),
            attention_mask=None if call.mask is None else call.mask.to(device),
            position_ids=call.positions.to(device),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        tokens: torch.Tensor = output.logits[:, -1].argmax(dim=-1)
        return tokens

    def forget(self, session: int) -> None:
        """Drop a session's KV cache."""
        self._caches.pop(session, None)

    @property
    def cache_bytes(self) -> int:
        """Return the bytes of this rank's KV caches."""
        return sum(map(cache_size, self._caches.values()))


def check_divides(config: PretrainedConfig, size: int, *, by_experts: bool = False) -> None:
    """Check that the ranks divide the heads or the experts.

    Raises:
        BadInputError: they do not; the message names the field.
    """
    if by_experts and not getattr(config, "num_experts", None):
        msg = f"a '{config.model_type}' model has no experts to divide"
        raise BadInputError(f"{msg}; choose tensor or pipeline parallel")
    for name in (*HEADS, "num_experts") if by_experts else (*HEADS, *WIDTHS):
        value = getattr(config, name, None)
        if isinstance(value, int) and value % size:
            msg = f"{name} is {value}, which {size} ranks do not divide"
            raise BadInputError(f"{msg}; choose a size that does, or pipeline parallel")


def _local(tensor: Any) -> torch.Tensor:  # noqa: ANN401 - DTensor is no Tensor to the checker
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
