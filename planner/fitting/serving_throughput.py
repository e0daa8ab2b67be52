"""Fit the parts of full batches to published throughput tables, per engine."""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from scipy.optimize import linprog

from planner.catalog.engines import COMMON_SERVING
from planner.catalog.model_names import find
from planner.cost.quantity import Ledger
from planner.fitting.evidence import (
    TABLE,
    TOTAL,
    Row,
    format_of,
    leave_one_group_out,
    number,
    table,
)
from planner.fitting.serving_model import PART_BY_NAME
from planner.fitting.step_fitting import Columns
from planner.specs.base import JsonObject
from planner.specs.estimate import EstimateRequest
from planner.specs.workload import ServeWorkload
from planner.workload.mixed_steps import MIXED
from planner.workload.resolve import resolve
from planner.workload.serve import BESIDE, PACKED, serve

# Published throughput tables as requests: full batches, bursts, static batches, open loops.
#
# All assumptions about unstated conditions are made here and listed on the accuracy page.


MLPERF, OPENVINO = "mlperf-inference-v4.1", "openvino-model-server-2025"
LATENCY, TPOT = "batch_latency", "tpot_mean"
# Number of requests per run, by prompt and answer length. The table states 1,000 to 30,000: short
# ones use most, runs of about equal length use 1,000 to 3,000.
REQUESTS = {
    (128, 128): 30_000,
    (128, 2048): 3_000,
    (128, 4096): 1_500,
    (500, 2000): 3_000,
    (1000, 1000): 3_000,
    (1000, 2000): 1_500,
    (2048, 128): 3_000,
    (2048, 2048): 1_500,
    (5000, 500): 1_500,
    (20000, 2000): 1_000,
}
ATTENTION_DATA = "attention data parallelism enabled"
OPEN_RATE = re.compile(r"(?:request rate|Poisson) ([\d.]+)")
SHARED_PREFIX = "shared-prefix"
# Output tokens per request at the lowest rate: tokens per second over requests per second.
OPENVINO_ANSWERS = {"llama-2-7b": 477, "llama-3-8b": 415}
OPENVINO_PROMPT = 256
BLACKWELL = ("b200", "gb200")
BURST_FROM = 1000.0  # a thousand requests in all at a thousand a second are a burst


def kind_of_row(row: Row) -> str:
    """Return a row's kind as named on the page; empty if no request can be made.

    Excluded are unstated lengths (GPT-J with four beams, Mixtral), prefix sharing without a stated
    share, and rates at the limit of an objective.
    """
    match row["source_id"]:
        case "trtllm-perf-overview-v1.0":
            return "full batch"
        case "modelopt-benchmark":
            return "batch sent at once"
        case "mlperf-inference-v4.1" if "ffline" in row["mode"] and row["input_len"]:
            return "full batch, fastest layout"
        case "openvino-model-server-2025" if row["metric"] == TPOT and "inf" not in row["mode"]:
            return "open loop, gap between tokens"
        case "dstack-405b-h100-mi300x" | "dstack-r1-h200-mi300x":
            return _by_mode(row)
        case _:
            return ""


def _by_mode(row: Row) -> str:
    """Return the kind of a row of a source with several kinds.

    A batch sent to an engine with continuous batching is a burst.
    """
    mode, metric = row["mode"], row["metric"]
    if SHARED_PREFIX in mode or metric not in {TOTAL, LATENCY}:
        return ""
    if mode.startswith("closed loop"):
        return "closed loop"
    return "" if mode.startswith("open loop, Poisson 16") else "burst"


@cache
def throughput_rows() -> tuple[Row, ...]:
    """Return the usable rows of the tables."""
    return tuple(row for row in table(TABLE) if kind_of_row(row) and "SUSPECT" not in row["notes"])


def throughput_request(row: Row) -> JsonObject:
    """Return a row as an estimate's request."""
    devices = int(number(row, "num_gpus", 1))
    return {
        "id": row["row_id"],
        "model": row["model"],
        "cluster": {"device": row["gpu_slug"], "devices_per_node": devices},
        "workload": workload_of(row),
        "strategy": {**formats_of(row), **layout_of(row, devices)},
        "engine": row["engine"] if "CUDA" not in row["engine"] else "tensorrt_llm",
    }


