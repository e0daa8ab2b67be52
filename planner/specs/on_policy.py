"""Reinforcement learning on a policy's own completions: what a step generates, and where."""

from typing import Annotated, Literal

from pydantic import (
    BeforeValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    SerializerFunctionWrapHandler,
    model_serializer,
)

from planner.specs.base import DTYPES, JsonObject, SparseSpec, alias_parser, refuse
from planner.specs.model import NamedModel

REWARDED, DISTILLED = "grpo", "distillation"  # objectives: by rewards, or by a teacher
ON_POLICY_OBJECTIVES = frozenset({REWARDED, DISTILLED})
Generator = Literal["colocated", "separate"]
Sleep = Literal["none", "generator", "both"]
OWN_ENGINE = "transformers"  # the trainer's own model generates: no copy, and no share of memory
WIDTHS = ("bf16", "fp16", "fp8")  # in which the engines of completions load a policy

JobPin = Literal["rollout.engine"]
ROLLOUT_ENGINE: JobPin = "rollout.engine"
GENERATED_BY = "completions by "  # begins the reason of a plan that says which engine, and why
ALL_GENERATE = "all devices generate in turn"
ASLEEP = {"none": "", "generator": "generator sleeps", "both": "generator and trainer sleep"}


class RolloutSpec(SparseSpec):
    """Where the completions of a policy in training are generated."""

    devices: NonNegativeInt = Field(
        default=0,
        description="Devices that only generate completions; with 0 all devices take turns in "
        "generating and training",
    )
    tensor_parallel_size: PositiveInt = Field(
        default=1, description="Devices that share each layer of one generating replica"
    )
    gpu_memory_utilization: Annotated[float, Field(gt=0.0, le=1.0)] | None = Field(
        default=None,
        description="The generating engine's share of a device's memory; without it 0.9, or what "
        "usual launches leave it beside a trainer on the same devices",
    )
    sleep: Sleep = Field(
        default="none",
        description="What leaves shared devices while the other works: nothing, the generating "
        "engine's weights and cache (generator), or the trainer's states too (both)",
    )
    weight_dtype: (
        Annotated[
            Literal["bf16", "fp16", "fp8"],
            BeforeValidator(alias_parser(WIDTHS, DTYPES)),
        ]
        | None
    ) = Field(default=None, description="Format of the generating engine's copy of the weights")
    engine: Literal["vllm", "sglang", "transformers"] | None = Field(
        default=None,
        description="Engine of the completions; without it vllm on GPUs and the trainer's own "
        "transformers elsewhere",
    )

    @property
    def stated(self) -> JsonObject:
        """Return the fields that somebody has set; a search chooses the others."""
        return {name: value for name, value in self if name in self.model_fields_set}

    @property
    def words(self) -> str:
        """Return in words where completions are generated, and what sleeps meanwhile.

        >>> RolloutSpec(devices=16, tensor_parallel_size=2, engine="vllm").words
        '16 devices generate (vllm, TP 2)'
        >>> RolloutSpec(sleep="both", engine="sglang").words
        'all devices generate in turn (sglang, generator and trainer sleep)'
        """
        who = (
            f"{self.devices} device{'s' * (self.devices > 1)} generate{'s' * (self.devices == 1)}"
        )
        how = [self.engine or "", f"{self.weight_dtype} weights" if self.weight_dtype else ""]
        how += [f"TP {self.tensor_parallel_size}"] if self.tensor_parallel_size > 1 else []
        how += [ASLEEP[self.sleep]]
        return f"{who if self.devices else ALL_GENERATE} ({', '.join(filter(None, how))})"

    @model_serializer(mode="wrap")
    def _drop_absent(self, handler: SerializerFunctionWrapHandler) -> JsonObject:
        """Leave out what is not set, so that a stored pin leaves it open again."""
        return {
            name: value
            for name, value in handler(self).items()
            if value is not None and name in self.model_fields_set
        }


