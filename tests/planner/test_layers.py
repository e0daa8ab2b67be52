"""What one sequence keeps in layers of each kind, against counts made by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from planner.catalog.models import get_model, model_from_config
from planner.cost.kv_cache import (
    cache_bytes,
    cached_tokens,
    cached_tokens_by_layer_group,
    read_tokens_by_layer_group,
    window_and_entries,
)
from planner.cost.parameters import count_parameters
from planner.cost.quantity import Ledger, Line
from planner.cost.roofline import chunked_pairs, decode_pairs_by_layer_group, pairs_by_layer_group
from planner.specs.model import (
    AttentionLayers,
    CompressedLayers,
    IndexLayers,
    LatentLayers,
    ModelSpec,
    NoMixingLayers,
    RecurrentLayers,
)
from tests.planner.asking import LLAMA_405B, TINY

SHAPE = {
    "model_type": "demo", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 100,
    "max_position_embeddings": 4096,
}  # fmt: skip
LATENT = {"kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12}
STATE = RecurrentLayers(
    count=3,
    num_heads=4,
    key_dim=8,
    value_dim=16,
    conv_channels=128,
    conv_kernel=4,
    linear_parameters=1000,
    small_parameters=10,
)


def model_of(*groups) -> ModelSpec:
    return ModelSpec(**SHAPE, attention_layers=groups)


def cached(model: ModelSpec, tokens: float, ranks: float = 1, element_bytes: float = 2.0):
    kept = cached_tokens_by_layer_group(model, tokens, paged=False)
    return cache_bytes(model, kept, ranks, element_bytes, (Ledger(), Line("memory", "cache")))


def test_a_layer_keeps_what_its_kind_needs():
    # A latent is cached once for all heads and on every rank.
    model = model_of(LatentLayers(count=4, **LATENT))
    assert cached(model, 100.0) == (32 + 8) * 2 * 4 * 100
    assert cached(model, 100.0, ranks=8) == cached(model, 100.0)
    # Narrow values make the cache smaller than wide keys suggest.
    model = model_of(AttentionLayers(count=4, head_dim=24, v_head_dim=16))
    assert cached(model, 10.0) == 4 * 10 * 2 * (24 + 16) * 2
    # Layers that reuse a cache keep nothing but read it.
    model = model_of(AttentionLayers(count=3), AttentionLayers(count=1, reuses_cache=True))
    assert cached_tokens_by_layer_group(model, 10.0, paged=False).values == (30, 0)
    assert read_tokens_by_layer_group(model, 10.0).values == (30, 10)

    # An index narrows what attention reads but not what it keeps.
    model = model_of(
        LatentLayers(count=4, top_k=50, **LATENT), IndexLayers(count=4, num_heads=2, head_dim=16)
    )
    assert read_tokens_by_layer_group(model, 1000.0).values == (4 * 50, 4 * 1000)
    assert decode_pairs_by_layer_group(model, 1000.0).values == (4 * 50, 4 * 1000)
    assert cached_tokens_by_layer_group(model, 1000.0, paged=False).values == (4000, 4000)

    # An index key takes eight bits an element and one scale.
    index = IndexLayers(count=4, num_heads=2, head_dim=16)
    model = model_of(NoMixingLayers(count=4), index)
    assert cached(model, 10.0) == 4 * 10 * (16 + 4)


def test_a_recurrent_state_stands_for_the_whole_past():
    # A recurrent state does not grow with the sequence.
    model = model_of(STATE, AttentionLayers(count=1))
    only_attention = cached(model_of(AttentionLayers(count=4)), 100.0) / 4
    short = cached(model, 100.0)
    grown = cached(model, 1100.0) - short
    assert grown == 10 * only_attention
    assert short - only_attention == 3 * (4 * 8 * 16 * 4 + 128 * 3 * 2)

    # A recurrent state is split over tensor ranks.
    model = model_of(STATE, NoMixingLayers(count=1))
    assert cached(model, 10.0, ranks=2) == cached(model, 10.0) / 2
    # A decode step reads a state and writes it back.
    assert read_tokens_by_layer_group(model, 5000.0).values == (2 * 3, 0)
    # Recurrent work grows with tokens and attention with pairs.
    model = model_of(STATE, AttentionLayers(count=1))
    assert pairs_by_layer_group(model, 10.0).values == (30, 55)
    # Layers that only mix or only feed forward are one block each.
    half = model_of(STATE, NoMixingLayers(count=1))
    whole = model_of(AttentionLayers(count=4))
    assert (half.num_blocks, whole.num_blocks) == (3 + 4, 4 + 4)


def test_chunked_pairs_equal_a_count_of_each_query():
    for sequence in [1, 7, 8, 9, 16, 30]:
        counted = sum(position % 8 + 1 for position in range(sequence))
        assert chunked_pairs(float(sequence), 8) == counted
    lengths = np.array([5.0, 20.0, 64.0])
    assert list(chunked_pairs(lengths, 16)) == [chunked_pairs(s, 16) for s in lengths.tolist()]


def test_a_model_of_two_head_counts_counts_each_in_its_own_layers():
    plain = count_parameters(model_of(AttentionLayers(count=4))).total
    wider = AttentionLayers(count=1, num_key_value_heads=4)
    mixed = count_parameters(model_of(AttentionLayers(count=3), wider)).total
    assert mixed - plain == 2 * 64 * 2 * 16


def test_layers_that_cannot_be_are_refused_by_name():
    with pytest.raises(ValidationError, match="num_key_value_heads is 3"):
        ModelSpec(**{**SHAPE, "num_key_value_heads": 3})
    with pytest.raises(ValidationError, match="count 5 layers, but num_hidden_layers is 4"):
        model_of(AttentionLayers(count=5))
    with pytest.raises(ValidationError, match="num_experts_per_tok is 3"):
        ModelSpec(**SHAPE, num_experts=2, num_experts_per_tok=3)
    with pytest.raises(ValidationError, match="num_hidden_layers is 4, but 5"):
        ModelSpec(**SHAPE, num_experts=2, num_experts_per_tok=1, num_dense_layers=5)
    with pytest.raises(ValidationError, match="sliding layers need a window"):
        AttentionLayers(kind="sliding", count=1)


def test_a_models_json_leads_back_to_the_same_model():
    # Groups are read from JSON by their kind.
    groups = [{"count": 1}, {"kind": "latent", "count": 2, **LATENT}, {"kind": "none", "count": 1}]
    model = ModelSpec.model_validate({**SHAPE, "attention_layers": groups})
    assert [type(group) for group in model.attention_layers] == [
        AttentionLayers,
        LatentLayers,
        NoMixingLayers,
    ]
    model = model_of(STATE, AttentionLayers(kind="chunked", window=64, count=1))
    assert ModelSpec.model_validate_json(model.model_dump_json()) == model


WINDOWED = {**TINY, "model_type": "gemma3_text", "head_dim": 32, "sliding_window": 100}
CHUNKED = {
    **TINY, "model_type": "llama4_text", "num_hidden_layers": 8, "num_local_experts": 4,
    "num_experts_per_tok": 1, "intermediate_size_mlp": 512, "attention_chunk_size": 256,
}  # fmt: skip
COMPRESSED = {
    "count": 1, "num_attention_heads": 8, "head_dim": 64, "window": 128, "split_parameters": 1,
    "replicated_parameters": 1,
}  # fmt: skip


def tiny_of(*groups) -> ModelSpec:
    fields = model_from_config(TINY).model_dump(exclude={"attention_layers", "num_hidden_layers"})
    layers = sum(group.count for group in groups if group.kind != "index")
    return ModelSpec(**fields, attention_layers=groups, num_hidden_layers=layers)


def kept_bytes(model: ModelSpec, tokens: float, *, ranks=1, paged=False, element_bytes=2.0):
    kept = cached_tokens_by_layer_group(model, tokens, paged=paged)
    return cache_bytes(model, kept, ranks, element_bytes, (Ledger(), Line("memory", "cache")))


def test_published_caches_are_met_byte_by_byte():
    # A token takes the published bytes of cache: Zhao et al. 2025 (Insights into DeepSeek-V3),
    # arXiv:2505.09343, table 1: in BF16.
    for name, kilobytes in [
        ("deepseek-ai/DeepSeek-V3", 70.272),
        ("Qwen/Qwen2.5-72B-Instruct", 327.680),
        (LLAMA_405B, 516.096),
    ]:
        model = get_model(name)
        one = kept_bytes(model, 1.0)
        assert one == pytest.approx(kilobytes * 1000)

    # A rank keeps whole heads and at least one.
    for ranks, heads_each in [(1, 8), (2, 4), (4, 2), (8, 1), (16, 1), (64, 1)]:
        model = get_model("meta-llama/Llama-3.1-8B")
        found = kept_bytes(model, 100.0, ranks=ranks)
        assert found == 32 * 100 * 2 * heads_each * 128 * 2

    # A gpt-oss cache is half of 128 tokens and half of everything.
    model = get_model("openai/gpt-oss-20b")
    found = kept_bytes(model, 10_000.0)
    # 24 layers, every second with a window of 128; keys and values of 8 heads of 64 in 2 bytes.
    assert found == (12 * 128 + 12 * 10_000) * 2 * 8 * 64 * 2

    # A hybrid keeps a state where it has no keys.
    model = get_model("Qwen/Qwen3-Next-80B-A3B-Instruct")
    first, second = kept_bytes(model, 1.0), kept_bytes(model, 1001.0)
    # 36 states of 32 x 128 x 128 in 4 bytes and 3 inputs of 8,192 channels in 2; 12 full layers
    # of keys and values of 2 heads of 256 in 2 bytes.
    states = 36 * (32 * 128 * 128 * 4 + 3 * 8192 * 2)
    token = 12 * 2 * 2 * 256 * 2
    assert first == states + token
    assert second - first == 1000 * token


def test_windows_chunks_and_pages_bound_what_is_kept():
    # A gemma 3 sequence grows in one layer of six past the window.
    model = model_from_config(WINDOWED)
    inside, longer = kept_bytes(model, 100.0), kept_bytes(model, 1100.0)
    # A token of one layer: keys and values of 4 heads of 32 in 2 bytes.
    assert inside == 6 * 100 * 512
    assert longer - inside == 1 * 1000 * 512

    # A chunked layer keeps at most one chunk.
    model = model_from_config(CHUNKED)
    kept = cached_tokens_by_layer_group(model, 1000.0, paged=False)
    # Two of eight layers see everything, six keep their chunk of 256.
    kinds = [group.kind for group in model.layers_by_attention]
    assert dict(zip(kinds, kept.values, strict=True)) == {"chunked": 6 * 256, "full": 2 * 1000}

    # Pages round each window and each sequence up.
    model = model_from_config(WINDOWED)
    kept = cached_tokens_by_layer_group(model, 1001.0, paged=True)
    # Windows of 100 take 7 pages of 16, a sequence of 1,001 tokens takes 63.
    assert kept.values == (5 * 112, 1 * 1008)
    # A window wider than the sequence reads the sequence.
    model = model_from_config({**TINY, "model_type": "mistral", "sliding_window": 4096})
    reads = [read_tokens_by_layer_group(model, float(n)).total for n in (1, 4095, 4096, 4097)]
    assert reads == [6 * 1, 6 * 4095, 6 * 4096, 6 * 4096]


@given(tokens=st.integers(1, 100_000), window=st.none() | st.integers(1, 10_000))
def test_a_paged_layer_wastes_less_than_one_page(tokens, window):
    plain = cached_tokens(float(tokens), window, paged=False)
    paged = cached_tokens(float(tokens), window, paged=True)
    assert plain == min(tokens, window or tokens)
    assert 0 <= paged - plain < 16
    assert paged % 16 == 0


def test_narrow_caches_and_layers_without_one_keep_less():
    # An eight bit cache leaves the index keys as they are.
    index = IndexLayers(count=4, num_heads=4, head_dim=128)
    model = tiny_of(AttentionLayers(count=6), index)
    wide, narrow = kept_bytes(model, 50.0), kept_bytes(model, 50.0, element_bytes=1.0)
    # Keys and values shrink by one byte an element; an index key stays at 128 + 4 bytes.
    assert wide - narrow == 6 * 50 * 2 * 4 * 32
    assert 2 * narrow - wide == 4 * 50 * (128 + 4)

    # A layer that mixes nothing keeps nothing.
    model = tiny_of(AttentionLayers(count=3), NoMixingLayers(count=3))
    found = kept_bytes(model, 200.0)
    assert found == kept_bytes(model_from_config(TINY), 200.0) / 2


def test_compressed_layers_keep_a_window_and_their_entries():
    # A compressed layer keeps its window and one entry for four tokens.
    group = CompressedLayers(**COMPRESSED, ratio=4)
    found = [window_and_entries(group, float(n), None, paged=False) for n in (64, 128, 4096)]
    assert found == [64 + 16, 128 + 32, 128 + 1024]
    # A compressed layer without entries keeps its window alone.
    group = CompressedLayers(**COMPRESSED)
    found = [window_and_entries(group, float(n), None, paged=False) for n in (1, 128, 100_000)]
    assert found == [1, 128, 128]

    # A chosen few entries bound what a compressed layer reads.
    model = tiny_of(CompressedLayers(**COMPRESSED, ratio=4, top_k=100))
    read, kept = (
        read_tokens_by_layer_group(model, 4096.0),
        cached_tokens_by_layer_group(model, 4096.0, paged=False),
    )
    assert read.total == 128 + 100
    assert kept.total == 128 + 1024


@given(tokens=st.integers(1, 50_000), more=st.integers(0, 50_000))
def test_a_longer_sequence_never_keeps_less(tokens, more):
    model = model_from_config(WINDOWED)
    shorter, longer = kept_bytes(model, float(tokens)), kept_bytes(model, float(tokens + more))
    assert shorter <= longer <= shorter + 6 * more * 512
