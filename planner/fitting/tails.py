"""Published percentiles of serving beside the planner's: tails and their shape."""

import math
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from planner.fitting.answered_rows import AnsweredRows
from planner.fitting.evidence import Row
from planner.specs.base import JsonObject

WORDS = """## Percentiles that others published

Percentiles of load tests (`planner/validation/published_percentiles.csv`): open loops by the vLLM
bench on a GB10 (djangodevreng/dgx-spark-benchmarks, CC BY 4.0; requests come in clusters, with a
burstiness of 0.7, where the plan says Poisson), and bursts of about a thousand requests and a few
closed loops on A100, H100 and H200 (gpustack/gpustack, performance lab). No load test is fitted;
single streams of the same GB10 are, but for Qwen3.6-35B-A3B's. How lengths are drawn (uniformly
up to a variation of 0.58, by a gamma distribution beyond), which steps a request of an open loop
waits for, and that its launches run Marlin's kernels, which compute in 16 bits, was chosen with
these rows in sight: neither shape nor mean is an untouched prediction. Lengths of ShareGPT
prompts are stated with a variation of 1. The shape is a percentile over the mean: it says how far
the tail is right where the mean is not. Open loops are short if their calls come within less than
three lives of a request: they never reach the steady load that the plan is of. A burst is asked
with as many requests at once as it has; where a launch states no limits, the engine's defaults
hold.

Time to first token on GB10 was said 0.60 as long as measured in the median until December 2026,
now 0.76. On the same 113 open loops it was 40 % off, now 26 %; time per output token 14 %, now 15
%, and time to the last token 12 %, now 15 %: worse, for 16-bit arithmetic and waits lengthen a
life, and both were said too long already. Bursts (72): 63 % became 46 %, time per output token 61
% became 44 %, as requests that wait for a place run in full steps. Six more loads are said to be
more than can be served. Kept: 16-bit arithmetic where the launch takes Marlin's kernels (63
loads, which were said at a quarter); FP8 weights for Ministral 3; the step that is scheduled
already, and the rest of a running step that reads prompts (closed form over simulation: 0.78 to
0.94, now 1.01 to 1.04); clean single streams, which ask for 2.8 times the attention of prompts.
Tried: the experts of prompts as a level of the chip, which clean rows put at 0.70; Gemma 4 26B
and Qwen3.6-35B-A3B are then read 1.2 to 2.2 times too fast, Nemotron 3 in 16 and 4 bits and
Mistral Small 4 within 15 %, so it is the model and not the chip; the engine's limits (1,024
requests, 8,192 tokens), which these loads never reach. What is left, a quarter too short, is no
slower step: in 107 runs of the same rate sweeps, steps with prompts take 0.8 (median) of the time
that the prompts would take alone. Bursts: vLLM's limits on A100 (256 at once, 2,048 tokens a
step) hold there; a thousand short prompts are still read two to six times too fast, mixtures
above all.
"""
LOADS = {"concurrency": "closed loops", "burst_requests": "bursts"}
STEADY_LIVES = 3  # of requests, over which calls must come
TIMES = {
    "ttft": "Time to first token",
    "tpot": "Time per output token",
    "latency": "Time to the last token",
}
TAILS = ("p50", "p95", "p99")


class Tail(NamedTuple):
    """A published percentile over the predicted one, as ratios of prediction and publication.

    ``mean`` is the ratio of the means, ``value`` that of the percentiles; ``is_inside`` says
    whether the published mean lies in the 80 % interval of the predicted one.
    """

    mean: float
    value: float
    is_inside: bool

    @property
    def shape(self) -> float:
        """Return the ratio of the percentiles over their means."""
        return self.value / self.mean


def _request(row: Row) -> JsonObject:
    workload: JsonObject = {
        "kind": "serve",
        "input_tokens": int(row["input_tokens"]),
        "output_tokens": int(row["output_tokens"]),
        row["arrivals"]: float(row["load"]),
    }
    if row["length_variation"]:
        workload["length_variation"] = float(row["length_variation"])
    strategy: JsonObject = {"tensor_parallel_size": int(row["tensor_parallel_size"])}
    for name in ("weight_dtype", "activation_dtype", "kv_cache_dtype"):
        if row[name]:
            strategy[name] = row[name]
    if row["max_batch_tokens"]:
        strategy["max_batch_tokens"] = int(row["max_batch_tokens"])
    return {
        "model": row["model"],
        "cluster": {"device": row["gpu"], "devices_per_node": int(row["gpus"])},
        "workload": workload,
        "strategy": strategy,
        "engine": row["engine"],
    }


def tail_rows(rows: AnsweredRows) -> Iterator[tuple[Row, str, str, Tail]]:
    """Yield each answered row with a time, a percentile, and the tail."""
    for row, answer in rows.of("published_percentiles", _request, simulate=True):
        found = answer.performance
        if found.ttft_p99_seconds is None:
            rows.refuse(row, "more than the plan says can be served")
            continue
        for time in TIMES:
            if not row[f"{time}_ms"]:
                continue
            seconds = float(row[f"{time}_ms"]) / 1e3
            mean = getattr(found, f"{time}_seconds") / seconds
            low, high = answer.interval[f"{time}_seconds"]
            for name in TAILS:
                if row[f"{time}_{name}_ms"]:
                    said = 1e3 * getattr(found, f"{time}_{name}_seconds")
                    value = said / float(row[f"{time}_{name}_ms"])
                    yield row, time, name, Tail(mean, value, low <= seconds <= high)


def tails() -> tuple[dict[tuple[str, str, str], list[Tail]], AnsweredRows]:
    """Return the tails by time, kind of load and percentile, and the rows not answered."""
    groups: dict[tuple[str, str, str], list[Tail]] = defaultdict(list)
    rows = AnsweredRows()
    for row, time, name, tail in tail_rows(rows):
        groups[time, load_of(row), name].append(tail)
    return dict(groups), rows


def load_of(row: Row) -> str:
    """Return the kind of load: open loops whose calls end too soon to be steady are their own."""
    if row["arrivals"] != "request_rate_per_second":
        return LOADS[row["arrivals"]]
    lives = float(row["requests"]) / float(row["load"]) / (float(row["latency_ms"]) / 1e3)
    return "open loops" if lives >= STEADY_LIVES else "short open loops"


def median_error(ratios: list[float]) -> float:
    """Return the median of the relative errors of ratios."""
    return float(np.median([abs(ratio - 1) for ratio in ratios]))


def section() -> str:
    """Return the tails as a section of the accuracy page."""
    groups, rows = tails()
    lines = [
        WORDS,
        "| Time | Loads | Percentile | n | Median error of the mean | Mean inside 80 % intervals | Median error of the percentile | of the shape | Median ratio of the shape |",  # noqa: E501 -- a row of a table
        "|---|---|---|---|---|---|---|---|---|",
        *_rows(groups),
        *rows.lines(),
    ]
    return "\n".join(lines) + "\n"


def _rows(groups: dict[tuple[str, str, str], list[Tail]]) -> Iterator[str]:
    for (time, load, name), found in groups.items():
        mean, value, shape = (
            f"{median_error([getattr(each, part) for each in found]):.0%}"
            for part in ("mean", "value", "shape")
        )
        inside = f"{np.mean([each.is_inside for each in found]):.0%}"
        ratio = math.exp(float(np.median([math.log(each.shape) for each in found])))
        columns = (TIMES[time], load, name, len(found), mean, inside, value, shape)
        yield f"| {' | '.join(map(str, columns))} | {ratio:.2f} |"
