"""Several devices: replicate, split inside layers, split between layers, shard states."""

from collections.abc import Callable

from planner.specs.strategy import Strategy
from planner.specs.workload import TrainWorkload
from planner.techniques.technique import (
    APPLIES,
    INFERENCE,
    TRAINING,
    Case,
    Technique,
    needs_devices,
)

BOTH = INFERENCE | TRAINING
ZERO_SOURCE = "Rajbhandari et al. 2020 (ZeRO), arXiv:1910.02054"
LAST_ZERO_STAGE = 3


def _more_than_one(field: str) -> Callable[[Strategy, Case], bool]:
    return lambda strategy, _case: (getattr(strategy, field) or 1) > 1


def _why_not_tensor(case: Case) -> str:
    if case.cluster.num_devices == 1:
        return needs_devices(case)
    heads = case.model.num_attention_heads
    if any(heads % size == 0 for size in range(2, case.cluster.devices_per_node + 1)):
        return APPLIES
    return (
        f"needs a divisor of the {heads} attention heads between 2 and the "
        f"{case.cluster.devices_per_node} devices of a node"
    )


def _why_not_experts(case: Case) -> str:
    if not case.model.is_moe:
        return "needs a sparse mixture-of-experts model: this one is dense"
    return needs_devices(case)


def _why_not_zero(case: Case) -> str:
    workload = case.workload
    if isinstance(workload, TrainWorkload) and workload.global_batch_size == 1:
        return "needs at least 2 sequences per step, one per data-parallel rank"
    return needs_devices(case)


def _zero(stage: int, what: str) -> Technique:
    return Technique(
        key=f"zero_{stage}",
        title=f"ZeRO stage {stage}",
        phases=TRAINING,
        effect=f"{what} / data-parallel ranks"
        + ("; one more weight gather per step" if stage == LAST_ZERO_STAGE else ""),
        headline="8x larger models, 10x faster, super-linear on 400 GPUs",
        source=ZERO_SOURCE,
        settings={"zero_stage": stage, "data_parallel_size": 2},
        why_not=_why_not_zero,
        is_used=lambda strategy, _case: strategy.zero_stage == stage,
    )


TENSOR_PARALLEL = Technique(
    key="tensor_parallel",
    title="Tensor parallelism",
    phases=BOTH,
    effect="weights, KV cache and products / ranks; two all-reduces per layer",
    headline="8.3B parameters on 512 V100: 15.1 PFLOP/s",
    source="Shoeybi et al. 2019 (Megatron-LM), arXiv:1909.08053",
    settings={"tensor_parallel_size": 2},
    why_not=_why_not_tensor,
    is_used=_more_than_one("tensor_parallel_size"),
)
PIPELINE_PARALLEL = Technique(
    key="pipeline_parallel",
    title="Pipeline parallelism",
    phases=BOTH,
    effect="layers / stages per device; a bubble of (p-1) micro-batches when training",
    headline="1F1B is near-linear with many micro-batches",
    source="Huang et al. 2018 (GPipe), arXiv:1811.06965; Narayanan et al. 2021, arXiv:2104.04473",
    settings={"pipeline_parallel_size": 2},
    why_not=needs_devices,
    is_used=_more_than_one("pipeline_parallel_size"),
)
DATA_PARALLEL = Technique(
    key="data_parallel",
    title="Data parallelism",
    phases=BOTH,
    effect="replicas share the requests or sequences; gradients are all-reduced when training",
    headline="near-linear while the model fits",
    source="Li et al. 2020 (PyTorch DDP), arXiv:2006.15704",
    settings={"data_parallel_size": 2},
    why_not=needs_devices,
    is_used=_more_than_one("data_parallel_size"),
)
EXPERT_PARALLEL = Technique(
    key="expert_parallel",
    title="Expert parallelism",
    phases=BOTH,
    effect="expert weights / ranks; two all-to-alls per sparse layer",
    source="Lepikhin et al. 2020 (GShard), arXiv:2006.16668",
    settings={"expert_parallel_size": 2},
    why_not=_why_not_experts,
    is_used=_more_than_one("expert_parallel_size"),
)
SEQUENCE_PARALLEL = Technique(
    key="sequence_parallel",
    title="Sequence parallelism beside tensor parallelism",
    phases=TRAINING,
    effect="norm and residual activations / tensor-parallel ranks, at equal traffic",
    source="Korthikanti et al. 2022, arXiv:2205.05198",
    settings={"sequence_parallel": True, "tensor_parallel_size": 2},
    why_not=_why_not_tensor,
    is_used=lambda strategy, _case: bool(strategy.sequence_parallel),
)

TECHNIQUES = (
    DATA_PARALLEL,
    TENSOR_PARALLEL,
    PIPELINE_PARALLEL,
    EXPERT_PARALLEL,
    SEQUENCE_PARALLEL,
    _zero(1, "optimiser states"),
    _zero(2, "optimiser states and gradients"),
    _zero(3, "optimiser states, gradients and weights"),
)
