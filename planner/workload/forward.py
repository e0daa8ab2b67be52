"""One forward pass through the whole model: the operators of a prefill or of a decode step.

Each operator class is costed by its roofline, then the links and the overheads are added. With a
pipeline the pass visits the stages one after another, each with its own share of the weights.
"""

from dataclasses import dataclass, replace

from planner.cost.communication import (
    all_reduce_seconds,
    all_to_all_seconds,
    point_to_point_seconds,
    transfer_seconds,
)
from planner.cost.compute import attention_flops, matmul_flops
from planner.cost.equation import Ledger, Line
from planner.cost.kv_cache import kv_cache_bytes
from planner.cost.roofline import (
    memory_seconds,
    overhead_seconds,
    roofline_seconds,
    scheduling_seconds,
)
from planner.cost.weights import kv_heads_share, linear_parameters_per_rank
from planner.specs.base import OperatorClass
from planner.workload.setting import Rates, Setting, rates_of

REDUCES_PER_LAYER = 2  # after attention and after the feed-forward block
LINEARS_PER_LAYER = 7  # query, key, value, output and three feed-forward matrices
# Bytes that operators other than matrix products move, in elements per token and layer: eager
# kernels write every intermediate result, fused ones only block boundaries.
EAGER_HIDDEN_PASSES, EAGER_FFN_PASSES = 24, 5
# An eager cache is read and written anew when a token is appended, then read by attention.
EAGER_KV_PASSES = 3
FUSED_HIDDEN_PASSES, FUSED_FFN_PASSES = 8, 3


@dataclass(frozen=True)
class Pass:
    """What one forward pass processes, over all sequences of its batch on one replica."""

    group: str
    sequences: float
    new_tokens: float
    token_pairs: float
    read_layer_tokens: float
    sampled_tokens: float


@dataclass(frozen=True)
class PassCost:
    """The seconds of one forward pass by what bounds them."""

    compute_s: float
    memory_s: float
    communication_s: float
    overhead_s: float
    total_s: float
    flops: float

    @property
    def by_class(self) -> dict[str, float]:
        """Return the seconds by operator class."""
        return {
            "compute": self.compute_s,
            "memory_bandwidth": self.memory_s,
            "communication": self.communication_s,
            "overhead": self.overhead_s,
        }


def forward_pass(setting: Setting, ledger: Ledger, work: Pass) -> PassCost:
    """Return the seconds of one forward pass, each operator class recorded in the ledger."""
    rates = rates_of(setting)
    operators = _Operators(setting, rates, ledger, work)
    linear = operators.linear()
    head = operators.output_head()
    attention = operators.attention()
    elementwise = operators.elementwise()
    communication = operators.communication() + operators.stream_from_host()
    issue, scheduling = operators.overhead()
    parts = [operators.dequantise(), linear, head, attention, elementwise]
    seconds = sum(part.seconds for part in parts)
    if setting.engine.ops_per_layer and setting.device.kind != "cpu":
        # Kernels are issued ahead: only what the device cannot hide is waited for.
        issue = max(0.0, issue - seconds)
    overhead = issue + scheduling
    compute = sum(part.seconds for part in parts if part.is_compute)
    return PassCost(
        compute_s=compute,
        memory_s=seconds - compute,
        communication_s=communication,
        overhead_s=overhead,
        total_s=seconds + communication + overhead,
        flops=sum(part.flops for part in parts),
    )


@dataclass(frozen=True)
class _Part:
    seconds: float
    is_compute: bool
    flops: float = 0.0


