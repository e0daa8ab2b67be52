"""The door to exports: what applies to a plan, golden files, and tools that accept them."""

import itertools
import json
import re
import shlex
import tomllib
from pathlib import Path

import pytest

from planner.exports.kubernetes import KUBERNETES
from planner.exports.megatron import dealt, megatron_arguments
from planner.exports.registry import FORMATS, export, export_case
from planner.exports.sglang import sglang_arguments
from planner.exports.vllm import vllm_arguments
from planner.specs.base import BadRequestError
from planner.specs.estimate import PlanRequest
from tests.planner.asking import LLAMA_70B, LLAMA_405B, MIXTRAL, TRAIN, document, search
from tests.planner.exports.making import made, trained

OPTIONS = tomllib.loads((Path(__file__).parent / "options.toml").read_text())
SERVED = made(
    model=LLAMA_70B,
    tensor_parallel_size=4,
    data_parallel_size=2,
    weight_dtype="fp8",
    activation_dtype="fp8",
    kv_cache_dtype="fp8",
    max_batch_tokens=8192,
    attention="flash",
)
TRAINED = trained(
    model=LLAMA_70B,
    nodes=4,
    data_parallel_size=4,
    tensor_parallel_size=8,
    sequence_parallel=True,
    zero_stage=1,
    activation_recomputation="selective",
    attention="flash",
    workload={"tokens": 10**9, "global_batch_size": 64},
)
RICH = (
    SERVED,
    made(
        model=MIXTRAL,
        tensor_parallel_size=8,
        expert_parallel_size=8,
        pipeline_parallel_size=2,
        context_parallel_size=2,
        nodes=4,
        weight_dtype="int4",
        kv_cache_dtype="int8",
        chunked_prefill=True,
        attention_data_parallel_size=2,
        offload={"weights_cpu": 0.25},
        speculative={"draft_model": "org/tiny", "tokens": 5},
    ),
    TRAINED,
    trained(
        model=MIXTRAL,
        data_parallel_size=8,
        expert_parallel_size=8,
        pipeline_parallel_size=4,
        virtual_pipeline_size=2,
        context_parallel_size=2,
        nodes=8,
        zero_stage=3,
        activation_recomputation="full",
        gradient_dtype="bf16",
        attention="flash",
        offload={"optimizer": "cpu"},
    ),
)


def served_by(case):
    return case.workload.kind == "serve"


@pytest.mark.parametrize("key", ["vllm", "sglang", "tensorrt_llm", "llama_cpp"])
def test_a_serving_export_is_as_it_was(key, snapshot):
    assert FORMATS[key].text(SERVED) == snapshot


@pytest.mark.parametrize("key", ["torchrun", "accelerate", "deepspeed", "torchtitan", "megatron"])
def test_a_training_export_is_as_it_was(key, snapshot):
    assert FORMATS[key].text(TRAINED) == snapshot


@pytest.mark.parametrize("key", ["slurm", "kubernetes", "compose"])
@pytest.mark.parametrize("case", [SERVED, TRAINED], ids=["serve", "train"])
def test_an_export_to_a_cluster_manager_is_as_it_was(key, case, snapshot):
    assert FORMATS[key].text(case) == snapshot


def test_every_option_is_one_of_the_tools_own_source_which_its_list_names():
    for key in OPTIONS:
        known = set(OPTIONS[key]["options"])
        training = key in {"megatron", "torchtitan", "torchrun"}
        cases = [case for case in RICH if served_by(case) is not training]
        texts = [FORMATS[key].body(case) for case in ([TRAINED] if key == "torchtitan" else cases)]
        pattern = r"config\.([a-z_.]+) =" if key == "torchtitan" else r"(?<=\s)--([a-z0-9_-]+)"
        used = {name for text in texts for name in re.findall(pattern, text)}
        assert used, key
        assert used - known - set(OPTIONS["torchrun"]["options"]) == set(), key

    for key in OPTIONS:
        assert re.search(r"\d", OPTIONS[key]["source"]), key


