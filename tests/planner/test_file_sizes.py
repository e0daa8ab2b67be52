"""Bytes of stored weights by their format, and names that state one."""

import io
import json
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.__main__ import run_catalog
from planner.api import estimate, plan
from planner.catalog.format_names import split_format, with_format
from planner.catalog.gguf import PackedFormat, file_bytes, file_sizes, packed_format
from planner.catalog.model_names import read_name
from planner.catalog.models import (
    checkpoint_name,
    get_entry,
    get_model,
    list_models,
    model_from_config,
)
from planner.catalog.reading import data_text
from planner.cost.parameters import count_parameters
from planner.cost.weights import (
    first_identical_stages,
    formats_of,
    group_size_of,
    key_value_share,
    kv_heads_share,
    padded_expert_ratio,
    stage_layers,
    stage_vocabulary,
    unquantised_dtype,
    weight_bytes_per_element,
)
from planner.exports.registry import export, export_case
from planner.fitting.evidence import table
from planner.specs.base import NotPossibleError, UnknownModelError, UnknownNameError
from planner.specs.estimate import EstimateRequest, PlanRequest
from planner.specs.model import AttentionLayers, ModelSpec
from tests.planner.asking import LLAMA_8B, ask, held

GIB = 1024**3
# Bytes and weights of one block: ggml/src/ggml-common.h of llama.cpp.
BLOCKS = {
    "q8_0": (2 + 32, 32),
    "q4_0": (2 + 16, 32),
    "q4_1": (2 + 2 + 16, 32),
    "q5_0": (2 + 4 + 16, 32),
    "q5_1": (2 + 2 + 4 + 16, 32),
    "q2_k": (16 + 64 + 2 + 2, 256),
    "q3_k_m": (32 + 64 + 12 + 2, 256),
    "q4_k_m": (2 + 2 + 12 + 128, 256),
    "q5_k_m": (2 + 2 + 12 + 32 + 128, 256),
    "q6_k": (128 + 64 + 16 + 2, 256),
    "iq4_xs": (2 + 2 + 4 + 128, 256),
}


def test_gguf_files_are_stored_in_whole_blocks():
    # A GGUF embedding is stored in whole blocks of its type.
    for kind, (stored, weights) in BLOCKS.items():
        found = packed_format(f"gguf:{kind}")
        assert found.embedding_bits == 8 * stored / weights
    # A q8_0 file of Llama 8B is 34 bytes for 32 weights.
    found = ask(device="rtx-4090", engine="llama_cpp", strategy={"quantization": "gguf:q8_0"})
    # 65 norms of 4,096 stay in 32 bits; every other weight is in a block.
    norms = 65 * 4096
    assert held(found, "weights") == pytest.approx((8_030_261_248 - norms) / 32 * 34 + 4 * norms)
    # An embedding and a head apart weigh their mean.
    packed = PackedFormat(linear_bits=4.0, embedding_bits=4.0, head_bits=8.0)
    assert packed.vocabulary_bytes_per_element == 0.75
    assert packed.head_bytes_per_element == 1.0
    # A mean of bits is a mix of GGUF types with a wider head.
    mix = packed_format("gguf:4.5")
    assert (mix.linear_bits, mix.embedding_bits, mix.head_bits) == (4.5, 4.5, 6.5625)


def test_the_name_of_a_packed_format_is_read_in_any_case_and_in_its_range():
    # The name of a packed format may be in any case.
    assert packed_format("GGUF:Q4_K_M") == packed_format("gguf:q4_k_m")
    # Bits up to both ends of their range are taken.
    for bits in [0.5, 4.25, 32.0]:
        assert packed_format(f"exl2:{bits}").linear_bits == bits

    # Bits outside their range are refused with the value and an example.
    for bits in ["0.49", "32.01", "nan", "inf", "-4", ""]:
        with pytest.raises(UnknownNameError) as caught:
            packed_format(f"exl2:{bits}")
        assert caught.value.field == "strategy.quantization"
        assert f"'exl2:{bits}'" in caught.value.message
        assert "exl2:4.25" in caught.value.message

    # A type that GGUF does not have is refused.
    with pytest.raises(UnknownNameError, match=r"gguf has no such format"):
        packed_format("gguf:q4_k_x")

    # A packed format stands for the nearest wider dtype.
    for bits, dtype in [
        (1.99, "ternary"),
        (2.0, "int4"),
        (5.99, "int4"),
        (6.0, "int8"),
        (8.99, "int8"),
        (9, "fp16"),
    ]:
        assert PackedFormat(bits, 16.0, 16.0).nominal == dtype


