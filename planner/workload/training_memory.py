"""Training memory per device: methods, weights, states, activations, loss."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import cast

from planner.catalog.engines import Engine
from planner.cost.column import single
from planner.cost.memory import MemoryUse, StageMemory, fullest_of
from planner.cost.quantity import Flag, Ledger, Line, NullLedger, either, maximum, minimum, where
from planner.cost.training import (
    ODDS_RATIO_FP32_COPIES,
    SCORE_GRADIENT_BYTES,
    STATE_BYTES,
    UNFUSED_LOSS_FP32_COPIES,
    Operators,
    SavedTensors,
    attention_elements_per_token,
    checkpoint_copy_bytes,
    chunked_loss_bytes,
    eager_attention_elements_per_token,
    every_second_product_elements,
    feed_forward_elements_per_token,
    feed_forward_elements_without_input,
    gradient_elements_per_token,
    hidden_tensors,
    inference_elements,
    kept_activation_bytes,
    kept_token_bytes,
    largest_weight,
    layer_at_work_bytes,
    lora_parameters,
    lora_widths,
    loss_bytes,
    output_widths,
    pipeline_in_flight,
    product_output_elements_per_token,
    product_residuals,
    residuals_of_every_second_product,
    saved_operand_elements_per_token,
    saved_residual_tensors,
    scale_parameters,
    score_bytes,
    score_copies,
    score_element_bytes,
    sharded_state_bytes,
    tiled_loss_bytes,
    zero_shards,
)
from planner.cost.weights import (
    SIXTEEN_BIT,
    WIDE,
    element_bytes,
    first_identical_stages,
    stage_vocabulary,
)
from planner.specs.workload import TrainWorkload
from planner.workload.inference_memory import stage_weight_bytes, usable_bytes
from planner.workload.layouts import Layout
from planner.workload.offloading import (
    FULL_SHARDING,
    StageBytes,
    device_activation_bytes,
    device_gradient_bytes,
    is_offloading,
    tier_bytes,
)
from planner.workload.setting import Setting
from planner.workload.teacher import TILES, as_read_by_teacher, teacher_setting
from planner.workload.torchao_casts import code_elements, keeps_codes, narrow_share

# The trained parameters, optimiser and state sizes of each training method.


DEFAULT_LORA_RANK = 16
MASTER_BYTES = 4.0
ADAPTER_METHODS = frozenset({"lora", "qlora", "alphatuning"})
FUSED_METHODS = frozenset({"lomo", "adalomo"})
OWN_STATES = FUSED_METHODS | {"qft"}


def optimizer_of(workload: TrainWorkload) -> str:
    """Return the optimiser in use: the method's own, the requested one, or AdamW."""
    if workload.method in OWN_STATES:
        return workload.method
    return workload.optimizer or "adamw"


def adapts_every_matrix(setting: Setting, workload: TrainWorkload) -> bool:
    """Return whether all linear weights have adapters, not only queries and values."""
    return (workload.lora_targets or setting.engine.lora_targets) == "all"


def trained_parameters(setting: Setting, workload: TrainWorkload) -> float:
    """Return the number of trained parameters: all, or those of the adapters."""
    if workload.method not in ADAPTER_METHODS:
        return float(setting.counts.total)
    if workload.method == "alphatuning":
        scales = scale_parameters(
            num_layers=setting.model.num_hidden_layers, outputs=output_widths(setting.model)
        )
        return float(scales)
    rank = workload.lora_rank or DEFAULT_LORA_RANK
    widths = lora_widths(setting.model, every=adapts_every_matrix(setting, workload))
    return float(
        lora_parameters(num_layers=setting.model.num_hidden_layers, rank=rank, widths=widths)
    )


def rows_per_record(setting: Setting, workload: TrainWorkload) -> float:
    """Return the rows of a record: two of a pair; packed rows have no padding."""
    filled = workload.text_ratio if setting.strategy.packed else 1.0
    return filled * workload.sequences_per_record


def gradient_bytes_each(setting: Setting, workload: TrainWorkload, layers: float) -> float:
    """Return the gradient bytes per trained parameter of a stage with ``layers`` layers.

    Fused optimisers hold the gradient of one weight at a time, at most the largest. QFT stores
    all gradients in 8 bits; some engines fuse its update too. Some engines keep 16-bit gradients
    in addition to the fp32 ones that accumulate them.
    """
    given = setting.strategy.gradient_dtype or "bf16"
    dtype = setting.engine.adapter_dtype if workload.method in ADAPTER_METHODS else given
    keeps_narrow = dtype == "fp32" and setting.engine.narrow_gradients_beside
    each = element_bytes(dtype) + (element_bytes("bf16") if keeps_narrow else 0.0)
    is_fused = workload.method in FUSED_METHODS or setting.has_integer_vocabulary
    if not is_fused:
        return each
    portion = layers / setting.model.num_hidden_layers
    return each * largest_weight(setting.model) / (setting.counts.total * portion)


