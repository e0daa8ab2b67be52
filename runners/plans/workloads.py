"""The workload of each goal: what there is to do, and the options of the job that does it."""

from collections.abc import Mapping
from functools import partial
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from planner.specs.base import BadRequestError, refuse
from planner.specs.on_policy import ON_POLICY_OBJECTIVES, Generator
from planner.specs.units import MINUTE
from planner.specs.workload import (
    PREFERENCE_METHODS,
    REFERENCE_OBJECTIVES,
    CompressMethod,
    TrainObjective,
)
from runners.datasets.conversations import DataError
from runners.datasets.records import Format, suffix_of
from runners.datasets.text import unix_lines
from runners.hub.names import parse_data, reason_of
from runners.jobspec.base import (
    LONGEST_PROMPT,
    MOST_PROMPTS,
    PackingStrategy,
    store_fault,
)
from runners.jobspec.generate import Batching, KvCache
from runners.jobspec.objectives import PreferenceLoss
from runners.jobspec.rewards import BUILT_IN, RewardFunction, parse_rewards
from runners.jobspec.train import Away, CheckpointWriting, OnSpike, TrainAttention
from runners.plans.data_set import DataSet
from runners.plans.fields import Key, Part, Path, field
from runners.plans.methods import COMPRESSIONS, OBJECTIVES, TRAININGS, methods_with

MILLION = 1e6


def check_path(name: str, path: str) -> None:
    """Refuse a path with “..”, which could leave the host's model folder."""
    if ".." in path.split("/") or "\x00" in path:
        refuse(name, "A file's path may not contain “..”.")


class ServeWork(Part):
    """Online requests."""

    input_tokens: int = field(
        1024, "Prompt length", "Tokens in a typical request", ge=1, le=1_000_000
    )
    output_tokens: int = field(
        256, "Answer length", "Tokens in a typical answer", ge=1, le=1_000_000
    )
    max_request_tokens: int | None = field(
        None,
        "Longest request",
        "Prompt and answer in total; empty means four times the typical request",
        ge=1,
        le=10_000_000,
    )
    concurrency: int = field(
        16, "Concurrent requests", "Requests in flight at once", ge=1, le=100_000
    )
    prefix_share_ratio: float = field(
        0.0,
        "Shared prefix",
        "Per cent of the prompt that all requests share",
        factor=0.01,
        ge=0.0,
        le=0.99,
    )
    length_variation: float | None = field(
        None,
        "Variation of lengths",
        "Standard deviation of prompts and answers, per cent of their mean: about 100 in chats, "
        "52 in random benchmarks with a range ratio of 0.9; empty means that they hardly differ",
        factor=0.01,
        ge=0.01,
        le=3.0,
    )

    @model_validator(mode="after")
    def _longest_is_no_shorter_than_typical(self) -> Self:
        typical, longest = self.input_tokens + self.output_tokens, self.max_request_tokens
        if longest is not None and longest < typical:
            refuse(
                "max_request_tokens",
                f"Longest request is {longest:,} tokens, and a typical one has {typical:,}. "
                f"Increase “Longest request” to at least {typical}, or leave it empty.",
            )
        return self


