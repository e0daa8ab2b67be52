"""What an export starts is accepted by the tool that it is for."""

import itertools
import re
import shlex

import pytest

from planner.exports.megatron import dealt, megatron_arguments
from planner.exports.registry import export, export_case
from planner.exports.sglang import sglang_arguments
from planner.exports.vllm import vllm_arguments
from planner.specs.estimate import PlanRequest
from tests.planner.asking import LLAMA_405B, document, search
from tests.planner.exports.making import made, trained

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


def test_megatron_takes_126_layers_on_any_number_of_stages():
    for chunks, pipeline, stated in itertools.product((None, 2, 3), (2, 4, 8, 9), (False, True)):
        held = list(dealt(126, pipeline)) if stated else None
        case = trained(
            model=LLAMA_405B,
            pipeline_parallel_size=pipeline,
            virtual_pipeline_size=chunks,
            memory={"per_stage_layers": held},
        )
        accepts(megatron_arguments(case), 126)


def test_megatron_takes_the_stages_as_the_plan_has_them():
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
        seconds = float(re.search(r"step_seconds ([0-9.e+]+)", made_one.text)[1])
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


def test_the_torchrun_script_of_a_qlora_plan_carries_method_and_rank():
    text = export("torchrun", trained(workload={"method": "qlora", "lora_rank": 64})).text
    assert '"method": "qlora"' in text
    assert '"r": 64' in text
    assert "load_in_4bit=True" in text


def test_a_method_that_no_public_trainer_has_is_offered_no_script():
    for method in ("qft", "alphatuning"):
        work = {"kind": "train", "sequence_length": 256, "global_batch_size": 4, "method": method}
        exports = search(device="h100-sxm5-80gb", workload=work).plans[0].exports
        assert not {"torchrun", "slurm", "kubernetes", "compose"} & set(exports), method