def state_bytes_each(setting: Setting, workload: TrainWorkload) -> float:
    """Return the bytes of moments and fp32 master weights per trained parameter."""
    optimizer = optimizer_of(workload)
    scale = element_bytes(setting.strategy.optimizer_dtype or "fp32") / element_bytes("fp32")
    bytes_each = STATE_BYTES[optimizer] * (scale if optimizer != "adamw_8bit" else 1.0)
    sixteen = workload.method in ADAPTER_METHODS or setting.weight_dtype in SIXTEEN_BIT
    if sixteen and setting.engine.master_weights and optimizer not in FUSED_METHODS:
        bytes_each += MASTER_BYTES
    return bytes_each + setting.engine.extra_state_bytes


# Training activations of a pipeline stage: saved tensors, working set of a layer, loss.


GROUP = "memory"
# Objectives whose trainer holds the logits of all positions, or has no vocabulary to tile.
WHOLE_LOGITS = frozenset({"orpo", "reward"})
BACKWARD_SCORES = 2.0  # scores and probabilities, plus the gradients of both
# Methods without a count by operator, because they train packed matrices with other rules.
UNCOUNTED_METHODS = frozenset({"alphatuning", "qft"})


class StageActivations:
    """The activations of one pipeline stage of a training run."""

    def __init__(
        self, setting: Setting, ledger: Ledger, workload: TrainWorkload, index: int
    ) -> None:
        self.setting, self.ledger, self.workload, self.index = setting, ledger, workload, index
        self.layers = cast("float", setting.shares[index].layers)
        layout = setting.layout
        rows = layout.micro_batch * rows_per_record(setting, workload)
        self.tokens = rows * workload.sequence_length / layout.context

    def activation_bytes(self) -> tuple[float, float, float]:
        """Return saved activations, the working set of one layer, and the loss in bytes.

        The working set is the recomputed tensors of one layer.
        """
        each, scores, loss = self._token_bytes(), self._scores, self._loss()
        if self._is_counted:
            return (*self._counted(each, scores), loss)
        recomputation = self.setting.strategy.activation_recomputation
        if recomputation == "full":
            saved_scores = 0.0 if self.setting.engine.recomputes_in_slack else scores
            working = self.tokens * each + BACKWARD_SCORES * saved_scores
            return self._saved_bytes(self._checkpoint), working, loss
        if recomputation == "selective" and self.setting.keeps_every_second_product:
            kept = self._per_token(
                "Kept of every second product",
                residuals_of_every_second_product(self.setting.model),
                every_second_product_elements(self.setting.model),
            )
            working = self.tokens * (each - kept) + BACKWARD_SCORES * scores
            if keeps_codes(self.setting):
                kept = self._with_codes(kept)
            return self._saved_bytes(kept), working, loss
        saved = self._saved_bytes(each)
        if recomputation == "selective":
            return saved, BACKWARD_SCORES * scores, loss
        return saved + scores * self.layers * self._in_flight, scores, loss

    def _with_codes(self, wide_bytes: float) -> float:
        """Return the mean bytes per token of layers that keep codes and of the wide last ones."""
        model, share = self.setting.model, narrow_share(self.setting)
        codes = self._per_token("Kept of narrow layers", 1, code_elements(model))
        return share * codes + (1 - share) * wide_bytes

    @property
    def in_fp32(self) -> bool:
        """Return whether an fp32 embedding with packed weights makes all activations fp32."""
        return self.setting.widens_the_rest

    @property
    def operand_element_bytes(self) -> float:
        """Return the bytes of an operand element of matrix products."""
        dtype = self.setting.strategy.compute_dtype or "bf16"
        dtype = "fp32" if self.in_fp32 else dtype
        return element_bytes(dtype if dtype in WIDE else "bf16")

    def _counted(self, each: float, scores: float) -> tuple[float, float]:
        """Return saved activations and working set of layers counted by operator."""
        recomputation = self.setting.strategy.activation_recomputation
        saved_each = {"full": self._checkpoint, "selective": 0.0}.get(
            recomputation or "none", each
        )
        if recomputation == "selective":
            saved_each = self._per_token(
                "Kept of products alone", product_residuals(self._operators),
                product_output_elements_per_token(self.setting.model, self._operators),
            )  # fmt: skip
        saved = self._saved_bytes(saved_each)
        if recomputation not in {"full", "selective"}:
            saved = saved + scores * self.layers * self._in_flight
            return saved, self._backward_working_set(0.0, 0.0, scores)
        return saved, self._backward_working_set(each - saved_each, scores, scores)

    def _backward_working_set(self, again: float, rebuilt: float, scores: float) -> float:
        model, tensor = self.setting.model, self.setting.layout.tensor
        inner = gradient_elements_per_token(model) * self.operand_element_bytes / tensor
        score = score_element_bytes(self.operand_element_bytes)
        return self.ledger.term(
            layer_at_work_bytes,
            self.setting.line(GROUP, "Layer in the backward pass", key="layer_at_work"),
            num_tokens=self.tokens,
            rebuilt_bytes=again,
            scores=rebuilt,
            gradient_bytes=inner + self._checkpoint,
            score_gradients=scores * SCORE_GRADIENT_BYTES / score,
            feed_forward_bytes=feed_forward_elements_without_input(model, self._operators)
            * self.operand_element_bytes
            / tensor,
        )

    @property
    def _is_counted(self) -> bool:
        counted = self.setting.engine.counted_by_operator
        return counted and self.workload.method not in UNCOUNTED_METHODS

    @cached_property
    def _operators(self) -> Operators:
        setting, workload = self.setting, self.workload
        adapts = workload.method in ADAPTER_METHODS
        every = adapts_every_matrix(setting, workload)
        return Operators(
            residual_bytes=self._hidden_bytes,
            product_bytes=self.operand_element_bytes,
            adapted=("all" if every else "query_value") if adapts else None,
            rank=workload.lora_rank or DEFAULT_LORA_RANK,
            writes_scores=setting.strategy.attention == "eager",
        )

    @property
    def _checkpoint(self) -> float:
        """Return the bytes per token of a layer's input."""
        hidden = self.setting.model.hidden_size * self._hidden_bytes
        return hidden / self.setting.layout.sequence_ranks

    @cached_property
    def _in_flight(self) -> float:
        layout = self.setting.layout
        return pipeline_in_flight(
            self.setting.strategy.pipeline_schedule or "1f1b",
            self.index,
            layout.pipeline,
            layout.micro_batches,
            layout.chunks,
        )

    def _token_bytes(self) -> float:
        """Return the saved bytes per token and layer."""
        model, name = self.setting.model, "Kept per token and layer"
        if self._is_counted:
            operators = self._operators
            return self._per_token(
                name,
                saved_residual_tensors(model, operators),
                saved_operand_elements_per_token(model, operators),
            )
        eager = self.setting.engine.ops_per_layer > 0
        attention = (
            eager_attention_elements_per_token(model)
            if eager
            else attention_elements_per_token(model)
        )
        saved = self._saved_tensors
        inner = attention + feed_forward_elements_per_token(model, saved)
        return self._per_token(name, hidden_tensors(model, saved), inner)

    def _per_token(self, name: str, residuals: float, inner_width: float) -> float:
        setting = self.setting
        factor = setting.engine.activation_ratio
        if setting.weight_dtype not in WIDE:
            factor *= setting.engine.quantised_activation_ratio
        return self.ledger.term(
            kept_token_bytes,
            replace(setting.line(GROUP, name), factor=factor),
            hidden_width=residuals * setting.model.hidden_size,
            sequence_ranks=setting.layout.sequence_ranks,
            hidden_bytes_per_element=self._hidden_bytes,
            inner_width=inner_width,
            tensor_parallel_size=setting.layout.tensor,
            inner_bytes_per_element=self.operand_element_bytes,
        )

    @property
    def _saved_tensors(self) -> SavedTensors:
        """Return which tensors the layers save in addition to the operands of attention.

        A frozen 16-bit matrix does not save its input; a quantised one does.
        """
        setting, workload = self.setting, self.workload
        adapters = workload.method in ADAPTER_METHODS
        frozen = adapters and not adapts_every_matrix(setting, workload)
        keeps = not frozen or (setting.weight_dtype not in WIDE and not self.in_fp32)
        return SavedTensors(
            wide_norms=not (setting.strategy.fused_norms or self.in_fp32), inputs=keeps
        )

    @property
    def _hidden_bytes(self) -> float:
        """Return the bytes of a residual element, at least as wide as the weights in autocast."""
        return max(self.operand_element_bytes, self.setting.plain_element_bytes)

    def _saved_bytes(self, token_bytes: float) -> float:
        return self.ledger.term(
            kept_activation_bytes,
            self.setting.line(GROUP, "Activations", key="activations"),
            num_tokens=self.tokens,
            num_layers=self.layers,
            token_bytes=token_bytes,
            in_flight=self._in_flight,
        )

    @cached_property
    def _scores(self) -> float:
        """Return the bytes of the attention scores of one layer; 0 with flash attention."""
        setting = self.setting
        if setting.strategy.attention != "eager":
            return 0.0
        each: float = self.operand_element_bytes
        copies: float = score_copies(setting.strategy.compute_dtype)
        if self._is_counted:
            copies = score_element_bytes(each) / each
        line = setting.line(GROUP, "Eager attention scores per layer", key="scores")
        return self.ledger.term(
            score_bytes,
            replace(line, factor=setting.engine.score_ratio),
            num_heads=setting.model.num_attention_heads,
            tensor_parallel_size=setting.layout.tensor,
            num_tokens=self.tokens,
            sequence_length=self.workload.sequence_length,
            bytes_per_element=each,
            copies=copies,
        )

    def _loss(self) -> float:
        if self.index != self.setting.layout.pipeline - 1:
            return 0.0
        engine = self.setting.engine
        quantised = self.setting.weight_dtype not in WIDE
        loss_ratio = engine.loss_ratio * (engine.quantised_loss_ratio if quantised else 1.0)
        line = replace(
            self.setting.line(GROUP, "Logits in the loss", key="activations"), factor=loss_ratio
        )
        tokens, objective = self.tokens, self.workload.objective
        if engine.loss_chunks:
            tokens = tokens / engine.loss_chunks
        if engine.loss_chunk_tokens and objective == "supervised":
            tokens = minimum(tokens, float(engine.loss_chunk_tokens))
        sizes = {
            "num_tokens": tokens,
            "vocab_size": self.setting.model.output_width,
            "tensor_parallel_size": 1 if engine.gathered_logits else self.setting.layout.tensor,
            "bytes_per_element": self.operand_element_bytes,
        }
        if self.workload.is_distilled:  # the fp32 tiles of both models, and a narrow gradient
            cast = self.operand_element_bytes % MASTER_BYTES
            sizes["bytes_per_element"] = TILES * MASTER_BYTES + cast
        if any(engine.logprob_tile) and objective not in WHOLE_LOGITS:
            return self._tiled_loss(line, sizes)
        if engine.loss_chunk_logits:
            return self.ledger.term(
                chunked_loss_bytes, line, chunk_logits=engine.loss_chunk_logits, **sizes
            )
        copies = UNFUSED_LOSS_FP32_COPIES if engine.gathered_logits else engine.loss_fp32_copies
        copies = ODDS_RATIO_FP32_COPIES if objective == "orpo" else copies
        return self.ledger.term(loss_bytes, line, fp32_copies=copies, **sizes)

    def _tiled_loss(self, line: Line, sizes: Mapping[str, float]) -> float:
        """Return the bytes of a loss whose head multiplies tiles.

        A trained head's gradient is summed beside the one that accumulates, unless it is that.
        """
        tokens, width = self.setting.engine.logprob_tile
        trained = self.workload.method not in ADAPTER_METHODS
        narrow = element_bytes(self.setting.strategy.gradient_dtype or "bf16") < MASTER_BYTES
        beside = where(self.setting.layout.micro_batches > 1, 1.0, float(narrow))
        return self.ledger.term(
            tiled_loss_bytes,
            replace(line, factor=1.0),  # counted: the engine's own was fitted to whole logits
            hidden_size=self.setting.model.hidden_size,
            tile_tokens=tokens,
            tile_width=width,
            summed_head=beside if trained else 0.0,
            **sizes,
        )

    def forward_bytes(self) -> float:
        """Return the live bytes of a forward pass of one layer that keeps nothing: a reference's.

        Sources: that of ``inference_elements``; with eager attention also a layer's scores.
        """
        elements = inference_elements(self.setting.model, self.setting.layout.tensor)
        return self.tokens * elements * self.operand_element_bytes + self._scores

    def last_state_bytes(self) -> float:
        """Return the bytes of the last hidden states, which the loss of a distillation reads."""
        is_last = self.index == self.setting.layout.pipeline - 1
        hidden = self.tokens * self.setting.model.hidden_size * self.operand_element_bytes
        return hidden if is_last else 0.0