class GenerateWork(DataSet):
    """A batch of prompts, answered at the highest throughput.

    Of a data set what stands before the answers is the prompts; an evaluation reads all of it.
    """

    batch_size: int = field(32, "Batch size", "Sequences processed in one pass", ge=1, le=100_000)
    input_tokens: int = field(1024, "Prompt length", "Tokens", ge=1, le=1_000_000)
    output_tokens: int = field(256, "Answer length", "Tokens", ge=1, le=1_000_000)
    prompts_path: Path = field(
        "",
        "Prompts file on the host",
        "A prompt a line, or JSON lines with “prompt”, below the host's model folder; empty means "
        "one batch of the host's own text.",
        max_length=1000,
    )
    batching: Batching = field(
        "given",
        "Batches",
        choices={
            "given": "In the order of the prompts",
            "sorted": "Sorted by length",
            "turbo": "By length, cut where it costs least",
            "packed": "Without padding, all prompts of a batch in one row",
            "continuous": "Continuous: the next prompt as soon as one is done",
        },
        group="",
    )
    kv_cache: KvCache = field(
        "plain",
        "Keys and values",
        "Format of the KV cache while a batch is processed",
        choices={"plain": "Default", "fp8": "8 bits (fp8)", "int4": "4 bits", "int2": "2 bits"},
        group="",
    )
    speculation: Literal["lookup"] | None = field(
        None,
        "Speculative decoding",
        "The output stays the same; the job shows the draft acceptance rate",
        choices={None: "None", "lookup": "Prompt lookup, one prompt at a time"},
        group="",
    )
    compiled_step: bool = field(
        default=False,
        title="Decode step",
        help="Minutes before the first batch, then quicker; needs g++ on the host",
        choices={False: "Default", True: "Compiled when the job starts"},
        group="",
    )

    @model_validator(mode="after")
    def _options_go_together(self) -> Self:
        check_path("prompts_path", self.prompts_path)
        self.refuse_without_data_set()
        if self.prompts_path and self.data_repository:
            refuse("prompts_path", "Prompts come from a file or a data set. Give one of them.")
        if self.kv_cache != "plain" and (self.speculation or self.batching == "continuous"):
            refuse("kv_cache", "Fewer bits run in batches only. Choose “Default”.")
        return self


class MixtureSource(Part):
    """One source of a mixture: the host's own text, a file on it, a data set, or an upload."""

    source: str = Field(
        max_length=40, description="host, file, hub, or the id of an uploaded file"
    )
    path: Path = Field(
        default="",
        max_length=1000,
        description="For source “file”; for “hub” the data set, as owner/name:SPLIT",
    )
    weight: float = Field(
        default=1.0, ge=0.001, le=1000, description="Share of the mixture against the others"
    )
    reference_loss: float | None = Field(
        default=None, ge=0, le=20, description="Reference loss, for weights that follow the loss"
    )


MOST_SOURCES, FEWEST_SOURCES = 4, 2
NAMED_SOURCES = frozenset({"file", "hub"})  # by their path
DATA_FORMATS: dict[Key, str] = {
    None: "By its first record",
    "text": "Text",
    "chat": "Chats: “messages”",
    "sharegpt": "Chats of ShareGPT: “conversations”",
    "instruction": "Instructions: “instruction”, “output”",
    "classification": "Classes: “text”, “label”",
    "completion": "Prompts: “prompt”, “completion”",
    "preference": "Preferences: “chosen”, “rejected”",
    "kto": "Rated answers: “prompt”, “completion”, “label”",
    "prompt": "Prompts alone: “prompt”, with “answer” for rewards",
}


class TrainingData(DataSet):
    """The text that a training reads."""

    data_source: Literal["host", "hub", "file", "upload", "mixed"] = field(
        "host",
        "Training text",
        choices={
            "host": "The host's own text",
            "hub": "A data set of the Hub",
            "file": "A file on the host",
            "upload": "An uploaded file",
            "mixed": "Several sources by weight",
        },
    )
    data_path: Path = field(
        "",
        "File on the host",
        "JSON, JSON lines, Parquet, CSV or .txt, below the host's model folder, or in an object "
        "store as s3://bucket/file",
        max_length=1000,
    )
    data_format: Format | None = field(None, "File format", choices=DATA_FORMATS)
    dataset: str = field("", "Uploaded file", max_length=40)
    rows: Literal["packed", "padded"] = field(
        "packed",
        "Short samples",
        "The plan assumes full rows, and padded rows are not full",
        choices={
            "packed": "Several per row, masked from each other",
            "padded": "One per row, padded",
        },
    )
    too_long: Literal["cut", "leave_out"] = field(
        "cut",
        "Samples longer than a row",
        choices={"cut": "Truncate", "leave_out": "Leave out"},
    )
    packing_strategy: PackingStrategy | None = field(
        None,
        "TRL's packing",
        "Of a supervised training by TRL, which else gives each sample a row of its own",
        choices={
            None: "Best fit where the plan packs rows",
            "bfd": "Best fit, longer samples cut",
            "bfd_split": "Best fit, longer samples divided between rows",
            "wrapped": "One text after the other, which see each other",
        },
    )
    mixture: list[MixtureSource] = field(
        [],
        "Sources",
        "The sources of data_source “mixed”, each with its weight",
        max_length=MOST_SOURCES,
    )
    mixture_weights: Literal["fixed", "dynamic"] = field(
        "fixed",
        "The weights",
        choices={"fixed": "Fixed", "dynamic": "Follow each source's loss"},
    )
    mixture_update_every_steps: int = field(
        50,
        "Steps between two updates",
        "The held-out loss on each source is measured before each update",
        ge=1,
        le=1_000_000,
    )

    @model_validator(mode="after")
    def _source_is_complete(self) -> Self:
        if self.data_repository and "data_source" not in self.model_fields_set:
            self.data_source = "hub"
        if self.data_source == "hub" and not self.data_repository:
            refuse("data_repository", "Name a data set, for example tatsu-lab/alpaca.")
        _check_data_file("data_path", self.data_path)
        if self.data_source == "file" and not self.data_path:
            refuse("data_path", "Name the file.")
        if self.data_source == "upload" and not self.dataset:
            refuse("dataset", "Choose a file, or upload one.")
        if self.data_source == "mixed":
            _check_mixture(self.mixture)
        return self


