"""How each kind of job measures a figure while it runs: series, window, warm-up."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from runners.jobspec.benchmark import (
    FIRST_STEPS_SKIPPED,
    JUDGING,
    MEASURING,
    ORIGINAL,
    SAVED,
    TRAINING,
)

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
        "tokens_per_second", "median", f"tokens of a step over the median time of {STEPS}"
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
