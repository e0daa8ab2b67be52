"""Exports: what a plan decides becomes the other tool's flags, and nothing else does."""

import shlex

import pytest

from planner.errors import BadRequestError
from planner.exports.registry import EXPORTERS, export
from planner.exports.torchrun import torchrun_arguments
from planner.exports.vllm import vllm_arguments
from planner.specs.plan import PlanRequest
from planner.specs.strategy import Strategy
from planner.specs.workload import ServeWorkload
from tests.planner.asking import LLAMA_70B, TRAIN, document, search

SERVING = ServeWorkload(input_tokens=1000, output_tokens=200, concurrency=64)


def test_one_device_needs_no_flag_for_its_layout():
    command = vllm_arguments("m", Strategy(tensor_parallel_size=1), SERVING)

    expected = "vllm serve m --dtype bfloat16 --max-model-len 1200 --max-num-seqs 64"
    assert shlex.join(command) == expected


def test_sizes_become_vllms_flags():
    strategy = Strategy(tensor_parallel_size=4, pipeline_parallel_size=2, data_parallel_size=2)
    line = shlex.join(vllm_arguments("m", strategy, SERVING))

    assert "--tensor-parallel-size 4 --pipeline-parallel-size 2 --data-parallel-size 2" in line
    assert "--max-num-seqs 32" in line


@pytest.mark.parametrize(
    ("strategy", "flags"),
    [
        (Strategy(weight_dtype="fp8"), "--quantization fp8"),
        (Strategy(weight_dtype="int4", quantization="gptq"), "--quantization gptq"),
        (Strategy(kv_cache_dtype="fp8"), "--kv-cache-dtype fp8"),
        (Strategy(max_batch_tokens=8192), "--max-num-batched-tokens 8192"),
        (Strategy(expert_parallel_size=4), "--enable-expert-parallel"),
    ],
)
def test_a_choice_becomes_its_flag(strategy, flags):
    assert flags in shlex.join(vllm_arguments("m", strategy, SERVING))


def test_one_node_stands_alone_and_several_meet():
    assert torchrun_arguments(1, 8, "train.py") == [
        "torchrun",
        "--nnodes=1",
        "--nproc-per-node=8",
        "--standalone",
        "train.py",
    ]
    assert "--rdzv-backend=c10d" in torchrun_arguments(2, 8, "train.py")


def test_a_training_plan_carries_its_layout():
    answer = search(
        model=LLAMA_70B, devices=8, device="b200", workload={**TRAIN, "method": "lora"}
    )
    request = PlanRequest.model_validate(document(workload={**TRAIN, "method": "lora"}))

    text = export("torchrun", LLAMA_70B, answer.plans[0], request.workload)

    assert f"export MODEL={LLAMA_70B}" in text
    assert "export MICRO_BATCH_SIZE=" in text


def test_a_plan_names_the_formats_that_it_can_be_exported_to():
    assert search(engine="vllm").plans[0].exports == ("vllm",)
    assert search(devices=8, workload=TRAIN).plans[0].exports == ("torchrun",)


def test_every_named_format_exists():
    for plan in search(engine="vllm").plans:
        assert set(plan.exports) <= set(EXPORTERS)


def test_an_unknown_format_is_refused_with_the_known_ones():
    plan = search(engine="vllm").plans[0]

    with pytest.raises(BadRequestError, match="torchrun"):
        export("fortran", "m", plan, SERVING)
