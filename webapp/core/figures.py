"""Registry of figures: name, label, unit, definition, and measurement per kind of job."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from runners.jobspec.compress import (
    FIRST_STEPS_SKIPPED,
    JUDGING,
    MEASURING,
    ORIGINAL,
    ORIGINAL_PREFIX,
    SAVED,
    TRAINING,
)

# How each kind of job measures a figure while it runs: series, window, warm-up.


Statistic = Literal["median", "highest", "latest"]
Counted = Literal["steps", "repetitions", "requests", "windows", "prompts", "samples"]
JUDGED_STEPS = 20
JUDGED_REPETITIONS = 3
JUDGED_REQUESTS = 20
REQUESTS_SERIES = "answered_requests"
STEP_SERIES = "step"


@dataclass(frozen=True)
class Taking:
    """How a running job's points become one value; a finished job has it in its result.

    ``phase`` is the job phase used as window; empty means the whole attempt. The first ``skipped``
    steps are ignored. Values are compared with predictions only from ``judged_from`` of
    ``counted`` on.
    """

    words: str
    series: str = ""  # metric in the store; empty: only known from the result
    statistic: Statistic = "latest"
    phase: str = ""
    counted: Counted = "samples"
    skipped: int = 0
    judged_from: int = 1


def of_steps(series: str, statistic: Statistic, words: str) -> Taking:
    """Return the measurement over a training run's steps without the first ones."""
    return Taking(words, series, statistic, TRAINING, "steps", FIRST_STEPS_SKIPPED, JUDGED_STEPS)


def of_repetitions(series: str, statistic: Statistic, phase: str, words: str) -> Taking:
    """Return the measurement over repetitions; the warm-up reports no points."""
    judged = JUDGED_REPETITIONS
    return Taking(words, series, statistic, phase, "repetitions", judged_from=judged)


STEPS = f"steps of the attempt without the first {FIRST_STEPS_SKIPPED}"
REPETITIONS = "repetitions after an unmeasured warm-up"
LIFE = "all requests of the endpoint's life"
PROMPTS = "all prompts that the attempt answered"
AT_MAIN = "requests of the main point, after the warm-up requests"
PART = "from when the model is loaded until it is measured, evaluating and saving left out"

PEAK: Mapping[str, Taking] = {
    "train": of_steps("peak_memory_bytes", "highest", PART),
    "benchmark": of_repetitions("peak_memory_bytes", "highest", MEASURING, PART),
    "compress": of_repetitions("peak_memory_bytes", "highest", SAVED, PART),
    "evaluate": Taking(
        PART, "peak_memory_bytes", "highest", JUDGING, "windows", judged_from=JUDGED_REPETITIONS
    ),
    "generate": Taking(PART, "peak_memory_bytes", "highest", counted="prompts"),
}
TOKENS: Mapping[str, Taking] = {
    "train": of_steps(
        "tokens_per_second",
        "median",
        f"tokens of a step over the median time of {STEPS}; evaluating, saving and what lies "
        "between steps are left out",
    ),
    "generate": Taking(
        f"written tokens over the seconds of {PROMPTS}, prefill included",
        "tokens_per_second",
        counted="prompts",
    ),
    "serve": Taking(
        "written tokens over the seconds in which the engine computed",
        "busy_tokens_per_second",
        counted="requests",
        judged_from=JUDGED_REQUESTS,
    ),
    "benchmark": Taking(f"written tokens of whole answers a second, mean over {AT_MAIN}"),
}
PERPLEXITY: Mapping[str, Taking] = {
    "evaluate": Taking(
        "windows of held-out text read so far", "perplexity", phase=JUDGING, counted="windows"
    ),
    "benchmark": Taking("held-out text", "perplexity", phase=MEASURING),
    "compress": Taking("held-out text", "perplexity", phase=SAVED),
}
STEP: Mapping[str, Taking] = {
    "train": of_steps("step_seconds", "median", f"median over {STEPS}"),
}


