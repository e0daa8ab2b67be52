"""Serving exports: what a plan decides becomes the other tool's flags, and nothing else does."""

import json
import shlex

import yaml

from planner.exports.llama_cpp import LLAMA_CPP, llama_cpp_arguments
from planner.exports.sglang import SGLANG, sglang_arguments
from planner.exports.tensorrt_llm import TENSORRT_LLM, trtllm_arguments, trtllm_text
from planner.exports.vllm import VLLM, layer_partition, vllm_arguments, vllm_text
from tests.planner.asking import LLAMA_8B, MIXTRAL
from tests.planner.exports.making import GIB, SERVE, made

DRAFT = {"draft_model": "org/tiny", "tokens": 5}


def test_one_device_needs_no_flag_for_its_layout():
    command = shlex.join(vllm_arguments(made(tensor_parallel_size=1)))
    assert command == (
        f"vllm serve {LLAMA_8B} --dtype bfloat16 --max-model-len 4800 --max-num-seqs 64 "
        "--no-enable-prefix-caching"
    )


def test_sizes_become_each_engines_flags():
    case = made(tensor_parallel_size=2, pipeline_parallel_size=2, data_parallel_size=2)
    for arguments, flags in (
        (
            vllm_arguments,
            "--tensor-parallel-size 2 --pipeline-parallel-size 2 --data-parallel-size 2",
        ),
        (sglang_arguments, "--tp-size 2 --pp-size 2 --dp-size 2"),
        (trtllm_arguments, "--tp_size 2 --pp_size 2"),
        (llama_cpp_arguments, "--split-mode row"),
    ):
        assert flags in shlex.join(arguments(case)), (arguments, flags)


def test_each_replica_takes_its_share_of_the_requests():
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
        ({"kv_cache_dtype": "fp8"}, "--kv-cache-dtype fp8_e4m3"),
        ({"max_batch_tokens": 4096}, "--chunked-prefill-size 4096"),
        ({"chunked_prefill": False, "max_batch_tokens": 4096}, "--chunked-prefill-size -1"),
        ({"attention_data_parallel_size": 4}, "--tp-size 4 --attn-dp-size 4"),
        ({"offload": {"weights_cpu": 0.5}}, "--cpu-offload-gb 15"),
        ({"speculative": DRAFT}, "--speculative-draft-model-path org/tiny"),
    ):
        assert flags in shlex.join(sglang_arguments(made(**strategy))), (strategy, flags)


def test_a_choice_becomes_llama_cpps_flag():
    for strategy, flags in (
        ({"weight_dtype": "int4"}, "--model Llama-3.1-8B-Q4_K_M.gguf"),
        ({"quantization": "gguf:q5_k_s"}, "--model Llama-3.1-8B-Q5_K_S.gguf"),
        ({"kv_cache_dtype": "int8"}, "--cache-type-k q8_0 --cache-type-v q8_0 --flash-attn on"),
        ({"offload": {"weights_cpu": 0.5}}, "--n-gpu-layers 16"),
        ({"offload": {"weights_cpu": 0.0}}, "--n-gpu-layers all"),
        ({"speculative": DRAFT}, "--spec-draft-model tiny.gguf --spec-draft-n-max 5"),
    ):
        assert flags in shlex.join(llama_cpp_arguments(made(**strategy))), (strategy, flags)


def test_llama_cpp_keeps_every_layer_on_a_processor():
    case = made(device="cpu-xeon-8480-2s", engine="llama_cpp")
    assert "--n-gpu-layers 0" in shlex.join(llama_cpp_arguments(case))


def test_tensorrt_llms_further_options_are_yaml_that_its_command_names():
    case = made(kv_cache_dtype="fp8", attention_data_parallel_size=4, speculative=DRAFT)
    text = trtllm_text(case)
    options = yaml.safe_load(text.split("<<'END'\n")[1].split("END\n")[0])

    assert options["kv_cache_config"] == {"dtype": "fp8", "enable_block_reuse": False}
    assert options["enable_attention_dp"] is True
    assert options["speculative_config"]["max_draft_len"] == 5
    assert "--extra_llm_api_options trtllm-options.yaml" in text