# Memory that a caching allocator reserves beyond its tensors and frees when memory is short.
#
# Reserved memory exceeds the tensors because blocks of earlier shapes stay cached. Near the
# device's limit they are freed and reallocated, so a run needs less memory than it usually
# reserves.


CONTEXT_BYTES = float(1024**3)
# Host memory of torch's profiler for one training step: 35 MiB for
# an empty step, 35 to 40 for one of six layers and two micro-batches (torch 2.13, 2026-11-23).
MESSAGES_LOOK_BYTES = 38.0 * 1024**2
# The upper bound of each engine field without spare blocks.
BARE = {
    "training_overhead_bytes": CONTEXT_BYTES,
    "unfilled_ratio": 0.0,
    "activation_ratio": 1.0,
    "quantised_activation_ratio": 1.0,
    "loss_ratio": 1.0,
    "quantised_loss_ratio": 1.0,
    "score_ratio": 1.0,
}


def training_overhead(engine: Engine, states_bytes: float) -> float:
    """Return the runtime's memory beyond tensors: context, communicators, unfilled blocks."""
    fitted = engine.training_overhead_bytes
    fixed = engine.runtime_overhead_bytes if fitted is None else fitted
    return fixed + engine.unfilled_ratio * states_bytes


def profiler_bytes(setting: Setting) -> float:
    """Return the profiler memory with which the runner's first rank records collectives.

    Only on CPUs: the profiler allocates host memory, which counts only if the device is a CPU.
    """
    if setting.engine.role != "runner" or setting.device.kind != "cpu":
        return 0.0
    return where(setting.layout.devices > 1, MESSAGES_LOOK_BYTES, 0.0)