class OnPolicyFields(SparseSpec):
    """The fields of a training whose model answers prompts, and learns from these completions.

    A reward scores them (grpo), or a teacher says how likely each next token is (distillation).
    """

    num_generations: Annotated[int, Field(ge=2)] = Field(
        default=8, description="Of grpo: completions of each prompt, which are compared"
    )
    max_completion_length: PositiveInt = Field(
        default=256,
        description="Of grpo and distillation: tokens at which a completion is cut",
    )
    max_prompt_length: PositiveInt | None = Field(
        default=None,
        description="Of grpo and distillation: tokens of the longest prompt; without it what "
        "sequence_length has beside completions",
    )
    mean_completion_length: PositiveInt | None = Field(
        default=None,
        description="Of grpo and distillation: mean tokens of a completion; without it all have "
        "the most",
    )
    mean_prompt_length: PositiveInt | None = Field(
        default=None,
        description="Of grpo and distillation: mean tokens of a prompt; without it all have the "
        "most",
    )
    length_variation: Annotated[float, Field(ge=0.01, le=3.0)] | None = Field(
        default=None,
        description="Of grpo and distillation: standard deviation of the completions' lengths "
        "over their mean, before they are cut; without it 1, as if each token were as likely to "
        "be the last",
    )
    generation_batch_size: PositiveInt | None = Field(
        default=None,
        description="Of grpo: completions that are generated at a time, for one or several "
        "updates; without it those of one update",
    )
    num_iterations: PositiveInt = Field(
        default=1, description="Of grpo: passes over the completions of one generation"
    )
    beta: NonNegativeFloat = Field(
        default=0.0,
        description="Of grpo: weight of the divergence from a reference model, which 0 needs none "
        "of; of distillation: which divergence from the teacher, from the forward (0) to the "
        "reverse (1) KL, at the same cost",
    )
    generator: Generator | None = Field(
        default=None,
        description="Of grpo and distillation: whether completions are generated on the "
        "trainer's devices or on others; without it both are compared",
    )
    rollout_devices: PositiveInt | None = Field(
        default=None,
        description="Of grpo and distillation: devices that only generate completions; without a "
        "number the search divides them",
    )
    staleness: Annotated[int, Field(ge=0, le=64)] = Field(
        default=0,
        description="Of grpo: updates of the weights that completions may lag behind; from 1 on "
        "separate devices generate while the others train",
    )
    reward_seconds: NonNegativeFloat = Field(
        default=0.0,
        description="Of grpo: seconds that the reward functions take for the completions of one "
        "generation",
    )
    reward_model: str | None = Field(
        default=None,
        description="Of grpo: catalog id of a model that scores completions on the trainer's "
        "devices",
    )
    teacher_model: NamedModel | None = Field(
        default=None,
        description="Of distillation: the model whose probabilities of each next token the "
        "trained one learns, on the trainer's devices: a catalog id, a config.json or a shape",
    )


ON_POLICY = tuple(OnPolicyFields.model_fields)
# Fields of one of the objectives alone. TRL's trainer of distillation generates one completion of
# a prompt for one update, and has neither rewards nor a reference.
# Source: huggingface/trl 1.16.0, trl/trainer/distillation_trainer.py.
OF_REWARDS = (
    "num_generations",
    "generation_batch_size",
    "num_iterations",
    "staleness",
    "reward_seconds",
    "reward_model",
)


def stated_on_policy_fields(fields: OnPolicyFields) -> tuple[str, ...]:
    """Return the fields of a policy's completions that differ from their defaults."""
    known = OnPolicyFields.model_fields
    return tuple(name for name in ON_POLICY if getattr(fields, name) != known[name].default)


def refuse_off_policy_fields(fields: OnPolicyFields, objective: str) -> None:
    """Reject fields of a policy's own completions for an objective that has none.

    Raises:
        ValueError: names the field and the objective.
    """
    for name in stated_on_policy_fields(fields):
        refuse(
            name,
            f"{name} is of the completions that a policy generates, and the objective is "
            f"{objective}: choose objective "
            f"{DISTILLED if name == 'teacher_model' else REWARDED}, or leave it out",
        )


