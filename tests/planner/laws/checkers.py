"""Laws that every answer of the planner keeps; a checker yields the violations it finds."""

import json
import math
import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from itertools import pairwise
from typing import Any

import numpy as np
import yaml

from planner.api import estimate, inverse, parse_model, plan
from planner.cost.quantity import NullLedger
from planner.exports.registry import export, export_case
from planner.search.question import strategy_family_numbers
from planner.search.rank import complexity_columns
from planner.specs.base import PlannerError
from planner.specs.estimate import (
    Estimate,
    EstimateRequest,
    InverseRequest,
    Limit,
    PlannedStrategy,
    PlanRequest,
)
from planner.workload.costing import cost_workload, fits_of, paid_setting, rented_devices
from planner.workload.inference_memory import usable_bytes
from planner.workload.outcome import expense
from planner.workload.resolve import resolve
from planner.workload.setting import Setting

GIB = 1024**3
ROUNDING = 1.001
HOST_FLOPS = 2e13  # more than the cores of any host compute beside the device
RATES = ("prefill_tokens_per_second", "decode_tokens_per_second")
PERCENTILES = ("p50", "p90", "p95", "p99")
Answers = Sequence[Estimate | None]


def estimated(document: dict) -> Estimate | None:
    """Return the estimate of a question, None if it is refused in words."""
    try:
        return estimate(parse_model(EstimateRequest, json.dumps(document)))
    except PlannerError:
        return None


def fits_within_memory(document: dict, answer: Estimate) -> Iterator[str]:
    """What fits stays within the usable memory, with a whole request on every rank."""
    if not answer.fits:
        return
    if document["cluster"].get("other_nodes"):
        sizes = answer.memory.per_stage_capacity_bytes or ()
        for peak, size in zip(answer.memory.per_stage_peak_bytes, sizes, strict=False):
            if peak > size:
                yield f"fits with {peak / GIB:.2f} of {size / GIB:.2f} GiB of a stage"
        return
    strategy = answer.strategy
    setting = resolve(
        EstimateRequest.model_validate(
            {**document, "strategy": strategy.model_dump(exclude_none=True)}
        )
    )
    memory, serving = answer.memory, document["workload"]["kind"] == "serve"
    usable = usable_bytes(setting)
    if memory.per_device_peak_bytes > usable * ROUNDING:
        yield (
            f"fits with {memory.per_device_peak_bytes / GIB:.2f} of {usable / GIB:.2f} usable GiB"
        )
    most = answer.performance.max_concurrency
    ranks = (strategy.data_parallel_size or 1) * (strategy.attention_data_parallel_size or 1)
    if pools := strategy.disaggregated:  # requests are held where they are decoded
        ranks = ranks * pools.decode_devices // (pools.prefill_devices + pools.decode_devices)
    if serving and most is not None and most < ranks:
        yield f"fits with {most} requests on {ranks} ranks that hold requests of their own"


def finite_and_ordered(document: dict, answer: Estimate) -> Iterator[str]:
    """Every figure is finite and not negative; intervals and percentiles are in order."""
    figures = {k: v for k, v in answer.performance if isinstance(v, int | float)}
    for name, value in figures.items():
        if not math.isfinite(value) or value < 0:
            yield f"{name} is {value}"
    for name, (low, high) in answer.interval.items():
        if not low <= high:
            yield f"the interval of {name} is [{low}, {high}]"
        if name in figures and not low / ROUNDING <= figures[name] <= high * ROUNDING:
            yield f"{name} {figures[name]} is outside [{low}, {high}]"
    for name in ("ttft", "tpot", "latency"):
        values = [figures.get(f"{name}_{part}_seconds") for part in PERCENTILES]
        known = [value for value in values if value is not None]
        if any(left > right * ROUNDING for left, right in pairwise(known)):
            yield f"percentiles of {name} are {known}"