def speeds(series: str, words: str) -> dict[str, Taking]:
    """Return the measurements of prefill or decode speed, by kind of job."""
    median = f"{words}; median over {REPETITIONS}"
    return {
        "benchmark": of_repetitions(series, "median", MEASURING, median),
        "compress": of_repetitions(series, "median", SAVED, median),
        "generate": Taking(f"{words}, summed over {PROMPTS}", series, counted="prompts"),
    }


def times(name: str, words: str) -> dict[str, Taking]:
    """Return the measurements of a request time such as ``ttft``, by kind of job."""
    served = Taking(
        f"{words}; mean over {LIFE}",
        f"{name}_mean_seconds",
        counted="requests",
        judged_from=JUDGED_REQUESTS,
    )
    return {
        "serve": served,
        "benchmark": Taking(f"{words}; median over {REPETITIONS}; under load mean of {AT_MAIN}"),
        "compress": Taking(f"{words}; median over {REPETITIONS}"),
        "generate": Taking(f"{words}; median over {PROMPTS}"),
    }


def percentiles(name: str, percent: int) -> dict[str, Taking]:
    """Return the measurements of a percentile of ``ttft``, ``tpot`` or ``latency``."""
    return {
        "serve": Taking(
            f"{'single gaps of ' if name == 'tpot' else ''}{LIFE}; interpolated within the "
            "buckets of its histogram",
            f"{name}_p{percent}_seconds",
            counted="requests",
            judged_from=JUDGED_REQUESTS,
        ),
        "benchmark": Taking(AT_MAIN),
    }


def of_original(taking: Taking) -> Taking:
    """Return how a compress job measures the same figure of the original model."""
    series = f"original_{taking.series}" if taking.series else ""
    return Taking(
        taking.words, series, taking.statistic, ORIGINAL, taking.counted, taking.skipped,
        taking.judged_from,
    )  # fmt: skip


Better = Literal["", "higher", "lower"]
FROM_RESULT = Taking("as the job reports it in its result")
_OF_DEVICE = re.compile(r"(gpu\d+|package_\w+)_energy_joules")
PERCENTS = (50, 90, 95, 99)
TIMES = {
    "ttft": ("Time to first token", "from a request to its first token"),
    "tpot": ("Time per output token", "mean gap between an answer's tokens after the first"),
    "latency": ("Time of a whole answer", "from a request to its last token"),
}


@dataclass(frozen=True)
class FigureDefinition:
    """Definition of one figure.

    ``unit`` is the base unit of values in the API and in exports; ``better`` says which direction
    is an improvement, or is empty.
    """

    name: str
    label: str
    unit: str
    definition: str
    better: Better = ""
    is_predicted: bool = False  # the plan of at least one kind of job predicts it
    takings: Mapping[str, Taking] = field(default_factory=dict)
    default: Taking = FROM_RESULT

    def taking(self, kind: str) -> Taking:
        """Return how a kind of job measures the figure."""
        return self.takings.get(kind, self.default)


def _figure(
    name: str,
    label: str,
    unit: str,
    definition: str,
    better: Better = "",
    takings: Mapping[str, Taking] | None = None,
    *,
    predicted: bool = False,
    default: Taking = FROM_RESULT,
) -> FigureDefinition:
    own_takings = takings or {}
    return FigureDefinition(name, label, unit, definition, better, predicted, own_takings, default)


def _percentile(name: str, percent: int) -> FigureDefinition:
    label, words = TIMES[name]
    return _figure(
        f"{name}_p{percent}_seconds",
        f"{label}, p{percent}",
        "seconds",
        f"The {words} that {percent} of 100 requests do not exceed.",
        "lower",
        percentiles(name, percent),
    )