def layouts_of(row: Row) -> Iterator[JsonObject]:
    """Yield the request for each layout that the row leaves open: powers of two of devices."""
    request = throughput_request(row)
    if not kind_of_row(row).endswith("fastest layout"):
        yield request
        return
    devices = request["cluster"]["devices_per_node"]
    per_node = min(devices, 8)
    request["cluster"] |= {"devices_per_node": per_node, "nodes": devices // per_node}
    tensor = 1
    while devices % tensor == 0 and tensor <= per_node:
        sizes = {"tensor_parallel_size": tensor, "data_parallel_size": devices // tensor}
        yield {**request, "strategy": {**request["strategy"], **sizes}}
        tensor *= 2


def workload_of(row: Row) -> JsonObject:
    """Return the workload of a row: arrivals and lengths."""
    prompt, answer = lengths_of(row)
    lengths: JsonObject = {"input_tokens": prompt, "output_tokens": answer}
    batch = int(number(row, "batch_or_concurrency"))
    rate = OPEN_RATE.search(row["mode"])
    kind = kind_of_row(row)
    if kind == "closed loop":
        return {"kind": "serve", "concurrency": batch, **lengths}
    if kind.startswith("open loop") and rate:
        return {"kind": "serve", "request_rate_per_second": float(rate[1]), **lengths}
    if row["source_id"] == MLPERF:
        return {"kind": "serve", **lengths}
    sent = batch or REQUESTS.get((prompt, answer), int(BURST_FROM))
    return {"kind": "serve", "burst_requests": sent, **lengths}


def lengths_of(row: Row) -> tuple[int, int]:
    """Return the prompt and answer lengths."""
    if row["source_id"] == OPENVINO:
        answer_tokens = next(
            n for name, n in OPENVINO_ANSWERS.items() if name in row["model"].lower()
        )
        return OPENVINO_PROMPT, answer_tokens
    return int(number(row, "input_len")), int(number(row, "output_len"))


def formats_of(row: Row) -> JsonObject:
    """Return the formats of weights, activations and cache.

    If a log does not state them: 8 bits, and 4 bits on the first chips that support them.
    """
    if row["source_id"] == MLPERF:
        low_bit_dtype = "nvfp4" if row["gpu_slug"].startswith(BLACKWELL) else "fp8"
        return {
            "weight_dtype": low_bit_dtype,
            "activation_dtype": low_bit_dtype,
            "kv_cache_dtype": "fp8",
        }
    formats = format_of(row) or {"weight_dtype": row["weight_dtype"]}
    if row["activation_dtype"]:
        formats["activation_dtype"] = row["activation_dtype"]
    if row["kv_dtype"]:
        formats["kv_cache_dtype"] = row["kv_dtype"]
    return formats


def layout_of(row: Row, devices: int) -> JsonObject:
    """Return the layout as stated, otherwise one tensor-parallel group of all devices."""
    ranks = int(number(row, "tp", devices) or devices)
    if ATTENTION_DATA in row["notes"] and ranks > 1:
        return {
            "tensor_parallel_size": 1,
            "attention_data_parallel_size": ranks,
            "expert_parallel_size": ranks,
        }
    return {"tensor_parallel_size": ranks}


def measured_of(row: Row) -> float:
    """Return the measurement as a rate: token/s, or the inverse of a token time."""
    value = number(row, "value")
    if row["metric"] == TPOT:
        return 1 / value
    if row["metric"] == LATENCY:
        return number(row, "batch_or_concurrency") * lengths_of(row)[1] / value
    return value


# Fit the parts of full batches to published throughput tables, per engine.
#
# A full batch has two kinds of steps: mixed steps, which process prompts while decoding, and
# packed steps, which only decode. Each part of a step has a factor. A table shows the sum of all
# steps, so one weighted least-absolute-deviations fit gives all factors. Every group of one model
# on one chip in a table weighs the same, independent of its number of rows. Chips are shrunk
# towards their engine.


FULL = frozenset({"full batch", "burst"})
NAMES = {
    **PART_BY_NAME,
    "Experts": "experts",
    "Further kernel launches": "further",
    "Moving tokens to and from experts": "routing",
}
# Each factor's prior, lower and upper bound. The state of a routed token is written and read a
# handful of times: sorted, quantised, sent, summed.
SHARED = {
    "routing": (10.0, 1.0, 80.0),
    "expert_exchange": (1.0, 0.25, 8.0),
    "issue": (1.0, 0.1, 10.0),
    "further": (1.0, 0.1, 10.0),
    "scheduling": (1.0, 0.1, 50.0),
    "requests": (1.0, 0.1, 50.0),
}
# A full batch determines these poorly: they stay near the physics, per-request cost less so.
STIFF = {"issue": 10.0, "scheduling": 10.0, "requests": 5.0}
OWN = {
    (MIXED, "linear"): (1.0, 0.8, 4.0),
    (PACKED, "linear"): (1.0, 0.8, 4.0),
    (MIXED, "experts"): (2.0, 0.8, 15.0),
    (PACKED, "experts"): (1.5, 0.8, 6.0),
    (MIXED, "attention"): (2.0, 0.5, 8.0),
    (PACKED, "attention"): (0.8, 0.56, 4.0),
    (MIXED, "elementwise"): (1.0, 0.25, 12.0),
    (PACKED, "elementwise"): (1.0, 0.25, 12.0),
    (MIXED, "tensor_parallel"): (1.2, 0.5, 6.0),
    (PACKED, "tensor_parallel"): (2.0, 0.5, 6.0),
}
PARTS = (*(f"{group}_{part}" for group, part in OWN), *SHARED)
BOUNDS = np.array([*OWN.values(), *SHARED.values()])
PRIOR, LOWER_BOUNDS, UPPER_BOUNDS = BOUNDS.T
RIDGE = 0.03
STIFFNESS = np.array([STIFF.get(part, 1.0) for part in PARTS])
NEUTRAL: dict[str, object] = {
    "serving_factors": {},
    "full_factors": {"any": {f"{group}_routing": 1.0 for group in (MIXED, PACKED)}},
    "stream_factors": {},
}


@dataclass(frozen=True, eq=False)
class FullBatch:
    """One measured row: the seconds of each part at factor 1, and the measured seconds."""

    engine: str
    source: str
    model: str
    device: str
    architecture: str
    seconds: Columns
    measured_s: float

    @property
    def group(self) -> str:
        """Return the key of rows that share weight."""
        return f"{self.source}/{self.model}/{self.device}"

    def error(self, factors: Columns) -> float:
        """Return the relative error of the predicted throughput."""
        return self.measured_s / float(self.seconds @ factors) - 1


def full_batch(row: Row) -> FullBatch:
    """Return a row as its parts, from the ledger of an uncalibrated estimate."""
    setting = resolve(EstimateRequest.model_validate(throughput_request(row)))
    setting = replace(setting, engine=setting.engine.model_copy(update=NEUTRAL))
    workload, ledger = setting.workload, Ledger()
    if not isinstance(workload, ServeWorkload) or not workload.burst_requests:
        raise TypeError("only bursts fill every place")
    serve(setting, workload, ledger)
    terms = {entry.key: entry for entry in ledger.entries}
    burst_inputs = {item.name: float(item.value) for item in terms["burst"].inputs()}
    waves, mixed = burst_inputs["waves"], burst_inputs["mixed steps"]
    steps = {
        MIXED: waves * mixed,
        BESIDE: waves * mixed,
        PACKED: waves * (workload.output_tokens - mixed) + mixed,
    }
    seconds = dict.fromkeys(PARTS, 0.0)
    for entry in ledger.entries:
        if entry.unit == "s" and entry.group in steps and entry.name in NAMES:
            seconds[_factor(entry.group, NAMES[entry.name])] += steps[entry.group] * entry.value
    produced = workload.burst_requests * workload.output_tokens
    named = find(setting.model.id)
    return FullBatch(
        engine=setting.engine.key,
        source=row["source_id"],
        model=named.entry.id if named else setting.model.id,  # of one shape: one group
        device=setting.device.id,
        architecture=setting.device.architecture,
        seconds=np.array([seconds[part] for part in PARTS]),
        measured_s=produced / measured_of(row),
    )


def _factor(group: str, part: str) -> str:
    return part if part in SHARED else f"{PACKED if group == BESIDE else group}_{part}"


@cache
def full_batches() -> tuple[FullBatch, ...]:
    """Return every full-batch row of the tables, with its parts."""
    return tuple(
        full_batch(row)
        for row in throughput_rows()
        if kind_of_row(row) in FULL and len(list(layouts_of(row))) == 1
    )


def fit_full(cases: Sequence[FullBatch], prior: Columns = PRIOR) -> Columns:
    """Return the factors of least weighted relative error, near the prior.

    Absolute errors and absolute distances from the prior make it a linear programme.
    """
    if not cases:
        return prior
    counts = Counter(case.group for case in cases)
    weights = np.array([counts[case.group] ** -0.5 for case in cases])
    shares = np.array([case.seconds / case.measured_s for case in cases])
    rows, parts = shares.shape
    error_slacks, prior_slacks = np.eye(rows), np.eye(parts)
    scaled_identity = np.diag(1 / prior)
    limits = np.block(
        [
            [shares, -error_slacks, np.zeros((rows, parts))],
            [-shares, -error_slacks, np.zeros((rows, parts))],
            [scaled_identity, np.zeros((parts, rows)), -prior_slacks],
            [-scaled_identity, np.zeros((parts, rows)), -prior_slacks],
        ]
    )
    upper_bounds = np.concatenate([np.ones(rows), -np.ones(rows), np.ones(parts), -np.ones(parts)])
    costs = np.concatenate([np.zeros(parts), weights / weights.sum(), RIDGE / parts * STIFFNESS])
    bounds = [*zip(LOWER_BOUNDS, UPPER_BOUNDS, strict=True), *[(0.0, None)] * (rows + parts)]
    solution = linprog(costs, A_ub=limits, b_ub=upper_bounds, bounds=bounds, method="highs")
    return np.asarray(solution.x[:parts])


def fitted_for(cases: Sequence[FullBatch], target: FullBatch) -> Columns:
    """Return an engine's factors on a chip: fitted to the engine, then to the chip.

    An engine without rows takes the common factors.
    """
    own = [case for case in cases if case.engine == target.engine]
    chip = [case for case in own if case.architecture == target.architecture]
    return fit_full(chip, fit_full(own or cases))


def left_out_full(
    cases: Sequence[FullBatch], part_of: Callable[[FullBatch], str]
) -> list[tuple[FullBatch, float]]:
    """Return the error of each case, fitted without its part."""
    errors = []
    for _, left_out, rest in leave_one_group_out(cases, part_of):
        fitted_by_key: dict[tuple[str, str], Columns] = {}
        for case in left_out:
            key = (case.engine, case.architecture)
            if key not in fitted_by_key:
                fitted_by_key[key] = fitted_for(rest, case)
            errors.append((case, case.error(fitted_by_key[key])))
    return errors


def factors_by_name(factors: Columns) -> dict[str, float]:
    """Return the factors under the names that an estimate reads."""
    by_name: dict[str, float] = {}
    for part, value in zip(PARTS, factors, strict=True):
        groups = (f"{MIXED}_", f"{PACKED}_") if part in SHARED else ("",)
        by_name |= {f"{group}{part}": float(f"{value:.4g}") for group in groups}
    return by_name


def throughput_factors() -> dict[str, dict[str, dict[str, float]]]:
    """Return each engine's full-batch factors: on any chip, and per measured chip."""
    cases = full_batches()
    factors_by_engine: dict[str, dict[str, dict[str, float]]] = {
        COMMON_SERVING: {"any": factors_by_name(fit_full(cases))}
    }
    for engine in sorted({case.engine for case in cases}):
        own = [case for case in cases if case.engine == engine]
        engine_factors = fit_full(own)
        factors_by_engine[engine] = {"any": factors_by_name(engine_factors)}
        for chip in sorted({case.architecture for case in own}):
            same = [case for case in own if case.architecture == chip]
            factors_by_engine[engine][chip] = factors_by_name(fit_full(same, engine_factors))
    return factors_by_engine


def model_of(case: FullBatch) -> str:
    """Return the model of a row."""
    return case.model


def device_of(case: FullBatch) -> str:
    """Return the device of a row."""
    return case.device


@cache
def left_out_parts() -> dict[str, list[tuple[FullBatch, float]]]:
    """Return every row's error without its model, and without its device."""
    cases = full_batches()
    parts = {"unseen model": model_of, "unseen device": device_of}
    return {name: left_out_full(cases, part) for name, part in parts.items()}


def throughput_report(summary: Callable[[list[float]], JsonObject]) -> JsonObject:
    """Return the held-out errors of full batches, by what was left out."""
    return {
        f"throughput of full batches, {name}": summary([error for _, error in case_errors])
        for name, case_errors in left_out_parts().items()
    }
