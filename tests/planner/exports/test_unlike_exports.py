"""A plan over unlike nodes is said by the tools that can run it, and refused by the others."""

import itertools
import subprocess

import pytest

from planner.api import plan
from planner.errors import BadRequestError
from planner.exports.registry import export, export_case
from planner.specs.estimate import PlanRequest
from tests.planner.asking import GENERATE, LLAMA_8B, SERVE

PAIR = {"device": "h100-sxm-80gb", "other_nodes": [{"device": "a100-sxm4-40gb"}]}
UNEQUAL = {"device": "h100-sxm-80gb", "devices_per_node": 2, "other_nodes": [{"device": "l40s"}]}
MIXED_VENDORS = {"device": "h100-sxm-80gb", "other_nodes": [{"device": "mi300x-192gb"}]}
REPLICAS = {"pipeline_parallel_size": 1, "tensor_parallel_size": 1, "weight_dtype": "bf16"}
STAGES = {**REPLICAS, "pipeline_parallel_size": 2}


def case(cluster=PAIR, pins=REPLICAS, workload=SERVE):
    """Return the best plan over all nodes."""
    request = PlanRequest.model_validate(
        {
            "model": LLAMA_8B,
            "cluster": cluster,
            "workload": workload,
            "engine": "vllm",
            "objective": "throughput",
            "pins": pins,
            "top": 9,
        }
    )
    best = next(one for one in plan(request).plans if one.cluster.other_nodes)
    return export_case(request, best)


def test_replicas_are_a_server_for_each_kind_of_node():
    for workload, name in itertools.product(
        (SERVE, {**GENERATE, "batch_size": 32}), ("vllm", "sglang", "tensorrt_llm", "llama_cpp")
    ):
        found = export(name, case(workload=workload))
        assert found.text.count('if [ "$KIND" = ') == 2, (workload, name)
        assert "H100 SXM5 80GB + 1 x NVIDIA A100" in found.text, (workload, name)


def test_a_node_starts_the_server_of_its_own_kind_alone(tmp_path):
    text = export("vllm", case()).text
    script = tmp_path / "serve.sh"
    script.write_text("vllm() { echo started; }\n" + text)

    for kind, count in (("1", 1), ("2", 1), ("3", 0)):
        ran = subprocess.run(
            ["bash", "-u", script], env={"KIND": kind}, capture_output=True, text=True, check=False
        )
        assert ran.stdout.count("started") == count


def test_the_router_is_told_the_share_of_each_kind():
    found = export("vllm", case())
    (told,) = (one for one in found.notes if "router" in one)
    shares = [int(word.rstrip("%")) for word in told.split() if word.endswith("%")]
    assert len(shares) == 2
    assert sum(shares) == 100
    assert shares[0] > shares[1]


def test_each_server_holds_its_own_part_of_the_callers():
    text = export("vllm", case()).text
    words = text.split()
    most = [int(words[at + 1]) for at, word in enumerate(words) if word == "--max-num-seqs"]
    assert len(most) == 2
    assert most[0] > most[1]
    assert 16 <= sum(most) <= 17


def test_a_pipeline_over_both_kinds_says_how_many_layers_each_stage_takes():
    asked = case(pins=STAGES)
    layers = asked.plan.memory.per_stage_layers
    text = export("vllm", asked).text
    assert layers[0] > layers[1]
    assert f"export VLLM_PP_LAYER_PARTITION={layers[0]},{layers[1]}\n" in text
    assert "--nnodes 2" in text


def test_tools_that_cannot_split_layers_unevenly_refuse_by_name():
    for name in ("sglang", "tensorrt_llm", "llama_cpp", "slurm", "kubernetes"):
        with pytest.raises(BadRequestError, match="choose among vllm") as caught:
            export(name, case(pins=STAGES))
        assert caught.value.field == "format", name


def test_cluster_managers_refuse_unlike_replicas():
    for name in ("slurm", "kubernetes", "compose"):
        with pytest.raises(BadRequestError, match="cannot say this plan"):
            export(name, case())


def test_a_pipeline_over_nodes_of_unlike_width_is_said_by_nobody():
    asked = case(UNEQUAL, {**STAGES, "pipeline_parallel_size": 3})
    assert asked.plan.exports == ()
    with pytest.raises(BadRequestError, match="choose among none"):
        export("vllm", asked)


def test_a_server_that_does_not_run_on_one_kind_is_not_offered():
    exports = case(MIXED_VENDORS).plan.exports
    assert "vllm" in exports
    assert "tensorrt_llm" not in exports


def test_the_measurement_names_the_hardware_of_both_kinds():
    measure = export("vllm", case()).measure
    assert "1 x NVIDIA H100 SXM5 80GB + 1 x NVIDIA A100" in measure