_SPEED = (
    _figure("tokens_per_second", "Tokens per second", "tokens_per_second",
            "Tokens written in a second; of a training, tokens of a step over the time of a step.",
            "higher", TOKENS, predicted=True),
    _figure("prefill_tokens_per_second", "Prefill speed", "tokens_per_second",
            "Prompt tokens read in a second.", "higher",
            speeds("prefill_tokens_per_second", "prompt tokens over the time of prefills"),
            predicted=True),
    _figure("decode_tokens_per_second", "Decode speed", "tokens_per_second",
            "Tokens written in a second once the prompt is read.", "higher",
            speeds("decode_tokens_per_second", "tokens after the first over the time they took"),
            predicted=True),
    _figure("step_seconds", "Step time", "seconds", "Time of one step of the optimiser.",
            "lower", STEP, predicted=True),
    _figure("mfu", "Model FLOP utilisation", "share",
            "The plan's FLOP per token times the measured tokens per second, over the devices' "
            "peak.", "higher", predicted=True),
    _figure("communication_ratio", "Communication in a step", "share",
            "Share of a step in which messages between ranks pass.", "lower"),
    _figure("exposed_communication_ratio", "Exposed communication", "share",
            "Share of a step in which ranks wait for messages that no computation overlaps.",
            "lower", predicted=True),
    _figure("prefill_seconds", "Prefill time", "seconds", "Time of one prefill.", "lower",
            predicted=True),
    _figure("decode_step_seconds", "Time per decoded token", "seconds",
            "Time of one decode step.", "lower", predicted=True),
)  # fmt: skip
_TIMES = (
    *(
        _figure(f"{name}_seconds", label, "seconds", f"Time {words}." if name != "tpot"
                else f"The {words}.", "lower", times(name, words), predicted=True)
        for name, (label, words) in TIMES.items()
    ),
    *(_percentile(name, percent) for name in TIMES for percent in PERCENTS),
    _figure("requests_per_second", "Requests per second", "",
            "Whole answers in a second.", "higher"),
    _figure("slo_max_concurrency", "Most clients within the targets", "clients",
            "The highest number of clients at which a search measured the latency targets met.",
            "higher", predicted=True),
    _figure("slo_max_requests_per_second", "Highest rate within the targets", "requests/s",
            "The highest rate at which a search measured the latency targets met.",
            "higher", predicted=True),
    _figure("run_seconds", "Run time", "elapsed_seconds",
            "From when the job began to run until it ended, or until now.", "lower",
            default=Taking("of the job, by the server's clock")),
    _figure("duration_seconds", "Duration", "seconds",
            "Time of the measured part, without starting and loading.", "lower", predicted=True),
    _figure("tasks_seconds", "Running tasks", "seconds",
            "Time of the tasks of lm-evaluation-harness.", "lower"),
)  # fmt: skip
_SAMPLED = "highest sample of the attempt, from its start to its end"
_MEMORY = (
    _figure("peak_memory_bytes", "Peak memory", "bytes",
            "The most memory that one device held for the measured part: CUDA's allocator on a "
            "GPU, the resident memory of the job's process on a CPU.", "lower", PEAK,
            predicted=True),
    _figure("host_memory_bytes", "Host memory, highest sample", "bytes",
            "The most resident memory of all processes of the attempt together in one sample, "
            "loading, evaluating and saving included. It is not the peak memory.", "lower",
            default=Taking(_SAMPLED, "rss_bytes", "highest")),
    _figure("device_memory_bytes", "Device memory, highest sample", "bytes",
            "The most memory in use on the fullest GPU in one sample, whoever used it. It is not "
            "the peak memory.", "lower", default=Taking(_SAMPLED, "gpu", "highest")),
    _figure("parameter_bytes", "Weights in memory", "bytes",
            "All weights and buffers as held, scales included.", "lower"),
    _figure("disk_bytes", "Size on disk", "bytes", "Weight files that the job leaves.", "lower"),
    _figure("trainable_parameters", "Trained parameters", "count", "Trainable parameters."),
    _figure("optimizer_bytes", "Optimiser states", "bytes",
            "States that the optimiser holds for them.", "lower"),
)  # fmt: skip
_OFFLOAD = (
    _figure("acceptance_ratio", "Draft acceptance rate", "share",
            "Share of drafted tokens that the model accepts.", "higher"),
    _figure("expert_hit_ratio", "Experts found on the device", "share",
            "Share of expert lookups served without a transfer.", "higher"),
    _figure("expert_guess_ratio", "Expert prefetch accuracy", "share",
            "Share of prefetched experts that were used.", "higher"),
    _figure("expert_bytes_brought", "Experts transferred to the device", "bytes",
            "Bytes of experts copied to the device.", "lower"),
    *(
        _figure(name, label, "share", f"{label}, as a share of the total.", predicted=True)
        for name, label in (
            ("weights_cpu", "Weights in host memory"),
            ("weights_disk", "Weights on disk"),
            ("kv_cpu", "KV cache in host memory"),
            ("kv_disk", "KV cache on disk"),
            ("activations_cpu", "Activations in host memory"),
        )
    ),
    _figure("host_bytes", "Offloaded to host memory", "bytes",
            "Bytes that the plan keeps in host memory.", "lower", predicted=True),
    _figure("offloaded_disk_bytes", "Offloaded to disk", "bytes",
            "Bytes that the plan keeps on disk.", "lower", predicted=True),
    _figure("layer_loads", "Layers transferred to the device", "",
            "How often a layer was copied to the device.", "lower"),
    _figure("weight_bytes_brought", "Weights transferred to the device", "bytes",
            "Bytes of weights copied to the device.", "lower"),
    _figure("kv_bytes_brought", "KV cache transferred to the device", "bytes",
            "Bytes of the KV cache copied to the device.", "lower"),
)  # fmt: skip
_QUALITY = (
    _figure("perplexity", "Perplexity", "",
            "exp of the mean loss per token on held-out text.", "lower", PERPLEXITY),
    _figure("perplexity_ratio", "Perplexity ratio", "",
            "Perplexity over the original's, on the same windows pair by pair.", "lower"),
    _figure("data_perplexity", "Perplexity on held-out samples", "",
            "exp of the mean loss per label on samples kept from training.", "lower"),
    _figure("data_loss", "Loss on held-out samples", "nats per token",
            "Mean loss per label on samples kept from training.", "lower"),
    _figure("accuracy", "Accuracy on held-out samples", "share",
            "Share of held-out samples whose class is right.", "higher",
            default=Taking("at the last evaluation", "accuracy")),
    _figure("f1", "F1 on held-out samples", "share", "Mean F1 of the classes.", "higher",
            default=Taking("at the last evaluation", "f1")),
    _figure("next_token_accuracy", "Next-token accuracy", "share",
            "Share of held-out tokens that the model finds likeliest.", "higher"),
    _figure("kl_divergence_nats", "KL divergence from the original", "nats per token",
            "Mean KL divergence of the next token's distribution.", "lower"),
    _figure("top_token_agreement", "Same next token as the original", "share",
            "Share of held-out tokens on which both models find the same likeliest.", "higher"),
    _figure("final_loss", "Loss at the last step", "nats per token",
            "Training loss of the last step.", "lower",
            {"train": replace(of_steps("loss", "latest", "the last step"), judged_from=1),
             "drill": Taking("the last step", "loss")}),
    _figure("final_reward", "Reward at the end", "",
            "Mean reward of the answers of the last ten steps, weighted as stated.", "higher",
            {"train": Taking("mean of the last ten steps", "reward")}),
    _figure("exported_step", "Step of the exported weights", "count",
            "Step of the exported weights."),
)  # fmt: skip
_DATA = (
    _figure("data_classes", "Classes", "count", "Classes that the data names."),
    _figure("data_documents", "Training samples", "count", "Samples that are trained on."),
    _figure("data_held_out", "Held-out samples", "count", "Samples kept from training."),
    _figure("data_tokens", "Tokens of the data", "count", "Tokens of all training samples."),
    _figure("data_cut", "Truncated samples", "count", "Samples longer than a row."),
    _figure("data_left_out", "Samples left out", "count", "Samples that could not be used."),
    _figure("padding_share", "Padding", "share", "Share of positions that hold no token."),
    _figure("label_share", "Loss tokens", "share", "Share of tokens that the loss counts."),
    _figure("checkpoint_wait_seconds", "Steps waited for checkpoints", "seconds",
            "Time in which steps waited for checkpoints, over the attempt.", "lower"),
    _figure("checkpoint_copy_bytes", "Copy of the states for checkpoints", "bytes",
            "Memory of the checkpoint copy that is written in the background.", "lower"),
)  # fmt: skip
PRICED = Taking("an ended job's figures at the prices that its host's labels state")
_COST = (
    _figure("energy_joules_per_token", "Energy per token", "joules_per_token",
            "Joules of the computing devices over the tokens trained or written.", "lower",
            predicted=True),
    _figure("energy_joules", "Energy of the run", "joules",
            "Joules that the host's devices drew, from start to end.", "lower"),
    _figure("run_electricity_usd", "Electricity of the run", "usd",
            "Measured joules at the host's price of a kWh.", "lower", default=PRICED),
    _figure("electricity_usd_per_million_tokens", "Electricity per million tokens", "usd",
            "Joules per token at the host's price of a kWh.", "lower", predicted=True,
            default=PRICED),
    _figure("run_cost_usd", "The host for the run", "usd",
            "Time from start to end at the host's price per hour.", "lower", default=PRICED),
    _figure("cost_usd_per_million_tokens", "The host per million tokens", "usd",
            "The host's price per hour over the measured tokens per second.", "lower",
            predicted=True, default=PRICED),
)  # fmt: skip
REGISTRY: dict[str, FigureDefinition] = {
    each.name: each for each in (*_SPEED, *_TIMES, *_MEMORY, *_OFFLOAD, *_QUALITY, *_DATA, *_COST)
}
# Candidates for a job's figure in lists, in order of preference.
MAIN_FIGURES = (
    "tokens_per_second",
    "decode_tokens_per_second",
    "step_seconds",
    "prefill_tokens_per_second",
    "peak_memory_bytes",
)