def _check_data_file(name: str, path: str) -> None:
    check_path(name, path)
    if fault := store_fault(path):
        refuse(name, f"{fault}.")
    try:
        if path:
            suffix_of(path)
    except DataError as error:
        text = str(error)
        refuse(name, f"{text[:1].upper()}{text[1:].rstrip('.')}.")


def _check_mixture(rows: list[MixtureSource]) -> None:
    """Refuse fewer than two sources, a file or data set without a name, and one named twice."""
    seen: set[tuple[str, str]] = set()
    for number, row in enumerate(rows):
        if row.source == "file":
            _check_data_file(f"mixture.{number}.path", row.path)
            if not row.path:
                refuse(f"mixture.{number}.path", "Name the file.")
        if row.source == "hub":
            try:
                parse_data(row.path)
            except BadRequestError as error:
                refuse(f"mixture.{number}.path", f"{reason_of(error)}.")
        key = (row.source, row.path if row.source in NAMED_SOURCES else "")
        if key in seen:
            refuse(
                f"mixture.{number}.source",
                "This source is already listed. Remove one of the two rows.",
            )
        seen.add(key)
    if len(seen) < FEWEST_SOURCES:
        refuse(
            "mixture",
            f"{len(seen)} of these rows name a source. Choose at least {FEWEST_SOURCES}.",
        )


PLACES: dict[Key, str] = {
    "none": "On the device",
    "cpu": "In the host's memory, for a GPU",
    "disk": "On the host's disk",
}
MEMORY, KERNELS, CONTROL, OUTPUTS, REWARDED = (
    "Memory",
    "Kernels and numbers",
    "Run control",
    "Outputs",
    "Answers and rewards",
)