def test_a_weight_takes_its_share_of_its_block():
    for dtype, block_bits, weights in [
        ("int4", 128 * 4 + 16 + 16, 128),
        ("nvfp4", 16 * 4 + 8, 16),
        ("mxfp4", 32 * 4 + 8, 32),
        ("int8", 8, 1),
        ("fp8", 8, 1),
        ("bf16", 16, 1),
        ("fp32", 32, 1),
    ]:
        assert weight_bytes_per_element(dtype) == block_bits / weights / 8

    # A normal float takes the published bits with double quantisation: Dettmers et al. 2023
    # (QLoRA), arXiv:2305.14314: 0.127 bits a parameter for the scales.
    assert weight_bytes_per_element("nf4") * 8 == pytest.approx(4.127, abs=5e-4)
    # Norms keep a wide dtype and never a quantised one.
    for dtype, kept in [("fp32", "fp32"), ("fp16", "fp16"), ("int4", "bf16")]:
        assert unquantised_dtype(dtype) == kept

    # Each part of the layers has exactly one format.
    formats = formats_of("fp8", 1.0, {"attention": "bf16", "feed_forward": "bf16"})
    assert [(found.dtype, found.element_bytes) for found in formats] == [("fp8", 1.0), ("bf16", 2)]
    for part in ("attention", "feed_forward", "experts"):
        assert sum(found.contains(part) for found in formats) == 1


@given(group=st.integers(1, 4096))
def test_formats_of_a_fixed_block_ignore_what_group_is_asked_for(group):
    assert weight_bytes_per_element("mxfp4", group) == 17 / 32
    assert weight_bytes_per_element("nvfp4", group) == 9 / 16
    assert group_size_of("int4", group) == group
    assert group_size_of("int8", group) == group
    assert group_size_of("fp8", group) == 0


def test_gpt_oss_is_as_large_as_its_model_card_says():
    """OpenAI 2025, arXiv:2508.10925, table 1; active parameters leave the embedding out."""
    for name, total, active, gib in [
        ("openai/gpt-oss-120b", 116.83, 5.13, 60.8),
        ("openai/gpt-oss-20b", 20.91, 3.61, 12.8),
    ]:
        counts = count_parameters(get_model(name))
        found = ask(model=name, device="h100-sxm5-80gb", engine="tensorrt_llm")
        assert counts.total / 1e9 == pytest.approx(total, abs=0.01)
        assert (counts.active - counts.embedding) / 1e9 == pytest.approx(active, rel=0.01)
        assert held(found, "weights") / GIB == pytest.approx(gib, rel=0.005)


@given(layers=st.integers(1, 200), stages=st.integers(1, 64))
def test_stages_share_the_layers_and_the_ends_get_no_more_than_the_middle(layers, stages):
    shares = stage_layers(layers, stages)
    assert sum(shares) == layers
    assert len(shares) == stages
    assert max(shares) - min(shares) <= 1
    assert max(shares[0], shares[-1]) <= min([*shares[1:-1], max(shares)])


@given(layers=st.integers(1, 200), stages=st.integers(1, 64))
def test_a_stage_stands_only_for_those_that_hold_the_same(layers, stages):
    shares = stage_layers(layers, stages)
    alike = first_identical_stages(layers, stages)
    for stage, first in enumerate(alike):
        assert first <= stage
        assert shares[first] == shares[stage]
        assert first == stage or (first > 0 and stage < stages - 1)


