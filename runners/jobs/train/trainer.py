"""The training loop, with recomputed and offloaded activations."""

import contextlib
import math
import os
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers import PreTrainedModel

from runners.jobs.corpus import TokenIds
from runners.jobs.events import Emitter
from runners.jobs.inputs import check_unchanged
from runners.jobs.loading import fresh_model, ready, use_attn_implementation
from runners.jobs.memory import PeakMeter, activations_counted, optimizer_bytes, terms_held
from runners.jobs.ranks import ALONE, Ranks
from runners.jobs.runtime import BadInputError, Job, MissingModelError
from runners.jobs.train.checkpoint import (
    CheckpointWriter,
    TrainState,
    keepers_of,
    read_latest_state,
)
from runners.jobs.train.communication import CollectiveProfiler
from runners.jobs.train.evaluator import Evaluator, HeldOutData
from runners.jobs.train.kernels import (
    PLAIN_STEPS,
    BlockAttention,
    CompiledLayers,
    evaluation_attention,
)
from runners.jobs.train.layout import StepLoss
from runners.jobs.train.layout_choice import chosen_layout
from runners.jobs.train.optimizers import FusedUpdate, optimizer_of
from runners.jobs.train.quantized import convert_to_integer_layers
from runners.jobs.train.rows import Batch, Batches, TextBatches, with_growing_lengths
from runners.jobs.train.run_progress import (
    LossScale,
    RunProgress,
    SpikeGuard,
    UnreadFigures,
    learning_rate_ratio,
)
from runners.jobs.weights import HostBuffers, activations_in_host
from runners.jobspec import RandomModel, TrainSpec
from runners.jobspec.compress import FIRST_STEPS_SKIPPED
from runners.jobspec.train import Away, Recomputation
from runners.shared.messages import RunRequest

# ---------------------------------------------------------------------------
# Activation memory: recomputation (gradient checkpointing), and offload between the passes.
# ---------------------------------------------------------------------------


# Activation recomputation (gradient checkpointing).
#
# Per layer: ``full`` saves only its input, ``selective`` also the outputs of its matrix products,
# so that only norms, activation functions and attention scores are recomputed.
#
# Source: Chen et al. 2016, arXiv:1604.06174; Korthikanti et al. 2022, arXiv:2205.05198, section 5.


_ATEN = torch.ops.aten
KEPT_PRODUCTS = frozenset(
    {
        _ATEN.mm.default,
        _ATEN.addmm.default,
        _ATEN._scaled_dot_product_flash_attention_for_cpu.default,  # noqa: SLF001 - SDPA on a CPU
        _ATEN._scaled_dot_product_flash_attention.default,  # noqa: SLF001 - SDPA on a GPU
        _ATEN._scaled_dot_product_efficient_attention.default,  # noqa: SLF001 - the same
    }
)


