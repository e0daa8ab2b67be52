"""Tensor and expert parallelism, and their exchanges between ranks."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

# mypy: disable-error-code="no-untyped-call"
# torch's autograd functions are called through an untyped method.
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from runners.jobs.loading import pick_device
from runners.jobs.ranks import Ranks, naming_rank_failures
from runners.jobs.train.layout import Replicas, StepLoss
from runners.jobs.train.layout_pipeline import Stage
from runners.jobs.train.quantized import Context
from runners.jobs.train.rows import Batch
from runners.jobspec import ComputeDtype
from runners.jobspec.train import LayoutOptions

# ---------------------------------------------------------------------------
# Tensor and sequence parallelism with torch's DTensor, and slices of whole weights.
# ---------------------------------------------------------------------------


# Slices of whole weights that ranks hold, and gathering of whole tensors.
#
# Every layout holds slices of the same whole tensors, so a checkpoint of one resumes another.


class TensorSlice(NamedTuple):
    """A slice of a named tensor: its start and size in each dimension."""

    name: str
    start: tuple[int, ...]
    size: tuple[int, ...]

    def within(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the slice as a view of the whole tensor."""
        part = whole
        for dimension, (at, length) in enumerate(zip(self.start, self.size, strict=True)):
            part = part.narrow(dimension, at, length)
        return part

    def rows(self, first: int, count: int) -> "TensorSlice":
        """Return the slice of some of this one's rows."""
        start = (self.start[0] + first, *self.start[1:])
        return TensorSlice(self.name, start, (count, *self.size[1:]))


def whole_slice(name: str, shape: Sequence[int]) -> TensorSlice:
    """Return the slice of a whole tensor."""
    return TensorSlice(name, (0,) * len(shape), tuple(shape))