@dataclass(frozen=True)
class _Operators:
    """The operators of one pass, each recorded as it is costed."""

    setting: Setting
    rates: Rates
    ledger: Ledger
    work: Pass

    def _line(self, name: str, part: str, operator_class: OperatorClass, key: str = "") -> Line:
        """Return where a term goes, with the factor that published serving gives its part."""
        group = self.work.group
        line = self.setting.line(group, name, operator_class, key)
        return replace(line, factor=line.factor * self.setting.serving_factor(f"{group}_{part}"))

    def linear(self) -> _Part:
        """Cost the matrix products of all layers."""
        counts, layout = self.setting.counts, self.setting.layout
        kv_share = float(kv_heads_share(self.setting.model.num_key_value_heads, layout.tensor))
        expert_ranks = max(layout.tensor, layout.expert)
        used = linear_parameters_per_rank(
            split=counts.query_output + counts.feed_forward,
            key_value=counts.key_value,
            experts=counts.experts_active,
            tensor_parallel_size=layout.tensor,
            kv_share=kv_share,
            expert_ranks=layout.tensor,
        )
        stored = linear_parameters_per_rank(
            split=counts.query_output + counts.feed_forward,
            key_value=counts.key_value,
            experts=counts.experts * self._experts_touched(),
            tensor_parallel_size=layout.tensor,
            kv_share=kv_share,
            expert_ranks=expert_ranks,
        )
        moved = float(stored) * self._read_bytes_per_weight()
        return self._matmul("Linear layers", "linear", float(used), self.work.new_tokens, moved)

    def _read_bytes_per_weight(self) -> float:
        """Return the bytes that a product reads per weight: 16 bits after dequantising."""
        setting = self.setting
        if setting.weight_dtype in setting.engine.dequantise_ops:
            return setting.plain_element_bytes
        return setting.weight_element_bytes

    def dequantise(self) -> _Part:
        """Cost reading quantised weights and writing them in 16 bits before each product."""
        setting = self.setting
        if setting.weight_dtype not in setting.engine.dequantise_ops:
            return _Part(0.0, is_compute=False)
        each = setting.weight_element_bytes + setting.plain_element_bytes
        seconds = self.ledger.term(
            memory_seconds,
            setting.line(
                self.work.group, "Dequantising weights", "memory_bandwidth", "dequantise"
            ),
            moved_bytes=setting.counts.layer_linear / setting.layout.tensor * each,
            memory_bytes_per_s=self.rates.memory_bytes_per_s,
            memory_efficiency=self.rates.stream_efficiency,
        )
        return _Part(seconds, is_compute=False)

    def stream_from_host(self) -> float:
        """Cost fetching the weights that live in host memory, once per pass."""
        setting = self.setting
        share = setting.offload.weights_cpu
        if not share:
            return 0.0
        held = setting.counts.layer_linear / setting.layout.tensor * setting.weight_element_bytes
        return self.ledger.term(
            transfer_seconds,
            setting.line(self.work.group, "Weights from host memory", "communication", "offload"),
            payload_bytes=held * share,
            link_bytes_per_s=setting.host_link_bytes_per_s,
        )

    def _experts_touched(self) -> float:
        """Return the share of the experts that this pass reads, when tokens spread evenly."""
        model = self.setting.model
        if not model.is_moe:
            return 0.0
        missed = (1 - model.num_experts_per_tok / model.num_experts) ** self.work.new_tokens
        return float(1 - missed)

    def output_head(self) -> _Part:
        """Cost the product with the vocabulary, for the tokens whose logits are needed."""
        model = self.setting.model
        parameters = model.vocab_size * model.hidden_size / self.setting.layout.tensor
        moved = parameters * self.setting.head_element_bytes
        name = "Output head"
        return self._matmul(name, "output_head", parameters, self.work.sampled_tokens, moved)

    def _matmul(
        self, name: str, key: str, parameters: float, tokens: float, moved: float
    ) -> _Part:
        group, rates = self.work.group, self.rates
        flops = self.ledger.term(
            matmul_flops,
            self.setting.line(group, f"{name}: arithmetic", key=f"{key}_flops"),
            parameters=parameters,
            num_tokens=tokens,
        )
        compute = flops / (rates.peak_flops_per_s * rates.compute_efficiency)
        memory = moved / (rates.memory_bytes_per_s * rates.weight_efficiency)
        is_compute = compute >= memory
        bound = "compute" if is_compute else "memory_bandwidth"
        seconds = self.ledger.term(
            roofline_seconds,
            self._line(name, "linear", "compute" if is_compute else "memory_bandwidth", key),
            work_flops=flops,
            peak_flops_per_s=rates.peak_flops_per_s,
            compute_efficiency=rates.compute_efficiency,
            moved_bytes=moved,
            memory_bytes_per_s=rates.memory_bytes_per_s,
            memory_efficiency=rates.weight_efficiency,
        )
        return _Part(seconds, bound == "compute", flops)

    def attention(self) -> _Part:
        """Cost scores and weighted sums, and the reading of the KV cache."""
        model, layout, rates = self.setting.model, self.setting.layout, self.rates
        flops = self.ledger.term(
            attention_flops,
            self.setting.line(self.work.group, "Attention: arithmetic", key="attention_flops"),
            num_heads=model.num_attention_heads / layout.tensor,
            head_dim=model.head_dim,
            num_layers=model.num_hidden_layers,
            token_pairs=self.work.token_pairs / model.num_hidden_layers,
        )
        passes = EAGER_KV_PASSES if self.setting.engine.ops_per_layer else 1
        read = passes * kv_cache_bytes(
            num_kv_heads=model.num_key_value_heads,
            tensor_parallel_size=layout.tensor,
            head_dim=model.head_dim,
            kv_bytes_per_element=self.setting.kv_element_bytes,
            num_layers=1,
            num_tokens=self.work.read_layer_tokens,
        )
        memory = float(read) / (rates.memory_bytes_per_s * rates.kv_efficiency)
        compute = flops / (rates.peak_flops_per_s * rates.compute_efficiency)
        is_compute = compute >= memory
        seconds = self.ledger.term(
            roofline_seconds,
            self._line(
                "Attention and KV-cache reads",
                "attention",
                "compute" if is_compute else "memory_bandwidth",
                "attention",
            ),
            work_flops=flops,
            peak_flops_per_s=rates.peak_flops_per_s,
            compute_efficiency=rates.compute_efficiency,
            moved_bytes=float(read),
            memory_bytes_per_s=rates.memory_bytes_per_s,
            memory_efficiency=rates.kv_efficiency,
        )
        return _Part(seconds, is_compute, flops)

    def elementwise(self) -> _Part:
        """Cost norms, rotary embeddings, activations and residuals: bytes without arithmetic."""
        moved = elementwise_bytes(self.setting, self.work.new_tokens)
        seconds = self.ledger.term(
            memory_seconds,
            self._line(
                "Norms, activations, residuals", "elementwise", "memory_bandwidth", "elementwise"
            ),
            moved_bytes=moved,
            memory_bytes_per_s=self.rates.memory_bytes_per_s,
            memory_efficiency=self.rates.stream_efficiency,
        )
        return _Part(seconds, is_compute=False)

    def communication(self) -> float:
        """Cost all-reduces of tensor parallelism, expert exchange and pipeline hand-over."""
        setting, layout = self.setting, self.setting.layout
        layers = setting.model.num_hidden_layers
        payload = (
            self.work.new_tokens * setting.model.hidden_size * setting.activation_element_bytes
        )
        link = link_for(setting, self.rates, layout.tensor)
        seconds = self.ledger.term(
            all_reduce_seconds,
            self._line("Tensor-parallel all-reduces", "tensor_parallel", "communication"),
            payload_bytes=payload,
            ranks=layout.tensor,
            link_bytes_per_s=link,
            latency_s=self.rates.latency_s,
            count=REDUCES_PER_LAYER * layers,
        )
        if layout.expert > 1:
            seconds += self.ledger.term(
                all_to_all_seconds,
                self._line("Expert exchange", "expert_exchange", "communication"),
                payload_bytes=payload * setting.model.num_experts_per_tok / layout.expert,
                ranks=layout.expert,
                link_bytes_per_s=link_for(setting, self.rates, layout.expert),
                latency_s=self.rates.latency_s,
                count=layers - setting.model.num_dense_layers,
            )
        if layout.pipeline > 1:
            seconds += self.ledger.term(
                point_to_point_seconds,
                self._line("Pipeline hand-over", "pipeline", "communication"),
                payload_bytes=payload,
                ranks=layout.pipeline,
                link_bytes_per_s=link_for(setting, self.rates, layout.tensor * layout.pipeline),
                latency_s=self.rates.latency_s,
            )
        return seconds

    def overhead(self) -> tuple[float, float]:
        """Cost the issuing of operators and the scheduling of the step."""
        engine = self.setting.engine
        issue = self.ledger.term(
            overhead_seconds,
            self._line("Issuing operators", "issue", "overhead"),
            num_layers=self.setting.model.num_hidden_layers,
            ops_per_layer=engine.ops_per_layer
            + LINEARS_PER_LAYER * engine.dequantise_ops.get(self.setting.weight_dtype, 0.0),
            op_overhead_s=self.rates.op_overhead_s,
            layer_overhead_s=engine.layer_overhead_s,
        )
        scheduling = 0.0
        if engine.step_overhead_s or engine.request_overhead_s:
            scheduling = self.ledger.term(
                scheduling_seconds,
                self._line("Scheduling the step", "scheduling", "overhead"),
                requests=self.work.sequences,
                request_overhead_s=engine.request_overhead_s,
                step_overhead_s=engine.step_overhead_s,
            )
        return issue, scheduling


def elementwise_bytes(setting: Setting, tokens: float, sequence_ranks: int = 1) -> float:
    """Return the bytes that operators other than matrix products move in one forward pass.

    Sequence parallelism splits the residual stream over ``sequence_ranks``.
    """
    model, tensor = setting.model, setting.layout.tensor
    eager = setting.engine.ops_per_layer > 0
    hidden_passes = EAGER_HIDDEN_PASSES if eager else FUSED_HIDDEN_PASSES
    ffn_passes = EAGER_FFN_PASSES if eager else FUSED_FFN_PASSES
    width = model.moe_intermediate_size * model.num_experts_per_tok or model.intermediate_size
    elements = hidden_passes * model.hidden_size / sequence_ranks + ffn_passes * width / tensor
    return tokens * model.num_hidden_layers * elements * setting.activation_element_bytes


def link_for(setting: Setting, rates: Rates, ranks: int) -> float:
    """Return the bandwidth between ``ranks`` neighbours: inside a node while they fit into it."""
    inside = ranks <= setting.cluster.devices_per_node
    return rates.link_bytes_per_s if inside else rates.inter_node_bytes_per_s
