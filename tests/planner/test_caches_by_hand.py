"""What one sequence keeps in the layers of real models, against counts made by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.catalog.models import get_model, model_from_config
from planner.cost.kv_cache import (
    cache_bytes,
    cached_tokens,
    layer_tokens,
    read_tokens,
    window_and_entries,
)
from planner.cost.quantity import Ledger, Line
from planner.specs.model import (
    AttentionLayers,
    CompressedLayers,
    IndexLayers,
    ModelSpec,
    NoMixingLayers,
)
from tests.planner.asking import LLAMA_405B, TINY

WINDOWED = {**TINY, "model_type": "gemma3_text", "head_dim": 32, "sliding_window": 100}
CHUNKED = {
    **TINY,
    "model_type": "llama4_text",
    "num_hidden_layers": 8,
    "num_local_experts": 4,
    "num_experts_per_tok": 1,
    "intermediate_size_mlp": 512,
    "attention_chunk_size": 256,
}
COMPRESSED = {
    "count": 1,
    "num_attention_heads": 8,
    "head_dim": 64,
    "window": 128,
    "split_parameters": 1,
    "replicated_parameters": 1,
}


def model_of(*groups) -> ModelSpec:
    fields = model_from_config(TINY).model_dump(exclude={"attention_layers", "num_hidden_layers"})
    layers = sum(group.count for group in groups if group.kind != "index")
    return ModelSpec(**fields, attention_layers=groups, num_hidden_layers=layers)


def kept_bytes(model: ModelSpec, tokens: float, *, ranks=1, paged=False, element_bytes=2.0):
    kept = layer_tokens(model, tokens, paged=paged)
    return cache_bytes(model, kept, ranks, element_bytes, (Ledger(), Line("memory", "cache")))


@pytest.mark.parametrize(
    ("name", "kilobytes"),
    [
        ("deepseek-ai/DeepSeek-V3", 70.272),
        ("Qwen/Qwen2.5-72B-Instruct", 327.680),
        (LLAMA_405B, 516.096),
    ],
)
def test_a_token_takes_the_published_bytes_of_cache(name, kilobytes):
    """Zhao et al. 2025 (Insights into DeepSeek-V3), arXiv:2505.09343, table 1: in BF16."""
    model = get_model(name)

    one = kept_bytes(model, 1.0)

    assert one == pytest.approx(kilobytes * 1000)


def test_a_gemma_3_sequence_grows_in_one_layer_of_six_past_the_window():
    model = model_from_config(WINDOWED)

    inside, longer = kept_bytes(model, 100.0), kept_bytes(model, 1100.0)

    # A token of one layer: keys and values of 4 heads of 32 in 2 bytes.
    assert inside == 6 * 100 * 512
    assert longer - inside == 1 * 1000 * 512


def test_a_chunked_layer_keeps_at_most_one_chunk():
    model = model_from_config(CHUNKED)

    kept = layer_tokens(model, 1000.0, paged=False)

    # Two of eight layers see everything, six keep their chunk of 256.
    kinds = [group.kind for group in model.layers_by_attention]
    assert dict(zip(kinds, kept.values, strict=True)) == {"chunked": 6 * 256, "full": 2 * 1000}


def test_a_gpt_oss_cache_is_half_of_128_tokens_and_half_of_everything():
    model = get_model("openai/gpt-oss-20b")

    found = kept_bytes(model, 10_000.0)

    # 24 layers, every second with a window of 128; keys and values of 8 heads of 64 in 2 bytes.
    assert found == (12 * 128 + 12 * 10_000) * 2 * 8 * 64 * 2


def test_pages_round_each_window_and_each_sequence_up():
    model = model_from_config(WINDOWED)

    kept = layer_tokens(model, 1001.0, paged=True)

    # Windows of 100 take 7 pages of 16, a sequence of 1,001 tokens takes 63.
    assert kept.values == (5 * 112, 1 * 1008)


@given(tokens=st.integers(1, 100_000), window=st.none() | st.integers(1, 10_000))
def test_a_paged_layer_wastes_less_than_one_page(tokens, window):
    plain = cached_tokens(float(tokens), window, paged=False)

    paged = cached_tokens(float(tokens), window, paged=True)

    assert plain == min(tokens, window or tokens)
    assert 0 <= paged - plain < 16
    assert paged % 16 == 0


@pytest.mark.parametrize(
    ("ranks", "heads_each"), [(1, 8), (2, 4), (4, 2), (8, 1), (16, 1), (64, 1)]
)
def test_a_rank_keeps_whole_heads_and_at_least_one(ranks, heads_each):
    model = get_model("meta-llama/Llama-3.1-8B")

    found = kept_bytes(model, 100.0, ranks=ranks)

    assert found == 32 * 100 * 2 * heads_each * 128 * 2


def test_every_rank_keeps_the_whole_latent_of_deepseek():
    model = get_model("deepseek-ai/DeepSeek-V3")

    alone, split = kept_bytes(model, 10.0), kept_bytes(model, 10.0, ranks=8)

    # 61 layers of 512 latent and 64 rotary elements.
    assert alone == split == 61 * 10 * (512 + 64) * 2


def test_an_eight_bit_cache_leaves_the_index_keys_as_they_are():
    index = IndexLayers(count=4, num_heads=4, head_dim=128)
    model = model_of(AttentionLayers(count=6), index)

    wide, narrow = kept_bytes(model, 50.0), kept_bytes(model, 50.0, element_bytes=1.0)

    # Keys and values shrink by one byte an element; an index key stays at 128 + 4 bytes.
    assert wide - narrow == 6 * 50 * 2 * 4 * 32
    assert 2 * narrow - wide == 4 * 50 * (128 + 4)


def test_a_compressed_layer_keeps_its_window_and_one_entry_for_four_tokens():
    group = CompressedLayers(**COMPRESSED, ratio=4)

    found = [window_and_entries(group, float(n), None, paged=False) for n in (64, 128, 4096)]

    assert found == [64 + 16, 128 + 32, 128 + 1024]


def test_a_chosen_few_entries_bound_what_a_compressed_layer_reads():
    model = model_of(CompressedLayers(**COMPRESSED, ratio=4, top_k=100))

    read, kept = read_tokens(model, 4096.0), layer_tokens(model, 4096.0, paged=False)

    assert read.total == 128 + 100
    assert kept.total == 128 + 1024


def test_a_compressed_layer_without_entries_keeps_its_window_alone():
    group = CompressedLayers(**COMPRESSED)

    found = [window_and_entries(group, float(n), None, paged=False) for n in (1, 128, 100_000)]

    assert found == [1, 128, 128]


def test_a_layer_that_mixes_nothing_keeps_nothing():
    model = model_of(AttentionLayers(count=3), NoMixingLayers(count=3))

    found = kept_bytes(model, 200.0)

    assert found == kept_bytes(model_from_config(TINY), 200.0) / 2


def test_a_hybrid_keeps_a_state_where_it_has_no_keys():
    model = get_model("Qwen/Qwen3-Next-80B-A3B-Instruct")

    first, second = kept_bytes(model, 1.0), kept_bytes(model, 1001.0)

    # 36 states of 32 x 128 x 128 in 4 bytes and 3 inputs of 8,192 channels in 2; 12 full layers
    # of keys and values of 2 heads of 256 in 2 bytes.
    states = 36 * (32 * 128 * 128 * 4 + 3 * 8192 * 2)
    token = 12 * 2 * 2 * 256 * 2
    assert first == states + token
    assert second - first == 1000 * token


def test_a_window_wider_than_the_sequence_reads_the_sequence():
    model = model_from_config({**TINY, "model_type": "mistral", "sliding_window": 4096})

    reads = [read_tokens(model, float(n)).total for n in (1, 4095, 4096, 4097)]

    assert reads == [6 * 1, 6 * 4095, 6 * 4096, 6 * 4096]


@given(tokens=st.integers(1, 50_000), more=st.integers(0, 50_000))
def test_a_longer_sequence_never_keeps_less(tokens, more):
    model = model_from_config(WINDOWED)

    shorter, longer = kept_bytes(model, float(tokens)), kept_bytes(model, float(tokens + more))

    assert shorter <= longer <= shorter + 6 * more * 512