def test_heads_and_vocabulary_are_shared_by_ranks_and_stages():
    # A tied vocabulary lies on both ends of a pipeline and once on one device.
    tied, untied = get_model("meta-llama/Llama-3.2-1B"), get_model(LLAMA_8B)
    one = 128_256 * 2048
    assert [stage_vocabulary(tied, stage, 4) for stage in range(4)] == [one, 0, 0, one]
    assert stage_vocabulary(tied, 0, 1) == one
    assert stage_vocabulary(untied, 0, 1) == 2 * 128_256 * 4096

    # A rank projects at least one whole key value head.
    for heads, ranks, share in [
        (8, 1, 1),
        (8, 4, 1 / 4),
        (8, 8, 1 / 8),
        (8, 16, 1 / 8),
        (1, 8, 1),
    ]:
        assert kv_heads_share(heads, ranks) == share

    # Layers of few and of many heads share by their own counts.
    wide, narrow = AttentionLayers(count=2), AttentionLayers(count=3, num_key_value_heads=2)
    model = ModelSpec(
        model_type="demo",
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=5,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=16,
        vocab_size=100,
        max_position_embeddings=64,
        attention_layers=(wide, narrow),
    )
    found = key_value_share(model, 4)
    # On 4 ranks: two heads of eight in two layers, one of two in three.
    assert found == pytest.approx((2 * 2 + 3 * 1) / (2 * 8 + 3 * 2))


ONE = {"kind": "generate", "batch_size": 1, "input_tokens": 512, "output_tokens": 128}
# A file is larger than its weights by the tokenizer, which counts in small models.
TOLERANCE = 0.02
WIDER = {("tiiuae/falcon-7b", "q4_k_m"): 0.03}  # the file has a head of its own
LIGHTNING = "nvidia/NVIDIA-Nemotron-3.5-Lightning-30B-A3B-NVFP4"


def weights(model, device="h100-sxm5-80gb", engine="llama_cpp", quantization=None, **fields):
    strategy = {"quantization": quantization} if quantization else {}
    strategy |= fields.pop("strategy", {})
    found = ask(
        model=model, device=device, engine=engine, workload=ONE, strategy=strategy, **fields
    )
    return held(found, "weights")


def test_a_file_is_as_large_as_published():
    rows, wrong = table("gguf_sizes"), []
    assert len(rows) >= 60
    for row in rows:
        tolerance = WIDER.get((row["model"], row["kind"]), TOLERANCE)
        found = file_bytes(row["kind"], get_model(row["model"]))
        if found != pytest.approx(float(row["published_bytes"]), rel=tolerance):
            wrong.append((row["row_id"], found, row["published_bytes"]))
    assert not wrong, wrong


def test_a_mix_of_another_maker_has_the_mean_bits_of_its_files():
    # llama-bench of lhl/strix-halo-testing prints the bytes of each file.
    for model, kind, published in (
        ("Qwen/Qwen3-30B-A3B", "ud-q4_k_xl", 17709692928),
        ("meta-llama/Llama-4-Scout-17B-16E-Instruct", "ud-q4_k_xl", 61985006336),
        ("mistralai/Mistral-Small-3.1-24B-Instruct-2503", "ud-q4_k_xl", 14497730560),
        ("zai-org/GLM-4.5-Air", "ud-q4_k_xl", 73028549632),
        ("tencent/Hunyuan-A13B-Instruct", "ud-q6_k_xl", 70490511104),
        ("Qwen/Qwen3-235B-A22B", "ud-q3_k_xl", 104146921472),
    ):
        found = weights(model, quantization=f"gguf:{kind}", device="mi325x")
        assert found == pytest.approx(published, rel=0.12), (model, kind, found / published)
    # No mix changes the experts of a model that is published in MXFP4.
    sizes = packed_format("gguf:ud-q6_k_xl", get_model("openai/gpt-oss-20b"))
    assert sizes.expert_bits == 4.25


