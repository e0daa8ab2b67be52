"""What an export writes is read back as the question that it was planned for.

An export does not say the lengths of typical requests, the targets, the prices and, for DeepSpeed,
anything but its own settings. What it does say must come back as it was.
"""

import tomllib
from pathlib import Path

import pytest

from planner.api import plan
from planner.catalog.models import get_model
from planner.exports.registry import FORMATS, export, export_case
from planner.imports import read_paste
from planner.specs.estimate import PlanRequest

QUESTIONS = tomllib.loads((Path(__file__).parents[1] / "exports" / "plans.toml").read_text())
# A Python module and a shape without a name have no reader of their own.
UNREAD = {"torchtitan"}
SIZES = [f"{axis}_parallel_size" for axis in
         ("tensor", "pipeline", "context", "expert", "data", "attention_data")]  # fmt: skip
# What a format says less exactly than the plan, by format or by kind of format.
COARSER = {
    "llama_cpp": {"quantization", "weight_dtype", "kv_cache_dtype", "attention"},
    "train": {"activation_recomputation"},  # whole layers, or none
}
BEYOND = {  # layouts that the text of a format does not have
    ("llama_cpp", "chat-405b-two-nodes"): "one split over two nodes",
    ("tensorrt_llm", "chat-405b-two-nodes"): "how many nodes share the ranks",
    ("tensorrt_llm", "deepseek-v3-two-nodes-experts"): "how many nodes share the ranks",
    ("deepspeed", "full-mixture-mi300x"): "experts",
    ("deepspeed", "pretrain-deepseek-experts"): "experts",
    ("deepspeed", "pretrain-mixture-pipeline"): "stages and experts",
    ("deepspeed", "pretrain-70b-32-nodes"): "stages",
    ("deepspeed", "pretrain-405b-zero-bubble"): "stages",
}


@pytest.mark.slow
def test_every_export_of_every_question_is_read_back():
    read, wrong = read_back(QUESTIONS)
    assert len(read) > 150
    assert wrong == []


def test_an_export_of_each_format_is_read_back():
    """Four questions in the gate; the slow test has all of them."""
    names = ("mixture-sglang-attention-replicas", "trtllm-nvfp4-b200", "lora-70b-zero3",
             "full-mixture-mi300x")  # fmt: skip
    read, wrong = read_back(names)
    assert set(read) == set(FORMATS) - UNREAD
    assert wrong == []


def read_back(names):
    """Return the formats that were read, and what came back otherwise than it was planned."""
    read, wrong = [], []
    for name in names:
        request = PlanRequest.model_validate(QUESTIONS[name])
        for planned in plan(request.model_copy(update={"top": 1})).plans:
            case = export_case(request, planned)
            for key in planned.exports:
                if key not in UNREAD and (key, name) not in BEYOND:
                    read.append(key)
                    wrong += [(name, key, *d) for d in differences(key, request, planned, case)]
    return read, wrong


def differences(key, request, planned, case):
    """Yield the fields that a reader gives otherwise than the question and its plan."""
    draft = read_paste(export(key, case).text)
    strategy, pins, work = planned.strategy, dict(draft.request.get("pins", {})), request.workload
    if draft.unknown:
        yield "unknown", draft.unknown
    for size in SIZES:
        if (getattr(strategy, size) or 1) != pins.pop(size, 1):
            yield size, getattr(strategy, size)
    yield from nested_differences(pins, strategy)
    coarse = COARSER.get(str(draft.request.get("engine")), set()) | COARSER.get(work.kind, set())
    for field, value in pins.items():
        if field not in coarse and getattr(strategy, field) != value:
            yield field, value, getattr(strategy, field)
    yield from workload_differences(draft, work)
    if key != "deepspeed":  # its JSON has neither a model nor a comment
        yield from model_differences(draft, request, strategy)
        cluster = draft.request["cluster"]
        if cluster["device"] != case.device.id:
            yield "device", cluster["device"]
        if (cluster.get("devices_per_node", 1), cluster.get("nodes", 1)) != (
            case.devices_per_node,
            case.nodes,
        ):
            yield "cluster", cluster


def nested_differences(pins, strategy):
    """Shares that are computed from GiB or layers come back within a few percent."""
    for field, value in pins.pop("offload", {}).items():
        told = getattr(strategy.offload, field)
        if told != (pytest.approx(value, abs=0.05) if isinstance(value, float) else value):
            yield f"offload.{field}", value
    for field, value in pins.pop("speculative", {}).items():
        if getattr(strategy.speculative, field) != value:
            yield f"speculative.{field}", value


def model_differences(draft, request, strategy):
    """A checkpoint in another format is named by it: then its shape and format must be those."""
    if draft.request["model"] == request.model or request.model == draft.model:
        return
    asked, read = get_model(request.model), get_model(draft.request["model"])
    is_packed = "quantization" in draft.request.get("pins", {})
    if read.shape != asked.shape or not (is_packed or read.weight_dtype == strategy.weight_dtype):
        yield "model", draft.request["model"]


def workload_differences(draft, work):
    told = draft.request["workload"]
    if work.kind == "generate":  # a server's command: the batch is what it runs at once
        if told["concurrency"] != work.batch_size:
            yield "concurrency", told["concurrency"]
        return
    for field in ("sequence_length", "global_batch_size", "method", "concurrency", "lora_rank"):
        value = getattr(work, field, None)
        may_choose = field == "method" and {told.get(field), value} <= {"pretrain", "full"}
        if value is not None and field in told and told[field] != value and not may_choose:
            yield field, told[field], value
    if getattr(work, "tokens", None) and "tokens" in told:
        step = work.global_batch_size * work.sequence_length
        if not work.tokens <= told["tokens"] < work.tokens + step:
            yield "tokens", told["tokens"]
    if told.get("max_request_tokens", 10**9) < getattr(work, "longest_tokens", 0):
        yield "max_request_tokens", told["max_request_tokens"]
