"""Serving exports: a plan becomes the tool's flags, and what has no flag is said in the notes."""

import itertools
import json
import shlex

import pytest
import yaml

from planner.exports.launch import _limit
from planner.exports.llama_cpp import LLAMA_CPP, llama_cpp_arguments
from planner.exports.registry import FORMATS, export
from planner.exports.sglang import SGLANG, sglang_arguments
from planner.exports.tensorrt_llm import TENSORRT_LLM, trtllm_arguments, trtllm_text
from planner.exports.vllm import VLLM, layer_partition, vllm_arguments, vllm_text
from planner.specs.base import BadRequestError
from tests.planner.asking import LLAMA_8B, MIXTRAL
from tests.planner.exports.making import GIB, SERVE, made, trained

DRAFT = {"draft_model": "org/tiny", "tokens": 5}


def test_one_device_needs_no_flag_and_sizes_and_shares_become_each_engines():
    command = shlex.join(vllm_arguments(made(tensor_parallel_size=1)))
    assert command == (
        f"vllm serve {LLAMA_8B} --dtype bfloat16 --max-model-len 4800 --max-num-seqs 64"
    )

    case = made(tensor_parallel_size=2, pipeline_parallel_size=2, data_parallel_size=2)
    for arguments, flags in (
        (
            vllm_arguments,
            "--tensor-parallel-size 2 --pipeline-parallel-size 2 --data-parallel-size 2",
        ),
        (sglang_arguments, "--tp-size 2 --pp-size 2 --dp-size 2"),
        (trtllm_arguments, "--tp_size 2 --pp_size 2"),
        (llama_cpp_arguments, "--split-mode tensor --fit off --flash-attn on"),
    ):
        assert flags in shlex.join(arguments(case)), (arguments, flags)

    for arguments, flags in (
        (vllm_arguments, "--max-model-len 4800 --max-num-seqs 32"),
        (sglang_arguments, "--context-length 4800 --max-running-requests 32"),
        (trtllm_arguments, "--max_batch_size 32 --max_seq_len 4800"),
        (llama_cpp_arguments, "--ctx-size 38400 --parallel 32 --kv-unified"),
    ):
        assert flags in shlex.join(arguments(made(data_parallel_size=2))), (arguments, flags)


def test_a_choice_becomes_vllms_flag():
    cases = (
        ({"weight_dtype": "fp8"}, "--quantization fp8_per_tensor"),
        ({"weight_dtype": "int4", "quantization": "gptq"}, "serve ./Llama-3.1-8B-GPTQ --dtype"),
        (
            {"quantization": "gguf:q4_k_m"},
            f"serve ./Llama-3.1-8B-Q4_K_M.gguf --tokenizer {LLAMA_8B} --dtype",
        ),
        ({"weight_dtype": "nvfp4"}, "serve ./Llama-3.1-8B-NVFP4 --dtype bfloat16 --max"),
        ({"kv_cache_dtype": "fp8"}, "--kv-cache-dtype fp8"),
        ({"max_batch_tokens": 8192}, "--max-num-batched-tokens 8192"),
        ({"expert_parallel_size": 4}, "--enable-expert-parallel"),
        ({"chunked_prefill": False}, "--no-enable-chunked-prefill"),
        ({"offload": {"weights_cpu": 0.5}}, "--cpu-offload-gb 15.0"),
        (
            {"tensor_parallel_size": 2, "attention_data_parallel_size": 4},
            "--tensor-parallel-size 2 --data-parallel-size 4 --enable-expert-parallel",
        ),
    )
    for strategy, flags in cases:
        assert flags in shlex.join(vllm_arguments(made(**strategy))), (strategy, flags)


def test_a_choice_becomes_sglangs_flag():
    for strategy, flags in (
        ({"weight_dtype": "int8"}, "--model-path ./Llama-3.1-8B-W8A8 --dtype bfloat16 --context"),
        (
            {"quantization": "gguf:q4_k_m"},
            f"./Llama-3.1-8B-Q4_K_M.gguf --tokenizer-path {LLAMA_8B}",
        ),
        ({"kv_cache_dtype": "fp8"}, "--kv-cache-dtype fp8_e4m3"),
        ({"max_batch_tokens": 4096}, "--chunked-prefill-size 4096"),
        ({"chunked_prefill": False, "max_batch_tokens": 4096}, "--chunked-prefill-size -1"),
        ({"attention_data_parallel_size": 4}, "--tp-size 4 --attn-dp-size 4"),
        ({"offload": {"weights_cpu": 0.5}}, "--cpu-offload-gb 15"),
        ({"speculative": DRAFT}, "--speculative-draft-model-path org/tiny"),
    ):
        assert flags in shlex.join(sglang_arguments(made(**strategy))), (strategy, flags)


