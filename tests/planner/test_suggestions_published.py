"""The first suggestion for a fine-tuning that was reported not to fit is what then worked.

The reports are those whose overflow the planner finds too: a public thread or table of what ran
out of memory, with the change after which it ran or which the maintainers measured to fit.
"""

from typing import Any, NamedTuple

import pytest

from planner.api import plan
from planner.specs.estimate import PlanRequest
from tests.planner.asking import MIXTRAL

A100_40, A100_80, A800 = "a100-sxm4-40gb", "a100-sxm4-80gb", "a800-sxm4-80gb"
# Shapes of Qwen-7B and Qwen-72B, which are Llama's but for a bias.
QWEN_7B: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
    "vocab_size": 151936, "max_position_embeddings": 8192,
}  # fmt: skip
QWEN_72B = {
    **QWEN_7B, "hidden_size": 8192, "intermediate_size": 24576, "num_hidden_layers": 80,
    "num_attention_heads": 64, "num_key_value_heads": 64, "vocab_size": 152064,
}  # fmt: skip
SMALL = {"lora_rank": 8, "lora_targets": "query_value"}


class Report(NamedTuple):
    """A report: what did not fit, and what the first suggestion has to change."""

    source: str
    model: str | dict[str, Any]
    device: str
    devices: int
    workload: dict[str, Any]
    pins: dict[str, Any]
    worked: str


def copies(devices: int, stage: int, **pins: Any) -> dict[str, Any]:
    """Return the pins of data-parallel ranks of a ZeRO stage, one sequence each."""
    return {"data_parallel_size": devices, "zero_stage": stage, "micro_batch_size": 1, **pins}


def tuned(method: str, length: int, batch: int, **fields: Any) -> dict[str, Any]:
    return {"method": method, "sequence_length": length, "global_batch_size": batch, **fields}


UNCHECKPOINTED = {"activation_recomputation": "none"}
ON_DEVICE: dict[str, Any] = {"offload": {}}
REPORTS = (
    Report("hiyouga/LlamaFactory#2321: a copy a GPU does not fit, ZeRO-3 trains",
           MIXTRAL, A100_80, 8, tuned("lora", 1024, 64, **SMALL), copies(8, 0), "zero stage"),
    Report("hiyouga/LlamaFactory#2520: out of memory with Accelerate alone, ZeRO-3 runs",
           QWEN_72B, A800, 8, tuned("lora", 1024, 8, lora_rank=8), copies(8, 0), "zero stage"),
    Report("QwenLM/Qwen#708: ZeRO-2 does not fit 8 A800, ZeRO-3 runs on 4",
           QWEN_72B, A800, 4, tuned("lora", 512, 4), copies(4, 2), "zero stage"),
    Report("QwenLM/Qwen#852: LoRA needs four GPUs of 80 GB, one supports QLoRA",
           QWEN_72B, A100_80, 1, tuned("lora", 512, 8), {}, "method qlora"),
    Report("hiyouga/LlamaFactory#1158: four A800 need ZeRO-3 in place of ZeRO-2",
           "baichuan-inc/Baichuan2-13B-Chat", A800, 4, tuned("full", 1536, 4),
           copies(4, 2, **ON_DEVICE), "zero stage"),
    Report("hiyouga/LlamaFactory#455: whole copies do not fit 8 A100, shard the states",
           QWEN_7B, A100_80, 8, tuned("full", 1024, 8), copies(8, 0, **ON_DEVICE), "zero stage"),
    Report("Lightning-AI/litgpt tutorials/resource-tables.md: micro-batch 2 does not fit, 1 does",
           "meta-llama/Llama-2-13b-hf", A100_40, 1, tuned("lora", 1304, 128, **SMALL),
           {"micro_batch_size": 2, **UNCHECKPOINTED}, "micro batch size"),
    Report("Lightning-AI/litgpt#781: micro-batch 4 does not fit, 2 does",
           "mistralai/Mistral-7B-v0.1", A100_40, 1, tuned("lora", 1304, 128, **SMALL),
           {"micro_batch_size": 4, **UNCHECKPOINTED}, "micro batch size"),
    Report("dev.to/sumanpro, QLoRA: Fine-Tuning a 7B Model on a 16GB GPU",
           "Qwen/Qwen2.5-7B", "t4", 1, tuned("lora", 512, 8), {}, "method qlora"),
    Report("arXiv:2305.14314: 65B in 48 GB by QLoRA",
           "huggyllama/llama-65b", "rtx-a6000", 1, tuned("lora", 512, 16), {}, "method qlora"),
    Report("InternLM/xtuner#275: QLoRA needs a single A100 of 80 GB",
           MIXTRAL, A100_80, 1, tuned("lora", 2048, 8), {}, "method qlora"),
)  # fmt: skip


@pytest.mark.parametrize("report", REPORTS, ids=lambda report: report.source.partition(":")[0])
def test_the_first_suggestion_is_what_worked(report):
    request = PlanRequest.model_validate(
        {
            "model": report.model,
            "cluster": {"device": report.device, "devices_per_node": report.devices},
            "workload": {"kind": "train", **report.workload},
            "pins": report.pins,
        }
    )

    answer = plan(request)

    assert not answer.plans
    first = answer.suggestions[0]
    assert first.title in {report.worked, f"{report.worked} not pinned"}
    stated = report.pins.get("zero_stage", 0)
    if report.worked == "zero stage":
        assert first.estimate.strategy.zero_stage > stated
    if report.worked == "micro batch size":
        assert first.estimate.strategy.micro_batch_size < report.pins["micro_batch_size"]
    assert not (first.estimate.strategy.offload and first.estimate.strategy.offload.places)
