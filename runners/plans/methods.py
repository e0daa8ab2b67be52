"""The methods of compression and training: their words, their options, and the job's name of each.

One row is one method. The search, the forms, the command line and the pages read these rows.
"""

from collections.abc import Mapping
from typing import Literal, NamedTuple

from runners.jobspec.base import BaseDtype
from runners.jobspec.compress import JobCompressMethod
from runners.plans.fields import Key

Format = Literal["fixed", "bits", "kept"]


class Compression(NamedTuple):
    """A method of compression.

    ``name``: in a sentence. ``words``: in the list of methods. ``job``: the job's name of it.
    ``format``: of the result: fixed by the method, with a chosen number of bits, or that of the
    original weights. ``planned_bits``: what the planner is asked for where the number is not
    chosen; None where the method has its own fractional number.
    """

    name: str
    words: str
    job: JobCompressMethod
    format: Format = "fixed"
    options: tuple[str, ...] = ()
    planned_bits: int | None = None
    removes_channels: bool = False


GROUPED = ("bits", "group_size")
COMPRESSIONS: Mapping[str, Compression] = {
    "int8_weight_only": Compression(
        "8-bit weights", "8-bit whole numbers, weights only", "int8", planned_bits=8
    ),
    "int8_dynamic": Compression(
        "8-bit weights and activations",
        "8-bit whole numbers, activations as well",
        "int8_dynamic",
        planned_bits=8,
    ),
    "fp8": Compression("8-bit floats", "8-bit floats, weights only", "fp8"),
    "int4_weight_only": Compression(
        "4-bit weights",
        "4-bit whole numbers in groups, weights only",
        "nf4",
        options=("group_size",),
        planned_bits=4,
    ),
    "nf4": Compression(
        "NormalFloat 4", "4-bit NormalFloat", "nf4", options=("group_size",), planned_bits=4
    ),
    "gguf": Compression(
        "GGUF", "GGUF for llama.cpp: Q4_K_M, or Q8_0 with 8 bits", "gguf", "bits", ("bits",)
    ),
    "gptq": Compression(
        "GPTQ", "GPTQ: error passed on, column by column", "gptq", "bits", GROUPED
    ),
    "norm_tweaking": Compression(
        "norm tweaking",
        "Norm tweaking: GPTQ, then norms re-fitted; for 2 and 3 bits",
        "norm_tweaking",
        "bits",
        GROUPED,
    ),
    "quantease": Compression(
        "QuantEase", "QuantEase: coordinate descent", "quantease", "bits", GROUPED
    ),
    "awq": Compression(
        "AWQ", "AWQ: large inputs scaled up before rounding", "awq", "bits", GROUPED
    ),
    "finequant": Compression(
        "FineQuant",
        "FineQuant: groups as coarse as each matrix allows",
        "finequant",
        "bits",
        GROUPED,
    ),
    "fptq": Compression("FPTQ", "FPTQ: 8-bit activations as well", "fptq", "bits", GROUPED),
    "sparsegpt": Compression(
        "SparseGPT",
        "SparseGPT: single weights to zero",
        "sparsegpt",
        "kept",
        ("sparsity",),
        16,
    ),
    "llm_pruner": Compression(
        "LLM-Pruner",
        "LLM-Pruner: whole heads and channels removed",
        "llm_pruner",
        "kept",
        ("sparsity", "recovery_steps"),
        16,
        removes_channels=True,
    ),
    "sheared_llama": Compression(
        "Sheared LLaMA",
        "Sheared LLaMA: a smaller shape by learned masks, then trained further",
        "sheared_llama",
        "kept",
        ("sparsity",),
        16,
        removes_channels=True,
    ),
    "qmoe": Compression(
        "QMoE", "QMoE: ternary experts in an entropy code, for sparse models", "qmoe"
    ),
    "autoround": Compression(
        "AutoRound", "AutoRound: rounding learned by signed descent", "autoround", "bits", GROUPED
    ),
}


def methods_with(option: str) -> tuple[str, ...]:
    """Return the methods of compression that have an option."""
    return tuple(name for name, each in COMPRESSIONS.items() if option in each.options)


class Training(NamedTuple):
    """A method of fine-tuning.

    ``adapter_base``: the format of the frozen weights below a low-rank adapter.
    ``is_optimizer``: the trainer has it as an optimizer, the planner as a method.
    """

    name: str
    words: str
    adapter_base: BaseDtype | None = None
    is_optimizer: bool = False


CLASSIFICATION, ALPHATUNING = "classification", "alphatuning"
TRAININGS: Mapping[str, Training] = {
    "full": Training("all weights", "Full: every weight"),
    "lora": Training("LoRA", "LoRA: low-rank adapters", "compute"),
    "qlora": Training("QLoRA", "QLoRA: adapters over 4-bit weights", "nf4"),
    "lomo": Training(
        "LOMO",
        "LOMO: every weight, no optimiser states, one gradient at a time",
        is_optimizer=True,
    ),
    "adalomo": Training(
        "AdaLomo", "AdaLomo: as LOMO, each weight at its own rate", is_optimizer=True
    ),
    "qft": Training(
        "QFT",
        "QFT: every weight, with weights, gradients and momentum in 8 bits",
        is_optimizer=True,
    ),
    CLASSIFICATION: Training("classification", "Classification: an encoder learns text labels"),
    ALPHATUNING: Training("AlphaTuning", "AlphaTuning: scales alone, over 4-bit weights"),
}
# Objectives of a fine-tuning, in the list of objectives.
OBJECTIVES: Mapping[Key, str] = {
    "supervised": "Supervised: each token of the text",
    "dpo": "DPO: a chosen above a rejected answer, against a frozen reference",
    "kto": "KTO: answers labelled good or bad, against a frozen reference",
    "orpo": "ORPO: a chosen above a rejected answer, without a reference",
    "reward": "Reward model: a score that ranks a chosen above a rejected answer",
    "grpo": "GRPO: its own answers to prompts, scored by reward functions",
    "distillation": "Distillation: a teacher's probabilities of its own answers to prompts",
}
METHOD_NAMES: Mapping[str, str] = {
    "pretrain": "all weights",
    **{name: each.name for name, each in TRAININGS.items()},
    **{name: each.name for name, each in COMPRESSIONS.items()},
}
