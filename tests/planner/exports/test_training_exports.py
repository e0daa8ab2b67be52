"""Training exports: each framework's words, and what DeepSpeed's own parser made of ours."""

import ast
import importlib
import importlib.util
import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from torch.distributed.run import get_args_parser

from planner.exports.megatron import MEGATRON, megatron_arguments
from planner.exports.registry import export
from planner.exports.train_script import (
    ACCELERATE,
    DEEPSPEED,
    TORCHRUN,
    TORCHTITAN,
    accelerate_text,
    deepspeed_config,
    layout_notes,
    script_plan,
    torchrun_arguments,
    torchtitan_text,
    train_script,
)
from tests.planner.asking import MIXTRAL
from tests.planner.exports.making import trained


def test_one_node_stands_alone_several_meet_and_torchruns_own_parser_takes_it():
    assert torchrun_arguments(1, 8, "train.py") == [
        "torchrun",
        "--nnodes=1",
        "--nproc-per-node=8",
        "--standalone",
        "train.py",
    ]
    assert "--rdzv-backend=c10d" in torchrun_arguments(2, 8, "train.py")

    for nodes in (1, 4):
        parsed = get_args_parser().parse_args(torchrun_arguments(nodes, 8, "train.py")[1:])
        assert (parsed.nnodes, parsed.nproc_per_node) == (str(nodes), "8"), nodes
        assert parsed.training_script == "train.py", nodes


def load(tmp_path, case):
    path = tmp_path / "accelerate.yaml"
    path.write_text(ACCELERATE.text(case))
    return path, load_config_from_file(str(path))


@pytest.mark.parametrize(
    ("strategy", "distributed_type"),
    [
        ({"data_parallel_size": 8, "zero_stage": 3}, "FSDP"),
        ({"data_parallel_size": 8, "zero_stage": 2}, "FSDP"),
        ({"data_parallel_size": 8, "zero_stage": 1}, "DEEPSPEED"),
        ({"data_parallel_size": 8, "zero_stage": 0}, "MULTI_GPU"),
        ({"data_parallel_size": 1}, "NO"),
        ({"zero_stage": 2, "offload": {"optimizer": "cpu"}}, "DEEPSPEED"),
    ],
)
def test_accelerate_loads_the_file_and_reads_the_sharding(tmp_path, strategy, distributed_type):
    _, config = load(tmp_path, trained(**strategy))
    assert config.distributed_type == distributed_type
    assert config.mixed_precision == "bf16"


def test_accelerates_launcher_takes_the_file(tmp_path):
    path, _ = load(tmp_path, trained(data_parallel_size=8, zero_stage=3))
    arguments = launch_command_parser().parse_args(["--config_file", str(path), "train.py"])
    launched, _, from_file = _validate_launch_command(arguments)
    assert launched.use_fsdp
    assert launched.fsdp_version == 2
    assert launched.num_processes == 8
    assert (launched.mixed_precision, from_file) == ("bf16", True)


@pytest.mark.parametrize(("stage", "reshards"), [(2, False), (3, True)])
def test_only_the_third_stage_drops_the_weights_between_passes(tmp_path, stage, reshards):
    _, config = load(tmp_path, trained(data_parallel_size=8, zero_stage=stage))
    assert config.fsdp_config["fsdp_reshard_after_forward"] is reshards


def test_accelerate_on_several_machines_has_a_meeting_point(tmp_path):
    _, config = load(tmp_path, trained(data_parallel_size=16, zero_stage=3, nodes=2))
    assert (config.num_machines, config.num_processes) == (2, 16)
    assert config.main_process_port == 29500


def test_a_processor_is_told_to_accelerate():
    case = trained(device="cpu-xeon-8480-2s", data_parallel_size=2)
    document = yaml.safe_load(accelerate_text(case))
    assert document["distributed_type"] == "MULTI_CPU"
    assert document["use_cpu"] is True