def test_a_plan_is_offered_to_the_tools_that_can_run_it():
    found = search(engine="vllm").plans[0].exports
    assert found == (
        *("vllm", "sglang", "tensorrt_llm", "llama_cpp"),
        *("slurm", "kubernetes", "compose"),
    )

    whole = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "context_parallel_size": 1}
    found = search(devices=8, workload=TRAIN, pins=whole).plans[0].exports
    assert found[0] == "torchrun"
    assert {"deepspeed", "torchtitan", "megatron"} <= set(found)
    assert "vllm" not in found

    cluster = {"device": "h100-sxm-80gb", "devices_per_node": 8, "nodes": 2}
    assert "compose" not in search(engine="vllm", cluster=cluster).plans[0].exports
    assert search(workload={"kind": "compress", "method": "gptq"}).plans[0].exports == ()


def test_every_format_that_a_plan_names_can_be_made_and_others_are_not_offered():
    for fields, missing in (
        ({"device": "mi300x"}, "tensorrt_llm"),
        ({"device": "m2-max"}, "vllm"),
        ({"devices": 8, "workload": {**TRAIN, "method": "lora"}}, "megatron"),
        ({"devices": 8, "model": MIXTRAL, "workload": {**TRAIN, "method": "lora"}}, "torchtitan"),
    ):
        assert missing not in search(**fields).plans[0].exports, (fields, missing)

    for engine in ("vllm", "llama_cpp", "torch"):
        request = PlanRequest.model_validate(document(engine=engine))
        for plan in search(engine=engine).plans:
            case = export_case(request, plan)
            made_all = [export(name, case) for name in plan.exports]
            assert all(one.text and one.measure for one in made_all), engine


def test_a_format_is_refused_with_those_that_can_or_made_with_what_is_lost():
    with pytest.raises(BadRequestError, match="torchrun"):
        export("fortran", SERVED)
    with pytest.raises(BadRequestError, match=r"deepspeed cannot express this plan .*vllm"):
        export("deepspeed", SERVED)
    with pytest.raises(BadRequestError, match="torchtitan cannot express this plan"):
        export("torchtitan", trained(model=MIXTRAL, data_parallel_size=8))

    for key, case in (
        ("accelerate", trained(tensor_parallel_size=8)),
        ("megatron", trained(data_parallel_size=8, workload={"method": "lora"})),
        ("compose", made(tensor_parallel_size=8, pipeline_parallel_size=2, nodes=2)),
        ("vllm", made(device="m2-max")),
    ):
        found = export(key, case)
        assert "cannot express or run all of this plan" in found.notes[0], (key, case)
        assert found.notes[0] in found.text, (key, case)


def test_the_head_says_what_is_predicted_and_json_has_its_notes_beside_it():
    head = KUBERNETES.text(SERVED).split("apiVersion")[0]
    assert "meta-llama/Llama-3.1-70B on 8 x NVIDIA H100" in head
    assert "# predicted: time to first token 0.25 s (80 %: 0.2 to 0.3125)" in head
    assert "# note: the options are those of v0.33.0, the image's tag" in head
    found = export("deepspeed", TRAINED)
    assert json.loads(found.text)["train_batch_size"] == 64
    assert found.notes


ATTENTION = [(1, 1, 8), (2, 1, 4), (1, 2, 4), (2, 2, 2), (4, 1, 1), (1, 8, 1)]


def told(command):
    """Return the options of a command by name; those without a value are true."""
    pairs = zip(command, [*command[1:], "--"], strict=True)
    return {
        word: True if value.startswith("--") else value
        for word, value in pairs
        if word.startswith("--")
    }


def test_sglang_takes_attention_data_parallelism():
    """The rules of sglang 0.5.23, sglang/srt/arg_groups/parallel_hook.py."""
    for tensor, data, attention in ATTENTION:
        case = made(
            tensor_parallel_size=tensor,
            data_parallel_size=data,
            attention_data_parallel_size=attention,
        )
        found = told(sglang_arguments(case))
        world, replicas, ranks = (
            int(found.get(flag, 1)) for flag in ("--tp-size", "--dp-size", "--attn-dp-size")
        )

        assert not (ranks > 1 and replicas > 1), (tensor, data, attention)
        assert world % ranks == 0, (tensor, data, attention)
        servers = data if ranks > 1 else 1
        assert servers * replicas * world == case.devices == tensor * data * attention
        noted = any(f"{data} servers, on port" in note for note in export("sglang", case).notes)
        assert noted is (ranks > 1 and data > 1), (tensor, data, attention)


def test_vllm_counts_the_same_devices():
    for tensor, data, attention in ATTENTION:
        case = made(
            tensor_parallel_size=tensor,
            data_parallel_size=data,
            attention_data_parallel_size=attention,
        )
        found = told(vllm_arguments(case))
        ranks = int(found.get("--data-parallel-size", 1))
        assert ranks * int(found.get("--tensor-parallel-size", 1)) == case.devices
        assert ranks * int(found["--max-num-seqs"]) >= 64, (tensor, data, attention)


