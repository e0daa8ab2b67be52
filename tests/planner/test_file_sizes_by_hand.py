"""Bytes of stored weights, counted from the blocks that the formats define."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.catalog.gguf import PackedFormat, packed_format
from planner.catalog.models import get_model
from planner.cost.parameters import count_parameters
from planner.cost.weights import (
    alike_stages,
    formats_of,
    group_size_of,
    key_value_share,
    kv_heads_share,
    stage_layers,
    stage_vocabulary,
    unquantised_dtype,
    weight_bytes_per_element,
)
from planner.errors import UnknownNameError
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


@pytest.mark.parametrize("kind", BLOCKS)
def test_a_gguf_embedding_is_stored_in_whole_blocks_of_its_type(kind):
    stored, weights = BLOCKS[kind]

    found = packed_format(f"gguf:{kind}")

    assert found.embedding_bits == 8 * stored / weights


def test_a_q8_0_file_of_llama_8b_is_34_bytes_for_32_weights():
    found = ask(device="rtx-4090", engine="llama_cpp", strategy={"quantization": "gguf:q8_0"})

    # 65 norms of 4,096 stay in 32 bits; every other weight is in a block.
    norms = 65 * 4096
    assert held(found, "weights") == pytest.approx((8_030_261_248 - norms) / 32 * 34 + 4 * norms)


def test_an_embedding_and_a_head_apart_weigh_their_mean():
    packed = PackedFormat(linear_bits=4.0, embedding_bits=4.0, head_bits=8.0)

    assert packed.vocabulary_bytes_per_element == 0.75
    assert packed.head_bytes_per_element == 1.0


def test_the_name_of_a_packed_format_may_be_in_any_case():
    assert packed_format("GGUF:Q4_K_M") == packed_format("gguf:q4_k_m")


@pytest.mark.parametrize("bits", [0.5, 4.25, 32.0])
def test_bits_up_to_both_ends_of_their_range_are_taken(bits):
    assert packed_format(f"exl2:{bits}").linear_bits == bits


@pytest.mark.parametrize("bits", ["0.49", "32.01", "nan", "inf", "-4", ""])
def test_bits_outside_their_range_are_refused_with_the_value_and_an_example(bits):
    with pytest.raises(UnknownNameError) as caught:
        packed_format(f"exl2:{bits}")

    assert caught.value.field == "strategy.quantization"
    assert f"'exl2:{bits}'" in caught.value.message
    assert "exl2:4.25" in caught.value.message


def test_a_mean_of_bits_is_a_mix_of_gguf_types_with_a_wider_head():
    mix = packed_format("gguf:4.5")

    assert (mix.linear_bits, mix.embedding_bits, mix.head_bits) == (4.5, 4.5, 6.5625)


def test_a_type_that_gguf_does_not_have_is_refused():
    with pytest.raises(UnknownNameError, match=r"gguf has no such format"):
        packed_format("gguf:q4_k_x")


@pytest.mark.parametrize(
    ("bits", "dtype"),
    [(1.99, "ternary"), (2.0, "int4"), (5.99, "int4"), (6.0, "int8"), (8.99, "int8"), (9, "fp16")],
)
def test_a_packed_format_stands_for_the_nearest_wider_dtype(bits, dtype):
    assert PackedFormat(bits, 16.0, 16.0).nominal == dtype


@pytest.mark.parametrize(
    ("dtype", "block_bits", "weights"),
    [
        ("int4", 128 * 4 + 16 + 16, 128),
        ("nvfp4", 16 * 4 + 8, 16),
        ("mxfp4", 32 * 4 + 8, 32),
        ("int8", 8, 1),
        ("fp8", 8, 1),
        ("bf16", 16, 1),
        ("fp32", 32, 1),
    ],
)
def test_a_weight_takes_its_share_of_its_block(dtype, block_bits, weights):
    assert weight_bytes_per_element(dtype) == block_bits / weights / 8


def test_a_normal_float_takes_the_published_bits_with_double_quantisation():
    """Dettmers et al. 2023 (QLoRA), arXiv:2305.14314: 0.127 bits a parameter for the scales."""
    assert weight_bytes_per_element("nf4") * 8 == pytest.approx(4.127, abs=5e-4)


@given(group=st.integers(1, 4096))
def test_formats_of_a_fixed_block_ignore_what_group_is_asked_for(group):
    assert weight_bytes_per_element("mxfp4", group) == 17 / 32
    assert weight_bytes_per_element("nvfp4", group) == 9 / 16
    assert group_size_of("int4", group) == group
    assert group_size_of("int8", group) == group
    assert group_size_of("fp8", group) == 0


@pytest.mark.parametrize(("dtype", "kept"), [("fp32", "fp32"), ("fp16", "fp16"), ("int4", "bf16")])
def test_norms_keep_a_wide_dtype_and_never_a_quantised_one(dtype, kept):
    assert unquantised_dtype(dtype) == kept


@pytest.mark.parametrize(
    ("name", "total", "active", "gib"),
    [("openai/gpt-oss-120b", 116.83, 5.13, 60.8), ("openai/gpt-oss-20b", 20.91, 3.61, 12.8)],
)
def test_gpt_oss_is_as_large_as_its_model_card_says(name, total, active, gib):
    """OpenAI 2025, arXiv:2508.10925, table 1; active parameters leave the embedding out."""
    counts = count_parameters(get_model(name))

    found = ask(model=name, device="h100-sxm5-80gb", engine="tensorrt_llm")

    assert counts.total / 1e9 == pytest.approx(total, abs=0.01)
    assert (counts.active - counts.embedding) / 1e9 == pytest.approx(active, rel=0.01)
    assert held(found, "weights") / GIB == pytest.approx(gib, rel=0.01)


def test_each_part_of_the_layers_has_exactly_one_format():
    formats = formats_of("fp8", 1.0, {"attention": "bf16", "feed_forward": "bf16"})

    assert [(found.dtype, found.element_bytes) for found in formats] == [("fp8", 1.0), ("bf16", 2)]
    for part in ("attention", "feed_forward", "experts"):
        assert sum(found.share(part) for found in formats) == 1


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

    alike = alike_stages(layers, stages)

    for stage, first in enumerate(alike):
        assert first <= stage
        assert shares[first] == shares[stage]
        assert first == stage or (first > 0 and stage < stages - 1)


def test_a_tied_vocabulary_lies_on_both_ends_of_a_pipeline_and_once_on_one_device():
    tied, untied = get_model("meta-llama/Llama-3.2-1B"), get_model(LLAMA_8B)
    one = 128_256 * 2048

    assert [stage_vocabulary(tied, stage, 4) for stage in range(4)] == [one, 0, 0, one]
    assert stage_vocabulary(tied, 0, 1) == one
    assert stage_vocabulary(untied, 0, 1) == 2 * 128_256 * 4096


@pytest.mark.parametrize(
    ("heads", "ranks", "share"),
    [(8, 1, 1), (8, 4, 1 / 4), (8, 8, 1 / 8), (8, 16, 1 / 8), (1, 8, 1)],
)
def test_a_rank_projects_at_least_one_whole_key_value_head(heads, ranks, share):
    assert kv_heads_share(heads, ranks) == share


def test_layers_of_few_and_of_many_heads_share_by_their_own_counts():
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