def test_parts_of_a_model_have_the_bits_of_their_rows():
    # Every model of the catalog has the bits of its parts.
    for entry in list_models():
        model = get_model(entry.id)
        counts = count_parameters(model)
        for kind in ["q4_k_m", "iq3_xxs", "q8_0"]:
            sizes = file_sizes(kind, model)
            parts = (counts.layer_linear - counts.experts) * sizes.dense_bits
            parts += counts.experts * sizes.expert_bits
            assert parts == pytest.approx(counts.layer_linear * sizes.linear_bits), entry.id
            assert 2 < sizes.linear_bits <= 16, entry.id

    # A model of odd widths is answered by its own bits: ggml-org/llama.cpp PR#28474: 6.18 bits
    # instead of the recipe's 5.00, 24.4 GB.
    found = weights(LIGHTNING, device="rtx-3090", quantization="gguf:q4_k_m")
    assert found == pytest.approx(24.4e9, rel=0.05)
    # Fractional mixes and forks keep their usual bits.
    model = get_model(LIGHTNING)
    for name in ("gguf:3.9", "gguf:iq4_k", "exl2:4.25", None):
        assert packed_format(name, model) == packed_format(name)


def test_rows_of_no_whole_block_fall_back_to_a_wider_type():
    for width, kind, bits in [
        (1024, "q4_k_s", 4.5),
        (1024 + 128, "q4_k_s", 5.5),
        (1024 + 128, "q5_k_s", 6.0),
        (1024 + 128, "q6_k", 8.5),
        (1024 + 128, "q3_k_s", 4.5),
        (1024 + 128, "iq3_s", 4.5),
        (1024 + 16, "q6_k", 16.0),
    ]:
        model = ModelSpec(
            model_type="llama",
            hidden_size=width,
            intermediate_size=width,
            num_hidden_layers=1,
            num_attention_heads=1,
            num_key_value_heads=1,
            head_dim=width,
            vocab_size=256,
            max_position_embeddings=256,
        )
        sizes = file_sizes(kind, model)

        # The first value and down projections of q4_k_s and q5_k_s take more bits in some models.
        assert sizes.linear_bits == pytest.approx(bits, rel=0.05)


def test_mxfp4_experts_are_stored_as_engines_store_them():
    # llama.cpp stores all but MXFP4 experts in 8 bits: llama-bench of ggml-org's files, as in
    # ggml-org/llama.cpp PR#16991.
    for model, gib in [("openai/gpt-oss-20b", 11.27), ("openai/gpt-oss-120b", 59.02)]:
        assert weights(model) / GIB == pytest.approx(gib, rel=0.005)
        assert weights(model, quantization="gguf:mxfp4_moe") == weights(model)

    # vLLM loads MXFP4 experts in padded widths.
    for model, device, gib in [
        ("openai/gpt-oss-120b", "h100-sxm5-80gb", 65.97),  # vllm-project/vllm#23278
        ("openai/gpt-oss-20b", "a100-sxm4-40gb", 13.72),  # "Model loading took 13.72 GiB"
    ]:
        assert weights(model, device, "vllm") / GIB == pytest.approx(gib, rel=0.005)
        assert weights(model, device, "sglang") / GIB < 0.95 * gib

    # Each rank rounds its own columns up.
    for ranks, multiples, widths in [
        (1, (128, 256), (2944, 3072)),
        (8, (128, 256), (8 * 384, 3072)),
        (1, (256, 256), (3072, 3072)),
    ]:
        found = padded_expert_ratio(2880, 2880, ranks, multiples)
        assert found == pytest.approx(widths[0] * widths[1] / 2880**2)


