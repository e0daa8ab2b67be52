"""Published percentiles of serving beside the planner's: tails and their shape."""

import math
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from planner.fitting.evidence import Row, table
from planner.specs.base import JsonObject, PlannerError
from planner.specs.estimate import EstimateRequest
from planner.workload.under_load import estimate_request

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
LOADS = {
    "request_rate_per_second": "open loops",
    "concurrency": "closed loops",
    "burst_requests": "bursts",
}
TIMES = {
    "ttft": "Time to first token",
    "tpot": "Time per output token",
    "latency": "Time to the last token",
}
TAILS = ("p50", "p95", "p99")


class Tail(NamedTuple):
    """A published percentile over the predicted one, as ratios of prediction and publication.

    ``mean`` is the ratio of the means, ``value`` that of the percentiles.
    """

    mean: float
    value: float

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
    for name in ("weight_dtype", "kv_cache_dtype"):
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


def tails() -> tuple[dict[tuple[str, str, str], list[Tail]], dict[str, int]]:
    """Return the tails by time, kind of load and percentile, and the refusals with their rows."""
    groups: dict[tuple[str, str, str], list[Tail]] = defaultdict(list)
    refused: dict[str, int] = defaultdict(int)
    for row in table("published_percentiles"):
        try:
            request = EstimateRequest.model_validate(_request(row))
            found = estimate_request(request, explain=False, simulate=True).performance
        except PlannerError as error:
            refused[f"{row['model']} on {row['gpu']}: {error}"] += 1
            continue
        if found.ttft_p99_seconds is None:
            refused[f"{row['model']} on {row['gpu']}: more than the plan says can be served"] += 1
            continue
        for time in TIMES:
            if not row[f"{time}_ms"]:
                continue
            mean = 1e3 * getattr(found, f"{time}_seconds") / float(row[f"{time}_ms"])
            for name in TAILS:
                if row[f"{time}_{name}_ms"]:
                    said = 1e3 * getattr(found, f"{time}_{name}_seconds")
                    tail = Tail(mean, said / float(row[f"{time}_{name}_ms"]))
                    groups[time, row["arrivals"], name].append(tail)
    return dict(groups), dict(refused)


def median_error(ratios: list[float]) -> float:
    """Return the median of the relative errors of ratios."""
    return float(np.median([abs(ratio - 1) for ratio in ratios]))


def section() -> str:
    """Return the tails as a section of the accuracy page."""
    groups, refused = tails()
    lines = [
        WORDS,
        "| Time | Loads | Percentile | n | Median error of the mean | of the percentile | of the shape | Median ratio of the shape |",  # noqa: E501 -- a row of a table
        "|---|---|---|---|---|---|---|---|",
        *_rows(groups),
    ]
    if refused:
        lines += ["\nNot answered:\n"]
        lines += [f"- {count} of {words}" for words, count in sorted(refused.items())]
    return "\n".join(lines) + "\n"


def _rows(groups: dict[tuple[str, str, str], list[Tail]]) -> Iterator[str]:
    for (time, load, name), found in groups.items():
        columns = ([getattr(each, part) for each in found] for part in ("mean", "value", "shape"))
        errors = " | ".join(f"{median_error(column):.0%}" for column in columns)
        ratio = math.exp(float(np.median([math.log(each.shape) for each in found])))
        loads = LOADS[load]
        yield f"| {TIMES[time]} | {loads} | {name} | {len(found)} | {errors} | {ratio:.2f} |"