LABELS = {  # of metrics that jobs report beside the figures, where the name reads badly
    "grad_norm": "Gradient norm",
    "data_wait_ratio": "Waiting for data, share of a step",
    # Of trainings by TRL, under its names.
    "rewards/chosen": "Reward of chosen answers",
    "rewards/rejected": "Reward of rejected answers",
    "rewards/margins": "Reward margin, chosen above rejected",
    "rewards/accuracies": "Pairs ranked right",
    "rewards/mean": "Mean reward",
    "rewards/min": "Lowest reward",
    "rewards/max": "Highest reward",
    "logps/chosen": "Log-probability of chosen answers",
    "logps/rejected": "Log-probability of rejected answers",
    "logits/chosen": "Mean logit of chosen answers",
    "logits/rejected": "Mean logit of rejected answers",
    "kl": "KL divergence from the reference",
    "entropy": "Entropy of the predicted tokens",
    "mean_token_accuracy": "Tokens predicted right",
    "nll_loss": "Loss on chosen answers",
    "log_odds_ratio": "Log of the odds ratio's sigmoid",
    "log_odds_chosen": "Log odds of chosen over rejected",
    "reward": "Mean reward of the answers",
    "reward_std": "Standard deviation of rewards",
    "frac_reward_zero_std": "Share of prompts whose answers have one reward",
    "clip_ratio/region_mean": "Tokens whose ratio is clipped",
    "clip_ratio/low_mean": "Tokens clipped from below",
    "clip_ratio/low_min": "Tokens clipped from below, least of a batch",
    "clip_ratio/high_mean": "Tokens clipped from above",
    "clip_ratio/high_max": "Tokens clipped from above, most of a batch",
    "completions/mean_length": "Mean length of answers",
    "completions/min_length": "Shortest answer",
    "completions/max_length": "Longest answer",
    "completions/clipped_ratio": "Answers cut at the longest length",
    "completions/mean_terminated_length": "Mean length of answers that end by themselves",
    "completions/min_terminated_length": "Shortest answer that ends by itself",
    "completions/max_terminated_length": "Longest answer that ends by itself",
}