ATTENTION = {"attention": "bf16"}
BESIDE_EXPERTS = {"attention": "bf16", "feed_forward": "bf16"}
CT = "compressed-tensors"
# Name, dtype, method, block, group, parts that stay wide.
PUBLISHED = [
    ("Qwen/Qwen3-VL-8B-Instruct-FP8", "fp8", "fp8", 128, None, {}),
    ("Qwen/Qwen3-235B-A22B-Instruct-2507-FP8", "fp8", "fp8", 128, None, {}),
    ("Qwen3 14B FP8", "fp8", "fp8", 128, None, {}),
    ("unsloth/Qwen3-14B-fp8", "fp8", "fp8", 128, None, {}),
    ("RedHatAI/Qwen3-8B-FP8-dynamic", "fp8", CT, None, None, {}),
    ("RedHatAI/Qwen3-8B-FP8-block", "fp8", CT, 128, None, {}),
    ("RedHatAI/Qwen3-32B-FP8", "fp8", CT, None, None, {}),
    ("zai-org/GLM-4.6-FP8", "fp8", CT, None, None, {}),
    ("nvidia/Llama-3.3-70B-Instruct-FP8", "fp8", "fp8", None, None, {}),
    ("nvidia/NVIDIA-Nemotron-Nano-9B-v2-FP8", "fp8", "fp8", None, None, {}),
    ("amd/Llama-3.3-70B-Instruct-FP8-KV", "fp8", "quark", None, None, {}),
    ("MiniMaxAI/MiniMax-M3-MXFP8", "fp8", "mxfp8", None, None, {}),
    ("nvidia/Llama-3.3-70B-Instruct-NVFP4", "nvfp4", "nvfp4", None, 16, {}),
    ("nvidia/DeepSeek-R1-0528-FP4-v2", "nvfp4", "nvfp4", None, 16, ATTENTION),
    ("RedHatAI/Llama-3.3-70B-Instruct-NVFP4", "nvfp4", CT, None, 16, {}),
    ("amd/Kimi-K2.5-MXFP4", "mxfp4", "quark", None, None, ATTENTION),
    ("amd/gpt-oss-120b-w-mxfp4-a-fp8", "mxfp4", "quark", None, None, ATTENTION),
    ("Qwen/Qwen2.5-72B-Instruct-AWQ", "int4", "awq", None, 128, {}),
    ("cpatonn/Qwen3-30B-A3B-Instruct-2507-AWQ-4bit", "int4", CT, None, 32, {}),
    ("Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4", "int4", "gptq", None, 128, {}),
    ("Qwen/Qwen2.5-7B-Instruct-GPTQ-Int8", "int8", "gptq", None, 128, {}),
    ("Qwen/Qwen3.5-397B-A17B-GPTQ-Int4", "int4", "gptq", None, 128, BESIDE_EXPERTS),
    ("neuralmagic/Meta-Llama-3.1-8B-Instruct-quantized.w8a8", "int8", CT, None, None, {}),
    ("RedHatAI/Meta-Llama-3.1-70B-Instruct-quantized.w4a16", "int4", CT, None, 128, {}),
    ("unsloth/Qwen3-8B-unsloth-bnb-4bit", "nf4", "bitsandbytes", None, 64, {}),
    ("mlx-community/Qwen3-8B-4bit", "int4", "mlx", None, 64, {}),
    ("mlx-community/Qwen3-8B-8bit", "int8", "mlx", None, 64, {}),
    ("unsloth/Kimi-K2-Instruct-BF16", "bf16", None, None, None, {}),
    ("unsloth/DeepSeek-R1-BF16", "bf16", None, None, None, {}),
]


def test_published_names_are_read_as_their_publishers_write_them():
    wrong = []
    for name, *told in PUBLISHED:
        model = get_model(name)
        fields = ("weight_dtype", "quantization", "weight_block_size", "group_size", "part_dtypes")
        read = [getattr(model, field) for field in fields]
        noted = read_name(name).repository in model.note and "config.json" in model.note
        if read != told or model.id != name or not noted:
            wrong.append((name, told, read, model.note))
    assert not wrong, wrong