def test_vllms_draft_is_json_that_survives_the_shell():
    command = VLLM.text(made(speculative=DRAFT)).replace("\\\n", "")
    line = next(part for part in command.splitlines() if not part.startswith("#"))
    words = shlex.split(line)
    setting = json.loads(words[words.index("--speculative-config") + 1])
    assert setting == {"method": "draft_model", "model": "org/tiny", "num_speculative_tokens": 5}


def test_shared_prefixes_turn_the_cache_of_each_engine_on():
    case = made({**SERVE, "prefix_share_ratio": 0.5})
    assert "--enable-prefix-caching" in vllm_arguments(case)
    assert "--disable-radix-cache" not in sglang_arguments(case)
    assert "enable_block_reuse: true" in trtllm_text(case)


def test_several_nodes_get_a_rank_and_a_meeting_point_that_the_shell_fills_in():
    case = made(tensor_parallel_size=8, pipeline_parallel_size=2, nodes=2)
    for chosen in (VLLM, SGLANG):
        text = chosen.text(case)
        assert "--nnodes 2" in text, chosen
        assert '--node-rank "$NODE_RANK"' in text, chosen
        assert "MASTER_ADDR" in text, chosen
        assert "every node" in " ".join(chosen.notes(case)), chosen


def test_figures_of_another_engine_are_named_as_such():
    for chosen in (VLLM, SGLANG, LLAMA_CPP, TENSORRT_LLM):
        assert any("figures are for torch" in note for note in chosen.notes(made(engine="torch")))


def test_what_a_command_cannot_say_is_a_note():
    case = made(disaggregated={"prefill_devices": 2, "decode_devices": 6}, offload={"kv_cpu": 0.5})
    for chosen in (VLLM, SGLANG, LLAMA_CPP, TENSORRT_LLM):
        notes = " ".join(chosen.notes(case))
        assert "prefills on 2 and decodes on 6" in notes, chosen
        assert "cache in host memory" in notes, chosen


def test_a_format_that_the_engine_cannot_make_itself_names_a_checkpoint():
    for chosen, dtype, needs in (
        (VLLM, "fp8", False),
        (VLLM, "int4", True),
        (SGLANG, "int8", True),
        (TENSORRT_LLM, "fp8", True),
    ):
        notes = chosen.notes(made(weight_dtype=dtype))
        assert any("checkpoint" in note for note in notes) is needs, (chosen, dtype, needs)


def test_a_format_that_gguf_lacks_says_which_one_is_close():
    notes = LLAMA_CPP.notes(made(weight_dtype="fp8", engine="llama_cpp"))
    assert any("GGUF has no fp8: Q8_0" in note for note in notes)


def test_weights_that_all_live_in_host_memory_are_counted_there():
    """The host holds 1.65 times what vLLM is told to offload."""
    case = made(offload={"weights_cpu": 1.0}, memory={"host_bytes": round(1.65 * 30 * GIB)})
    assert "--cpu-offload-gb 30.0" in shlex.join(vllm_arguments(case))


def test_experts_are_spread_by_each_engines_own_flag():
    case = made(model=MIXTRAL, tensor_parallel_size=8, expert_parallel_size=8)
    assert "--enable-expert-parallel" in vllm_arguments(case)
    assert "--ep-size 8" in shlex.join(sglang_arguments(case))
    assert "--ep_size 8" in shlex.join(trtllm_arguments(case))


def test_a_model_that_is_published_in_its_format_needs_no_other_checkpoint():
    for chosen in (VLLM, SGLANG, TENSORRT_LLM):
        notes = chosen.notes(made(model="deepseek-ai/DeepSeek-V3", weight_dtype="fp8"))
        assert not any("checkpoint" in note for note in notes), chosen


def test_vllm_is_told_how_stages_share_a_remainder_of_layers():
    for layers, said in (
        ([11, 11, 10], "export VLLM_PP_LAYER_PARTITION=11,11,10\n"),
        ([8, 8], ""),
        (None, ""),
    ):
        case = made(memory={"per_stage_layers": layers}, pipeline_parallel_size=2)
        assert layer_partition(case) == said, (layers, said)
        assert vllm_text(case).startswith(said), (layers, said)
