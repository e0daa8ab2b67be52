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
closed loops on A100, H100 and H200 (gpustack/gpustack, performance lab). No factor is fitted on
them. How lengths are drawn (uniformly up to a variation of 0.58, by a gamma distribution beyond)
was chosen with these rows in sight, so the shape is no untouched prediction; the means are.
Lengths of ShareGPT prompts are stated with a variation of 1. The shape is a percentile over the
mean: it says how far the tail is right where the mean is not. A burst is asked with as many
requests at once as it has; the servers were started with their defaults, of which vLLM's is 256 or
1,024 at once.
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


def tails() -> tuple[dict[tuple[str, str, str], list[Tail]], AnsweredRows]:
    """Return the tails by time, kind of load and percentile, and the rows not answered."""
    groups: dict[tuple[str, str, str], list[Tail]] = defaultdict(list)
    rows = AnsweredRows()
    for row, answer in rows.of("published_percentiles", _request, simulate=True):
        found = answer.performance
        if found.ttft_p99_seconds is None:
            rows.refuse(row, "more than the plan says can be served")
            continue
        load = load_of(row)
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
                    groups[time, load, name].append(Tail(mean, value, low <= seconds <= high))
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