class PretrainWork(TrainingData):
    """A training: sequence length, batch size, duration, and the trainer's options."""

    sequence_length: int = field(256, "Sequence length", "Tokens per sequence", ge=8, le=1_000_000)
    global_batch_size: int = field(  # small steps reduce the loss most in the demo's two minutes
        2, "Batch size", "Sequences per step", ge=1, le=100_000
    )
    optimizer: Literal["adamw", "adamw_8bit", "adafactor", "lion", "sgd", "lomo", "adalomo"] = (
        field(
            "adamw",
            "Optimiser",
            choices={
                "adamw": "AdamW",
                "adamw_8bit": "AdamW, 8-bit states",
                "adafactor": "Adafactor",
                "lion": "Lion",
                "sgd": "SGD",
                "lomo": "LOMO: no states, one gradient at a time",
                "adalomo": "AdaLomo: LOMO, each weight at its own rate",
            },
        )
    )
    time_budget_seconds: float | None = field(
        120.0,
        "Time budget",
        "Minutes; training stops when they are used up",
        factor=MINUTE,
        ge=6.0,
        le=6_000_000.0,
    )
    tokens: int | None = field(
        None,
        "Or a number of tokens",
        "Millions; empty means the time budget",
        factor=MILLION,
        ge=1000,
        le=10**15,
    )
    learning_rate: float | None = field(
        None,
        "Learning rate",
        "At its peak, such as 2e-4. Empty: the usual one of optimiser, method and model",
        gt=0,
        le=1,
    )
    activation_offload: Away = field(
        "none",
        "Activation offload",
        "Where activations are stored between the forward and the backward pass; offload makes a "
        "step slower",
        choices=PLACES,
        group=MEMORY,
    )
    optimizer_offload: Away = field(
        "none",
        "Optimiser state offload",
        "Where AdamW's moments are stored between two steps (ZeRO-Offload)",
        choices=PLACES,
        group=MEMORY,
    )
    checkpoint_writing: CheckpointWriting = field(
        "auto",
        "Checkpoints",
        "Background writing needs host memory for one more copy of the states",
        choices={
            "auto": "In the background on GPUs",
            "background": "Written in the background",
            "in_step": "Synchronous",
        },
        group=MEMORY,
    )
    attention: TrainAttention = field(
        "auto",
        "Attention kernel",
        "The fused kernel does not store scores; on a CPU it is slower for short sequences",
        choices={
            "auto": "Automatic",
            "flash": "Fused (SDPA)",
            "eager": "Eager (separate products)",
            "flex": "By blocks (FlexAttention), for GPUs",
        },
        group=KERNELS,
    )
    compute_dtype: Literal["auto", "fp8"] = field(
        "auto",
        "Matrix products",
        "For GPUs from Ada Lovelace on; emulated elsewhere, which is slower than 16 bits",
        choices={"auto": "In 16 bits or wider", "fp8": "In 8-bit floats (fp8)"},
        group=KERNELS,
    )
    compiled: bool = field(
        default=False,
        title="Training step",
        help="Compiling takes up to a few minutes at the start, and needs g++ on the host",
        choices={False: "Default", True: "Compiled layers"},
        group=KERNELS,
    )
    qat_bits: Literal[4, 8] | None = field(
        None,
        "Quantisation-aware training",
        "Reduces the quality loss of a later compression to that width",
        choices={None: "None", 8: "To 8 bits", 4: "To 4 bits, in groups of 32"},
        group=KERNELS,
    )
    length_schedule: Literal["constant", "grow"] = field(
        "constant",
        "Sequence length schedule",
        "Starts at an eighth of the sequence length; four lengths with a quarter of the tokens "
        "each. Needs a number of tokens",
        choices={"constant": "Constant", "grow": "Growing (GrowLength)"},
        group=CONTROL,
    )
    early_stop_validations: Literal[2, 3] | None = field(
        None,
        "Stop early",
        "A run has eight validations",
        choices={None: "No", 2: "After two without gain", 3: "After three without gain"},
        group=CONTROL,
    )
    on_spike: OnSpike = field(
        "stop",
        "On a loss spike",
        choices={"stop": "Stop; the last checkpoint stays", "skip": "Skip the step"},
        group=CONTROL,
    )
    keep_best: bool = field(
        default=True,
        title="Exported weights",
        help="Evaluated eight times in a run; the best weights are kept on the host's disk",
        choices={True: "Lowest held-out loss", False: "Last step"},
        group=OUTPUTS,
    )
    text_samples_every_steps: Literal[20, 100, 500] | None = field(
        None,
        "Text samples",
        "The current weights continue prompts; the job's page shows what they wrote. GRPO shows "
        "answers of its own, every 20 steps unless stated",
        choices={
            None: "No",
            20: "Every 20 steps",
            100: "Every 100 steps",
            500: "Every 500 steps",
        },
        group=OUTPUTS,
    )
    sample_prompts: str = field(
        "",
        "Prompts of the samples",
        f"One a line, {MOST_PROMPTS} at most; empty means the first words of held-out text",
        has_lines=True,
        group=OUTPUTS,
        max_length=20_000,
    )

    @field_validator("sample_prompts")
    @classmethod
    def _prompts_are_short(cls, text: str) -> str:
        lines = [each for each in unix_lines(text).split("\n") if each.strip()]
        if len(lines) > MOST_PROMPTS:
            refuse(
                "sample_prompts",
                f"There are {len(lines)} prompts, one a line. Give {MOST_PROMPTS} at most.",
            )
        longest = max(map(len, lines), default=0)
        if longest > LONGEST_PROMPT:
            refuse(
                "sample_prompts",
                f"A prompt has {longest:,} characters. It may have {LONGEST_PROMPT} at most.",
            )
        return "\n".join(lines)

    @model_validator(mode="after")
    def _ends_some_time(self) -> Self:
        if self.length_schedule == "grow" and not self.tokens:
            refuse("tokens", "Lengths that grow need a number of tokens.")
        if not self.tokens and not self.time_budget_seconds:
            refuse("time_budget_seconds", "Give a time budget or a number of tokens.")
        return self

    @property
    def sequences_per_step(self) -> int:
        """Return how many sequences a step learns from."""
        return self.global_batch_size

    @property
    def prompt_lines(self) -> tuple[str, ...]:
        """Return the prompts of the samples."""
        return tuple(self.sample_prompts.split("\n")) if self.sample_prompts else ()