def within_physics(document: dict, answer: Estimate) -> Iterator[str]:
    """No rate needs more arithmetic than the peak of what computes it."""
    workload, setting = document["workload"], resolve(EstimateRequest.model_validate(document))
    device, is_measured = setting.device, document.get("host_calibration")
    if workload["kind"] not in {"serve", "generate"} or not device.peak_flops_per_second:
        return
    if setting.cluster.other_nodes or is_measured:
        return
    counts, strategy = setting.counts, answer.strategy
    # Routers, norms and the vocabulary come on top: this is what each prompt token takes at least.
    per_token = 2 * (counts.layer_linear - counts.experts + counts.experts_active)
    peak = max(device.peak_flops_per_second.values())
    if device.halves_wide_sums:
        peak *= 2
    total = peak * setting.layout.devices
    if setting.engine.computes_on_host and answer.strategy.offload:
        total += HOST_FLOPS
    if strategy.sparsity:
        total *= 2
    figures = answer.performance
    reads = workload["input_tokens"] * (1 - workload.get("prefix_share_ratio", 0))
    for name, tokens in (
        ("prefill_tokens_per_second", 1 - workload.get("prefix_share_ratio", 0)),
        ("requests_per_second", reads + workload["output_tokens"] - 1),
    ):
        rate = getattr(figures, name)
        if rate and rate * tokens * per_token > total * ROUNDING:
            yield f"{name} {rate:.4g} needs {rate * tokens * per_token:.3g} FLOP/s of {total:.3g}"
    rate = figures.decode_tokens_per_second
    if rate and rate * per_token > total * ROUNDING and not strategy.speculative:
        yield f"decode_tokens_per_second {rate:.4g} is above the peak"


def columns_cost_as_numbers(document: dict, answer: Estimate) -> Iterator[str]:
    """A layout of columns costs what its rows cost: the search and the estimate are one."""
    setting = resolve(EstimateRequest.model_validate(document))
    strategy, kind = setting.strategy, setting.workload.kind
    if kind == "compress" or strategy.disaggregated or setting.cluster.other_nodes:
        return  # a search costs these one by one
    single = {each.name: getattr(setting.layout, each.name) for each in fields(setting.layout)}
    fixed = {"pipeline"} if kind == "train" else set()
    columns = {
        name: value if name in fixed else np.array([value, value])
        for name, value in single.items()
    }
    column = replace(setting, layout=replace(setting.layout, **columns))
    costs, one = costs_of(column), costs_of(resolve(EstimateRequest.model_validate(document)))
    for name, value in one.items():
        rows = np.broadcast_to(np.asarray(costs[name], dtype=np.float64), 2)
        if not np.allclose(rows, float(value), rtol=1e-6, equal_nan=True):
            yield f"{name} is {value}, in a column {rows}"


def costs_of(setting: Setting) -> dict[str, Any]:
    """Return what a search reads of a setting, a number or a column each."""
    outcome, ledger = cost_workload(setting, NullLedger()), NullLedger()
    paid = paid_setting(setting)
    return {
        **{name: value for name, value in outcome.performance if value is not None},
        **expense(paid, outcome, ledger, rented_devices(setting)).figures,
        "peak_bytes": outcome.memory.peak_bytes,
        "usable_bytes": outcome.memory.usable_bytes,
        "fits": outcome.fits,
        "fits at a first look": fits_of(setting),
        "families": strategy_family_numbers(setting.strategy, setting.layout),
        **{
            f"complexity {at}": number
            for at, number in enumerate(complexity_columns(setting.strategy, setting.layout))
        },
    }


def offload_is_no_faster(documents: Sequence[dict], answers: Answers) -> Iterator[str]:
    """The more is offloaded, the slower prefill and decode."""
    known = [
        (document["strategy"].get("offload"), answer)
        for document, answer in zip(documents, answers, strict=True)
        if answer is not None
    ]
    for (less, before), (more, after) in pairwise(known):
        for name in RATES:
            old, new = getattr(before.performance, name), getattr(after.performance, name)
            queued = documents[0]["workload"]["kind"] == "generate"  # its prompts too
            is_rate = name.startswith("decode") or queued
            if is_rate and _runs_more(documents[0], before, after):
                continue
            if old and new and new > old * ROUNDING:
                yield f"{name} {old:.4g} with {less}, {new:.4g} with {more}"


def _runs_more(document: dict, before: Estimate, after: Estimate) -> bool:
    """Return whether more requests may run at once, which decode faster together."""
    workload = document["workload"]
    if workload["kind"] == "generate":
        held = before.performance.max_concurrency  # of a queued batch: the others wait
        return held is not None and held < workload["batch_size"]
    if "request_rate_per_second" in workload:
        return True  # slower requests overlap more
    room = [answer.performance.max_concurrency or 0 for answer in (before, after)]
    return room[0] != room[1] and room[0] < workload.get("concurrency", math.inf)


