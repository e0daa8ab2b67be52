"""The links in one pass: tensor-parallel sums, expert exchange, pipeline, the host."""

from planner.cost.columns import any_of
from planner.cost.communication import (
    all_reduce_seconds,
    all_to_all_seconds,
    point_to_point_seconds,
    transfer_seconds,
)
from planner.workload.operators import Operation, link_for

REDUCES_PER_LAYER = 2  # after attention and after the feed-forward block


def communication(run: Operation) -> float:
    """Cost all-reduces of tensor parallelism, expert exchange and pipeline hand-over."""
    setting, layout = run.setting, run.setting.layout
    layers = setting.model.num_hidden_layers
    payload = run.work.new_tokens * setting.model.hidden_size * setting.activation_element_bytes
    seconds = run.ledger.term(
        all_reduce_seconds,
        run.line("Tensor-parallel all-reduces", "tensor_parallel", "communication"),
        payload_bytes=payload,
        ranks=layout.tensor,
        link_bytes_per_s=link_for(setting, run.rates, layout.tensor),
        latency_s=run.rates.latency_s,
        count=REDUCES_PER_LAYER * layers,
    )
    if layout.expert > 1:
        seconds += run.ledger.term(
            all_to_all_seconds,
            run.line("Expert exchange", "expert_exchange", "communication"),
            payload_bytes=payload * setting.model.num_experts_per_tok / layout.expert,
            ranks=layout.expert,
            link_bytes_per_s=link_for(setting, run.rates, layout.expert),
            latency_s=run.rates.latency_s,
            count=setting.model.num_moe_layers,
        )
    if any_of(layout.pipeline > 1):
        seconds += run.ledger.term(
            point_to_point_seconds,
            run.line("Pipeline hand-over", "pipeline", "communication"),
            payload_bytes=payload,
            ranks=layout.pipeline,
            link_bytes_per_s=link_for(setting, run.rates, layout.tensor * layout.pipeline),
            latency_s=run.rates.latency_s,
        )
    return seconds


def stream_from_host(run: Operation) -> float:
    """Cost fetching the weights that live in host memory, once per pass."""
    setting = run.setting
    share = setting.offload.weights_cpu
    if not share:
        return 0.0
    held = setting.counts.layer_linear / setting.layout.tensor * setting.weight_element_bytes
    return run.ledger.term(
        transfer_seconds,
        setting.line(run.work.group, "Weights from host memory", "communication", "offload"),
        payload_bytes=held * share,
        link_bytes_per_s=setting.host_link_bytes_per_s,
    )