def fields_without_spare_blocks(fields: Mapping[str, float]) -> dict[str, float]:
    """Return an engine's fields without memory that its allocator can free.

    >>> fields = {"loss_ratio": 3.0, "activation_ratio": 0.8, "update_copies": 1.0}
    >>> fields_without_spare_blocks(fields)
    {'loss_ratio': 1.0, 'activation_ratio': 0.8, 'update_copies': 1.0}
    """
    return {name: min(value, BARE.get(name, value)) for name, value in fields.items()}


def without_spare_blocks(setting: Setting) -> Setting:
    """Return the setting with an engine that holds only its tensors and context."""
    engine = setting.engine
    fields = {name: getattr(engine, name) for name in BARE}
    fitted = {name: value for name, value in fields.items() if value is not None}
    return replace(setting, engine=engine.model_copy(update=fields_without_spare_blocks(fitted)))


def with_spare_blocks_freed(
    setting: Setting, shown: StageMemory, bare: StageMemory
) -> StageMemory:
    """Return the memory at a moment with spare blocks freed as far as needed."""
    spare = shown.peak_bytes - bare.peak_bytes
    needed = maximum(0.0, shown.peak_bytes - maximum(usable_bytes(setting), bare.peak_bytes))
    share = needed / where(spare > 0, spare, 1.0)
    by_class = {
        name: value + (bare.by_class.get(name, 0.0) - value) * share
        for name, value in shown.by_class.items()
    }
    return StageMemory(by_class)