_REWARD = re.compile(r"rewards/(\w+)/(mean|std)")  # of one of several reward functions
REWARD_WORDS = {"mean": "mean", "std": "standard deviation"}


def definition_of(name: str) -> FigureDefinition:
    """Return the definition of a figure; for an unknown name, one with the name as label.

    ``original_`` before a listed name means the figure of the model before compression.
    """
    if name in REGISTRY:
        return REGISTRY[name]
    bare = name.removeprefix(ORIGINAL_PREFIX)
    if bare != name and bare in REGISTRY:
        return _original(name, REGISTRY[bare])
    if match := _OF_DEVICE.fullmatch(name):
        words = f"Joules that {match[1]} drew, from start to end."
        return _figure(name, f"Energy of {match[1]}", "joules", words, "lower")
    if match := _REWARD.fullmatch(name):
        words = "Of the answers of a step, reported by the job under this name."
        return _figure(name, f"Reward {match[1]}, {REWARD_WORDS[match[2]]}", "", words)
    task, slash, metric = name.partition("/")
    if slash and name not in LABELS and task and metric:
        return _figure(name, f"{metric} of {task}", "", f"{metric} of the task {task}.")
    label = LABELS.get(name) or name.replace("_", " ").capitalize()
    return _figure(name, label, "", "Reported by the job under this name.")