class TunedWork(PretrainWork):
    """What a fine-tuning changes of the trained weights, and what they learn."""

    method: Literal[
        "full", "lora", "qlora", "lomo", "adalomo", "qft", "classification", "alphatuning"
    ] = field("lora", "Method", choices={name: each.words for name, each in TRAININGS.items()})
    lora_rank: int = field(
        16,
        "Adapter rank",
        "For LoRA and QLoRA",
        only_for={"method": ("lora", "qlora")},
        ge=1,
        le=1024,
    )
    objective: TrainObjective = field(
        "supervised",
        "Training objective",
        "All but supervised train by LoRA, QLoRA or in full; a batch counts records: pairs of "
        "answers, for KTO single ones, for GRPO and distillation prompts",
        choices=OBJECTIVES,
    )


of_grpo = partial(field, only_for={"objective": ("grpo",)})
finer_of_grpo = partial(of_grpo, group=REWARDED)
of_answers = partial(field, only_for={"objective": tuple(sorted(ON_POLICY_OBJECTIVES))})
finer_of_answers = partial(of_answers, group=REWARDED)


class RewardedWork(TunedWork):
    """The options of GRPO and distillation: answers to prompts, and what they are learnt by."""

    teacher_model: str = field(
        "",
        "Teacher",
        "A larger model with the same tokenizer, by its name in the catalog, or the name or id of "
        "a model of the team: of a job, a folder or a repository",
        only_for={"objective": ("distillation",)},
        max_length=200,
    )
    reward_function: str = of_grpo(
        "",
        "Reward functions",
        f"One a line: {', '.join(BUILT_IN)}, or FILE.py:FUNCTION in the host's folder rewards; "
        "a weight may follow. Called as TRL calls its own",
        has_lines=True,
        max_length=4000,
    )
    num_generations: int = of_grpo(
        8,
        "Answers to a prompt",
        "Compared with each other; a step generates the batch size times as many",
        ge=2,
        le=1024,
    )
    max_completion_length: int = of_answers(
        256,
        "Longest answer",
        "Tokens; an answer that reaches it is cut",
        ge=1,
        le=1_000_000,
    )
    max_prompt_length: int | None = finer_of_answers(
        None,
        "Longest prompt",
        "Tokens; longer ones are left out. Empty: what the sequence length leaves",
        ge=1,
        le=1_000_000,
    )
    temperature: float = finer_of_answers(
        1.0,
        "Temperature",
        "At which answers are drawn; of distillation also that of the compared probabilities",
        gt=0.0,
        le=5.0,
    )
    num_iterations: int = finer_of_grpo(
        1,
        "Updates by the same answers",
        "More than one reuses them, with a clipped ratio",
        ge=1,
        le=64,
    )
    generator: Generator | None = finer_of_answers(
        None,
        "Devices that generate",
        "Jobs generate with the trained weights, in the training's own process (transformers). "
        "Other devices and engines, such as vLLM, are planned for catalog hardware",
        choices={
            None: "As jobs do; for catalog hardware both are compared",
            "colocated": "Those that train, in turn",
            "separate": "Others than those that train",
        },
    )
    reward_timeout_seconds: float = finer_of_grpo(
        60.0,
        "Time limit of rewards",
        "Seconds that the functions may take for the answers of a step",
        ge=1.0,
        le=86_400.0,
    )
    reward_memory_gib: float = finer_of_grpo(
        4.0, "Memory limit of rewards", "GiB that their process may address", ge=0.25, le=1024.0
    )

    @model_validator(mode="after")
    def _can_be_rewarded(self) -> Self:
        """Refuse rewards that GRPO cannot learn with."""
        if not self.is_rewarded:
            return self
        try:
            rewards = parse_rewards(self.reward_function)
        except ValueError as error:
            refuse("reward_function", f"Rewards: {error}.")
        if not rewards:
            refuse(
                "reward_function",
                f"GRPO learns from rewards. Name a function ({', '.join(BUILT_IN)}), or a file.",
            )
        return self

    @model_validator(mode="after")
    def _has_a_teacher(self) -> Self:
        if self.objective == "distillation" and not self.teacher_model.strip():
            refuse(
                "teacher_model",
                "Distillation learns a teacher's probabilities. Name a larger model with the same "
                "tokenizer: of the catalog, or of your team.",
            )
        return self

    @model_validator(mode="after")
    def _answers_have_room(self) -> Self:
        """Refuse lengths of prompts and answers that are no sequence."""
        if not self.generates:
            return self
        room = self.sequence_length - self.max_completion_length
        if room < 1:
            refuse(
                "max_completion_length",
                f"The longest answer has {self.max_completion_length:,} tokens, and the sequence "
                f"length {self.sequence_length:,} leaves none for a prompt. Raise it.",
            )
        if self.max_prompt_length is not None and self.max_prompt_length > room:
            refuse(
                "max_prompt_length",
                f"The longest prompt has {self.max_prompt_length:,} tokens, and the sequence "
                f"length leaves {room:,} beside the answer. Change one of them.",
            )
        return self

    @property
    def is_rewarded(self) -> bool:
        """Return whether the model learns from the rewards of its own answers."""
        return self.objective == "grpo"

    @property
    def generates(self) -> bool:
        """Return whether the model learns from its own answers."""
        return self.objective in ON_POLICY_OBJECTIVES

    @property
    def longest_prompt(self) -> int:
        """Return how many tokens a prompt that is answered may have."""
        return self.max_prompt_length or self.sequence_length - self.max_completion_length

    @property
    def reward_functions(self) -> tuple[RewardFunction, ...]:
        """Return the reward functions that the lines name."""
        return parse_rewards(self.reward_function)

    @property
    def sequences_per_step(self) -> int:
        """Return how many records a step learns from, of GRPO how many answers."""
        return self.global_batch_size * (self.num_generations if self.is_rewarded else 1)


