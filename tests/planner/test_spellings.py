"""What other tools call a format, an optimiser, a card or a model is understood, or refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.catalog.devices import get_device, list_devices
from planner.catalog.engines import engine_name, get_engine, list_engines
from planner.catalog.gguf import packed_format
from planner.catalog.models import get_entry, get_model, list_models, shape_key
from planner.errors import NotCoveredError, UnknownDeviceError, UnknownModelError, UnknownNameError
from planner.specs.base import grouped_format, read_quantization
from planner.specs.workload import Strategy, TrainWorkload
from tests.planner.asking import TRAIN, ask, held

INT4_128 = {"weight_dtype": "int4", "group_size": 128}


def test_a_published_name_of_a_format_is_read():
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


def test_a_name_that_cannot_be_read_whole_is_refused_as_it_was_given():
    for name in ("int8 AMX experts on CPU, int4 on GPU", "gptq awq", "hqq", ":4"):
        with pytest.raises((NotCoveredError, UnknownNameError)) as caught:
            ask(strategy={"quantization": name})
        assert caught.value.field == "strategy.quantization", name
        assert name in str(caught.value), name


@given(st.text(max_size=30))
def test_any_text_is_read_into_fields_of_a_strategy(text):
    read = read_quantization(text)
    assert set(read) <= set(Strategy.model_fields)


def test_three_bits_in_groups_hold_a_scale_and_a_zero_point_for_each():
    found = packed_format(grouped_format("gptq", 3, 128))
    assert found.linear_bits == pytest.approx(3 + (16 + 3) / 128, rel=1e-4)


def test_a_format_given_as_a_dtype_is_a_quantisation():
    strategy = Strategy.model_validate({"weight_dtype": "gguf:q4_k_m"})
    assert (strategy.weight_dtype, strategy.quantization) == (None, "gguf:q4_k_m")


def test_what_is_given_outright_wins_over_the_name():
    strategy = Strategy.model_validate({"quantization": "gptq-int4 g128", "group_size": 32})
    assert (strategy.quantization, strategy.group_size) == ("gptq", 32)


def test_a_mix_of_so_many_bits_weighs_between_its_neighbours():
    weights = [
        held(ask(strategy={"quantization": name}, engine="llama_cpp"), "weights")
        for name in ("gguf:q3_k_m", "gguf:4.3", "gguf:q4_k_m")
    ]
    assert weights == sorted(weights)


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


def test_every_variant_of_adam_keeps_two_moments():
    for name in ("adam", "decoupled_adamw", "AdamW", "adamw_torch_fused"):
        workload = TrainWorkload.model_validate({**TRAIN, "optimizer": name})
        assert workload.optimizer == "adamw", name


def test_an_unknown_optimiser_is_refused():
    with pytest.raises(ValueError, match="adamw"):
        TrainWorkload.model_validate({**TRAIN, "optimizer": "sophia"})


def test_a_card_is_known_by_what_its_driver_prints():
    cases = (
        ("NVIDIA H100 80GB HBM3", "h100-sxm5-80gb"),
        ("NVIDIA H100 PCIe", "h100-pcie-80gb"),
        ("NVIDIA H100 NVL", "h100-nvl-94gb"),
        ("NVIDIA H200", "h200-sxm-141gb"),
        ("NVIDIA GH200 480GB", "gh200-96gb"),
        ("NVIDIA B200", "b200-sxm"),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm4-80gb"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie-80gb"),
        ("NVIDIA A100-PCIE-40GB", "a100-pcie-40gb"),
        ("NVIDIA A800-SXM4-80GB", "a800-sxm4-80gb"),
        ("NVIDIA A10G", "a10g"),
        ("NVIDIA L40S", "l40s"),
        ("Tesla T4", "t4"),
        ("Tesla V100-SXM2-32GB", "v100-sxm2-32gb"),
        ("NVIDIA RTX A6000", "rtx-a6000"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx-6000-ada"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA TITAN RTX", "titan-rtx"),
        ("AMD Instinct MI300X", "mi300x"),
        ("Radeon RX 7900 XTX", "rx-7900-xtx"),
        ("L40S-48GB", "l40s"),
        ("a800-sxm-80gb", "a800-sxm4-80gb"),
    )
    wrong = [
        (printed, device, get_device(printed).id)
        for printed, device in cases
        if get_device(printed).id != device
    ]
    assert not wrong, wrong


def test_a_card_with_another_memory_is_another_card():
    with pytest.raises(UnknownDeviceError, match="rtx-4090"):
        get_device("RTX 4090 48GB")


def test_an_alias_never_hides_another_device():
    for device in list_devices():
        assert get_device(device.id) is device
        assert get_device(device.name).id == device.id


def test_a_copy_of_a_model_has_the_shape_of_the_model():
    for named, known in (
        ("NousResearch/Llama-2-7b-chat-hf", "meta-llama/Llama-2-7b"),
        ("unsloth/Meta-Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-8B"),
        ("Llama 2 13B", "meta-llama/Llama-2-13b"),
        ("Mixtral 8x7B", "mistralai/Mixtral-8x7B-v0.1"),
        ("gpt-j-6b", "EleutherAI/gpt-j-6b"),
    ):
        model = get_model(named)
        assert model.id == known, (named, known)
        assert known in model.note, (named, known)


def test_a_name_that_says_more_or_less_is_no_copy():
    for named in (
        "TheBloke/Llama-2-7B-32g-GPTQ",
        "Mistral 7B",
        "qwen25-7b",
        "llama",
        "7b",
        "",
        "mistralai/Mistral-9B",
    ):
        with pytest.raises(UnknownModelError):
            get_model(named)


def test_the_nearest_models_are_named_as_they_are_written():
    with pytest.raises(UnknownModelError) as caught:
        get_model("meta-llama/Llama-3.1-9B")
    assert "meta-llama/Llama-3.1-8B" in caught.value.nearest


def test_every_model_of_the_catalog_is_found_under_its_own_name():
    for entry in list_models():
        for name in (entry.id, *entry.aliases):
            assert get_entry(name.upper()).id == entry.id
        assert shape_key(entry.id)


def test_an_engine_is_known_however_it_is_spelt():
    for named, known in (
        ("TensorRT-LLM", "tensorrt_llm"),
        ("Megatron-LM", "megatron"),
        ("llama.cpp", "llama_cpp"),
        ("megatron-deepspeed", "megatron_deepspeed"),
        (None, "torch"),
    ):
        assert engine_name(named) == known, (named, known)


def test_an_engine_without_figures_trains_by_those_of_engines_that_train():
    for engine in ("colossalai", "vllm", "my trainer"):
        found = ask(workload=TRAIN, engine=engine)
        known = ask(workload=TRAIN, engine="pytorch_lightning")
        assert found.performance.step_seconds == pytest.approx(known.performance.step_seconds)
        assert any("generic figures of training engines" in line for line in found.warnings)


def test_an_engine_keeps_its_own_role_where_it_can():
    roles = {name: get_engine(name, "gpu", training=True).role for name in list_engines()}
    assert set(roles.values()) == {"runner", "training"}