# Memory of a background checkpoint: a copy of the written states.


ON_DEVICE = frozenset({"cpu", "uma"})  # kinds whose memory is the host's own


def writes_checkpoints_in_background(setting: Setting) -> bool:
    """Return whether checkpoints are written in the background.

    By default, Slipway's runner does so only on GPUs. States on disk have no copy in memory.
    """
    default = setting.engine.counted_by_operator and setting.device.runs_cuda
    mode = setting.strategy.checkpoint_writing or ("background" if default else "in_step")
    return mode == "background" and setting.offload.optimizer != "nvme"


def host_copy_bytes(setting: Setting, ledger: Ledger, workload: TrainWorkload) -> float:
    """Return the host memory of all ranks' copies; 0 if the device memory is host memory."""
    if not writes_checkpoints_in_background(setting) or setting.device.kind in ON_DEVICE:
        return 0.0
    return _copy_bytes(setting, ledger, workload, 1.0)


def device_copy_bytes(setting: Setting, ledger: Ledger, workload: TrainWorkload) -> float:
    """Return the device memory of the first rank's copy if device memory is host memory."""
    if not writes_checkpoints_in_background(setting) or setting.device.kind not in ON_DEVICE:
        return 0.0
    layout = setting.layout
    return _copy_bytes(
        setting, ledger, workload, where(is_sharded(layout), 1 / layout.devices, 1.0)
    )


def _copy_bytes(setting: Setting, ledger: Ledger, workload: TrainWorkload, parts: float) -> float:
    line = setting.line("memory", "Checkpoint copy in host memory", key="checkpoint_copy")
    gathered = where(is_sharded(setting.layout), 1.0, 0.0)
    return checkpoint_bytes(setting, ledger, workload, line, parts, gathered)


def checkpoint_bytes(
    setting: Setting,
    ledger: Ledger,
    workload: TrainWorkload,
    line: Line,
    parts: float = 1.0,
    gathered: float = 0.0,
) -> float:
    """Return the bytes of a checkpoint, or of copies for one: trained weights and their states."""
    adapts = workload.method in ADAPTER_METHODS
    adapter_bytes = element_bytes(setting.engine.adapter_dtype)
    return ledger.term(
        checkpoint_copy_bytes,
        line,
        parameters=trained_parameters(setting, workload),
        weight_bytes_per_element=adapter_bytes if adapts else setting.weight_element_bytes,
        state_bytes_per_element=state_bytes_each(setting, workload)
        - setting.engine.extra_state_bytes,
        parts_share=parts,
        gathered_share=gathered,
    )


def is_sharded(layout: Layout) -> Flag:
    """Return whether states are sharded, so that the first rank gathers them."""
    split = either(layout.devices != layout.data, layout.expert > 1)
    return either(split, layout.zero_stage > 0)


GATHERED_LAYERS = 2  # ZeRO-3 gathers the current and the next layer


def training_memory(setting: Setting, ledger: Ledger, workload: TrainWorkload) -> MemoryUse:
    """Return the memory of every pipeline stage; the ledger records the fullest one.

    Without a record, only stages that can be the fullest are costed: of the stages with equal
    layers, the first has the most micro-batches in flight.
    """
    first_equal = first_identical_stages(setting.model.num_hidden_layers, setting.layout.pipeline)
    costed = range(len(first_equal)) if ledger.records else sorted(set(first_equal))
    stages = [_Stage(setting, NullLedger(), workload, index).memory() for index in costed]
    if ledger.records:
        fullest = max(costed, key=lambda index: stages[index].peak_bytes)
        stages[fullest] = _Stage(setting, ledger, workload, fullest).memory()
    host_bytes, disk_bytes = _offloaded_bytes(setting, workload, first_equal)
    host_bytes = host_bytes + host_copy_bytes(setting, ledger, workload)
    return MemoryUse(
        stages=tuple(stages),
        capacity_bytes=setting.device.memory_bytes,
        usable_bytes=usable_bytes(setting),
        host_bytes=host_bytes,
        disk_bytes=disk_bytes,
    )


def _offloaded_bytes(
    setting: Setting, workload: TrainWorkload, first_equal: Sequence[int]
) -> tuple[float, float]:
    """Return the offloaded bytes in host memory and on disk over all stages and ranks.

    DeepSpeed's ranks load the whole checkpoint before ZeRO-1 and 2 move it to the devices; for
    ZeRO-3 they load their shards (``zero.Init``).
    """
    if not is_offloading(setting.offload):
        return 0.0, 0.0
    ranks = setting.layout.tensor * setting.layout.state_ranks
    host = disk = loaded = 0.0
    for index in sorted(set(first_equal)):
        stage = _Stage(setting, NullLedger(), workload, index)
        host_and_disk, equal = stage.offloaded_bytes(), first_equal.count(index)
        host = host + equal * ranks * host_and_disk[0]
        disk = disk + equal * ranks * host_and_disk[1]
        loaded = loaded + equal * ranks * stage.weights()
    if setting.engine.host_gradient_bytes and setting.offload.optimizer == "cpu":
        whole = setting.layout.zero_stage < FULL_SHARDING
        host = maximum(host, where(whole, loaded, 0.0))
    return host, disk