def refuse_fields_of_another(fields: OnPolicyFields, objective: str) -> None:
    """Reject what only the other of the objectives with completions has, and a missing teacher.

    Raises:
        ValueError: names the field and the objective.
    """
    others = OF_REWARDS if objective == DISTILLED else ("teacher_model",)
    for name in stated_on_policy_fields(fields):
        if name in others:
            owner = REWARDED if objective == DISTILLED else DISTILLED
            said = f"{name} is of the objective {owner}, and it is {objective}: leave it out"
            refuse(name, said)
    if objective == DISTILLED and fields.beta > 1:
        refuse(
            "beta",
            f"beta is {fields.beta:g}: in a distillation it lies between 0, the forward KL "
            "divergence, and 1, the reverse one",
        )
    if objective == DISTILLED and fields.teacher_model is None:
        refuse(
            "teacher_model",
            "objective distillation learns the probabilities of a teacher, and teacher_model is "
            "not given: name a larger model with the same vocabulary",
        )


def refuse_inconsistent_lengths(fields: OnPolicyFields, sequence_length: int) -> None:
    """Reject completions, prompts and batches that contradict each other.

    Raises:
        ValueError: names the field, its value and its limit.
    """
    completion, prompt = fields.max_completion_length, fields.max_prompt_length
    if completion >= sequence_length:
        refuse(
            "max_completion_length",
            f"max_completion_length is {completion}: sequence_length, of {sequence_length} "
            f"tokens, has the prompt too; raise it to at least {completion + (prompt or 1)}",
        )
    if prompt and prompt + completion > sequence_length:
        refuse(
            "max_prompt_length",
            f"max_prompt_length is {prompt}: with max_completion_length {completion} it exceeds "
            f"sequence_length, of {sequence_length} tokens; raise that to {prompt + completion}",
        )
    for name, mean, most in (
        ("mean_completion_length", fields.mean_completion_length, completion),
        (
            "mean_prompt_length",
            fields.mean_prompt_length,
            prompt or sequence_length - completion,
        ),
    ):
        if mean and mean > most:
            refuse(name, f"{name} is {mean}, more than the longest, of {most} tokens")
    if fields.staleness and fields.generator == "colocated":
        refuse(
            "staleness",
            f"staleness is {fields.staleness}, but colocated devices generate and train in turn: "
            "set generator to separate, or staleness to 0",
        )
    if fields.rollout_devices and fields.generator == "colocated":
        refuse(
            "rollout_devices",
            f"rollout_devices is {fields.rollout_devices}, but generator is colocated: all "
            "devices generate; leave rollout_devices out, or set generator to separate",
        )


def refuse_divided_groups(fields: OnPolicyFields, global_batch_size: int) -> None:
    """Reject batches that divide the completions of a prompt, or updates that leave some over.

    Source: huggingface/trl 1.16.0, trl/trainer/grpo_config.py.

    Raises:
        ValueError: names the field, its value and what divides it.
    """
    batch = fields.generation_batch_size or global_batch_size
    named = "generation_batch_size" if fields.generation_batch_size else "global_batch_size"
    if batch % fields.num_generations:
        refuse(
            named,
            f"{named} is {batch} completions: it must be a multiple of num_generations "
            f"{fields.num_generations}",
        )
    if batch % global_batch_size:
        refuse(
            named,
            f"{named} is {batch} completions: it must be a multiple of global_batch_size "
            f"{global_batch_size}, those of one update",
        )


def refuse_other_lengths(padding_ratio: float | None, document_tokens: int | None) -> None:
    """Reject what says the lengths of given records, of which a policy makes its own.

    Raises:
        ValueError: names the field.
    """
    for name, value in (("padding_ratio", padding_ratio), ("document_tokens", document_tokens)):
        if value is not None:
            refuse(
                name,
                f"{name} is {value:g}, which says how long given records are: completions have "
                "mean_completion_length and length_variation; leave it out",
            )