def test_a_choice_becomes_llama_cpps_flag_and_a_processor_keeps_every_layer():
    for strategy, flags in (
        ({"weight_dtype": "int4"}, "--model Llama-3.1-8B-Q4_K_M.gguf"),
        ({"quantization": "gguf:q5_k_s"}, "--model Llama-3.1-8B-Q5_K_S.gguf"),
        ({"kv_cache_dtype": "int8"}, "--cache-type-k q8_0 --cache-type-v q8_0 --flash-attn on"),
        ({"offload": {"weights_cpu": 0.5}}, "--n-gpu-layers 16"),
        ({"offload": {"weights_cpu": 0.0}}, "--n-gpu-layers all"),
        ({"speculative": DRAFT}, "--spec-draft-model tiny.gguf --spec-draft-n-max 5"),
    ):
        assert flags in shlex.join(llama_cpp_arguments(made(**strategy))), (strategy, flags)

    case = made(device="cpu-xeon-8480-2s", engine="llama_cpp")
    assert "--n-gpu-layers 0" in shlex.join(llama_cpp_arguments(case))


def test_tensorrt_llms_further_options_are_yaml_that_its_command_names():
    case = made(kv_cache_dtype="fp8", attention_data_parallel_size=4, speculative=DRAFT)
    text = trtllm_text(case)
    options = yaml.safe_load(text.split("<<'END'\n")[1].split("END\n")[0])
    assert options["kv_cache_config"] == {"dtype": "fp8"}
    assert options["enable_attention_dp"] is True
    assert options["speculative_config"]["max_draft_len"] == 5
    assert "--extra_llm_api_options trtllm-options.yaml" in text


def test_drafts_prefixes_and_experts_become_each_engines_own_flags():
    command = VLLM.text(made(speculative=DRAFT)).replace("\\\n", "")
    line = next(part for part in command.splitlines() if not part.startswith("#"))
    words = shlex.split(line)
    setting = json.loads(words[words.index("--speculative-config") + 1])
    assert setting == {"method": "draft_model", "model": "org/tiny", "num_speculative_tokens": 5}

    case = made({**SERVE, "prefix_share_ratio": 0.5})
    assert "--enable-prefix-caching" in vllm_arguments(case)
    assert "--disable-radix-cache" not in sglang_arguments(case)
    assert "enable_block_reuse: true" in trtllm_text(case)

    case = made(model=MIXTRAL, tensor_parallel_size=8, expert_parallel_size=8)
    assert "--enable-expert-parallel" in vllm_arguments(case)
    assert "--ep-size 8" in shlex.join(sglang_arguments(case))
    assert "--ep_size 8" in shlex.join(trtllm_arguments(case))


def test_several_nodes_get_a_rank_and_a_meeting_point_that_the_shell_fills_in():
    case = made(tensor_parallel_size=8, pipeline_parallel_size=2, nodes=2)
    for chosen in (VLLM, SGLANG):
        text = chosen.text(case)
        assert "--nnodes 2" in text, chosen
        assert '--node-rank "$NODE_RANK"' in text, chosen
        assert "MASTER_ADDR" in text, chosen
        assert "every node" in " ".join(chosen.notes(case)), chosen


def test_what_a_command_or_format_cannot_say_is_a_note():
    for chosen in (VLLM, SGLANG, LLAMA_CPP, TENSORRT_LLM):
        assert any("figures are for torch" in note for note in chosen.notes(made(engine="torch")))

    case = made(disaggregated={"prefill_devices": 2, "decode_devices": 6}, offload={"kv_cpu": 0.5})
    for chosen in (VLLM, SGLANG, LLAMA_CPP, TENSORRT_LLM):
        notes = " ".join(chosen.notes(case))
        assert "prefills on 2 and decodes on 6" in notes, chosen
        assert "cache in host memory" in notes, chosen

    notes = LLAMA_CPP.notes(made(weight_dtype="fp8", engine="llama_cpp"))
    assert any("GGUF has no fp8: Q8_0" in note for note in notes)

    for chosen in (VLLM, SGLANG, TENSORRT_LLM):
        notes = chosen.notes(made(model="deepseek-ai/DeepSeek-V3", weight_dtype="fp8"))
        assert not any("checkpoint" in note for note in notes), chosen