def micro_batch_bytes(setting: Setting, workload: TrainWorkload) -> float:
    """Return the activation bytes of one micro-batch on a device of the first stage."""
    layout = setting.layout
    saved, _, _ = _Stage(setting, NullLedger(), workload, 0).activations()
    schedule = setting.strategy.pipeline_schedule or "1f1b"
    return saved / pipeline_in_flight(
        schedule, 0, layout.pipeline, layout.micro_batches, layout.chunks
    )


def stage_moments(setting: Setting, workload: TrainWorkload) -> tuple[StageMemory, ...]:
    """Return the memory of every stage at every moment that can be its peak."""
    stages = range(single(setting.layout.pipeline))
    whole = (_Stage(setting, NullLedger(), workload, index).full_moments() for index in stages)
    return tuple(moment for moments in whole for moment in moments)


def stage_memory(
    setting: Setting, ledger: Ledger, workload: TrainWorkload, index: int
) -> StageMemory:
    """Return the peak memory of one pipeline stage."""
    return _Stage(setting, ledger, workload, index).memory()


class _Stage:
    """One pipeline stage of a training run."""

    def __init__(
        self, setting: Setting, ledger: Ledger, workload: TrainWorkload, index: int
    ) -> None:
        self.setting, self.ledger, self.workload, self.index = setting, ledger, workload, index
        self.share = setting.shares[index]
        self.layers = cast("float", self.share.layers)

    def memory(self) -> StageMemory:
        """Return the stage's bytes by tensor class at its fullest moment."""
        return fullest_of(self.moments())

    def moments(self) -> tuple[StageMemory, ...]:
        """Return the candidate peaks, with the allocator's spare blocks freed as needed."""
        if not self.setting.engine.returns_blocks:
            return self.full_moments()
        setting = self.setting
        bare_setting = setting.cached_cost(
            "without_spare_blocks", lambda: without_spare_blocks(setting)
        )
        bare = _Stage(bare_setting, NullLedger(), self.workload, self.index).full_moments()
        pairs = zip(self.full_moments(), bare, strict=True)
        return tuple(
            with_spare_blocks_freed(self.setting, full, bare_moment) for full, bare_moment in pairs
        )

    def full_moments(self) -> tuple[StageMemory, ...]:
        """Return the candidate peaks: loss, backward pass, optimiser update, loading.

        Logits are freed before recomputation and activations before the optimiser update, so they
        never add up. A reference answers while the policy's activations wait for their backward
        pass.
        """
        setting = self.setting
        factor = setting.factor("memory")
        saved, layer, loss = self.activations()
        saved = device_activation_bytes(setting, self.ledger, saved, self.layers)
        weights, gradients = self.weights(), self.gradients()
        optimizer = self.optimizer_states()
        by_class = {
            "weights": weights * (1 - setting.offload.weights_share),
            "adapters": self.adapters(),
            "reference_weights": self.reference_weights() + self.teacher_weights(),
            "gradients": device_gradient_bytes(setting, self.ledger, gradients),
            "optimizer_states": 0.0 if setting.offload.optimizer != "none" else optimizer,
        }
        states = sum(by_class.values()) - self._extra()
        profiler = 0.0 if self.index else profiler_bytes(setting)
        by_class["runtime_overhead"] = (
            training_overhead(setting.engine, states) + profiler
        ) * factor
        copies = self.autocast_copies()
        if not self.index:  # the first rank gathers the copy of a background checkpoint
            copies = copies + device_copy_bytes(setting, self.ledger, self.workload)
        gathered = self.gathered_weights(weights)
        buffers = copies + gathered + self._unbucketed_gradients(gradients)
        moments = [
            {"activations": (saved + loss) * factor, "buffers": buffers},
            {"activations": (saved + layer) * factor, "buffers": buffers},
            {"activations": 0.0, "buffers": copies + self.update_buffers()},
        ]
        if self.workload.has_reference:
            adapts = self.workload.method in ADAPTER_METHODS
            # Autocast copies a reference as the policy; adapters that are off have no copies.
            held = gathered if adapts else copies + gathered
            forward = saved + self._activations.forward_bytes()
            moments.append({"activations": forward * factor, "buffers": held})
        if self._teacher is not None:
            read = as_read_by_teacher(self.workload)
            teacher = StageActivations(self._teacher, NullLedger(), read, self.index)
            forward = saved + teacher.forward_bytes()
            fetched = self.gathered_of_teacher()
            moments.append({"activations": forward * factor, "buffers": copies + fetched})
            moments[0]["activations"] += teacher.last_state_bytes() * factor
            moments[0]["buffers"] = buffers + self.gathered_heads()
        peaks = [StageMemory({**by_class, **moment}) for moment in moments]
        if setting.engine.loads_before_sharding:
            peaks.append(self._loading(weights, by_class["runtime_overhead"], saved * factor))
        return tuple(peaks)

    def reference_weights(self) -> float:
        """Return the bytes of a reference model, which is sharded as the policy from ZeRO 3 on.

        With adapters it is the policy with these switched off.

        Source: huggingface/trl 1.16.0, trl/trainer/dpo_trainer.py and kto_trainer.py.
        """
        if not self.workload.has_reference or self.workload.method in ADAPTER_METHODS:
            return 0.0
        return self.ledger.term(
            sharded_state_bytes,
            self.setting.line(GROUP, "Reference model weights", key="reference_weights"),
            parameters=stage_weight_bytes(self.setting, NullLedger(), self.share),
            bytes_per_element=1.0,
            shards=self._shards(3),
        )

    @cached_property
    def _teacher(self) -> Setting | None:
        return teacher_setting(self.setting, self.workload)

    def teacher_weights(self) -> float:
        """Return the bytes of a distillation's teacher, which is split as the student.

        Source: huggingface/trl 1.16.0, trl/trainer/distillation_trainer.py (prepare_model).
        """
        teacher = self._teacher
        if teacher is None:
            return 0.0
        return self.ledger.term(
            sharded_state_bytes,
            self.setting.line(GROUP, "Teacher weights", key="teacher_weights"),
            parameters=teacher.counts.total / teacher.layout.tensor / teacher.layout.pipeline,
            bytes_per_element=teacher.weight_element_bytes,
            shards=self._shards(3),
        )

    def whole_teacher_bytes(self) -> float:
        """Return the bytes of the teacher on a device of the stage before ranks shard it."""
        teacher = self._teacher
        if teacher is None:
            return 0.0
        split = teacher.layout.tensor * teacher.layout.pipeline
        return teacher.counts.total / split * teacher.weight_element_bytes

    def gathered_of_teacher(self) -> float:
        """Return the bytes of the teacher's layers that are gathered: one, and one ahead."""
        teacher = self._teacher
        if teacher is None:
            return 0.0
        model, layout = teacher.model, teacher.layout
        vocabulary = stage_vocabulary(model, self.index, layout.pipeline) / layout.tensor
        layers = self.whole_teacher_bytes() - vocabulary * teacher.weight_element_bytes
        each = layers * layout.pipeline / model.num_hidden_layers
        return where(self._shards(3) > 1, 2.0 * each, 0.0)

    def gathered_heads(self) -> float:
        """Return the bytes of both models' output layers, which the loss reads whole.

        Source: huggingface/trl 1.16.0, trl/trainer/distillation_trainer.py (full_tensor).
        """
        if self._teacher is None or self.index < self.setting.layout.pipeline - 1:
            return 0.0
        models = (self.setting.model, self._teacher.model)
        elements = sum(model.vocab_size * model.hidden_size for model in models)
        each = self.setting.activation_element_bytes / self.setting.layout.tensor
        return where(self._shards(3) > 1, elements * each, 0.0)

    def offloaded_bytes(self) -> tuple[float, float]:
        """Return the offloaded bytes in host memory and on disk of one device of the stage."""
        saved, _, _ = self.activations()
        stage_bytes = StageBytes(
            self.weights(),
            self.gradients(),
            self.optimizer_states(),
            saved,
            self._trained / self._shards(1),
        )
        return tier_bytes(self.setting, stage_bytes)

    def _loading(self, weights: float, overhead: float, saved: float) -> StageMemory:
        """Return the peak of a device that loads all weights before it shards them.

        The vocabulary is in the outermost FSDP unit, which stays gathered for the whole step.
        """
        shards, model, layout = self._shards(3), self.setting.model, self.setting.layout
        root = stage_vocabulary(model, self.index, layout.pipeline) / layout.tensor
        gathered = weights * shards + root * self.setting.vocabulary_element_bytes
        buffers = where(shards > 1, gathered, 0.0)
        by_class = {"weights": weights, "buffers": buffers, "runtime_overhead": overhead}
        return StageMemory({**by_class, "activations": where(shards > 1, saved, 0.0)})

    def update_buffers(self) -> float:
        """Return the temporary copies of the optimiser during its update."""
        moment_bytes = element_bytes(self.setting.strategy.optimizer_dtype or "fp32")
        each = self.setting.engine.update_copies * moment_bytes
        if not each or optimizer_of(self.workload) != "adamw":
            return 0.0
        return self._state("Copies while updating", "buffers", each, self._shards(1))

    def _extra(self) -> float:
        """Return the fitted extra state bytes, which are not in allocator blocks."""
        if self.setting.offload.optimizer != "none":
            return 0.0
        return self._trained * self.setting.engine.extra_state_bytes / self._shards(1)

    def _shards(self, first_sharding_stage: int) -> float:
        """Return the shards of a state: with experts that ranks divide, those of all in the mean.

        The states of an expert are sharded over the ranks that hold a copy of it.

        Source: NVIDIA/Megatron-LM, megatron/core/parallel_state.py (expert data parallel group).
        """
        layout, counts = self.setting.layout, self.setting.counts
        shards = zero_shards(layout.zero_stage, first_sharding_stage, layout.shard_ranks)
        if not counts.experts or self.workload.method in ADAPTER_METHODS:
            return shards
        portion = self.layers / self.setting.model.num_hidden_layers
        experts = counts.experts * portion / layout.expert_ranks
        share = minimum(1.0, experts / self._trained)
        copies = maximum(1.0, shards * layout.tensor / layout.expert_ranks)
        return where(layout.expert > 1, 1 / ((1 - share) / shards + share / copies), shards)

    def weights(self) -> float:
        """Return the stored weights, split over data ranks from ZeRO stage 3 on."""
        whole = stage_weight_bytes(self.setting, self.ledger, self.share)
        return self.ledger.term(
            sharded_state_bytes,
            self.setting.line(GROUP, "Weights after sharding", key="sharded_weights"),
            parameters=whole,
            bytes_per_element=1.0,
            shards=self._shards(3),
        )

    def gathered_weights(self, sharded: float) -> float:
        """Return the unsharded or fetched weights needed for computation.

        Sharded layers are gathered one ahead. Offloaded layers are fetched in halves, attention
        and feed-forward: one computes while the other is loaded.
        """
        shards, fetched = self._shards(3), self.setting.offload.weights_share
        layer = sharded * shards / maximum(1, self.layers)
        return layer * where(shards > 1, 2.0 - fetched, fetched)

    def _unbucketed_gradients(self, gradients: float) -> float:
        """Return the accumulated gradients outside the DDP buckets.

        With gradient accumulation, gradients are separate from the buckets until these are
        rebuilt in the third step.
        """
        layout = self.setting.layout
        if not self.setting.engine.counted_by_operator:
            return 0.0
        whole = (layout.data > 1) & (layout.devices == layout.data) & (layout.zero_stage == 0)
        return where(whole & (layout.micro_batches > 1), gradients, 0.0)

    def autocast_copies(self) -> float:
        """Return the narrow copies that autocast makes of trained weights.

        With recomputation, copies exist for one layer at a time. Layers with 8-bit products round
        their weights on the fly: in Slipway's trainer only the output layer is copied.
        """
        setting, narrow = self.setting, self._activations.operand_element_bytes
        adapts = self.workload.method in ADAPTER_METHODS
        stored_bytes = element_bytes(setting.engine.adapter_dtype) if adapts else narrow
        if narrow >= max(stored_bytes, setting.plain_element_bytes):
            return 0.0
        again = setting.strategy.activation_recomputation in {"selective", "full"}
        pieces, copied = 1.0, self._trained
        shards = self._shards(3)
        if again and setting.engine.counted_by_operator:
            pieces = maximum(1, self.layers)
        if setting.strategy.compute_dtype == "fp8" and setting.engine.counted_by_operator:
            head = setting.model.output_width * setting.model.hidden_size
            pieces, copied, shards = 1.0, head / setting.layout.tensor, 1.0
        return self.ledger.term(
            sharded_state_bytes,
            setting.line(GROUP, "Autocast copies of the weights", key="buffers"),
            parameters=copied,
            bytes_per_element=narrow,
            shards=where(shards > 1, maximum(1, self.layers) / GATHERED_LAYERS, pieces),
        )

    @cached_property
    def _trained(self) -> float:
        """Return the trained parameters on one device of this stage, before ZeRO."""
        setting, model = self.setting, self.setting.model
        portion = self.layers / model.num_hidden_layers
        if self.workload.method in ADAPTER_METHODS:
            whole = trained_parameters(setting, self.workload)
            return whole * portion / setting.layout.tensor
        stored = stage_weight_bytes(setting, NullLedger(), self.share)
        return stored / setting.weight_element_bytes

    def adapters(self) -> float:
        """Return the bytes of the adapter weights."""
        if self.workload.method not in ADAPTER_METHODS:
            return 0.0
        each = element_bytes(self.setting.engine.adapter_dtype)
        return self._state("Adapter weights", "adapters", each, self._shards(3))

    def gradients(self) -> float:
        """Return the bytes of gradients; a fused optimiser holds one weight's at a time."""
        each = gradient_bytes_each(self.setting, self.workload, self.layers)
        return self._state("Gradients", "gradients", each, self._shards(2))

    def optimizer_states(self) -> float:
        """Return the bytes of moments and fp32 master weights."""
        each = state_bytes_each(self.setting, self.workload)
        return self._state("Optimiser states", "optimizer_states", each, self._shards(1))

    def _state(self, name: str, key: str, bytes_each: float, shards: float) -> float:
        return self.ledger.term(
            sharded_state_bytes,
            self.setting.line(GROUP, name, key=key),
            parameters=self._trained,
            bytes_per_element=bytes_each,
            shards=shards,
        )

    def activations(self) -> tuple[float, float, float]:
        """Return saved activations, the working set of one layer, and the loss in bytes."""
        return self._activations.activation_bytes()

    @cached_property
    def _activations(self) -> StageActivations:
        return StageActivations(self.setting, self.ledger, self.workload, self.index)
