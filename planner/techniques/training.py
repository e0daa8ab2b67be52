"""Cheaper training: fewer trained parameters, smaller states, recomputed activations."""

from collections.abc import Callable

from planner.specs.strategy import Strategy
from planner.specs.workload import TrainWorkload
from planner.techniques.technique import TRAINING, Case, Technique, always


def _method(*methods: str) -> Callable[[Strategy, Case], bool]:
    def used(_strategy: Strategy, case: Case) -> bool:
        return isinstance(case.workload, TrainWorkload) and case.workload.method in methods

    return used


def _optimizer(*names: str) -> Callable[[Strategy, Case], bool]:
    def used(_strategy: Strategy, case: Case) -> bool:
        return isinstance(case.workload, TrainWorkload) and case.workload.optimizer in names

    return used


MIXED_PRECISION = Technique(
    key="mixed_precision",
    title="Mixed precision",
    phases=TRAINING,
    effect="products and kept activations in 16 bits, master weights and moments in 32",
    headline="memory nearly halved",
    source="Micikevicius et al. 2017, arXiv:1710.03740",
    settings={"compute_dtype": "bf16", "optimizer_dtype": "fp32"},
    why_not=always,
    is_used=lambda strategy, _case: strategy.compute_dtype in {"bf16", "fp16"},
)
GRADIENT_CHECKPOINTING = Technique(
    key="gradient_checkpointing",
    title="Activation recomputation",
    phases=TRAINING,
    effect="kept activations fall to one tensor per layer; one more forward pass",
    headline="activations halved or better",
    source="Chen et al. 2016, arXiv:1604.06174",
    settings={"activation_recomputation": "full"},
    why_not=always,
    is_used=lambda strategy, _case: strategy.activation_recomputation in {"full", "selective"},
)
LORA = Technique(
    key="lora",
    title="LoRA: low-rank adapters",
    phases=TRAINING,
    effect="gradients and optimiser states for the adapters alone; the base is frozen",
    headline="10,000x fewer trainable parameters, 3x less GPU memory (GPT-3 175B)",
    source="Hu et al. 2021, arXiv:2106.09685",
    settings={},
    why_not=always,
    is_used=_method("lora", "qlora"),
)
QLORA = Technique(
    key="qlora",
    title="QLoRA: adapters over 4-bit weights",
    phases=TRAINING,
    effect="as LoRA, with base weights in nf4",
    source="Dettmers et al. 2023, arXiv:2305.14314",
    settings={"weight_dtype": "nf4"},
    why_not=always,
    is_used=_method("qlora"),
)
LOMO = Technique(
    key="lomo",
    title="LOMO: gradient and update fused",
    phases=TRAINING,
    effect="no optimiser states, one layer's gradients at a time",
    headline="65B full tuning on RTX 3090-class cards",
    source="Lv et al. 2023, arXiv:2306.09782",
    settings={},
    why_not=always,
    is_used=_method("lomo", "adalomo"),
)
EIGHT_BIT_OPTIMIZER = Technique(
    key="adamw_8bit",
    title="8-bit AdamW",
    phases=TRAINING,
    effect="moments take 2 instead of 8 bytes per parameter",
    source="Dettmers et al. 2021, arXiv:2110.02861",
    settings={},
    why_not=always,
    is_used=_optimizer("adamw_8bit"),
)
ZERO_OFFLOAD = Technique(
    key="zero_offload",
    title="Optimiser states in host memory",
    phases=TRAINING,
    effect="optimiser states leave the device and live on the host",
    headline="13B on one GPU",
    source="Ren et al. 2021, arXiv:2101.06840",
    settings={"offload": {"optimizer": "cpu"}},
    why_not=lambda case: (
        "needs a device beside the host's processor: this one is the host"
        if case.device.kind == "cpu"
        else ""
    ),
    is_used=lambda strategy, _case: bool(
        strategy.offload and strategy.offload.optimizer != "none"
    ),
)

TECHNIQUES = (
    MIXED_PRECISION,
    GRADIENT_CHECKPOINTING,
    LORA,
    QLORA,
    LOMO,
    EIGHT_BIT_OPTIMIZER,
    ZERO_OFFLOAD,
)