def _original(name: str, of: FigureDefinition) -> FigureDefinition:
    takings = {kind: of_original(taking) for kind, taking in of.takings.items()}
    return replace(
        of,
        name=name,
        label=f"{of.label}, original",
        definition=f"{of.definition} Of the original.",
        takings={kind: taking for kind, taking in takings.items() if kind == "compress"},
        default=FROM_RESULT,  # only compress jobs report series of the original
    )


def device_figures(names: Iterable[str]) -> list[str]:
    """Return the names that are the energy of single devices, sorted."""
    return sorted(name for name in names if _OF_DEVICE.fullmatch(name))


# The registry as a table in the documentation: definition and measurement of each figure.


BETTER = {"higher": "more is better", "lower": "less is better", "": ""}
UNITS = {
    "bytes": "bytes",
    "seconds": "s",
    "elapsed_seconds": "s",
    "tokens_per_second": "tokens/s",
    "share": "fraction, shown in %",
    "count": "count",
    "usd": "US dollars",
    "joules": "J",
    "joules_per_token": "J/token",
    "": "number",
}


def figure_table() -> str:
    """Return one Markdown row per registered figure: name, unit, meaning, window."""
    head = "| Figure | Unit | What it is | Taken over |\n|---|---|---|---|\n"
    return head + "\n".join(_row(each) for each in REGISTRY.values())


def _row(figure: FigureDefinition) -> str:
    unit = UNITS.get(figure.unit, figure.unit)
    better = BETTER[figure.better]
    meaning = f"{figure.definition} *{better}*" if better else figure.definition
    named = f"{figure.label}<br>`{figure.name}`"
    return f"| {named} | {unit} | {meaning} | {_windows(figure)} |"


def _windows(figure: FigureDefinition) -> str:
    """Return how each kind of job measures the figure; equal ones are grouped."""
    kinds: dict[str, list[str]] = {}
    for kind, taking in figure.takings.items():
        kinds.setdefault(taking.words, []).append(kind)
    groups = [f"**{', '.join(names)}**: {words}" for words, names in kinds.items()]
    return "; ".join(groups) or figure.default.words