# The catalog's own checkpoints whose parts are in several quantised formats, or in other ones
# than those of their siblings: no name says that.
UNLIKE = frozenset({"nvidia/GLM-5-NVFP4", "nvidia/Kimi-K2.6-NVFP4", "nvidia/Kimi-K2.7-Code-NVFP4"})


def catalog_checkpoints():
    """Return the catalog's own checkpoints of one format whose model it has in another one."""
    found = []
    for entry in list_models():
        split, own = split_format(entry.id), get_model(entry.id)
        mixed = {*own.part_dtypes.values()} - {"bf16"}
        if split is None or split[1].is_plain or mixed or entry.id in UNLIKE:
            continue
        for rest in (split[0], f"{split[0]}-BF16"):
            with suppress(UnknownModelError):
                found.append((entry.id, get_entry(rest), split[1]))
                break
    return [each for each in found if each[1].id != each[0]]


def test_a_format_means_what_the_catalogs_own_configs_of_it_say():
    checkpoints, wrong = catalog_checkpoints(), []
    for name, base, stated in checkpoints:
        config = json.loads(data_text(f"configs/{base.config}.json"))
        told = model_from_config(with_format(config, get_model(base.id), stated))
        own, total = get_model(name), count_parameters(told).total
        fields = ("weight_dtype", "part_dtypes", "weight_block_size")
        if any(getattr(told, field) != getattr(own, field) for field in fields):
            wrong.append((name, told, own))
        if total != pytest.approx(count_parameters(own).total, rel=0.01):
            wrong.append((name, total, count_parameters(own).total))
    assert len(checkpoints) >= 39
    assert not wrong, wrong


# The published size of a checkpoint's weights, or what vLLM reports after loading it.
SIZES = [
    # QwenLM/Qwen3, issue 1700
    ("Qwen/Qwen3-4B-Instruct-2507-FP8", 1, 4.2299 * GIB),
    # vllm-project/vllm, issue 6746: per GPU
    ("meta-llama/Meta-Llama-3.1-405B-Instruct-FP8", 8, 57.75 * GIB * 8),
    # vllm-project/vllm, issue 17327: "model weights take"
    ("nytopop/Qwen3-30B-A3B.w4a16", 1, 15.68 * GIB),
    # their model cards on Hugging Face
    ("AH22-neb/GLM-4.6-NVFP4", 4, 220e9),
    ("lukealonso/Qwen3.5-397B-A17B-NVFP4", 4, 233e9),
    ("xega-ai/Qwen3.5-35B-A3B-FP8-Dynamic", 1, 36.8e9),
]


def test_a_named_checkpoint_is_costed_and_described_as_it_is():
    # Weights are as large as published.
    for name, devices, published in SIZES:
        loaded = answer_of(name, "b200-sxm", devices)
        assert loaded.memory.breakdown_bytes["weights"] * devices == pytest.approx(
            published, rel=0.05
        )

    # Blocks of a named checkpoint bound the degrees.
    with pytest.raises(NotPossibleError, match="FP8 block"):
        answer_of("Qwen/Qwen3-30B-A3B-Instruct-2507-FP8", "h100-sxm5-80gb", 4)
    assert answer_of("RedHatAI/Qwen3-30B-A3B-Instruct-2507-FP8-dynamic", "h100-sxm5-80gb", 4).fits
    # The warnings say what was assumed of a name.
    warnings = answer_of("Qwen/Qwen3-8B-FP8", "h100-sxm5-80gb").warnings
    assert any("the FP8 checkpoint of Qwen/Qwen3-8B" in warning for warning in warnings)
    assert any("block of 128 x 128" in warning for warning in warnings)

    # The command line describes a named checkpoint.
    sink = io.StringIO()
    run_catalog(sink, "models", "Qwen/Qwen3-8B-FP8", as_json=True)
    row = json.loads(sink.getvalue())
    assert (row["id"], row["weight_dtype"]) == ("Qwen/Qwen3-8B-FP8", "fp8")
    assert row["aliases"] == []


