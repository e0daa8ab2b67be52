"""What other tools call things, and configs as people paste them, are understood or refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.catalog.devices import get_device, list_devices
from planner.catalog.engines import engine_name, get_engine, list_engines
from planner.catalog.gguf import packed_format
from planner.catalog.gguf_names import agreed_pins, read_model_name
from planner.catalog.model_names import name_words, shape_key
from planner.catalog.models import (
    checkpoint_name,
    get_entry,
    get_model,
    list_models,
    model_from_config,
)
from planner.specs.base import (
    BadConfigError,
    BadRequestError,
    NotCoveredError,
    NotPossibleError,
    UnknownDeviceError,
    UnknownModelError,
    UnknownNameError,
    grouped_format,
    read_quantization,
)
from planner.specs.workload import Strategy, TrainWorkload
from tests.planner.asking import TINY, TRAIN, ask, held

INT4_128 = {"weight_dtype": "int4", "group_size": 128}


def test_a_published_name_of_a_format_is_read_whole_or_refused_as_it_was_given():
    cases = (
        ("gptq-int4", {"quantization": "gptq", "weight_dtype": "int4"}),
        ("GPTQ-Int8", {"quantization": "gptq", "weight_dtype": "int8"}),
        ("gptq-int4 g128 act-order", {"quantization": "gptq", **INT4_128}),
        ("gptq-int4 g- act-order", {"quantization": "gptq", "weight_dtype": "int4"}),
        ("int4 (awq g128)", {"quantization": "awq", **INT4_128}),
        ("bnb.nf4-dq", {"quantization": "nf4", "weight_dtype": "nf4"}),
        ("bnb-fp4", {"quantization": "nf4", "weight_dtype": "nf4"}),
        ("bitsandbytes 8-bit", {"weight_dtype": "int8"}),
        ("int4 (group 64)", {"weight_dtype": "int4", "group_size": 64}),
        ("exl2 4.0 bpw", {"quantization": "exl2:4.0"}),
        ("AQLM 2-bit", {"quantization": "aqlm:2"}),
        ("quip# 2-bit", {"quantization": "quip:2"}),
        ("Q4_K_M", {"quantization": "gguf:q4_k_m"}),
        ("gguf:q4_k_m (ollama default, assumed)", {"quantization": "gguf:q4_k_m"}),
        ("iq4_xs", {"quantization": "gguf:iq4_xs"}),
        ("kv-int8", {"kv_cache_dtype": "int8"}),
        ("smoothquant", {"quantization": "w8a8"}),
        ("none", {"quantization": None}),
        ("fp8", {"quantization": "fp8"}),
    )
    wrong = [
        (name, meant, read_quantization(name))
        for name, meant in cases
        if read_quantization(name) != meant
    ]
    assert not wrong, wrong

    for name in ("int8 AMX experts on CPU, int4 on GPU", "gptq awq", "hqq", ":4"):
        with pytest.raises((BadRequestError, NotCoveredError, UnknownNameError)) as caught:
            ask(strategy={"quantization": name})
        assert caught.value.field == "strategy.quantization", name
        assert name in str(caught.value), name


@given(st.text(max_size=30))
def test_any_text_is_read_into_fields_of_a_strategy(text):
    read = read_quantization(text)
    assert set(read) <= set(Strategy.model_fields)


def test_a_format_is_read_from_a_name_unless_given_and_a_mix_weighs_between_neighbours():
    found = packed_format(grouped_format("gptq", 3, 128))
    assert found.linear_bits == pytest.approx(3 + (16 + 3) / 128, rel=1e-4)
    strategy = Strategy.model_validate({"weight_dtype": "gguf:q4_k_m"})
    assert (strategy.weight_dtype, strategy.quantization) == (None, "gguf:q4_k_m")
    strategy = Strategy.model_validate({"quantization": "gptq-int4 g128", "group_size": 32})
    assert (strategy.quantization, strategy.group_size) == ("gptq", 32)

    weights = [
        held(ask(strategy={"quantization": name}, engine="llama_cpp"), "weights")
        for name in ("gguf:q3_k_m", "gguf:4.3", "gguf:q4_k_m")
    ]
    assert weights == sorted(weights)


def test_a_wide_dtype_beside_a_quantisation_computes_and_another_narrow_one_is_refused():
    for name, dtype, computes in (
        ("awq", "bf16", "bf16"),
        ("gptq-int4", "half", "fp16"),
        ("w4a16", "float16", "fp16"),
        ("fp8", "bfloat16", "fp8"),
        ("w8a8", "bf16", "int8"),
    ):
        both = ask(strategy={"quantization": name, "weight_dtype": dtype}, engine="vllm")
        alone = ask(strategy={"quantization": name}, engine="vllm")
        assert held(both, "weights") == held(alone, "weights"), name
        assert both.quality == alone.quality, name
        assert both.strategy.activation_dtype == computes, name

    for name, dtype in (("awq", "fp8"), ("fp8", "int4"), ("w8a8", "int4")):
        with pytest.raises(NotPossibleError, match=name) as caught:
            ask(strategy={"quantization": name, "weight_dtype": dtype})
        assert caught.value.field == "strategy.weight_dtype"


def test_other_tools_words_are_read_as_ours():
    for field, theirs, ours in (
        ("weight_dtype", "bfloat16", "bf16"),
        ("compute_dtype", "MXFP8", "fp8"),
        ("kv_cache_dtype", "fp8_e5m2", "fp8"),
        ("attention", "sdpa", "flash"),
        ("attention", "flash_attention_2", "flash"),
        ("attention", "flex_attention", "flex"),
        ("pipeline_schedule", "1F1B", "1f1b"),
        ("pipeline_schedule", "zero-bubble", "zero_bubble"),
        ("activation_recomputation", True, "full"),
    ):
        assert getattr(Strategy.model_validate({field: theirs}), field) == ours


def test_every_variant_of_adam_keeps_two_moments_and_an_unknown_optimiser_is_refused():
    for name in ("adam", "decoupled_adamw", "AdamW", "adamw_torch_fused"):
        workload = TrainWorkload.model_validate({**TRAIN, "optimizer": name})
        assert workload.optimizer == "adamw", name
    with pytest.raises(ValueError, match="adamw"):
        TrainWorkload.model_validate({**TRAIN, "optimizer": "sophia"})


def test_a_card_is_known_by_what_its_driver_prints():
    cases = (
        ("NVIDIA H100 80GB HBM3", "h100-sxm5-80gb"), ("NVIDIA H100 PCIe", "h100-pcie-80gb"),
        ("NVIDIA H100 NVL", "h100-nvl-94gb"), ("NVIDIA H200", "h200-sxm-141gb"),
        ("NVIDIA GH200 480GB", "gh200-96gb"), ("NVIDIA B200", "b200-sxm"),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm4-80gb"), ("NVIDIA A100 80GB PCIe", "a100-pcie-80gb"),
        ("NVIDIA A100-PCIE-40GB", "a100-pcie-40gb"), ("NVIDIA A800-SXM4-80GB", "a800-sxm4-80gb"),
        ("NVIDIA A10G", "a10g"), ("NVIDIA L40S", "l40s"), ("Tesla T4", "t4"),
        ("Tesla V100-SXM2-32GB", "v100-sxm2-32gb"), ("NVIDIA RTX A6000", "rtx-a6000"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx-6000-ada"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"), ("NVIDIA TITAN RTX", "titan-rtx"),
        ("AMD Instinct MI300X", "mi300x"), ("Radeon RX 7900 XTX", "rx-7900-xtx"),
        ("L40S-48GB", "l40s"), ("a800-sxm-80gb", "a800-sxm4-80gb"),
    )  # fmt: skip
    wrong = [
        (printed, device, get_device(printed).id)
        for printed, device in cases
        if get_device(printed).id != device
    ]
    assert not wrong, wrong


def test_another_memory_is_another_card_and_an_alias_hides_no_device():
    with pytest.raises(UnknownDeviceError, match="rtx-4090"):
        get_device("RTX 4090 48GB")
    for device in list_devices():
        assert get_device(device.id) is device
        assert get_device(device.name).id == device.id


def test_a_copy_of_a_model_has_the_shape_of_the_model():
    for named, known in (
        ("NousResearch/Llama-2-7b-chat-hf", "meta-llama/Llama-2-7b-chat-hf"),
        ("unsloth/Meta-Llama-3.1-8B-Instruct", "meta-llama/Meta-Llama-3.1-8B-Instruct"),
        ("Llama 2 13B", "meta-llama/Llama-2-13b"),
        ("Mixtral 8x7B", "mistralai/Mixtral-8x7B-v0.1"),
        ("gpt-j-6b", "EleutherAI/gpt-j-6b"),
    ):
        model = get_model(named)
        assert model.id == known, (named, known)
        assert known in model.note, (named, known)


def test_every_alias_stands_for_its_own_repository_with_or_without_its_owner():
    for entry in list_models():
        for name in (each for each in entry.names if "/" in each):
            short = name.rpartition("/")[2]
            assert checkpoint_name(name) == get_model(name).id == name
            for written in (short.lower(), short.replace("-", " ")):
                named = checkpoint_name(written)
                assert name_words(named) == name_words(name), (written, named)
                assert get_model(written).id == named
        assert set(entry.own) <= set(entry.aliases)


def test_a_short_name_stands_for_the_model_with_its_version_tuning_and_limits_or_is_refused():
    for named, known, context in (
        ("llama-3.1-8b-instruct", "meta-llama/Llama-3.1-8B-Instruct", 131_072),
        ("llama-3.3-70b", "meta-llama/Llama-3.3-70B-Instruct", 131_072),
        ("qwq-32b", "Qwen/QwQ-32B", 131_072),
        ("phi-3.5-mini", "microsoft/Phi-3.5-mini-instruct", 131_072),
        ("kimi-k2", "moonshotai/Kimi-K2-Instruct", 131_072),
        ("qwen3-4b-instruct-2507", "Qwen/Qwen3-4B-Instruct-2507", 262_144),
        ("qwen3-30b-a3b", "Qwen/Qwen3-30B-A3B", 40_960),
        ("qwen3-coder-30b-a3b", "Qwen/Qwen3-Coder-30B-A3B-Instruct", 262_144),
        ("mixtral-8x22b", "mistralai/Mixtral-8x22B-v0.1", 65_536),
        ("mistral-small-24b", "mistralai/Mistral-Small-24B-Base-2501", 32_768),
        ("llama-4-scout", "meta-llama/Llama-4-Scout-17B-16E-Instruct", 10_485_760),
    ):
        model = get_model(named)
        found = (checkpoint_name(named), model.id, model.max_position_embeddings)
        assert found == (known, known, context), named
    assert get_model("my/Phi-3.5-mini-instruct-AWQ").max_position_embeddings == 131_072

    for named, nearest in (
        ("mistral-7b", "mistralai/Mistral-7B-v0.3"),
        ("zephyr-7b", "HuggingFaceH4/zephyr-7b-beta"),
        ("qwen3", "Qwen/Qwen3-0.6B"),
        ("qwen3-8b-instruct", "Qwen/Qwen3-8B"),
        ("llama-2-7b-instruct", "meta-llama/Llama-2-7b"),
    ):
        with pytest.raises(UnknownModelError) as caught:
            checkpoint_name(named)
        assert nearest in caught.value.nearest, named


def test_a_copy_has_the_models_own_name_and_the_nearest_are_named_as_they_are_written():
    for named in (
        "TheBloke/Llama-2-7B-32g-GPTQ", "Mistral 7B", "qwen25-7b", "llama", "7b", "",
        "mistralai/Mistral-9B",
    ):  # fmt: skip
        with pytest.raises(UnknownModelError):
            get_model(named)

    with pytest.raises(UnknownModelError) as caught:
        get_model("meta-llama/Llama-3.1-9B")
    assert "meta-llama/Llama-3.1-8B" in caught.value.nearest

    for entry in list_models():
        for name in (entry.id, *entry.aliases):
            assert get_entry(name.upper()).id == entry.id
        assert shape_key(entry.id)


def test_an_engine_is_known_however_it_is_spelt_and_trains_by_others_where_it_has_no_figures():
    for named, known in (
        ("TensorRT-LLM", "tensorrt_llm"), ("Megatron-LM", "megatron"), ("llama.cpp", "llama_cpp"),
        ("megatron-deepspeed", "megatron_deepspeed"), (None, "torch"),
    ):  # fmt: skip
        assert engine_name(named) == known, (named, known)

    for engine in ("colossalai", "vllm", "my trainer"):
        found = ask(workload=TRAIN, engine=engine)
        known = ask(workload=TRAIN, engine="pytorch_lightning")
        assert found.performance.step_seconds == pytest.approx(known.performance.step_seconds)
        assert any("generic figures of training engines" in line for line in found.warnings)
    roles = {name: get_engine(name, "gpu", training=True).role for name in list_engines()}
    assert set(roles.values()) == {"runner", "training"}


SPARSE = {
    **TINY,
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
}
LATENT = {
    **TINY,
    "model_type": "deepseek_v2",
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
HYBRID = {
    **TINY,
    "model_type": "nemotron_h",
    "conv_kernel": 4,
    "mamba_num_heads": 8,
    "mamba_head_dim": 32,
    "ssm_state_size": 16,
    "n_groups": 2,
}


def without(config: dict, *names: str) -> dict:
    return {name: value for name, value in config.items() if name not in names}


def refused(config: dict) -> BadConfigError:
    with pytest.raises(BadConfigError) as caught:
        model_from_config(config)
    return caught.value


def test_sizes_that_are_text_null_or_missing_are_refused_by_name():
    error = refused({**TINY, "num_hidden_layers": "32"})
    assert error.field == "model.num_hidden_layers"
    assert "num_hidden_layers is '32'" in error.message
    assert "a whole number of at least 0" in error.message

    error = refused({**TINY, "vocab_size": None})
    assert error.message == "config.json of model_type llama lacks vocab_size"

    error = refused(without(TINY, "hidden_size", "vocab_size"))
    assert "lacks hidden_size, vocab_size" in error.message
    assert error.field == "model.hidden_size"

    error = refused(without(TINY, "intermediate_size"))
    assert error.field == "model.intermediate_size"


def test_gpt2_is_four_times_as_wide_inside_where_its_config_says_nothing():
    config = {
        "model_type": "gpt2",
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
        "vocab_size": 50257,
    }

    model = model_from_config({**config, "n_positions": 1024, "n_inner": None})

    assert model.intermediate_size == 3072
    assert model.learned_positions == 1024
    assert model.tie_word_embeddings


def test_sizes_that_are_untold_zero_too_many_or_lists_are_taken_or_refused():
    model = model_from_config(without(TINY, "max_position_embeddings"))
    assert model.max_position_embeddings == 2048

    for name in ("num_key_value_heads", "head_dim", "max_position_embeddings"):
        error = refused({**TINY, name: 0})
        assert error.field == f"model.{name}", name
        assert f"{name} is 0" in error.message, name

    error = refused({**TINY, "hidden_size": 4})
    assert error.field == "model.num_attention_heads"
    assert "at most hidden_size, 4" in error.message

    error = refused({**TINY, "num_key_value_heads": [4, 4, 2, 4, 4, 4]})
    assert "num_key_value_heads is [4, 4, 2, 4, 4, 4]" in error.message


def test_the_dtype_is_read_in_both_spellings_and_the_text_part_wins():
    old = model_from_config({**TINY, "torch_dtype": "float16"})
    new = model_from_config({**TINY, "dtype": "float16"})
    assert old.weight_dtype == new.weight_dtype == "fp16"
    assert model_from_config({**TINY, "torch_dtype": "float8_e5m2"}).weight_dtype is None

    outer = {"model_type": "llava", "hidden_size": 9, "text_config": {**TINY, "vocab_size": 777}}
    model = model_from_config(outer)
    assert (model.model_type, model.hidden_size, model.vocab_size) == ("llama", 256, 777)
    outer = {"text_config": TINY, "quantization_config": {"quant_method": "fp8"}}
    assert model_from_config(outer).weight_dtype == "fp8"
    plain = model_from_config(TINY)
    marked = model_from_config({**TINY, "_name_or_path": "x", "rope_scaling": {"factor": 8.0}})
    assert marked == plain


def test_windows_are_refused_or_full_and_sparse_layers_counted_however_they_are_given():
    error = refused({**TINY, "model_type": "mistral", "sliding_window": -5})
    assert error.field == "model.sliding_window"
    assert "window is -5" in error.message
    model = model_from_config({**TINY, "model_type": "mistral", "sliding_window": None})
    assert model.attention_layers == ()

    config = {**SPARSE, "decoder_sparse_step": 2, "mlp_only_layers": [1]}
    model = model_from_config(config)
    # Layers 1, 3 and 5 are due; layer 1 is excepted.
    assert model.num_moe_layers == 2
    assert model.num_dense_layers == 4

    for first, dense in ((0, 0), (1, 1), (6, 6), (99, 6)):
        model = model_from_config({**LATENT, "first_k_dense_replace": first})
        assert (model.num_dense_layers, model.num_moe_layers) == (dense, 6 - dense), (first, dense)

    kinds = ["dense", "sparse", "sparse", "dense", "sparse", "sparse"]
    model = model_from_config({**SPARSE, "mlp_layer_types": kinds})
    assert model.num_moe_layers == 4


def test_sparse_families_and_latent_attention_name_what_they_lack():
    error = refused(without(SPARSE, "num_experts_per_tok"))
    assert error.field == "model.num_experts_per_tok"
    mixtral = {**without(SPARSE, "moe_intermediate_size"), "model_type": "mixtral"}
    model = model_from_config(mixtral)
    assert model.moe_intermediate_size == TINY["intermediate_size"]

    error = refused(without(LATENT, "v_head_dim"))
    assert error.field == "model.v_head_dim"
    model = model_from_config(LATENT)
    (group,) = model.layers_by_attention
    assert model.head_dim == group.key_dim == 16 + 8
    assert (group.latent_dim, group.q_lora_rank) == (32 + 8, None)


def test_a_pattern_says_what_each_layer_does_and_how_many_there_are():
    model = model_from_config({**HYBRID, "hybrid_override_pattern": "MM*-M-"})
    kinds = {group.kind: group.count for group in model.layers_by_attention}
    assert kinds == {"recurrent": 3, "full": 1, "none": 2}
    assert model.num_layers_without_feed_forward == 4
    assert model.num_feed_forward_layers == 2

    blocks = ["mamba", "attention", "mlp", "mamba"]
    model = model_from_config(
        {**without(HYBRID, "num_hidden_layers"), "layers_block_type": blocks}
    )
    assert model.num_hidden_layers == 4

    config = {**TINY, "model_type": "gemma3_text", "sliding_window": 64}
    for step, full in ((1, 6), (2, 3), (4, 1), (6, 1), (100, 0)):
        model = model_from_config({**config, "sliding_window_pattern": step})
        counted = sum(g.count for g in model.layers_by_attention if g.kind == "full")
        assert counted == full, (step, full)


def test_a_name_with_a_gguf_type_is_its_model_in_that_type_however_it_is_published():
    for name, model, pins in (
        ("bartowski/Meta-Llama-3.1-8B-Instruct-GGUF:Q4_K_M", "meta-llama/Meta-Llama-3.1-8B-Instruct", "q4_k_m"),
        ("hf.co/unsloth/Qwen3-8B-GGUF:Q4_K_M", "Qwen/Qwen3-8B", "q4_k_m"),
        ("Qwen2.5-7B-Instruct-Q4_K_M.gguf", "Qwen/Qwen2.5-7B-Instruct", "q4_k_m"),
        ("/m/Llama-3.3-70B-Instruct-Q6_K-00001-of-00002.gguf", "meta-llama/Llama-3.3-70B-Instruct", "q6_k"),
        ("https://huggingface.co/x/Y/resolve/main/Qwen3-8B-Q8_0.gguf", "Qwen/Qwen3-8B", "q8_0"),
        ("bartowski/Qwen_Qwen3-8B-GGUF:IQ4_XS", "Qwen/Qwen3-8B", "iq4_xs"),
        ("unsloth/Qwen3.6-27B-MTP-GGUF:UD-Q4_K_XL", "Qwen/Qwen3.6-27B", "ud-q4_k_xl"),
        ("Qwen3-30B-A3B-UD-IQ4_XS.gguf", "Qwen/Qwen3-30B-A3B", "ud-iq4_xs"),
        ("bartowski/Qwen_Qwen3-8B-GGUF:Q6_K_L", "Qwen/Qwen3-8B", "q6_k_l"),
        ("unsloth/Qwen3-8B-GGUF", "Qwen/Qwen3-8B", "q4_k_m"),  # llama.cpp's own choice
        ("llama3.3:70b-instruct-q4_K_M", "meta-llama/Llama-3.3-70B-Instruct", "q4_k_m"),
        ("qwen3:8b-q8_0", "Qwen/Qwen3-8B", "q8_0"),
        ("Qwen3-8B-Q5_K_M", "Qwen/Qwen3-8B", "q5_k_m"),
        ("ggml-org/gpt-oss-20b-GGUF", "openai/gpt-oss-20b", None),  # keeps its own format
        ("qwen3:8b", "Qwen/Qwen3-8B", None),
        ("Qwen3-8B:latest", "Qwen/Qwen3-8B", None),
        ("https://huggingface.co/Qwen/Qwen3-8B", "Qwen/Qwen3-8B", None),
        ("https://huggingface.co/Qwen/Qwen3-8B/tree/main?x=1", "Qwen/Qwen3-8B", None),
        ("Qwen/Qwen3-8B-AWQ", "Qwen/Qwen3-8B-AWQ", None),
    ):  # fmt: skip
        found = read_model_name(name)
        stated = {"quantization": f"gguf:{pins}"} if pins else {}
        assert (found.id, found.pins) == (model, stated), name
    found = read_model_name("Qwen/Qwen3-8B-GGUF:BF16")
    assert (found.id, found.pins) == ("Qwen/Qwen3-8B", {"weight_dtype": "bf16"})
    for entry in list_models():
        for address in ("https://huggingface.co/{}", "hf.co/{}", "huggingface.co/{}/tree/main"):
            assert checkpoint_name(address.format(entry.id)) == entry.id
            assert get_model(address.format(entry.id)) == get_model(entry.id)

    with pytest.raises(BadRequestError, match=r"Q9_K, whose size is not known.*Qwen/Qwen3-8B"):
        read_model_name("unsloth/Qwen3-8B-GGUF:Q9_K")
    named = read_model_name("qwen3:8b-q8_0")
    assert agreed_pins(named, {"quantization": "Q8_0"}, "--quantization") == {}
    with pytest.raises(BadRequestError, match="'awq', but the name of the model states gguf:q8_0"):
        agreed_pins(named, {"quantization": "awq"}, "--quantization")