class FinetuneWork(RewardedWork):
    """A training that starts from trained weights."""

    beta: float | None = field(
        None,
        "Beta",
        "How strongly answers are held to the reference; of ORPO the weight of its odds ratio. "
        "Empty: 0.1, of GRPO 0, which needs no reference. Of distillation the divergence from the "
        "teacher, from 0 (forward KL) to 1 (reverse KL, if empty)",
        only_for={"objective": ("dpo", "kto", "orpo", "grpo", "distillation")},
        ge=0.0,
        le=100.0,
        group="",
    )
    preference_loss: PreferenceLoss = field(
        "sigmoid",
        "Loss of DPO",
        choices={
            "sigmoid": "Sigmoid, as in the paper",
            "ipo": "IPO",
            "hinge": "Hinge",
            "robust": "Robust to wrong pairs",
            "apo_zero": "APO, zero",
            "apo_down": "APO, down",
        },
        only_for={"objective": ("dpo",)},
        group="",
    )
    precompute_reference: bool = field(
        default=False,
        title="Reference model",
        help="A first pass over the records of the run saves its memory",
        choices={False: "Beside the trained one", True: "In a first pass, then let go"},
        only_for={"objective": REFERENCE_OBJECTIVES},
        group=MEMORY,
    )
    sequence_length: int = field(
        2048, "Sequence length", "Tokens per sequence", ge=8, le=1_000_000
    )
    global_batch_size: int = field(16, "Batch size", "Sequences per step", ge=1, le=100_000)
    time_budget_seconds: float | None = field(
        None,
        "Time budget",
        "Minutes; training stops when they are used up",
        factor=MINUTE,
        ge=6.0,
        le=6_000_000.0,
    )
    tokens: int | None = field(
        10_000_000,
        "Or a number of tokens",
        "Millions; empty means the time budget",
        factor=MILLION,
        ge=1000,
        le=10**15,
    )

    @model_validator(mode="after")
    def _objective_has_its_parts(self) -> Self:
        if self.objective != "supervised" and self.method not in PREFERENCE_METHODS:
            refuse(
                "objective",
                f"The method {TRAININGS[self.method].name} has no objective but supervised. "
                "Choose LoRA, QLoRA or all weights.",
            )
        if self.objective == "distillation" and (self.beta or 0.0) > 1.0:
            refuse(
                "beta",
                f"Beta is {self.beta:g}, and of distillation it lies between 0, the forward KL "
                "divergence, and 1, the reverse one.",
            )
        if self.objective != "supervised" and self.length_schedule == "grow":
            refuse(
                "length_schedule",
                "Lengths grow in supervised trainings alone. Choose one length, or the objective "
                "supervised.",
            )
        if self.objective == "reward" and self.method == "qlora":
            refuse(
                "method",
                "QLoRA leaves a reward model no head to train. Choose LoRA or all weights.",
            )
        if self.precompute_reference and self.objective not in REFERENCE_OBJECTIVES:
            refuse(
                "precompute_reference",
                "Only DPO and KTO have a reference model. Leave it out, or choose one of them.",
            )
        return self