def answer_of(name, device, devices=1):
    return estimate(
        EstimateRequest.model_validate(
            {
                "model": name,
                "engine": "vllm",
                "cluster": {"device": device, "devices_per_node": devices},
                "workload": {
                    "kind": "serve",
                    "input_tokens": 512,
                    "output_tokens": 64,
                    "concurrency": 1,
                },
                "strategy": {"tensor_parallel_size": devices},
            }
        )
    )


def test_formats_that_contradict_or_are_unknown_are_refused_with_a_way_to_ask():
    for name in [
        "Qwen/Qwen3-32B-NVFP4-FP8",
        "RedHatAI/Qwen3-8B-AWQ-FP8",
        "Qwen/Qwen3-9B-FP8",
        "Qwen/Qwen3-8B-FP9",
        "Qwen/Qwen3-8B-exl2",
        "nobody/FP8",
        "-FP8",
        "FP8",
    ]:
        with pytest.raises(UnknownModelError) as caught:
            get_model(name)
        assert caught.value.nearest

    # A repository of GGUF files is refused with the way to ask.
    for name in ["unsloth/Qwen3-8B-GGUF", "unsloth/Qwen3-8B-GGUF:Q4_K_M"]:
        with pytest.raises(UnknownModelError, match=r"Qwen/Qwen3-8B,.* gguf:q4_k_m"):
            get_model(name)


def test_a_stated_format_replaces_that_of_the_catalogs_checkpoint():
    assert get_model("deepseek-ai/DeepSeek-R1").weight_dtype == "fp8"
    assert get_model("RedHatAI/DeepSeek-R1-0528-quantized.w4a16").weight_dtype == "int4"
    # A model in the stated format keeps its own config.
    own, read = get_model("moonshotai/Kimi-K2.5"), get_model("moonshotai/Kimi-K2.5-INT4")
    assert (read.weight_dtype, read.group_size) == (own.weight_dtype, own.group_size)
    assert read.part_dtypes == own.part_dtypes
    # The way of another publisher is not that of the catalog.
    assert get_model("Qwen/Qwen3-32B-FP8").weight_block_size == 128
    assert get_model("RedHatAI/Qwen3-32B-FP8").weight_block_size is None


def test_an_engine_is_started_with_the_checkpoint_that_was_named():
    for named, started in [
        ("Qwen/Qwen3-VL-8B-Instruct-FP8", "Qwen/Qwen3-VL-8B-Instruct-FP8"),
        ("META-LLAMA/llama-3.1-8b-instruct", "meta-llama/Llama-3.1-8B-Instruct"),
        ("unsloth/Meta-Llama-3.1-8B-Instruct", "unsloth/Meta-Llama-3.1-8B-Instruct"),
        ("Llama 2 13B", "meta-llama/Llama-2-13b"),
        (" Qwen3-8B-AWQ ", "Qwen3-8B-AWQ"),
    ]:
        assert checkpoint_name(named) == started

    # Commands start the named checkpoint in its own format.
    for engine, format_name, start in [
        ("vllm", "vllm", "vllm serve"),
        ("sglang", "sglang", "python -m sglang.launch_server --model-path"),
        ("tensorrt_llm", "tensorrt_llm", "trtllm-serve"),
    ]:
        name = "Qwen/Qwen3-VL-8B-Instruct-FP8"
        request = PlanRequest.model_validate(
            {
                "model": name,
                "engine": engine,
                "cluster": {"device": "h100-sxm5-80gb", "devices_per_node": 1},
                "workload": {
                    "kind": "serve",
                    "input_tokens": 512,
                    "output_tokens": 128,
                    "concurrency": 4,
                },
            }
        )
        answer = plan(request)
        exported = export(format_name, export_case(request, answer.plans[0]))
        command = " ".join(exported.text.replace("\\\n", " ").split())
        assert answer.plans[0].strategy.weight_dtype == "fp8"
        assert f"{start} {name}" in command
        assert "--quantization" not in command