def one_memory(documents: Sequence[dict], answers: Answers) -> Iterator[str]:
    """A batch of one sequence takes the memory of one caller, within 10 %."""
    if None in answers:
        return
    generating, serving = (answer.memory.per_device_peak_bytes for answer in answers)
    if not 0.9 <= generating / serving <= 1.1:
        yield f"{generating / GIB:.2f} GiB generating, {serving / GIB:.2f} GiB serving one caller"


def whole_sequences(documents: Sequence[dict], answers: Answers) -> Iterator[str]:
    """A batch that ranks share unevenly takes what the busiest rank's sequences take."""
    if None in answers:
        return
    uneven, whole = (answer.memory.per_device_peak_bytes for answer in answers)
    if uneven < whole / ROUNDING:
        sizes = [document["workload"]["batch_size"] for document in documents]
        yield f"{uneven / GIB:.2f} GiB for {sizes[0]} sequences, {whole / GIB:.2f} for {sizes[1]}"


def planned(document: dict) -> tuple[PlannedStrategy, ...] | None:
    """Return the plans of a question, each exported; None if it is refused in words."""
    try:
        request = parse_model(PlanRequest, json.dumps(document))
        answer = plan(request)
    except PlannerError:
        return None
    for chosen in answer.plans:
        case = export_case(request, chosen)
        for name in chosen.exports:
            with suppress(PlannerError):
                export(name, case)
    return answer.plans


def limited(document: dict) -> tuple[Limit, ...] | None:
    """Return the limits of an inverse question; None if it is refused in words."""
    try:
        return inverse(parse_model(InverseRequest, json.dumps(document))).limits
    except PlannerError:
        return None


def violations_of(ask: str, document: dict) -> tuple[bool, list[str]]:
    """Return whether a fresh question has an answer, and the laws that the answer breaks."""
    if ask == "plan":
        found: Sequence[Estimate] = planned(document) or ()
    elif ask == "inverse":
        found = [limit.estimate for limit in limited(document) or ()]
    else:
        answer = estimated(document)
        checks = OF_ONE_ANSWER if answer else ()
        words = [f"{law.__name__}: {text}" for law in checks for text in law(document, answer)]
        return answer is not None, words
    words = [text for answer in found for text in finite_and_ordered(document, answer)]
    words += [f"{one.strategy} is offered and does not fit" for one in found if not one.fits]
    return bool(found), words


def exports_start_the_plan(document: dict) -> Iterator[str]:
    """Every export names the plan's devices, and its degrees multiply to them."""
    request = PlanRequest.model_validate(document)
    try:
        answer = plan(request)
    except PlannerError:
        return
    for chosen in answer.plans:
        fields = {name: document[name] for name in ("model", "cluster", "workload", "engine")}
        yield from fits_within_memory(fields, chosen)
        case = export_case(request, chosen)
        for name in chosen.exports:
            text = export(name, case).text
            count = devices_of(chosen)
            for what, started in started_devices(name, text, case.nodes).items():
                if started != count:
                    yield f"{name} {what} {started} of {count} devices: {degrees_of(chosen)}"


def limit_is_the_limit(document: dict) -> Iterator[str]:
    """The answer of an inverse question fits, and a fifth more does not."""
    try:
        answer = inverse(InverseRequest.model_validate(document))
    except PlannerError:
        return
    for limit in answer.limits:
        if not limit.estimate.fits:
            yield f"{answer.question} {limit.value} does not fit"
        if limit.beyond is None or limit.beyond.constraint == "max_position_embeddings":
            continue
        largest = max(int(1.2 * float(limit.value)), int(float(limit.beyond.value)))
        if _works(document, answer.question, largest):
            yield f"{answer.question} {limit.value}, but {largest} works"


def _works(document: dict, question: str, value: int) -> bool:
    """Return whether a value of the inverse question's quantity has a plan."""
    fields = {name: value for name, value in document.items() if name != "question"}
    workload = dict(document["workload"])
    for name in ("request_rate_per_second", "burst_requests"):
        workload.pop(name, None)
    callers = workload.get("concurrency", 1)
    if question == "longest_context":
        output = min(workload["output_tokens"], value - 1)
        workload |= {"input_tokens": value - output, "output_tokens": output}
    elif question == "most_users":
        callers = value
    else:
        workload |= {"batch_size": value, "at_once": True}
    if workload["kind"] == "serve":
        workload["concurrency"] = callers
        fields["constraints"] = {"max_concurrency": {"min": callers}}
    return bool(plan(PlanRequest.model_validate({**fields, "workload": workload})).plans)


