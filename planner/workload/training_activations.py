"""Training activations of a pipeline stage: saved tensors, working set of a layer, loss."""

from dataclasses import replace
from functools import cached_property
from typing import cast

from planner.cost.activations import (
    LOSS_FP32_COPIES,
    SCORE_GRADIENT_BYTES,
    UNFUSED_LOSS_FP32_COPIES,
    Operators,
    SavedTensors,
    attention_width,
    eager_attention_width,
    feed_forward_kept,
    feed_forward_width,
    gradient_width,
    hidden_tensors,
    kept_activation_bytes,
    kept_residuals,
    kept_token_bytes,
    kept_width,
    layer_at_work_bytes,
    loss_bytes,
    product_residuals,
    product_width,
    score_bytes,
    score_copies,
    score_element_bytes,
)
from planner.cost.quantity import Ledger
from planner.cost.training import pipeline_in_flight
from planner.cost.weights import WIDE, element_bytes
from planner.specs.workload import TrainWorkload
from planner.workload.setting import Setting
from planner.workload.training_methods import (
    ADAPTER_METHODS,
    DEFAULT_LORA_RANK,
    adapts_every_matrix,
    filled_ratio,
)

GROUP = "memory"
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
        rows = layout.micro_batch * filled_ratio(setting, workload)
        self.tokens = rows * workload.sequence_length / layout.context

    def found(self) -> tuple[float, float, float]:
        """Return saved activations, the working set of one layer, and the loss in bytes.

        The working set is the recomputed tensors of one layer.
        """
        each, scores, loss = self._token_bytes(), self._scores(), self._loss()
        if self._is_counted:
            return (*self._counted(each, scores), loss)
        recomputation = self.setting.strategy.activation_recomputation
        if recomputation == "full":
            saved_scores = 0.0 if self.setting.engine.recomputes_in_slack else scores
            working = self.tokens * each + BACKWARD_SCORES * saved_scores
            return self._saved_bytes(self._checkpoint), working, loss
        saved = self._saved_bytes(each)
        if recomputation == "selective":
            return saved, BACKWARD_SCORES * scores, loss
        return saved + scores * self.layers * self._in_flight, scores, loss

    @property
    def in_fp32(self) -> bool:
        """Return whether an fp32 embedding with packed weights makes all activations fp32."""
        packed = self.setting.weight_dtype not in WIDE
        return packed and self.setting.engine.fp32_embeddings_beside_packed

    @property
    def kept_bytes(self) -> float:
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
                product_width(self.setting.model, self._operators),
            )  # fmt: skip
        saved = self._saved_bytes(saved_each)
        if recomputation not in {"full", "selective"}:
            saved = saved + scores * self.layers * self._in_flight
            return saved, self._backward_working_set(0.0, 0.0, scores)
        return saved, self._backward_working_set(each - saved_each, scores, scores)

    def _backward_working_set(self, again: float, rebuilt: float, scores: float) -> float:
        model, tensor = self.setting.model, self.setting.layout.tensor
        inner = gradient_width(model) * self.kept_bytes / tensor
        score = score_element_bytes(self.kept_bytes)
        return self.ledger.term(
            layer_at_work_bytes,
            self.setting.line(GROUP, "Layer in the backward pass", key="layer_at_work"),
            num_tokens=self.tokens,
            rebuilt_bytes=again,
            scores=rebuilt,
            gradient_bytes=inner + self._checkpoint,
            score_gradients=scores * SCORE_GRADIENT_BYTES / score,
            feed_forward_bytes=feed_forward_kept(model, self._operators)
            * self.kept_bytes
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
            product_bytes=self.kept_bytes,
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

    @property
    def _kept_ratio(self) -> float:
        """Return the engine's fitted factor for activations."""
        engine = self.setting.engine
        quantised = self.setting.weight_dtype not in WIDE
        return engine.activation_ratio * (engine.quantised_activation_ratio if quantised else 1.0)

    def _token_bytes(self) -> float:
        """Return the saved bytes per token and layer."""
        model, name = self.setting.model, "Kept per token and layer"
        if self._is_counted:
            operators = self._operators
            return self._per_token(
                name, kept_residuals(model, operators), kept_width(model, operators)
            )
        eager = self.setting.engine.ops_per_layer > 0
        attention = eager_attention_width(model) if eager else attention_width(model)
        saved = self._saved_tensors
        inner = attention + feed_forward_width(model, saved)
        return self._per_token(name, hidden_tensors(model, saved), inner)

    def _per_token(self, name: str, residuals: float, inner_width: float) -> float:
        setting = self.setting
        return self.ledger.term(
            kept_token_bytes,
            replace(setting.line(GROUP, name), factor=self._kept_ratio),
            hidden_width=residuals * setting.model.hidden_size,
            sequence_ranks=setting.layout.sequence_ranks,
            hidden_bytes_per_element=self._hidden_bytes,
            inner_width=inner_width,
            tensor_parallel_size=setting.layout.tensor,
            inner_bytes_per_element=self.kept_bytes,
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
        return max(self.kept_bytes, self.setting.plain_element_bytes)

    def _saved_bytes(self, token_bytes: float) -> float:
        return self.ledger.term(
            kept_activation_bytes,
            self.setting.line(GROUP, "Activations", key="activations"),
            num_tokens=self.tokens,
            num_layers=self.layers,
            token_bytes=token_bytes,
            in_flight=self._in_flight,
        )

    def _scores(self) -> float:
        """Return the bytes of the attention scores of one layer; 0 with flash attention."""
        setting = self.setting
        if setting.strategy.attention != "eager":
            return 0.0
        each: float = self.kept_bytes
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
        line = self.setting.line(GROUP, "Logits in the loss", key="activations")
        return self.ledger.term(
            loss_bytes,
            replace(line, factor=loss_ratio),
            num_tokens=self.tokens,
            vocab_size=self.setting.model.output_width,
            tensor_parallel_size=1 if engine.gathered_logits else self.setting.layout.tensor,
            bytes_per_element=self.kept_bytes,
            fp32_copies=UNFUSED_LOSS_FP32_COPIES if engine.gathered_logits else LOSS_FP32_COPIES,
        )