def stages(layout):
    """Unroll a layout as Megatron-LM's PipelineParallelLayerLayout.parse_str_to_list does."""
    unrolled = re.sub(r"(.)\*(\d+)", lambda found: found[1] * int(found[2]), layout)
    return unrolled.split("|")


def accepts(command, layers):
    """Check what megatron/training/arguments.py and the layout's own validation check."""
    found = told(command)
    pipeline = int(found.get("--pipeline-model-parallel-size", 1))
    layout = found.get("--pipeline-model-parallel-layout")
    chunks = found.get("--num-virtual-stages-per-pipeline-rank")
    assert layout is None or chunks is None
    if layout is None:
        assert layers % (pipeline * int(chunks or 1)) == 0
        return
    parts = stages(layout)
    flat = "".join(parts)
    assert len(parts) % pipeline == 0
    assert (flat[0], flat[-1]) == ("E", "L")
    assert flat.count("t") == layers
    assert (flat.count("E"), flat.count("L")) == (1, 1)


def test_megatron_takes_any_layers_on_the_stages_as_the_plan_has_them():
    for chunks, pipeline, stated in itertools.product((None, 2, 3), (2, 4, 8, 9), (False, True)):
        held = list(dealt(126, pipeline)) if stated else None
        case = trained(
            model=LLAMA_405B,
            pipeline_parallel_size=pipeline,
            virtual_pipeline_size=chunks,
            memory={"per_stage_layers": held},
        )
        accepts(megatron_arguments(case), 126)

    held = [15, 16, 16, 16, 16, 16, 16, 15]
    case = trained(model=LLAMA_405B, pipeline_parallel_size=8, memory={"per_stage_layers": held})
    layout = told(megatron_arguments(case))["--pipeline-model-parallel-layout"]
    assert [part.count("t") for part in stages(layout)] == held


@pytest.fixture(scope="module")
def zero_bubble():
    """A plan of 405B whose pipeline has no bubble, and its request."""
    fields = {
        "model": LLAMA_405B,
        "cluster": {"device": "h100-sxm5-80gb", "devices_per_node": 8, "nodes": 16},
        "workload": {"kind": "train", "sequence_length": 8192, "global_batch_size": 512,
                     "method": "pretrain"},
        "pins": {"pipeline_parallel_size": 8, "pipeline_schedule": "zero_bubble"},
    }  # fmt: skip
    return PlanRequest.model_validate(document(**fields)), search(**fields).plans[0]


def test_megatrons_figures_are_for_a_schedule_that_it_runs(zero_bubble):
    request, plan = zero_bubble
    for key in ("megatron", "slurm"):
        made_one = export(key, export_case(request, plan))
        assert any("figures are for 1F1B" in note for note in made_one.notes), key
        seconds = float(re.search(r"predicted: step ([0-9.e+]+) s", made_one.text)[1])
        assert seconds > plan.performance.step_seconds * 1.001, key
        command = shlex.split(made_one.text.replace("\\\n", ""), comments=True)
        accepts(command, 126)


def test_a_search_for_megatron_looks_at_no_schedule_that_it_has_not(zero_bubble):
    request, _ = zero_bubble
    free = request.pins.model_copy(update={"pipeline_schedule": None})
    fields = {**dict(request), "pins": free, "engine": "megatron"}
    plans = search(**{name: fields[name] for name in ("model", "cluster", "workload", "pins",
                                                      "engine")}).plans  # fmt: skip
    assert {plan.strategy.pipeline_schedule for plan in plans} <= {"1f1b", "interleaved"}


def test_a_script_carries_method_and_rank_and_is_not_offered_without_a_trainer():
    text = export("torchrun", trained(workload={"method": "qlora", "lora_rank": 64})).text
    assert '"method": "qlora"' in text
    assert '"r": 64' in text
    assert "load_in_4bit=True" in text
    for method in ("qft", "alphatuning"):
        work = {"kind": "train", "sequence_length": 256, "global_batch_size": 4, "method": method}
        exports = search(device="h100-sxm5-80gb", workload=work).plans[0].exports
        assert not {"torchrun", "slurm", "kubernetes", "compose"} & set(exports), method