def recompute(model: PreTrainedModel, how: Recomputation) -> None:
    """Enable recomputation in the model's layers.

    Raises:
        BadInputError: the architecture does not support it.
    """
    if how == "none":
        return
    kwargs: dict[str, Any] = {"use_reentrant": False}
    if how == "selective":
        kwargs["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    try:
        if hasattr(model, "activation_checkpointing_enable"):
            model.activation_checkpointing_enable(activation_checkpointing_kwargs=kwargs)
        else:  # transformers before 5.18
            older: Any = model
            older.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
    except ValueError as error:
        msg = (
            f"activation_recomputation {how}: {type(model).__name__} has no layers that can be "
            "computed again; choose none, or a smaller micro_batch_size"
        )
        raise BadInputError(msg) from error


def _policy(_context: object, operator: object, *_args: object, **_kwargs: object) -> object:
    """Save what is expensive: one product costs more than everything between two."""
    if operator in KEPT_PRODUCTS:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


# Activation offload between forward and backward pass.
#
# On a GPU activations go to host memory, on a CPU to a file; weights stay.
#
# Source: Huang et al. 2020 (SwapAdvisor), ASPLOS.


SMALLEST_BYTES = 4096  # smaller tensors stay: one page of memory


class TensorLocation(NamedTuple):
    """The location of a tensor in the file, and its metadata."""

    offset: int
    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class DiskSwap:
    """A file of one step's activations; each step overwrites it."""

    def __init__(self, model: torch.nn.Module, folder: Path) -> None:
        """Open an unnamed file in the folder; it vanishes with the process."""
        self._model = model
        self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 - for the job
        weakref.finalize(self, self._file.close)
        self._end = 0
        self.written_bytes = 0
        self._known: dict[tuple[object, ...], tuple[weakref.ref[object], TensorLocation]] = {}
        self._model_storages: frozenset[int] = frozenset()

    @contextlib.contextmanager
    def swap_activations(self) -> Iterator[None]:
        """Save the block's activations to the file; the backward passes run in the block, too."""
        self._end = 0
        self._known.clear()
        self._model_storages = _storages(self._model)
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            yield

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | TensorLocation:
        storage = tensor.untyped_storage()
        size = tensor.numel() * tensor.element_size()
        if size < SMALLEST_BYTES or storage.data_ptr() in self._model_storages:
            return tensor
        view = (tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        key = (storage.data_ptr(), view, tensor._version)  # noqa: SLF001 - torch's own count
        saved = self._known.get(key)
        if saved is not None and saved[0]() is storage:
            return saved[1]  # several operators save one tensor: a norm's output, three products
        dense = _dense(tensor.detach().cpu())
        place = TensorLocation(
            self._end, tensor.shape, dense.stride(), tensor.dtype, tensor.device
        )
        data = _bytes_of(dense)
        while data:
            done = os.pwrite(self._file.fileno(), data, self._end)
            self._end += done
            data = data[done:]
        self.written_bytes = max(self.written_bytes, self._end)
        self._known[key] = (weakref.ref(storage), place)
        return place

    def _unpack(self, packed: torch.Tensor | TensorLocation) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        tensor = torch.empty_strided(packed.shape, packed.strides, dtype=packed.dtype)
        data, at = _bytes_of(tensor), packed.offset
        while data:
            done = os.preadv(self._file.fileno(), [data], at)
            if not done:
                msg = f"the swap file ends at {at}, inside an activation"
                raise OSError(msg)
            at += done
            data = data[done:]
        return tensor.to(packed.device)


def offloaded_activations(
    where: Away, model: torch.nn.Module, device: torch.device, folder: Path
) -> "ActivationSwap":
    """Return the context factory that offloads each step's activations.

    Raises:
        BadInputError: a CPU's activations are in host memory already.
    """
    if where == "disk":
        return ActivationSwap(model, DiskSwap(model, folder))
    if where == "cpu" and device.type == "cpu":
        msg = (
            "activation_offload cpu: this host computes on its CPU, whose activations are in its "
            "memory already; choose disk, or activation_recomputation full"
        )
        raise BadInputError(msg)
    return ActivationSwap(model, to_host=where == "cpu")


class ActivationSwap:
    """Offloads one step's activations to disk or host memory, or not at all."""

    def __init__(
        self, model: torch.nn.Module, disk: DiskSwap | None = None, *, to_host: bool = False
    ) -> None:
        self.disk = disk
        self._model = model
        self._to_host = to_host
        self._buffers = HostBuffers(is_pinned=torch.cuda.is_available())

    def step(self) -> AbstractContextManager[object]:
        """Return the context of one step's forward and backward passes."""
        if self.disk is not None:
            return self.disk.swap_activations()
        if self._to_host:
            kept = _storages(self._model)
            return activations_in_host(self._buffers, kept, SMALLEST_BYTES)
        return contextlib.nullcontext()


def _storages(model: torch.nn.Module) -> frozenset[int]:
    """Return the addresses of the weights, which stay where they are."""
    return frozenset(each.untyped_storage().data_ptr() for each in model.parameters())


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor densely stored; keep its strides if it is dense already.

    The product of a transposed matrix and that of its contiguous copy may differ in the last bit.
    """
    strides = torch.empty_like(tensor, device="meta").stride()
    return tensor if tensor.stride() == strides else torch.empty_like(tensor).copy_(tensor)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    array: Any = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy()
    return memoryview(array)


# ---------------------------------------------------------------------------
# The training loop on one or many ranks, with a time budget, a step limit or both.
# ---------------------------------------------------------------------------


MAX_GRAD_NORM = 1.0
METRIC_INTERVAL_SECONDS = 0.25  # at most four chart points per second
SAY_INTERVAL_SECONDS = 2.0  # one log line every two seconds


@dataclass
class Trainer:
    """One training run: model, data, optimizer and progress."""

    job: Job
    spec: TrainSpec
    model: PreTrainedModel
    batches: Batches
    held_out: HeldOutData
    device: torch.device
    ranks: Ranks = ALONE
    blocks: BlockAttention | None = None  # set if the attention is block-sparse
    state: TrainState = field(default_factory=TrainState)
    step_seconds: list[float] = field(default_factory=list)
    resumed_at_step: int | None = None
    meter: PeakMeter | None = None  # of the training, started before the model was built
    trained_tokens: int = 0  # by this process alone, as its energy measurement
    inputs: Mapping[str, str] = field(default_factory=dict)  # digests by what the training reads
    resumed_remark: str = ""  # what could not be checked of the checkpoint's inputs

    def __post_init__(self) -> None:
        spec, scratch = self.spec, self.job.scratch_dir()
        self.attention = str(self.model.config._attn_implementation)  # noqa: SLF001 - no public name
        if spec.optimizer == "qft":
            convert_to_integer_layers(self.model)
        if spec.compute_dtype == "fp8":
            from runners.jobs.train.kernels import use_fp8_linear_layers  # torchao is large

            use_fp8_linear_layers(self.model, self.device)
        recompute(self.model, spec.activation_recomputation)
        self.layout = chosen_layout(self.model, spec, self.device, self.ranks)  # or its refusal
        self.keepers = keepers_of(self.ranks, scratch)
        self.compiled = CompiledLayers(self.model, scratch) if spec.compiled else None
        self.optimizer = optimizer_of(spec, self.layout.trained, scratch)
        check_fused(self.optimizer, self.ranks)
        self.pace = RunProgress(spec.max_steps, spec.time_budget_seconds)
        self._swap = offloaded_activations(
            spec.activation_offload, self.model, self.device, scratch
        )
        is_classifier = spec.objective == "classification"
        config = self.model.config
        self.guard = SpikeGuard(
            int(config.num_labels or 1) if is_classifier else config.vocab_size,
            spec.spike_loss_ratio,
            spec.learning_rate,
            skips=spec.on_spike == "skip",
        )
        self.scale = LossScale() if spec.compute_dtype == "fp16" else None
        # A guard that may skip an update has to read before it; one that ends the run need not.
        self.checks_late = (
            self.device.type == "cuda" and not self.guard.skips and self.scale is None
        )
        self._unchecked: UnreadFigures | None = None
        self._last: UnreadFigures | None = None
        self.watch = CollectiveProfiler(self.ranks, self.layout.axes_of_groups)
        self.writer = CheckpointWriter(
            self.job.checkpoint_dir, spec.keep_checkpoints, self.keepers
        )
        self._writes_in_background = spec.writes_checkpoints_in_background(self.device.type)
        self.evaluator = Evaluator(
            self.job, spec, self.layout, self.ranks, self.pace, self.held_out, self.aside,
            self.report_progress, self.writer if self._writes_in_background else None,
        )  # fmt: skip
        self._data_seconds = 0.0  # of the step under way
        self._next_metric_at = 0.0
        self._next_line_at = 0.0
        self._last_checkpoint_at = time.monotonic()
        self._uncounted_since: float | None = None  # began a step that ``state`` has in part
        self.has_ended = False  # at a limit, or early: no further step follows

    @property
    def last_loss(self) -> float:
        """Return the loss of the last step, in nats."""
        return math.nan if self._last is None else self._last.figures.loss

    def resume(self) -> None:
        """Resume from the newest checkpoint of all hosts, if any, with equal weights on all ranks.

        Raises:
            BadInputError: the checkpoint is of other data or another model, or is damaged.
            MissingModelError: no host has what the job is to go on from.
        """
        self.keepers.share_newest(self.job.checkpoint_dir)
        self._check_inputs()
        state = self.layout.resume(self.job.checkpoint_dir, self.optimizer)
        if state is not None:
            self.state = state
            self.resumed_at_step = state.step
            where = f"resumed from the checkpoint at step {state.step}"
            remark = f"; {self.resumed_remark}" if self.resumed_remark else ""
            self.job.emitter.log(self.ranks.name + where + remark)
            if self.scale is not None and state.loss_scale:
                self.scale.value, self.scale.good_steps = state.loss_scale, state.scaled_steps
            self.evaluator.resume(state)
        elif self.spec.resume_from:
            raise MissingModelError(
                f"no host of this job keeps a checkpoint of job {self.spec.resume_from}; resume "
                "it with one of the hosts that it ran on, or run it again from the start"
            )
        self.state.inputs = tuple(self.inputs.items())

    def _check_inputs(self) -> None:
        """Compare the lead's checkpoint with what this training reads, before it is loaded."""
        state = read_latest_state(self.job.checkpoint_dir) if self.ranks.is_lead else None
        fault: BadInputError | None = None
        if state is not None:
            where = f"the checkpoint at step {state.step}"
            try:
                self.resumed_remark = check_unchanged(where, dict(state.inputs), self.inputs)
            except BadInputError as error:
                fault = error
        (num_faults,) = self.ranks.total([float(fault is not None)])
        if num_faults:
            raise fault or BadInputError("the first rank's checkpoint is of other data or weights")

    def run(self) -> bool:
        """Train to the end; return False if stopped, after a checkpoint if the model is kept.

        Raises:
            RankFailedError: another rank did not respond within the job's timeout.
            DivergedError: the loss spiked or is not finite.
        """
        try:
            return self._train()
        finally:
            self.writer.abandon(self.spec.parallel.rank_timeout_seconds)

    def _train(self) -> bool:
        self.model.train()
        self.layout.begin()
        self.evaluator.begin(self.state)
        while True:
            is_stopped, is_due = self._synchronise_flags()
            self.writer.check()
            if news := self.writer.news():
                self.job.emitter.metric(news, step=self.state.step)
            if is_due and not is_stopped:
                self.checkpoint(in_background=self._writes_in_background)
            is_over = self.evaluator.is_over
            if is_over:
                self.job.emitter.log(self.ranks.name + self.evaluator.patience.note(self.state))
            if self.pace.fraction(self.state) >= 1.0 or is_over:
                self._check_last()
                if self.compiled is not None:
                    self.compiled.end()
                self.writer.finish()
                self.has_ended = True
                return True
            if is_stopped:
                if self.spec.keeps_model:
                    self.checkpoint()
                return False
            began = time.monotonic()
            with self.watch.step():
                values = self.make_step()
            values |= self.watch.news()
            if not self.step_seconds:
                self.ranks.settle(self.spec.parallel)
                self.layout.set_timeout(self.spec.parallel.rank_timeout_seconds)
            self._after_step(values, began)

    def _synchronise_flags(self) -> tuple[bool, bool]:
        """Broadcast the lead's clock; return whether to stop, and whether a checkpoint is due."""
        counts = self.ranks.is_lead or self.spec.parallel.on_lost_rank != "shrink"
        stops = counts and self.job.stop_requested.is_set()
        elapsed = self.state.elapsed_seconds if self.ranks.is_lead else 0.0
        since_checkpoint = time.monotonic() - self._last_checkpoint_at
        is_due = (
            self.spec.keeps_model
            and since_checkpoint >= self.spec.checkpoint_every_seconds
            and not self.writer.is_busy
        )
        is_over = self.ranks.is_lead and self.evaluator.patience.is_over(self.state)
        flags = [float(stops), float(is_due and self.ranks.is_lead), float(is_over), elapsed]
        num_stopping, due, over, self.state.elapsed_seconds = self.ranks.total(flags)
        self.evaluator.is_over = over > 0
        return num_stopping > 0, due > 0

    def checkpoint(self, *, in_background: bool = False) -> None:
        """Save model, optimizer and progress; each rank writes its part of them.

        Raises:
            RankFailedError: another rank did not respond within the job's timeout.
            OSError: the write failed, for example on a full disk; the previous checkpoint remains.
        """
        self._check_last()
        waited_before = self.writer.waited_seconds
        self.layout.synchronise()
        if self.scale is not None:
            scale = self.scale
            self.state.loss_scale, self.state.scaled_steps = scale.value, scale.good_steps
        staged = self.layout.checkpoint_part(self.optimizer, self.state)
        if in_background:
            self.writer.begin(staged)
        else:
            self.writer.write(staged)
        self._last_checkpoint_at = time.monotonic()
        seconds = self.writer.waited_seconds - waited_before
        self.job.emitter.metric({"checkpoint_wait_seconds": seconds}, step=self.state.step)

    def make_step(self) -> dict[str, float | torch.Tensor]:
        """Run one optimizer step on its micro-batches, and return its metrics, unread."""
        if self.compiled is not None and len(self.step_seconds) == PLAIN_STEPS:
            self.compiled.begin()
        rate = self.spec.learning_rate * learning_rate_ratio(self.pace.fraction(self.state))
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        indices = self.layout.share(self._micro_steps)
        began = time.monotonic()
        batches = [self.batches.micro_batch(self.state.step, index) for index in indices]
        self._data_seconds = time.monotonic() - began
        step_loss = self._gradients(batches)
        norm = self._clipped_norm()
        if norm is not None and self._may_update(
            UnreadFigures(self.state.step + 1, *step_loss, norm)
        ):
            self.optimizer.step()
        if not self.step_seconds:
            self.report_held_bytes(optimizer_states=optimizer_bytes(self.optimizer))
        self.optimizer.zero_grad(set_to_none=not self.layout.keeps_gradients)
        self.layout.after_update()
        loss = step_loss.loss if self.ranks.is_lead else step_loss.own_loss
        skipped = {} if norm is not None else {"loss_scale_overflow": 1.0}
        figures = {**skipped, **self.layout.figures()}
        shown_norm = 0.0 if norm is None else norm
        return {"loss": loss, "grad_norm": shown_norm, "learning_rate": rate, **figures}

    def _may_update(self, reading: UnreadFigures) -> bool:
        """Return whether the guard allows the step; checked later, the device is not waited for.

        Raises:
            DivergedError: the loss of this step, or of the last one, spiked or is not finite.
        """
        self._last = reading
        self._check_last()
        if self.checks_late:
            self._unchecked = reading
            return True
        return self._is_allowed(reading)

    def _check_last(self) -> None:
        """Check the step that was updated unread, if any: before its weights are used or kept.

        Raises:
            DivergedError: as in ``run``.
        """
        reading, self._unchecked = self._unchecked, None
        if reading is not None:
            self._is_allowed(reading)

    def _is_allowed(self, reading: UnreadFigures) -> bool:
        loss, _own, norm = reading.figures
        return self.guard.allows(reading.step, loss, norm)

    def _clipped_norm(self) -> torch.Tensor | None:
        """Clip the gradients; return the norm before clipping, None if fp16 ones overflowed."""
        if isinstance(self.optimizer, FusedUpdate):
            return self.optimizer.norm()
        if self.scale is not None:
            trained = self.layout.trained.parameters()
            if not self.scale.unscale(trained, self.ranks):
                return None
        return self.layout.clip(MAX_GRAD_NORM)

    def _gradients(self, batches: list[Batch]) -> StepLoss:
        """Compute the step's gradients; in the first step, measure the activation memory."""
        is_counted = not self.step_seconds and self.ranks.is_alone
        counting = activations_counted(self.model) if is_counted else contextlib.nullcontext()
        if self.scale is not None:
            self.layout.loss_scale = self.scale.value
        with counting as live, self._swap.step():
            step_loss = self.layout.gradients(batches)
        if not self.step_seconds:  # report before the next allocation, which may fail
            activations = {} if live is None else {"activations": live.peak}
            self.report_held_bytes(gradients=self.gradients_held(), **activations)
        return step_loss

    def gradients_held(self) -> int:
        """Return the bytes of the gradients in memory; of a fused update, the peak."""
        if isinstance(self.optimizer, FusedUpdate):
            return self.optimizer.peak_gradient_bytes
        return self.layout.gradient_bytes()

    def report_held_bytes(self, **held: int) -> None:
        """Report which bytes are held from the next step on."""
        self.job.emitter.metric(terms_held(held), step=self.state.step + 1)

    @property
    def _micro_steps(self) -> int:
        return self.spec.gradient_accumulation_steps

    def _after_step(self, values: Mapping[str, float | torch.Tensor], began: float) -> None:
        seconds = time.monotonic() - began
        self._uncounted_since = began
        tokens = self._num_tokens(range(self._micro_steps))
        own = self._num_tokens(self.layout.share(self._micro_steps))
        self.state.step += 1
        self.state.tokens += tokens
        self.trained_tokens += tokens
        self.step_seconds.append(seconds)
        reported_tokens = tokens if self.ranks.is_lead else own
        speed = {
            "tokens_per_second": reported_tokens / seconds,
            "step_seconds": seconds,
            "data_wait_ratio": self._data_seconds / seconds,
        }
        self._emit({**values, **speed})
        if self.evaluator.is_due(self.state):
            self._check_last()
        self.evaluator.after_step(self.state)
        self.state.elapsed_seconds += time.monotonic() - began
        self._uncounted_since = None

    def _num_tokens(self, micro_steps: range) -> int:
        return sum(self.batches.num_tokens(self.state.step, each) for each in micro_steps)

    def _emit(self, unread: Mapping[str, float | torch.Tensor]) -> None:
        now = time.monotonic()
        is_last = self.pace.fraction(self.state) >= 1.0 or "communication_ratio" in unread
        if now < self._next_metric_at and not is_last:
            return
        self._next_metric_at = now + METRIC_INTERVAL_SECONDS
        values = {name: float(value) for name, value in unread.items()}
        memory = (
            {} if self.meter is None else {"peak_memory_bytes": float(self.meter.read().bytes)}
        )
        self.job.emitter.metric({**values, **memory}, step=self.state.step)
        if now >= self._next_line_at or is_last:
            self._next_line_at = now + SAY_INTERVAL_SECONDS
            self.job.emitter.log(self.ranks.name + step_line(self.state.step, values))
        self.report_progress()

    def report_progress(self) -> None:
        """Report what is done, and the seconds left with what follows the last step."""
        left = 0.0 if self.has_ended else self._training_seconds_left()
        after = self.evaluator.final_seconds + self.writer.last_seconds
        eta = None if left is None else left + after
        self.job.emitter.progress(*self.pace.progress(self.state), eta)

    def report_saving(self) -> None:
        """Report that the model is saved, in as many seconds as its last checkpoint took."""
        self.job.emitter.phase("Saving the model")
        self.job.emitter.progress(*self.pace.progress(self.state), self.writer.last_seconds)

    def _training_seconds_left(self) -> float | None:
        """Return the estimated seconds until the last step, with the checkpoints between."""
        began = self._uncounted_since
        elapsed = self.state.elapsed_seconds + (time.monotonic() - began if began else 0.0)
        state = replace(self.state, elapsed_seconds=elapsed)
        left = self.pace.seconds_left(state, self.step_seconds, self.evaluator.between_seconds)
        if left is None or not self.spec.keeps_model:
            return left
        return left * (1.0 + self.writer.mean_wait / self.spec.checkpoint_every_seconds)

    @contextlib.contextmanager
    def aside(self, model: PreTrainedModel) -> Iterator[None]:
        """Run the model within the block as it will be loaded, without compilation."""
        with contextlib.ExitStack() as contexts:
            if self.compiled is not None:
                contexts.enter_context(self.compiled.uncompiled())
            if self.blocks is not None:
                contexts.enter_context(use_attn_implementation(model, evaluation_attention(model)))
            yield


def check_fused(optimizer: torch.optim.Optimizer, ranks: Ranks) -> None:
    """Reject fused updates on several ranks: they run before gradients are reduced.

    Raises:
        BadInputError: the optimizer is fused and there are several ranks.
    """
    if isinstance(optimizer, FusedUpdate) and not ranks.is_alone:
        msg = (
            f"{type(optimizer).__name__} updates each weight as its gradient comes, before the "
            f"gradients of {ranks.size} ranks could meet; use one device, or adamw_8bit"
        )
        raise BadInputError(msg)


def step_line(step: int, values: Mapping[str, float]) -> str:
    """Return the log line of a step."""
    return (
        f"step {step}  loss {values['loss']:.4f}  lr {values['learning_rate']:.2e}  "
        f"grad_norm {values['grad_norm']:.2f}  {values['tokens_per_second']:,.0f} tok/s"
    )


def steady(values: list[float]) -> list[float]:
    """Return the step times without the first ones, unless there are no others."""
    return values[FIRST_STEPS_SKIPPED:] or values


# The trainer on a fresh model without reporting: for benchmarks and measurements.


RANDOM_TOKENS = 100_000


def random_token_trainer(
    fields: Mapping[str, Any],
    config: Mapping[str, Any],
    folder: Path,
    ranks: Ranks = ALONE,
    ids: TokenIds | None = None,
    model: PreTrainedModel | None = None,
    device: torch.device | None = None,
) -> Trainer:
    """Return a trainer with these spec ``fields`` that works in ``folder``, on random tokens.

    ``ids`` and ``model`` replace the random tokens and the fresh model. The same seed gives the
    same weights on every rank. ``device`` is where it trains; by default the CPU.
    """
    device = device or torch.device("cpu")
    spec = TrainSpec.model_validate({"model": RandomModel(config={}), **fields})
    torch.manual_seed(spec.seed)
    model = ready(model or fresh_model(dict(config), torch.float32), device=device)
    if device.type == "cpu":
        model.set_attn_implementation("eager")  # as the job does
    if ids is None:
        vocabulary = int(model.config.vocab_size)
        random_ids = np.random.default_rng(spec.seed).integers(0, vocabulary, RANDOM_TOKENS)
        ids = random_ids.astype(np.int32)
    text = ids
    request = RunRequest(attempt_id="quiet", job_id="quiet", number=1, fence="quiet", spec=spec)
    emitter = Emitter(os.open(os.devnull, os.O_WRONLY))
    job = Job(folder, folder, request, emitter, threading.Event())
    batches = with_growing_lengths(spec, lambda each: TextBatches(text, each))
    return Trainer(job, spec, model, batches, HeldOutData(ids), device, ranks)