def degrees_of(chosen: PlannedStrategy) -> str:
    sizes = {
        name.removesuffix("_parallel_size"): value
        for name, value in chosen.strategy
        if name.endswith("_parallel_size") and value and value > 1
    }
    return " x ".join(f"{size} {name}" for name, size in sizes.items()) or "one device"


def devices_of(chosen: PlannedStrategy) -> int:
    strategy = chosen.strategy
    axes = ("data", "tensor", "pipeline", "context", "attention_data")
    return math.prod(getattr(strategy, f"{axis}_parallel_size") or 1 for axis in axes)


def started_devices(name: str, text: str, nodes: int) -> dict[str, int]:
    """Return the devices that an export starts, by the place that says it.

    A command without the ranks of several nodes is one node's.
    """
    lines = text.splitlines()
    head = " ".join(line for line in lines if line.lstrip().startswith("# "))
    body = "\n".join(line for line in lines if not line.lstrip().startswith("# "))
    found: dict[str, int] = {}
    stated = re.search(r" on (\d+) x ", head)
    if stated:
        found["head"] = int(stated[1])
    if name == "kubernetes" and ".com/" in body:
        found["requests"] = _kubernetes_devices(body)
        return found
    for tool, count in commands(_compose_command(body) if name == "compose" else body).items():
        one_node = "NODE_RANK" not in body and tool != "tensorrt_llm"
        on_each = one_node or "of each of" in head
        found[f"command {tool}"] = count * (nodes if on_each else 1)
    if name == "compose" and "count: " in body:
        found["reserves"] = sum(map(int, re.findall(r"count: (\d+)", body)))
    if name == "slurm" and "--gpus-per-node" in text:
        each = re.findall(r"--(?:nodes|gpus-per-node)=(\d+)", text)
        found["reserves"] = math.prod(map(int, each))
    return found


def _compose_command(body: str) -> str:
    """Return the command of a compose file as one line, or the script that it runs."""
    service = next(iter(yaml.safe_load(body)["services"].values()))
    words = service["command"]
    return words[-1] if words[:2] == ["bash", "-c"] else " ".join(words)


def _kubernetes_devices(body: str) -> int:
    found = re.findall(r"(?:nvidia|amd|intel|google)\.com/\w+: (\d+)", body)
    pods = re.findall(r"(?:completions|replicas): (\d+)", body)
    return int(found[0]) * int(pods[0] if pods else 1)


def commands(body: str) -> dict[str, int]:
    """Return the devices of each server's command by the tool's own counting.

    vLLM: tensor x pipeline x data. SGLang: tensor (with its attention ranks) x pipeline x data,
    where data ranks outside attention are replicas. TensorRT-LLM: tensor x pipeline x context,
    with the attention ranks inside the tensor size. A loop starts a command several times.
    """
    counted: dict[str, int] = {}
    times, joined = 1, re.sub(r"\\\n\s*", " ", body)
    for line in joined.splitlines():
        loop = re.search(r"for server in ([\d ]+); do", line)
        times = len(loop[1].split()) if loop else 1 if line.strip() == "done" else times
        try:
            words = shlex.split(line)
        except ValueError:
            continue
        flags = _flags(words)
        if "vllm" in words and "serve" in words:
            form = "--{}-parallel-size"
            counted["vllm"] = times * _product(flags, "tensor", "pipeline", "data", form=form)
        elif "sglang.launch_server" in words:
            size = _product(flags, "tp", "pp", "dp", form="--{}-size")
            counted["sglang"] = times * size
        elif "trtllm-serve" in words:
            size = _product(flags, "tp", "pp", "cp", form="--{}_size")
            counted["tensorrt_llm"] = times * size
    return counted


def _flags(words: list[str]) -> dict[str, Any]:
    flags: dict[str, Any] = {}
    for index, word in enumerate(words):
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            after = words[index + 1] if index + 1 < len(words) else ""
            flags[name] = value if equals else after
    return flags


def _product(flags: dict[str, Any], *names: str, form: str) -> int:
    return math.prod(int(flags.get(form.format(name), 1)) for name in names)


OF_ONE_ANSWER = (fits_within_memory, finite_and_ordered, within_physics, columns_cost_as_numbers)