def test_deepspeeds_batch_multiplies_up_and_it_offloads_what_it_can():
    config = deepspeed_config(trained(data_parallel_size=8, zero_stage=2))
    sizes = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    assert config["train_batch_size"] == 8 * config[sizes[0]] * config[sizes[1]] == 64
    assert config["bf16"] == {"enabled": True}

    for offload, stage, expected in (
        ({}, 1, {"stage": 1}),
        ({"optimizer": "cpu"}, 2, {"stage": 2, "offload_optimizer": {"device": "cpu"}}),
        ({"weights_cpu": 1.0}, 3, {"stage": 3, "offload_param": {"device": "cpu"}}),
        (
            {"weights_disk": 1.0},
            3,
            {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/local_nvme"}},
        ),
        ({"optimizer": "cpu"}, 0, {"stage": 2, "offload_optimizer": {"device": "cpu"}}),
        ({"weights_cpu": 1.0}, 2, {"stage": 2}),
    ):
        config = deepspeed_config(trained(zero_stage=stage, offload=offload))
        assert config["zero_optimization"] == expected, (offload, stage, expected)

    strategy = {"zero_stage": 2, "offload": {"activations_cpu": 1.0}}
    plain, again = (trained(**strategy, activation_recomputation=how) for how in ("none", "full"))
    assert deepspeed_config(again)["activation_checkpointing"]["cpu_checkpointing"] is True
    assert "activation_checkpointing" not in deepspeed_config(plain)
    assert "save_on_cpu" in " ".join(DEEPSPEED.notes(plain))
    assert "save_on_cpu" not in " ".join(DEEPSPEED.notes(again))


def test_accelerate_reads_where_weights_and_states_go(tmp_path):
    offload = {"optimizer": "nvme", "weights_disk": 1.0}
    _, config = load(tmp_path, trained(zero_stage=3, offload=offload))
    assert config.distributed_type == "DEEPSPEED"
    assert config.deepspeed_config["offload_param_device"] == "nvme"
    assert config.deepspeed_config["offload_param_nvme_path"] == "/local_nvme"
    assert config.deepspeed_config["offload_optimizer_nvme_path"] == "/local_nvme"


def test_megatron_torchtitan_and_deepspeed_say_what_they_offload_otherwise():
    strategy = {"offload": {"activations_cpu": 1.0}, "data_parallel_size": 8}
    line = shlex.join(megatron_arguments(trained(**strategy)))
    piped = trained(**strategy, pipeline_parallel_size=4)
    assert "--cpu-offloading-num-layers 31" in line
    assert "--cpu-offloading" not in shlex.join(megatron_arguments(piped))
    assert "only without pipeline" in " ".join(MEGATRON.notes(piped))

    for offload, said in (
        ({"optimizer": "cpu"}, "weights, gradients and optimiser states together"),
        ({"activations_cpu": 1.0}, "does not move activations"),
        ({"weights_disk": 1.0}, "not to NVMe"),
    ):
        assert said in " ".join(TORCHTITAN.notes(trained(zero_stage=3, offload=offload)))

    case = trained(pipeline_parallel_size=4, workload={"optimizer": "adafactor"})
    notes = " ".join(DEEPSPEED.notes(case))
    assert "optimizer" not in json.loads(DEEPSPEED.text(case))
    assert "num_stages=4" in notes
    assert "adafactor" in notes


def test_megatron_gets_the_models_shape_experts_and_steps():
    line = shlex.join(megatron_arguments(trained(data_parallel_size=8)))
    for flags in (
        "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32",
        "--group-query-attention --num-query-groups 8 --rotary-base 500000",
        "--untie-embeddings-and-output-weights --disable-bias-linear",
        "--seq-length 4096 --micro-batch-size 2 --global-batch-size 64",
    ):
        assert flags in line

    line = shlex.join(megatron_arguments(trained(model=MIXTRAL, expert_parallel_size=8)))
    assert "--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 14336" in line
    assert "--expert-model-parallel-size 8" in line
    case = trained(workload={"tokens": 26_214_400})
    assert "--train-iters 100" in shlex.join(megatron_arguments(case))
    assert "config.training.steps = 100" in torchtitan_text(case)


def test_a_choice_becomes_megatrons_flag():
    cases = (
        ({"tensor_parallel_size": 8}, "--tensor-model-parallel-size 8"),
        ({"pipeline_parallel_size": 4}, "--pipeline-model-parallel-size 4"),
        ({"context_parallel_size": 2}, "--context-parallel-size 2"),
        (
            {"pipeline_parallel_size": 4, "virtual_pipeline_size": 2},
            "--num-virtual-stages-per-pipeline-rank 2",
        ),
        ({"tensor_parallel_size": 2, "sequence_parallel": True}, "--sequence-parallel"),
        ({"zero_stage": 1}, "--use-distributed-optimizer"),
        ({"zero_stage": 3}, "--data-parallel-sharding-strategy optim_grads_params"),
        (
            {"activation_recomputation": "full"},
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        ),
        ({"activation_recomputation": "selective"}, "--recompute-granularity selective"),
        ({"offload": {"optimizer": "cpu"}}, "--optimizer-cpu-offload"),
        ({"gradient_dtype": "bf16"}, "--grad-reduce-in-bf16"),
    )
    for strategy, flags in cases:
        assert flags in shlex.join(megatron_arguments(trained(**strategy))), (strategy, flags)


def settings(text):
    """What the function of an exported torchtitan module sets, by name."""
    function = next(n for n in ast.parse(text).body if isinstance(n, ast.FunctionDef))
    sets = [node for node in function.body if isinstance(node, ast.Assign)][1:]
    return {ast.unparse(node.targets[0]): ast.unparse(node.value) for node in sets}


def test_torchtitan_captures_graphs_where_it_may_and_its_module_sets_the_layout():
    for layout, refused in (
        ({"data_parallel_size": 8}, False),
        ({"pipeline_parallel_size": 4, "data_parallel_size": 2}, True),
        ({"expert_parallel_size": 8, "data_parallel_size": 8}, True),
        ({"tensor_parallel_size": 8}, False),
    ):
        found = settings(torchtitan_text(trained(**layout)))
        assert (found.get("config.training.disable_cuda_graphs") == "True") is refused

    case = trained(
        data_parallel_size=4, tensor_parallel_size=2, zero_stage=3, activation_recomputation="full"
    )
    chosen = settings(TORCHTITAN.text(case))
    assert chosen["config.parallelism.data_parallel_shard_degree"] == "4"
    assert chosen["config.parallelism.tensor_parallel_degree"] == "2"
    assert chosen["config.parallelism.fsdp_reshard_after_forward"] == "'always'"
    assert chosen["config.activation_checkpoint"] == "FullAC.Config()"


def test_stages_adapters_and_replicas_are_left_as_the_tool_has_them_or_noted():
    case = trained(data_parallel_size=8, pipeline_parallel_size=2, pipeline_schedule="1f1b")
    chosen = settings(torchtitan_text(case))
    assert chosen["config.training.local_batch_size"] == "8"
    assert chosen["config.parallelism.pipeline_parallel_microbatch_size"] == "2"
    assert chosen["config.parallelism.pipeline_parallel_schedule"] == "'1F1B'"

    for chosen in (DEEPSPEED, ACCELERATE):
        notes = chosen.notes(trained(workload={"method": "lora", "lora_rank": 64}))
        assert any("lora, rank 64" in note for note in notes), chosen

    case = trained(pipeline_schedule="gpipe", workload={"optimizer": "adafactor"})
    notes = " ".join(MEGATRON.notes(case))
    assert "schedule gpipe" in notes
    assert "no optimiser adafactor" in notes

    chosen = settings(torchtitan_text(trained(data_parallel_size=8, zero_stage=0)))
    assert chosen["config.parallelism.data_parallel_replicate_degree"] == "8"
    assert chosen["config.parallelism.data_parallel_shard_degree"] == "1"


UNEVEN = {"per_stage_layers": [12, 12, 5, 3]}


def test_uneven_stages_are_told_to_megatron_and_noted_elsewhere():
    case = trained(engine="megatron", memory=UNEVEN, pipeline_parallel_size=4)
    arguments = megatron_arguments(case)
    at = arguments.index("--pipeline-model-parallel-layout")
    assert arguments[at + 1] == "Et*12|t*12|t*5|t*3L"

    even = {"per_stage_layers": [8, 8, 8, 8]}
    case = trained(engine="megatron", memory=even, pipeline_parallel_size=4)
    assert "--pipeline-model-parallel-layout" not in megatron_arguments(case)

    case = trained(memory=UNEVEN, pipeline_parallel_size=4)
    notes = layout_notes(case, frozenset({"pipeline"}), "torchtitan")
    assert notes == (
        "the stages hold 12, 12, 5, 3 layers: torchtitan splits them evenly by default",
    )


# What DeepSpeed's own parser made of our configurations, and that we still export those.
#
# DeepSpeed needs no GPU to read a configuration, but it is no package of ours. Its answers were
# written down from 0.19.8 on 2026-11-22; where it is installed it is asked again.


CASES: dict[str, dict[str, Any]] = {
    "copies": {"data_parallel_size": 8, "zero_stage": 0},
    "states in host memory": {"zero_stage": 2, "offload": {"optimizer": "cpu"}},
    "states on NVMe": {"zero_stage": 3, "offload": {"optimizer": "nvme"}},
    "states on NVMe of one device": {"zero_stage": 0, "offload": {"optimizer": "nvme"}},
    "states on NVMe, asked in stage 2": {"zero_stage": 2, "offload": {"optimizer": "nvme"}},
    "weights in host memory": {"zero_stage": 3, "offload": {"weights_cpu": 1.0}},
    "all on NVMe": {"zero_stage": 3, "offload": {"optimizer": "nvme", "weights_disk": 1.0}},
    "checkpoints in host memory": {
        "zero_stage": 2, "activation_recomputation": "full", "offload": {"activations_cpu": 1.0},
    },
}  # fmt: skip
READ = Path(__file__).with_name("deepspeed_read.json")
has_deepspeed = importlib.util.find_spec("deepspeed") is not None


def read_by_deepspeed(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return what DeepSpeed's parser makes of a configuration, on as many ranks as it is for."""
    deepspeed = importlib.import_module("deepspeed.runtime.config")
    each = config["train_micro_batch_size_per_gpu"] * config["gradient_accumulation_steps"]
    ranks = config["train_batch_size"] // each
    monkeypatch.setattr(deepspeed.dist, "get_world_size", lambda *_: ranks)
    monkeypatch.setattr(deepspeed.dist, "get_rank", lambda *_: 0)
    monkeypatch.setattr(deepspeed.dist, "is_initialized", lambda: True)
    found = deepspeed.DeepSpeedConfig(json.loads(json.dumps(config)))
    zero = json.loads(found.zero_config.model_dump_json())
    places = {
        name: place and {"device": place["device"], "nvme_path": place["nvme_path"]}
        for name in ("offload_optimizer", "offload_param")
        for place in [zero[name]]
    }
    return {
        "stage": zero["stage"],
        **places,
        "train_batch_size": found.train_batch_size,
        "bf16": found.bfloat16_config.enabled,
        "cpu_checkpointing": found.activation_checkpointing_config.cpu_checkpointing,
    }


def test_what_is_exported_is_what_deepspeed_took():
    read = json.loads(READ.read_text())
    for name, strategy in CASES.items():
        assert deepspeed_config(trained(**strategy)) == read[name]["config"], name


def test_deepspeed_understood_what_the_plan_says():
    on_disk = {"device": "nvme", "nvme_path": "/local_nvme"}
    in_memory = {"device": "cpu", "nvme_path": None}
    kept = json.loads(READ.read_text())
    for name, strategy in CASES.items():
        read = kept[name]["read"]
        offload = strategy.get("offload", {})
        states = {"cpu": in_memory, "nvme": on_disk}.get(offload.get("optimizer", ""))
        weights = in_memory if "weights_cpu" in offload else None
        assert read["offload_optimizer"] == states, name
        assert read["offload_param"] == (on_disk if "weights_disk" in offload else weights), name
        assert read["stage"] == (3 if states == on_disk else strategy["zero_stage"]), name
        assert (read["train_batch_size"], read["bf16"]) == (64, True), name
        assert read["cpu_checkpointing"] == ("activations_cpu" in offload), name


@pytest.mark.skipif(not has_deepspeed, reason="DeepSpeed is not installed here")
@pytest.mark.parametrize("name", CASES)
def test_the_deepspeed_that_is_here_reads_the_same(name, monkeypatch):
    config = deepspeed_config(trained(**CASES[name]))
    assert read_by_deepspeed(config, monkeypatch) == json.loads(READ.read_text())[name]["read"]


def test_a_stage_that_deepspeed_would_keep_in_host_memory_is_raised_and_said():
    for stage, is_said in ((0, True), (1, True), (2, True), (3, False)):
        case = trained(zero_stage=stage, offload={"optimizer": "nvme"})
        assert deepspeed_config(case)["zero_optimization"]["stage"] == 3, (stage, is_said)
        assert (f"the plan has ZeRO stage {stage}" in " ".join(DEEPSPEED.notes(case))) == is_said


def test_a_fine_tuning_starts_from_the_models_weights_and_names_what_the_plan_does_not_know():
    for method, is_loaded in (("full", True), ("pretrain", False)):
        case = trained(data_parallel_size=8, workload={"method": method})
        assert ("--finetune" in megatron_arguments(case)) == is_loaded, method
        named = trained(model="Qwen/Qwen3-4B-Instruct-2507", workload={"method": method})
        assert "--rotary-base" in " ".join(MEGATRON.notes(named)), method
        text = TORCHTITAN.text(case)
        assert ("checkpoint.initial_load_in_hf = True" in text) == is_loaded, method
    assert json.loads(DEEPSPEED.text(case))["optimizer"]["params"] == {"lr": "auto"}
    assert 'lr is "auto"' in " ".join(DEEPSPEED.notes(case))


def test_ranks_share_the_4_bit_weights_of_qlora_as_peft_documents_it():
    sizes = {"data_parallel_size": 4, "workload": {"method": "qlora", "global_batch_size": 32}}
    for stage, is_shared in ((3, True), (2, False)):
        case = trained(zero_stage=stage, **sizes)
        plan = script_plan(case)
        assert plan["fsdp_mode"] == ("full_shard auto_wrap" if is_shared else ""), stage
        assert plan["fsdp"].get("version") == (1 if is_shared else None), stage
        assert ("transformers<5" in " ".join(TORCHRUN.notes(case))) == is_shared, stage
        ast.parse(train_script(case))
        config = yaml.safe_load(accelerate_text(case))
        version, precision = config["fsdp_config"]["fsdp_version"], config["mixed_precision"]
        assert (version, precision) == ((1, "no") if is_shared else (2, "bf16")), stage
    offloaded = trained(zero_stage=3, offload={"weights_cpu": 1.0, "optimizer": "cpu"}, **sizes)
    assert script_plan(offloaded)["fsdp_mode"] == "full_shard auto_wrap offload"


def test_megatron_overlaps_where_the_plan_does_and_knows_the_rotary_base():
    for layout, reduces, gathers in (
        ({"data_parallel_size": 8, "zero_stage": 0}, True, False),
        ({"data_parallel_size": 8, "zero_stage": 1}, True, True),
        ({"tensor_parallel_size": 8, "zero_stage": 1}, False, False),
        ({"data_parallel_size": 4, "pipeline_parallel_size": 2, "zero_stage": 1}, False, False),
        ({"data_parallel_size": 4, "pipeline_parallel_size": 2, "zero_stage": 2}, True, True),
    ):
        text = export("megatron", trained(**layout)).text
        assert ("--overlap-grad-reduce" in text) == reduces, layout
        assert ("--overlap-param-gather" in text) == gathers, layout

    for model, flags in (
        ("Qwen/Qwen3-8B", "--rotary-base 1000000"),
        ("meta-llama/Llama-3.1-8B-Instruct", "--rotary-base 500000"),
        ("meta-llama/Llama-3.1-8B", "--use-rope-scaling"),
    ):
        made_one = export("megatron", trained(model=model))
        assert flags in made_one.text, model
        assert not any("rope_theta" in note for note in made_one.notes), model
    # Other names of the shape have another base, which the catalog does not know.
    unknown = export("megatron", trained(model="Qwen/Qwen3-4B-Instruct-2507"))
    assert "--rotary-base" not in shlex.split(unknown.text, comments=True)
    assert any("rope_theta" in note for note in unknown.notes)


def test_megatron_cuts_experts_by_the_tensor_ranks_that_are_left():
    for tensor, expert, cut in ((1, 8, None), (2, 1, None), (2, 8, 1), (4, 2, 2), (8, 8, 1)):
        case = trained(model=MIXTRAL, tensor_parallel_size=tensor, expert_parallel_size=expert,
                       sequence_parallel=tensor > 1)  # fmt: skip
        flag = "--expert-tensor-parallel-size"
        text = export("megatron", case).text
        assert (f"{flag} {cut}" in text) if cut else (flag not in text), (tensor, expert)


def test_the_script_says_that_it_measures():
    notes = export("torchrun", trained(data_parallel_size=8)).notes
    assert any("measures the plan" in note and "into memory" in note for note in notes)