def test_formats_that_need_a_checkpoint_and_weights_on_the_host_are_said():
    for chosen, dtype, needs in (
        (VLLM, "fp8", False),
        (VLLM, "int4", True),
        (SGLANG, "int8", True),
        (TENSORRT_LLM, "fp8", True),
    ):
        notes = chosen.notes(made(weight_dtype=dtype))
        assert any("checkpoint" in note for note in notes) is needs, (chosen, dtype, needs)

    # The host holds 1.65 times what vLLM is told to offload.
    case = made(offload={"weights_cpu": 1.0}, memory={"host_bytes": round(1.65 * 30 * GIB)})
    assert "--cpu-offload-gb 30.0" in shlex.join(vllm_arguments(case))


def test_vllm_is_told_how_stages_share_a_remainder_of_layers():
    for layers, said in (
        ([11, 11, 10], "export VLLM_PP_LAYER_PARTITION=11,11,10\n"),
        ([8, 8], ""),
        (None, ""),
    ):
        case = made(memory={"per_stage_layers": layers}, pipeline_parallel_size=2)
        assert layer_partition(case) == said, (layers, said)
        assert vllm_text(case).startswith(said), (layers, said)


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


def test_nf4_names_the_plugin_that_newer_versions_of_vllm_alone_need_for_it():
    for key in ("vllm", "kubernetes", "compose"):
        said = notes(key, made(engine="vllm", weight_dtype="nf4"))
        assert "up to 0.27; from 0.28 on install the package vllm-bnb-plugin" in said, key
        assert "vllm-bnb-plugin" not in notes(key, made(engine="vllm", weight_dtype="fp8")), key
    assert "vllm-bnb-plugin" not in notes("sglang", made(engine="sglang", weight_dtype="nf4"))


def test_what_is_left_out_is_said_to_be():
    for key in ("vllm", "sglang"):
        assert "context" in notes(key, made(context_parallel_size=2)), key
        assert "context" not in notes(key, made(tensor_parallel_size=2)), key

    split = {"prefill_devices": 2, "decode_devices": 6}
    for key in ("vllm", "sglang", "tensorrt_llm", "llama_cpp"):
        said = notes(key, made(disaggregated=split, data_parallel_size=8))
        assert "prefills on 2 and decodes on 6 devices" in said, key

    for key in ("vllm", "sglang", "tensorrt_llm", "llama_cpp"):
        own, other = made(engine=key), made(engine="transformers")
        assert "the figures are for" not in notes(key, own), key
        assert "the figures are for transformers" in notes(key, other), key

    for key, offload in itertools.product(
        ("vllm", "sglang", "tensorrt_llm", "llama_cpp"), ({"weights_disk": 0.3}, {"kv_cpu": 0.3})
    ):
        assert "not expressed here" in notes(key, made(offload=offload)), (key, offload)


def test_what_tensorrt_torchtitan_and_megatron_do_otherwise_is_said():
    case = made(engine="tensorrt_llm", offload={"weights_cpu": 0.5})
    made_one = export("tensorrt_llm", case)
    assert any("offload is lost" in note for note in made_one.notes)
    assert "offload" not in made_one.text.split("trtllm-serve")[-1]

    for stage, is_said in ((0, False), (1, True), (2, True), (3, False)):
        said = notes("torchtitan", trained(zero_stage=stage, data_parallel_size=8))
        assert (f"ZeRO {stage}: torchtitan shards the weights too" in said) == is_said

    for schedule, is_said in (("1f1b", False), ("interleaved", False), ("gpipe", True)):
        case = trained(pipeline_parallel_size=4, pipeline_schedule=schedule)
        assert (f"schedule {schedule}: Megatron-LM runs" in notes("megatron", case)) == is_said
    endless, ending = trained(), trained(workload={"tokens": 10**9})
    assert "add --train-iters" in notes("megatron", endless)
    assert "add --train-iters" not in notes("megatron", ending)
    assert "--train-iters" not in export("megatron", endless).text.split("torchrun")[-1]


