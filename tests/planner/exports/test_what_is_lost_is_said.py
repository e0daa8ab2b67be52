"""What a format has no word for is told in its notes, and never silently dropped."""

import itertools
import json

import pytest
import yaml

from planner.errors import BadRequestError
from planner.exports.launch import _limit
from planner.exports.registry import FORMATS, export
from tests.planner.exports.making import SERVE, made, trained

COMPRESS = {"kind": "compress", "method": "gptq"}


def notes(key, case):
    return "\n".join(export(key, case).notes)


def test_a_size_is_in_the_file_or_in_the_notes():
    said_by_deepspeed = {"tensor": '"autotp_size": 2'}
    for (axis, size), key in itertools.product(
        (("tensor", 2), ("pipeline", 4), ("expert", 8)), ("accelerate", "deepspeed")
    ):
        made_one = export(key, trained(**{f"{axis}_parallel_size": size}))
        in_notes = f"{axis} parallel {size}" in "\n".join(made_one.notes)
        in_file = key == "deepspeed" and said_by_deepspeed.get(axis, "nothing") in made_one.text
        assert in_notes != in_file, (axis, size, key)


def test_nf4_names_the_plugin_that_newer_versions_of_vllm_need_for_it():
    for key in ("vllm", "kubernetes", "compose"):
        said = notes(key, made(engine="vllm", weight_dtype="nf4"))
        assert "up to 0.27; from 0.28 on install the package vllm-bnb-plugin" in said, key
        assert "vllm-bnb-plugin" not in notes(key, made(engine="vllm", weight_dtype="fp8")), key


def test_another_server_needs_no_plugin_of_vllms_for_nf4():
    assert "vllm-bnb-plugin" not in notes("sglang", made(engine="sglang", weight_dtype="nf4"))


def test_a_context_that_is_split_is_said_to_be_left_out():
    for key in ("vllm", "sglang"):
        assert "context" in notes(key, made(context_parallel_size=2)), key
        assert "context" not in notes(key, made(tensor_parallel_size=2)), key


def test_prefill_and_decode_apart_are_named_with_their_devices():
    split = {"prefill_devices": 2, "decode_devices": 6}
    for key in ("vllm", "sglang", "tensorrt_llm", "llama_cpp"):
        said = notes(key, made(disaggregated=split, data_parallel_size=8))
        assert "prefills on 2 and decodes on 6 devices" in said, key


def test_figures_of_another_engine_are_not_passed_off_as_this_ones():
    for key in ("vllm", "sglang", "tensorrt_llm", "llama_cpp"):
        own, other = made(engine=key), made(engine="transformers")
        assert "the figures are for" not in notes(key, own), key
        assert "the figures are for transformers" in notes(key, other), key


def test_tensorrt_says_that_it_keeps_what_the_plan_puts_on_the_host():
    case = made(engine="tensorrt_llm", offload={"weights_cpu": 0.5})
    made_one = export("tensorrt_llm", case)
    assert any("offload is lost" in note for note in made_one.notes)
    assert "offload" not in made_one.text.split("trtllm-serve")[-1]


def test_weights_on_disk_and_caches_on_the_host_are_said_to_be_unsaid():
    for key, offload in itertools.product(
        ("vllm", "sglang", "tensorrt_llm", "llama_cpp"), ({"weights_disk": 0.3}, {"kv_cpu": 0.3})
    ):
        assert "not expressed here" in notes(key, made(offload=offload)), (key, offload)


def test_torchtitan_says_that_it_shards_more_than_stages_one_and_two():
    for stage, is_said in ((0, False), (1, True), (2, True), (3, False)):
        said = notes("torchtitan", trained(zero_stage=stage, data_parallel_size=8))
        assert (f"ZeRO {stage}: torchtitan shards the weights too" in said) == is_said


def test_megatron_names_a_schedule_that_it_lacks():
    for schedule, is_said in (("1f1b", False), ("interleaved", False), ("gpipe", True)):
        case = trained(pipeline_parallel_size=4, pipeline_schedule=schedule)
        assert (f"schedule {schedule}: Megatron-LM runs" in notes("megatron", case)) == is_said


def test_megatron_says_whether_it_knows_how_long_to_train():
    endless, ending = trained(), trained(workload={"tokens": 10**9})
    assert "add --train-iters" in notes("megatron", endless)
    assert "add --train-iters" not in notes("megatron", ending)
    assert "--train-iters" not in export("megatron", endless).text.split("torchrun")[-1]


def test_deepspeed_offloads_weights_in_its_third_stage_or_says_that_it_does_not():
    for stage in (0, 1, 2, 3):
        made_one = export("deepspeed", trained(zero_stage=stage, offload={"weights_cpu": 0.5}))
        is_in_file = "offload_param" in json.loads(made_one.text)["zero_optimization"]
        is_said = any("only in ZeRO stage 3" in note for note in made_one.notes)
        assert (is_in_file, is_said) == (stage == 3, stage != 3), stage


def test_a_format_without_comments_keeps_all_of_its_notes_beside_it():
    made_one = export("deepspeed", trained(workload={"method": "lora"}))
    json.loads(made_one.text)  # a comment would make it something else than JSON
    assert any("method lora" in note for note in made_one.notes)


def test_a_compression_can_be_said_by_no_format():
    for key in sorted(FORMATS):
        with pytest.raises(BadRequestError, match=f"{key} cannot say this plan") as caught:
            export(key, made({**COMPRESS}, engine="torch"))
        assert caught.value.field == "format", key
        assert "choose among none" in caught.value.message, key


def test_a_time_limit_is_never_shorter_than_its_run():
    for seconds, limit in (
        (1, "0-00:01:00"),
        (60, "0-00:01:00"),
        (60.1, "0-00:02:00"),
        (86_399, "1-00:00:00"),
        (90_061, "1-01:02:00"),
    ):
        assert _limit(seconds) == limit, (seconds, limit)


def test_accelerate_on_two_nodes_has_an_address_to_fill_in_and_says_so():
    made_one = export("accelerate", trained(data_parallel_size=16, nodes=2, zero_stage=3))
    written = yaml.safe_load(made_one.text)
    assert (written["num_machines"], written["num_processes"]) == (2, 16)
    assert written["main_process_ip"] == "MASTER_ADDR"
    assert any("MASTER_ADDR is the first one's address" in note for note in made_one.notes)


def test_an_unlimited_number_of_requests_is_left_to_the_server():
    open_loop = {name: value for name, value in SERVE.items() if name != "concurrency"}
    case = made({**open_loop, "request_rate_per_second": 2.0})
    texts = [export(key, case).text for key in ("vllm", "sglang", "tensorrt_llm")]
    words = ("--max-num-seqs", "--max-running-requests", "--max_batch_size")
    assert not any(word in text for word, text in zip(words, texts, strict=True))
