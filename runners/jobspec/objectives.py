"""What a training learns: one row says which trainer does it, on which records, with what options.

The rows name TRL's classes, so that specs, data checks and pages read them without TRL.
Source: https://huggingface.co/docs/trl/dataset_formats.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from runners.datasets.records import Format

TrainEngine = Literal["slipway", "trl"]
ObjectiveName = Literal[
    "next_token", "classification", "dpo", "kto", "orpo", "reward", "grpo", "distillation"
]
PreferenceLoss = Literal["sigmoid", "ipo", "hinge", "robust", "apo_zero", "apo_down"]
OWN_TRAINER: TrainEngine = "slipway"
TRL: TrainEngine = "trl"
TRL_ENVIRONMENT = "trl"  # the named environment with the library


@dataclass(frozen=True, eq=False)
class Objective:
    """An objective that TRL's trainers have.

    ``title`` is its name in sentences. ``trainer`` and ``config`` are classes of ``module``;
    ``formats`` the records that it learns from. ``options`` are the fields of a training's spec
    that its config has besides those of all. ``scores``: the result is a model with one output,
    the reward of a text, and not one that predicts tokens. ``has_reference``: the loss compares
    with the model as it was at the start, which is in memory a second time unless an adapter is
    trained. ``least_batch``: sequences of a micro-batch that its loss needs. ``sequences``: what
    the model reads of a record, by name, each of columns of the prepared data one after the other.
    ``learning_rate``: TRL's default, for all weights; an adapter's is ten times as high, as TRL
    advises (https://huggingface.co/docs/trl/peft_integration). ``beta``: TRL's default.
    ``generates``: the model answers prompts itself in each step; a micro-batch then counts
    answers. ``is_rewarded``: reward functions score several answers to each of them.
    ``has_teacher``: another model's probabilities of each token of an answer are learnt.
    """

    name: ObjectiveName
    title: str
    trainer: str
    config: str
    formats: tuple[Format, ...]
    sequences: Mapping[str, tuple[str, ...]]
    module: str = "trl"
    options: tuple[str, ...] = ()
    learning_rate: float = 1e-6
    adapter_learning_rate: float = 1e-5
    scores: bool = False
    has_reference: bool = False
    least_batch: int = 1
    beta: float = 0.1
    generates: bool = False
    is_rewarded: bool = False
    has_teacher: bool = False


_ANSWERS = ("chosen", "rejected")
_PAIR = {each: ("prompt_ids", f"{each}_ids") for each in _ANSWERS}
ROWS = (
    Objective(
        "next_token",
        "supervised fine-tuning",
        "SFTTrainer",
        "SFTConfig",
        ("text", "chat", "sharegpt", "instruction", "completion"),
        {"text": ("input_ids",)},
        learning_rate=2e-5,
        adapter_learning_rate=2e-4,
    ),
    Objective(
        "dpo",
        "DPO",
        "DPOTrainer",
        "DPOConfig",
        ("preference",),
        _PAIR,
        options=("beta", "preference_loss", "precompute_reference"),
        has_reference=True,
    ),
    Objective(
        "kto",
        "KTO",
        "KTOTrainer",
        "KTOConfig",
        ("kto",),
        {"completion": ("prompt_ids", "completion_ids")},
        options=("beta", "precompute_reference"),
        has_reference=True,
        least_batch=2,  # the divergence is estimated from answers to other prompts of the batch
    ),
    Objective(
        "orpo",
        "ORPO",
        "ORPOTrainer",
        "ORPOConfig",
        ("preference",),
        {each: (f"{each}_input_ids",) for each in _ANSWERS},
        module="trl.experimental.orpo",
        options=("beta",),
    ),
    Objective(
        "reward",
        "reward model",
        "RewardTrainer",
        "RewardConfig",
        ("preference",),
        {each: (f"{each}_ids",) for each in _ANSWERS},
        learning_rate=1e-4,
        adapter_learning_rate=1e-3,
        scores=True,
    ),
    Objective(
        "grpo",
        "GRPO",
        "GRPOTrainer",
        "GRPOConfig",
        ("prompt",),
        {"prompt": ("prompt_ids",)},
        options=(
            "beta",
            "num_generations",
            "max_completion_length",
            "max_prompt_length",
            "num_iterations",
            "temperature",
            "reward_functions",
            "reward_timeout_seconds",
            "reward_memory_gib",
        ),
        beta=0.0,
        generates=True,
        is_rewarded=True,
    ),
    # The trainer that `trl distillation` runs, which left trl.experimental with 1.16; GKDTrainer,
    # with its share of given answers (lmbda), is still there and points to this one.
    Objective(
        "distillation",
        "distillation",
        "DistillationTrainer",
        "DistillationConfig",
        ("prompt",),
        {"prompt": ("prompt_ids",)},
        options=("beta", "max_completion_length", "max_prompt_length", "temperature", "teacher"),
        beta=1.0,
        generates=True,
        has_teacher=True,
    ),
)
OBJECTIVES: Mapping[ObjectiveName, Objective] = MappingProxyType(
    {each.name: each for each in ROWS}
)
PREFERENCES = frozenset(OBJECTIVES) - {"next_token"}  # that only TRL has
GENERATING = frozenset(each.name for each in ROWS if each.generates)