def test_deepspeed_offloads_weights_in_stage_three_and_keeps_notes_beside_its_file():
    for stage in (0, 1, 2, 3):
        made_one = export("deepspeed", trained(zero_stage=stage, offload={"weights_cpu": 0.5}))
        is_in_file = "offload_param" in json.loads(made_one.text)["zero_optimization"]
        is_said = any("only in ZeRO stage 3" in note for note in made_one.notes)
        assert (is_in_file, is_said) == (stage == 3, stage != 3), stage
    made_one = export("deepspeed", trained(workload={"method": "lora"}))
    json.loads(made_one.text)  # a comment would make it something else than JSON
    assert any("method lora" in note for note in made_one.notes)


def test_a_compression_can_be_said_by_no_format_and_no_limit_is_shorter_than_its_run():
    for key in sorted(FORMATS):
        with pytest.raises(BadRequestError, match=f"{key} cannot express this plan") as caught:
            export(key, made({**COMPRESS}, engine="torch"))
        assert caught.value.field == "format", key
        assert "choose among none" in caught.value.message, key

    for seconds, limit in (
        (1, "0-00:01:00"), (60, "0-00:01:00"), (60.1, "0-00:02:00"), (86_399, "1-00:00:00"),
        (90_061, "1-01:02:00"),
    ):  # fmt: skip
        assert _limit(seconds) == limit, (seconds, limit)


def test_what_is_to_be_filled_in_is_said_and_unlimited_requests_left_to_the_server():
    made_one = export("accelerate", trained(data_parallel_size=16, nodes=2, zero_stage=3))
    written = yaml.safe_load(made_one.text)
    assert (written["num_machines"], written["num_processes"]) == (2, 16)
    assert written["main_process_ip"] == "MASTER_ADDR"
    assert any("MASTER_ADDR is the first one's address" in note for note in made_one.notes)

    open_loop = {name: value for name, value in SERVE.items() if name != "concurrency"}
    case = made({**open_loop, "request_rate_per_second": 2.0})
    texts = [export(key, case).text for key in ("vllm", "sglang", "tensorrt_llm")]
    words = ("--max-num-seqs", "--max-running-requests", "--max_batch_size")
    assert not any(word in text for word, text in zip(words, texts, strict=True))


def test_servers_run_a_repositorys_own_python_and_say_so_only_where_it_has_some():
    for model, is_told in (("moonshotai/Kimi-K2-Instruct", True), (LLAMA_8B, False)):
        case = made(model=model, device="h200-sxm-141gb")
        for format_ in (VLLM, SGLANG, TENSORRT_LLM):
            text = format_.text(case)
            flag = "--trust_remote_code" if format_ is TENSORRT_LLM else "--trust-remote-code"
            assert (f"  {flag}" in text.replace(" --", "   --")) == is_told, (model, format_.key)
            assert ("Python of the model's repository" in text) == is_told, (model, format_.key)


def test_prefix_caching_is_left_as_by_default_and_said():
    for format_ in (VLLM, SGLANG, TENSORRT_LLM):
        text = format_.text(made())
        assert "prefix caching stays on" in text, format_.key
        for switch in ("no-enable-prefix-caching", "disable-radix-cache", "block_reuse: false"):
            assert switch not in text, format_.key


def test_gguf_on_vllm_names_its_plugin():
    text = VLLM.text(made(quantization="gguf:q4_k_m"))
    assert "vllm-gguf-plugin" in text
    assert "llm-compressor" not in text


def test_tensorrt_llm_cuts_prompts_longer_than_a_step_unless_it_is_told_not_to():
    longer = {**SERVE, "max_request_tokens": 20_000}
    for chunked, written in ((None, "enable_chunked_prefill: true"),
                             (True, "enable_chunked_prefill: true"),
                             (False, "enable_chunked_prefill: false")):  # fmt: skip
        case = made(longer, max_batch_tokens=8192, chunked_prefill=chunked)
        assert written in export("tensorrt_llm", case).text
    short = made({**SERVE, "max_request_tokens": 4096}, max_batch_tokens=8192)
    assert "chunked" not in export("tensorrt_llm", short).text
