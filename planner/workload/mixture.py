"""The routed experts of one pass, costed on the busiest rank."""

from dataclasses import replace

from planner.catalog.engines import routing_evenness
from planner.cost.compute import matmul_flops
from planner.cost.experts import expert_visits, experts_read
from planner.workload.linear import read_bytes_per_weight
from planner.workload.operators import Operation, Part


def experts(run: Operation) -> Part:
    """Cost the products of the routed experts; the busiest rank limits each layer."""
    setting, model, layout = run.setting, run.setting.model, run.setting.layout
    if not model.is_moe:
        return Part(0.0)
    group, steps = run.work.group, run.work.steps
    # Ranks that share one set of whole experts split each by columns.
    visited = setting.counts.experts - setting.counts.experts_of_images
    expert_weights = visited / model.num_experts * layout.expert / layout.expert_group
    visits = run.ledger.term(
        expert_visits,
        setting.line(group, "Expert visits of the busiest rank", key="expert_visits"),
        num_experts=model.num_experts,
        experts_per_token=model.num_experts_per_tok,
        num_tokens=run.work.routed_tokens,
        expert_ranks=layout.expert,
        evenness=routing_evenness(),
    )
    read = run.ledger.term(
        experts_read,
        setting.line(group, "Experts that the busiest rank reads", key="experts_read"),
        num_experts=model.num_experts,
        experts_per_token=model.num_experts_per_tok,
        num_tokens=run.work.routed_tokens / steps,
        expert_ranks=layout.expert,
        evenness=routing_evenness(),
    )
    flops = run.ledger.term(
        matmul_flops,
        setting.line(group, "Experts: arithmetic", key="expert_flops"),
        parameters=expert_weights,
        num_tokens=visits,
    )
    moved = (
        expert_weights
        * read
        * steps
        * read_bytes_per_weight(setting, setting.format_of("experts"))
    )
    part = run.roofline(("Experts", "experts", "experts"), flops, moved)
    return replace(part, moved_bytes=0.0)  # what the busiest rank reads is an expectation
