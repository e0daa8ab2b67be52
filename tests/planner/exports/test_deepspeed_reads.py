"""What DeepSpeed's own parser made of our configurations, and that we still export those.

DeepSpeed needs no GPU to read a configuration, but it is no package of ours. Its answers were
written down from 0.19.8 on 2026-11-22; where it is installed it is asked again.
"""

import importlib
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from planner.exports.deepspeed import DEEPSPEED, deepspeed_config
from tests.planner.exports.making import trained

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
