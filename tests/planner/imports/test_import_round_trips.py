"""What an export writes is read back as the question that it was planned for.

An export does not say the lengths of typical requests, the targets, the prices and, for DeepSpeed,
anything but its own settings. What it does say must come back as it was.
"""

import tomllib
from pathlib import Path

import pytest

from planner.api import plan
from planner.catalog.models import get_model
from planner.cost.parameters import count_parameters
from planner.exports.export import CONFIGURATIONS
from planner.exports.registry import FORMATS, export, export_case
from planner.imports import read_paste
from planner.imports.torchtitan import MODELS
from planner.specs.estimate import PlanRequest
from tests.planner.asking import ask
from tests.planner.exports.making import made

QUESTIONS = tomllib.loads((Path(__file__).parents[1] / "exports" / "plans.toml").read_text())
SIZES = [f"{axis}_parallel_size" for axis in
         ("tensor", "pipeline", "context", "expert", "data", "attention_data")]  # fmt: skip
# What a format says less exactly than the plan, by format or by kind of format.
COARSER = {
    "llama_cpp": {"quantization", "weight_dtype", "kv_cache_dtype", "attention"},
    "tensorrt_llm": {"chunked_prefill"},  # on where it would refuse a longer prompt
    "train": {"activation_recomputation"},  # whole layers, or none
    # Weights stay gathered in stages 1 and 2, and are moved with the optimiser's states.
    "torchtitan": {"zero_stage", "offload"},
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
    """Five questions in the gate; the slow test has all of them."""
    names = ("mixture-sglang-attention-replicas", "trtllm-nvfp4-b200", "lora-70b-zero3",
             "full-mixture-mi300x", "full-8b-offloaded-host")  # fmt: skip
    read, wrong = read_back(names)
    assert set(read) == set(FORMATS)
    assert wrong == []


def test_a_configuration_of_torchtitan_is_of_the_model_that_is_exported_by_it():
    for model, (_, function) in CONFIGURATIONS.items():
        assert get_model(MODELS[function]).shape == get_model(model).shape, model
    assert set(MODELS) == {function for _, function in CONFIGURATIONS.values()}


def read_back(names):
    """Return the formats that were read, and what came back otherwise than it was planned."""
    read, wrong = [], []
    for name in names:
        request = PlanRequest.model_validate(QUESTIONS[name])
        for planned in plan(request.model_copy(update={"top": 1})).plans:
            case = export_case(request, planned)
            for key in planned.exports:
                if (key, name) not in BEYOND:
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
    names = (str(draft.request.get("engine")), work.kind, key)
    coarse = {field for name in names for field in COARSER.get(name, ())}
    yield from nested_differences({k: v for k, v in pins.items() if k not in coarse}, strategy)
    for field, value in pins.items():
        if field not in coarse | {"offload", "speculative"} and getattr(strategy, field) != value:
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


def test_experts_of_whole_layers_in_host_memory_come_back_as_they_were_told():
    """--n-cpu-moe counts all layers from the first; the share is that of the layers it moves."""
    for model, layers, dense in (
        ("Qwen/Qwen3-30B-A3B", 48, 0),
        ("deepseek-ai/DeepSeek-V2-Lite", 27, 1),
    ):
        shape, asked = get_model(model), None
        counts = count_parameters(shape)
        for count in (dense + 1, layers // 2, layers):
            share = counts.experts / counts.total * (count - dense) / (layers - dense)
            for _ in range(2):  # written, read, and written again
                offload = {"weights_cpu": round(share, 3)}
                case = made(model=model, engine="llama_cpp", device="rtx-4090", offload=offload,
                            devices_per_node=1, quantization="gguf:q4_k_m")  # fmt: skip
                text = export("llama_cpp", case).text
                assert f"--n-gpu-layers all --n-cpu-moe {count}" in " ".join(text.split()).replace(
                    " \\ ", " "
                ), (model, count)
                asked = read_paste(text).request["pins"]["offload"]
                share = asked["weights_cpu"]
            assert asked == offload, (model, count)

    # More than all experts: the other layers follow, and come back with them.
    case = made(model="Qwen/Qwen3-30B-A3B", engine="llama_cpp", offload={"weights_cpu": 0.975})
    text = export("llama_cpp", case).text
    assert "--n-cpu-moe 48" in text
    assert "--n-gpu-layers 24" in text
    assert read_paste(text).request["pins"]["offload"]["weights_cpu"] == pytest.approx(
        0.975, abs=0.01
    )


def test_experts_on_the_host_are_those_of_whole_layers_whoever_is_popular():
    # 14 of 40 layers' experts on the CPU: 52 tokens/s (ik_llama.cpp#1593), host memory assumed.
    fields = {
        "model": "Qwen/Qwen3.5-35B-A3B",
        "cluster": {"device": "rtx-5060-ti-16gb", "host_memory_bytes": 64 * 1024**3,
                    "host_memory_bandwidth_bytes_per_second": 51.2e9},
        "workload": {"kind": "generate", "batch_size": 1, "input_tokens": 2048,
                     "output_tokens": 256},
        "engine": "llama_cpp",
    }  # fmt: skip
    speeds = [
        1 / ask(**fields, strategy={"quantization": "gguf:q4_k_m",
                                    "offload": {"weights_cpu": share}}).performance.tpot_seconds
        for share in (0.321, 0.9)
    ]  # fmt: skip
    assert speeds[0] == pytest.approx(52, rel=0.15)
    assert speeds[1] < speeds[0]