PATTERN = "2:4"


class CompressWork(DataSet):
    """Make the weights smaller and measure the loss of quality.

    A data set is the text that the method calibrates with, in place of the host's own.
    """

    method: CompressMethod = field(
        "int8_weight_only",
        "Method",
        choices={name: each.words for name, each in COMPRESSIONS.items()},
    )
    bits: Literal[2, 3, 4, 8] = field(
        4,
        "Bits",
        "For GGUF and the methods from GPTQ to FPTQ",
        choices={bits: f"{bits} bits" for bits in (4, 3, 2, 8)},
        only_for={"method": methods_with("bits")},
    )
    group_size: int = field(
        64,
        "Group size",
        "Weights that share one scale",
        only_for={"method": methods_with("group_size")},
        ge=8,
        le=4096,
    )
    sparsity: Literal["50", "20", "30", "60", "2:4"] = field(
        "50",
        "Weights to remove",
        "For SparseGPT and LLM-Pruner",
        choices={
            "50": "Half",
            "20": "A fifth",
            "30": "30 per cent",
            "60": "60 per cent",
            PATTERN: "Two of each four weights",
        },
        only_for={"method": methods_with("sparsity")},
    )
    recovery_steps: int = field(
        0,
        "Recovery steps",
        "Steps of LoRA training after pruning, then merged; 0 means none",
        only_for={"method": methods_with("recovery_steps")},
        ge=0,
        le=100_000,
    )

    @model_validator(mode="after")
    def _pattern_is_for_single_weights(self) -> Self:
        self.refuse_without_data_set()
        if self.sparsity == PATTERN and COMPRESSIONS[self.method].removes_channels:
            refuse(
                "sparsity",
                "Structured pruning does not support 2:4 sparsity. Choose a sparsity ratio.",
            )
        return self


Workload = ServeWork | GenerateWork | FinetuneWork | PretrainWork | CompressWork
WORKLOADS: Mapping[str, type[Part]] = {
    "serve": ServeWork,
    "generate": GenerateWork,
    "finetune": FinetuneWork,
    "pretrain": PretrainWork,
    "compress": CompressWork,
}
TRAINING_GOALS = frozenset({"finetune", "pretrain"})