def shard_rows(length: int, index: int, count: int) -> tuple[int, int]:
    """Return the first row and the number of rows of share ``index`` of ``length`` rows.

    Shares are divided as by torch.chunk: all as long as the first, except the last ones.
    """
    share = -(-length // count)
    first = min(length, index * share)
    return first, min(length, first + share) - first


class HeldSlice(NamedTuple):
    """A slice and this rank's tensor of it, which shares its memory with the model's."""

    box: TensorSlice
    tensor: nn.Parameter


class TrainedParameters(nn.Module):
    """The tensors that a rank's optimizer updates, as parameters under the weights' names."""

    def __init__(self, held: Sequence[HeldSlice]) -> None:
        super().__init__()
        for each in held:
            self.register_parameter(each.box.name.replace(".", "/"), each.tensor)


class SliceRegistry:
    """The ranks that hold each slice; every rank has the same registry."""

    def __init__(self, ranks: Ranks, held: Sequence[HeldSlice]) -> None:
        """Exchange the slices with the other ranks."""
        self._ranks = ranks
        self.held = {each.box: each.tensor for each in held}
        slices_by_rank: list[list[TensorSlice]] = [[] for _ in range(ranks.size)]
        with naming_rank_failures(ranks):
            dist.all_gather_object(slices_by_rank, [each.box for each in held])
        holders: dict[TensorSlice, list[int]] = defaultdict(list)
        for rank, boxes in enumerate(slices_by_rank):
            for box in boxes:
                holders[TensorSlice(*box)].append(rank)
        self._holders = dict(sorted(holders.items()))

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every whole tensor, by name."""
        shapes_by_name: dict[str, tuple[int, ...]] = {}
        for box in self._holders:
            ends = tuple(at + size for at, size in zip(box.start, box.size, strict=True))
            previous = shapes_by_name.get(box.name, (0,) * len(ends))
            shapes_by_name[box.name] = tuple(map(max, previous, ends))
        return shapes_by_name

    def parts_to_send(
        self, parts: Mapping[TensorSlice, torch.Tensor]
    ) -> dict[TensorSlice, torch.Tensor]:
        """Return this rank's parts that a gather takes from it, not from another rank."""
        return {
            box: part for box, part in parts.items() if self._holders[box][0] == self._ranks.rank
        }

    def gather(self, parts: Mapping[TensorSlice, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the whole tensors on the lead, in host memory; nothing on the others.

        Raises:
            RankFailedError: a rank did not send in time.
        """
        lead, me = self._ranks.lead, self._ranks.rank
        whole: dict[str, torch.Tensor] = {}
        if self._ranks.is_lead:
            dtypes = {each.dtype for each in parts.values()} or {torch.float32}
            shapes, dtype = self.shapes, dtypes.pop()
            whole = {name: torch.zeros(shape, dtype=dtype) for name, shape in shapes.items()}
        for box, (owner, *_) in self._holders.items():
            if owner == me == lead:
                box.within(whole[box.name]).copy_(parts[box].detach())
            elif owner == me:
                self._ranks.send(parts[box].detach().cpu(), lead)
            elif me == lead:
                received = torch.empty(box.size, dtype=whole[box.name].dtype)
                self._ranks.receive(received, owner)
                box.within(whole[box.name]).copy_(received)
        return whole

    def norm(self, gradients: Mapping[TensorSlice, torch.Tensor | None]) -> torch.Tensor:
        """Return the norm of the whole gradient, unread; slices on several ranks count once.

        Raises:
            RankFailedError: a rank did not respond in time.
        """
        own_squares = torch.zeros((), dtype=torch.float64, device=pick_device())
        for box, gradient in gradients.items():
            if gradient is not None:
                squares = gradient.float().square().sum().double() / len(self._holders[box])
                own_squares += squares.to(own_squares.device)
        return self._ranks.total_on_device(own_squares).sqrt()


SEQUENCE = 1  # dimension of the length in [rows, length, width]


def shard_matrices(stage: Stage, mesh: DeviceMesh, *, is_sequence_divided: bool) -> None:
    """Shard every matrix of a stage; norms stay whole."""
    between: Placement = Shard(SEQUENCE) if is_sequence_divided else Replicate()
    ends: dict[str, ParallelStyle] = {}
    if hasattr(stage.model, "embed_tokens"):
        ends["model.embed_tokens"] = RowwiseParallel(
            input_layouts=Replicate(), output_layouts=between
        )
    if stage.is_last:
        ends["lm_head"] = ColwiseParallel(input_layouts=between, output_layouts=Replicate())
        if is_sequence_divided:
            ends["model.norm"] = SequenceParallel()
    is_tied = stage.is_last and bool(stage.config.tie_word_embeddings)
    parallelize_module(stage, mesh, ends)
    if is_tied:
        stage.lm_head.weight = stage.model.embed_tokens.weight  # type: ignore[union-attr]  # torch types a submodule as a tensor too
    for block in stage.blocks.values():
        parallelize_module(block, mesh, _block_plan(between))


def _block_plan(between: Placement) -> dict[str, ParallelStyle]:
    plan: dict[str, ParallelStyle] = {
        **{f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"},
        "self_attn.o_proj": RowwiseParallel(output_layouts=between),
        "mlp.gate_proj": ColwiseParallel(),
        "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": RowwiseParallel(output_layouts=between),
    }
    if isinstance(between, Replicate):
        return plan
    return plan | {
        "input_layernorm": SequenceParallel(),
        "post_attention_layernorm": SequenceParallel(),
        "self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": between},
            desired_input_kwarg_layouts={"hidden_states": Replicate()},
        ),
        "mlp": PrepareModuleInput(input_layouts=(between,), desired_input_layouts=(Replicate(),)),
    }


def own_slice(name: str, weight: torch.Tensor) -> TensorSlice:
    """Return the slice of a weight that this rank has on the tensor axis."""
    box = whole_slice(name, weight.shape)
    if not isinstance(weight, DTensor):
        return box
    index, count = weight.device_mesh.get_local_rank(), weight.device_mesh.size()
    for placement in weight.placements:
        if isinstance(placement, Shard):
            at = placement.dim
            size = weight.shape[at] // count
            start = (*box.start[:at], index * size, *box.start[at + 1 :])
            box = TensorSlice(name, start, (*box.size[:at], size, *box.size[at + 1 :]))
    return box


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def plain_gradient(weight: torch.Tensor) -> torch.Tensor | None:
    """Return a weight's gradient with the weight's placements, as a local tensor."""
    gradient = weight.grad
    if isinstance(gradient, DTensor) and isinstance(weight, DTensor):
        gradient = gradient.redistribute(placements=weight.placements)
    return None if gradient is None else plain(gradient)


# ---------------------------------------------------------------------------
# Expert parallelism: each rank has some whole experts; tokens are exchanged by all-to-all.
#
# Source: Lepikhin et al. 2020 (GShard), arXiv:2006.16668, section 3.
# ---------------------------------------------------------------------------


STACKS = ("gate_up_proj", "down_proj")


class LocalExperts(nn.Module):
    """This rank's experts of a layer under expert parallelism; the group has all of them."""

    def __init__(self, whole: Any, group: dist.ProcessGroup) -> None:  # noqa: ANN401 - one class for each architecture
        super().__init__()
        self._group, self._act = group, whole.act_fn
        self._size = dist.get_world_size(group)
        self.num_experts = int(whole.gate_up_proj.shape[0]) // self._size
        self.first = dist.get_rank(group) * self.num_experts
        self.gate_up_proj, self.down_proj = (
            nn.Parameter(getattr(whole, name).detach()[self.first :][: self.num_experts].clone())
            for name in STACKS
        )

    def forward(
        self, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Return the weighted outputs of the chosen experts for ``hidden`` [tokens, width].

        ``chosen`` and ``weights`` [tokens, experts per token].
        """
        order = chosen.flatten().argsort(stable=True)
        tokens = order // chosen.shape[1]
        counts = chosen.flatten().bincount(minlength=self._size * self.num_experts)
        sent = counts.view(self._size, self.num_experts)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent.contiguous(), group=self._group)
        out, back = (each.sum(dim=1).tolist() for each in (sent, received))
        arrived = _AllToAll.apply(hidden[tokens], out, back, self._group)
        outputs = self._make(arrived, received)
        returned = _AllToAll.apply(outputs, back, out, self._group)
        returned = returned * weights.flatten()[order, None]
        return torch.zeros_like(hidden).index_add(0, tokens, returned.to(hidden.dtype))

    def _make(self, arrived: torch.Tensor, received: torch.Tensor) -> torch.Tensor:
        """Return each token's expert output; tokens are ordered by sender and expert."""
        expert_numbers = torch.arange(self.num_experts, device=arrived.device).repeat(self._size)
        expert_of = expert_numbers.repeat_interleave(received.flatten())
        rows, parts = [], []
        for index in range(self.num_experts):
            rows.append((expert_of == index).nonzero().flatten())
            gated = nn.functional.linear(arrived[rows[-1]], self.gate_up_proj[index])
            gate, up = gated.chunk(2, dim=-1)
            parts.append(nn.functional.linear(self._act(gate) * up, self.down_proj[index]))
        return torch.cat(parts)[torch.cat(rows).argsort()]


class _AllToAll(torch.autograd.Function):
    """All-to-all of rows: ``out`` rows to each rank of a group, ``back`` rows from each."""

    @staticmethod
    def forward(
        ctx: Context,
        rows: torch.Tensor,
        out: Sequence[int],
        back: Sequence[int],
        group: dist.ProcessGroup,
    ) -> torch.Tensor:
        ctx.out, ctx.back, ctx.group = out, back, group
        return _all_to_all(rows, out, back, group)

    @staticmethod
    def backward(ctx: Context, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _all_to_all(gradient, ctx.back, ctx.out, ctx.group), None, None, None


def _all_to_all(
    rows: torch.Tensor, out: Sequence[int], back: Sequence[int], group: dist.ProcessGroup
) -> torch.Tensor:
    received = rows.new_empty(sum(back), rows.shape[1])
    dist.all_to_all_single(received, rows.contiguous(), list(back), list(out), group=group)
    return received


def shard_experts(stage: Stage, group: dist.ProcessGroup) -> None:
    """Replace every layer's experts by those of this rank."""
    for block in stage.blocks.values():
        sparse: Any = block.mlp
        sparse.experts = LocalExperts(sparse.experts, group)


def expert_slices(stage: Stage, num_experts: int) -> dict[str, TensorSlice]:
    """Return the slices of this rank's experts, by name."""
    slices = {}
    for name, module in stage.named_modules():
        if isinstance(module, LocalExperts):
            for stack in STACKS:
                inner = tuple(getattr(module, stack).shape[1:])
                at = (module.first, *(0 for _ in inner))
                key = f"{name}.{stack}"
                slices[key] = TensorSlice(key, at, (num_experts // module._size, *inner))  # noqa: SLF001 - of the same file
    return slices


# ---------------------------------------------------------------------------
# Replicas with reduced communication: gradient compression, or local SGD.
# ---------------------------------------------------------------------------


if TYPE_CHECKING:
    GradBucket = Any  # torch's stubs leave it out, but DDP reads it from a hook's signature
else:
    from torch.distributed import GradBucket

NARROW = {"fp16": torch.float16, "bf16": torch.bfloat16}
INT8_LEVELS = 127
POWERSGD_START = 3  # uncompressed steps first: torch requires at least 2
Reduced = torch.futures.Future[torch.Tensor]


class CompressedReplicas(Replicas):
    """Replicas with gradients compressed to fewer bits, or to low rank by PowerSGD.

    Source: Vogels et al. 2019 (PowerSGD), arXiv:1905.13727; Dettmers 2015, arXiv:1511.04561.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        compute_dtype: ComputeDtype,
        device: torch.device,
        ranks: Ranks,
        options: LayoutOptions,
    ) -> None:
        super().__init__(model, compute_dtype, device, ranks)
        self._method, self._rank = options.gradient_compression, options.powersgd_rank
        self._sent_bytes = 0

    def begin(self) -> None:
        """Wrap the model in DDP with a compression hook.

        Raises:
            RankFailedError: not every rank connected in time.
        """
        super().begin()
        if not isinstance(self._replica, DistributedDataParallel):
            return
        if self._method == "powersgd":
            state = PowerSGDState(
                None,
                matrix_approximation_rank=self._rank,
                start_powerSGD_iter=POWERSGD_START,
                min_compression_rate=1,
            )
            self._replica.register_comm_hook(state, self._counted(powerSGD_hook))
        elif self._method == "int8":
            self._replica.register_comm_hook(None, self._in_int8)
        else:
            self._replica.register_comm_hook(NARROW[self._method or "bf16"], self._narrowed)

    def gradients(self, batches: Sequence[Batch]) -> StepLoss:
        """Compute the step's gradients from this rank's micro-batches.

        Raises:
            RankFailedError: another rank did not respond in time.
        """
        self._sent_bytes = 0
        return super().gradients(batches)

    def figures(self) -> dict[str, float]:
        """Return the gradient bytes that this rank sent in the last step."""
        return {"gradient_bytes_sent": float(self._sent_bytes)}

    def _narrowed(self, state: torch.dtype, bucket: GradBucket) -> Reduced:
        gradient: torch.Tensor = bucket.buffer()
        narrow = gradient.div(self._ranks.size).to(state)
        self._sent_bytes += narrow.nbytes
        summing = dist.all_reduce(narrow, async_op=True)

        def widened(_done: object) -> torch.Tensor:
            return gradient.copy_(narrow)

        return _then(summing, widened)

    def _in_int8(self, state: None, bucket: GradBucket) -> Reduced:  # noqa: ARG002 - torch passes it by name
        """Return the mean of the ranks' int8 gradients, each in units of 1/127 of its maximum."""
        gradient: torch.Tensor = bucket.buffer()
        scale = gradient.abs().amax().clamp_min(torch.finfo(gradient.dtype).tiny) / INT8_LEVELS
        codes = (gradient / scale).round().to(torch.int8)
        self._sent_bytes += codes.nbytes + scale.nbytes
        scales = [torch.empty_like(scale) for _ in range(self._ranks.size)]
        dist.all_gather(scales, scale)
        all_codes = [torch.empty_like(codes) for _ in range(self._ranks.size)]
        gathering = dist.all_gather(all_codes, codes, async_op=True)

        def mean(_done: object) -> torch.Tensor:
            gradient.zero_()
            for each, its_scale in zip(all_codes, scales, strict=True):
                gradient.add_(each * its_scale)
            return gradient.div_(self._ranks.size)

        return _then(gathering, mean)

    def _counted(self, hook: Callable[..., Reduced]) -> Callable[..., Reduced]:
        def counted(state: Any, bucket: GradBucket) -> Reduced:  # noqa: ANN401 - PowerSGD's own
            _ratio, _before, sent = state.compression_stats()
            if state.iter < state.start_powerSGD_iter:
                self._sent_bytes += bucket.buffer().nbytes
            reduced = hook(state, bucket)
            added = state.compression_stats()[2] - sent
            self._sent_bytes += added * bucket.buffer().element_size()
            return reduced

        return counted


class LocalReplicas(Replicas):
    """Local SGD: replicas train independently and average their weights periodically.

    Evaluations and checkpoints average the weights first, in addition.
    Source: Stich 2018, arXiv:1805.09767.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        compute_dtype: ComputeDtype,
        device: torch.device,
        ranks: Ranks,
        options: LayoutOptions,
    ) -> None:
        super().__init__(model, compute_dtype, device, ranks)
        self._interval = options.synchronization_interval_steps
        self._steps_since_average = 0
        self._sent_bytes = 0

    def begin(self) -> None:
        """Do nothing: each replica trains by itself."""

    def gradients(self, batches: Sequence[Batch]) -> StepLoss:
        """Compute the gradients of this rank's own micro-batches.

        Raises:
            RankFailedError: another rank did not respond in time.
        """
        own_labels = sum(batch.num_labels for batch in batches)
        loss_sum = torch.zeros((), dtype=torch.float64, device=self._device)
        for batch in batches:
            loss_sum += self._backward(batch, own_labels * self._ranks.size)
        (labels,) = self._ranks.total([float(own_labels)])
        total = self._ranks.total_on_device(loss_sum)
        self._sent_bytes = 0
        return StepLoss(total / labels, loss_sum / max(1, own_labels))

    def after_update(self) -> None:
        """Average the replicas' weights if the interval is over."""
        self._steps_since_average += 1
        if self._steps_since_average >= self._interval:
            self.synchronise()

    def synchronise(self) -> None:
        """Average the weights of all replicas.

        Raises:
            RankFailedError: another rank did not respond in time.
        """
        if not self._steps_since_average or self._ranks.is_alone:
            return
        self._steps_since_average = 0
        with naming_rank_failures(self._ranks), torch.no_grad():
            for each in self.trained.parameters():
                if each.requires_grad:
                    dist.all_reduce(each)
                    each.div_(self._ranks.size)
                    self._sent_bytes += each.nbytes

    def figures(self) -> dict[str, float]:
        """Return the weight bytes that this rank sent after the last step."""
        return {"weight_bytes_sent": float(self._sent_bytes)}


def _then(work: Any, continuation: Callable[[object], torch.Tensor]) -> Reduced:  # noqa: ANN401 - torch types no Work's future
    reduced: Reduced = work.get_future().then(continuation)
    return reduced
