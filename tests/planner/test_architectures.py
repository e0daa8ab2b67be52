"""Published models of every kind of layer: what they keep of the past, and what a token costs."""

import pytest

from planner.catalog.models import get_model, list_models
from planner.cost.kv_cache import cache_bytes, layer_tokens, read_tokens
from planner.cost.parameters import count_parameters
from planner.cost.quantity import Ledger, Line
from planner.specs.model import AttentionLayers, IndexLayers, LatentLayers, RecurrentLayers
from tests.planner.asking import ask, held

BF16 = 2.0


def cached(model_id: str, tokens: float, ranks: int = 1) -> float:
    model = get_model(model_id)
    kept = layer_tokens(model, tokens, paged=False)
    return cache_bytes(model, kept, ranks, BF16, (Ledger(), Line("memory", "cache")))


@pytest.mark.parametrize(
    ("model_id", "bytes_per_token"),
    [
        ("deepseek-ai/DeepSeek-V3", 61 * (512 + 64) * 2),
        ("moonshotai/Kimi-K2-Instruct", 61 * (512 + 64) * 2),
        ("deepseek-ai/DeepSeek-V3.2", 61 * ((512 + 64) * 2 + 128 + 4)),
        ("zai-org/GLM-5.3", 78 * (512 + 64) * 2 + 21 * (128 + 4)),
    ],
)
def test_latent_attention_caches_one_latent_a_token_and_layer(model_id, bytes_per_token):
    assert cached(model_id, 1000.0) == 1000 * bytes_per_token


def test_tensor_parallelism_does_not_split_a_latent_cache():
    assert cached("deepseek-ai/DeepSeek-R1", 100.0, ranks=8) == cached(
        "deepseek-ai/DeepSeek-R1", 100.0
    )


def test_every_second_layer_of_gpt_oss_keeps_128_tokens():
    per_layer = 2 * 8 * 64 * 2

    assert cached("openai/gpt-oss-120b", 10_000.0) == 18 * per_layer * (10_000 + 128)


def test_three_of_four_layers_of_llama_4_keep_one_chunk():
    per_layer = 2 * 8 * 128 * 2

    assert cached("meta-llama/Llama-4-Scout-17B-16E", 100_000.0) == per_layer * (
        36 * 8192 + 12 * 100_000
    )


def test_qwen3_5_caches_tokens_in_every_fourth_layer_and_states_in_the_others():
    state = 64 * 128 * 128 * 4 + (2 * 16 * 128 + 64 * 128) * 3 * 2

    assert cached("Qwen/Qwen3.5-397B-A17B", 1000.0) == 15 * 2 * 2 * 256 * 2 * 1000 + 45 * state


@pytest.mark.parametrize(
    ("model_id", "kinds"),
    [
        ("deepseek-ai/DeepSeek-V3", [LatentLayers]),
        ("deepseek-ai/DeepSeek-V3.2", [LatentLayers, IndexLayers]),
        ("Qwen/Qwen3.5-27B", [RecurrentLayers, AttentionLayers]),
        ("openai/gpt-oss-20b", [AttentionLayers, AttentionLayers]),
    ],
)
def test_published_models_are_grouped_by_the_kinds_of_their_layers(model_id, kinds):
    assert [type(group) for group in get_model(model_id).layers_by_attention] == kinds


@pytest.mark.parametrize(
    ("model_id", "billions"),
    [
        ("deepseek-ai/DeepSeek-V3", 37.0),
        ("moonshotai/Kimi-K2-Instruct", 32.0),
        ("openai/gpt-oss-120b", 5.1),
        ("openai/gpt-oss-20b", 3.6),
        ("Qwen/Qwen3.5-397B-A17B", 17.0),
        ("meta-llama/Llama-4-Maverick-17B-128E", 17.0),
    ],
)
def test_active_parameters_are_those_of_the_model_card(model_id, billions):
    counts = count_parameters(get_model(model_id))

    # Cards count with or without the embedding, and never the biases of idle experts.
    assert 0.985 * (counts.active - counts.embedding) <= billions * 1e9 <= counts.active


def test_the_first_layers_of_deepseek_are_dense():
    model = get_model("deepseek-ai/DeepSeek-V3")

    assert (model.num_feed_forward_layers, model.num_moe_layers) == (3, 58)


def test_every_second_layer_of_maverick_is_dense_and_none_of_scout():
    maverick = get_model("meta-llama/Llama-4-Maverick-17B-128E")

    assert maverick.num_feed_forward_layers == maverick.num_moe_layers == 24
    assert get_model("meta-llama/Llama-4-Scout-17B-16E").num_moe_layers == 48


@pytest.mark.parametrize(
    ("model_id", "published_gib"), [("openai/gpt-oss-120b", 60.8), ("openai/gpt-oss-20b", 12.8)]
)
def test_weights_of_gpt_oss_take_what_its_model_card_says(model_id, published_gib):
    found = ask(model=model_id, engine="tensorrt_llm")

    assert held(found, "weights") / 1024**3 == pytest.approx(published_gib, rel=0.005)


def test_attention_of_gpt_oss_is_read_in_16_bits_and_its_experts_in_4():
    found = ask(model="openai/gpt-oss-120b", engine="vllm")
    terms = [t for t in found.terms if t.key == "weights" and t.group == "memory"]

    assert [term.name for term in terms] == ["Weights", "Weights kept in bf16"]


def test_a_strategy_with_a_dtype_of_its_own_ignores_how_the_checkpoint_was_stored():
    found = ask(
        model="openai/gpt-oss-20b", engine="vllm", strategy={"weight_dtype": "bf16"}, devices=1
    )
    counts = count_parameters(get_model("openai/gpt-oss-20b"))

    assert held(found, "weights") == pytest.approx(2 * counts.total, rel=1e-6)


def test_decoding_with_a_latent_cache_attends_to_latents_and_prefill_to_decompressed_keys():
    found = ask(
        model="deepseek-ai/DeepSeek-V3", device="h200-sxm-141gb", devices=8, engine="sglang"
    )
    equations = {
        term.group: term.equation for term in found.terms if term.key == "attention_flops"
    }

    assert "d_rope" in equations["decode"]
    assert "d_rope" not in equations["prefill"]


def test_the_latent_cache_lets_eight_cards_serve_far_more_than_heads_would():
    found = ask(
        model="deepseek-ai/DeepSeek-V3",
        device="h200-sxm-141gb",
        devices=8,
        engine="sglang",
        strategy={"tensor_parallel_size": 8},
    )

    assert found.performance.max_concurrency > 100


def test_nemotron_layers_mix_tokens_or_feed_forward_but_never_both():
    model = get_model("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16")
    counts = {group.kind: group.count for group in model.layers_by_attention}

    assert counts == {"recurrent": 23, "none": 23, "full": 6}
    assert (model.num_moe_layers, model.num_feed_forward_layers) == (23, 0)


def test_nemotron_keeps_a_mamba_state_a_sequence_and_keys_in_six_layers():
    state = 64 * 64 * 128 * 4 + (64 * 64 + 2 * 8 * 128) * 3 * 2

    assert cached("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", 1000.0) == (
        6 * 2 * 2 * 128 * 2 * 1000 + 23 * state
    )


def test_mimo_slides_with_wider_heads_in_39_layers():
    sliding, full = 39 * 8 * (192 + 128) * 2 * 128, 9 * 4 * (192 + 128) * 2

    assert cached("XiaomiMiMo/MiMo-V2-Flash", 5000.0) == sliding + full * 5000


def test_gemma_3_keeps_a_window_in_five_of_six_layers():
    per_layer = 2 * 16 * 128 * 2

    assert cached("google/gemma-3-27b-it", 10_000.0) == per_layer * (52 * 1024 + 10 * 10_000)


def test_command_r7b_keeps_a_window_in_three_of_four_layers():
    model = get_model("CohereLabs/c4ai-command-r7b-12-2024")

    assert [(g.kind, g.count) for g in model.layers_by_attention] == [("sliding", 24), ("full", 8)]


def test_experts_on_a_latent_are_narrower_than_the_model():
    model = get_model("nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-FP8")

    assert model.expert_hidden_size == 1024 < model.hidden_size


def test_every_model_of_the_catalog_can_be_served():
    for entry in list_models():
        model = get_model(entry.id)
        kept = layer_tokens(model, 4096.0, paged=True)
        record = (Ledger(), Line("memory", "cache"))

        assert cache_bytes(model, kept, 8, BF16, record) > 0, entry.id


def test_deepseek_v4_caches_a_window_and_entries_of_4_and_of_128_tokens():
    entry, tokens = 512 * 2, 128_000.0
    windows, fours, wides = 43 * 128, 21 * tokens / 4, 20 * tokens / 128
    index = 21 * tokens / 4 * (128 + 4)

    assert cached("deepseek-ai/DeepSeek-V4-Flash", tokens) == (
        (windows + fours + wides) * entry + index
    )


def test_deepseek_v4_attends_to_its_window_and_what_the_index_chose():
    model = get_model("deepseek-ai/DeepSeek-V4-Flash")
    by_ratio = dict(
        zip(
            [getattr(group, "ratio", 0) for group in model.layers_by_attention],
            read_tokens(model, 128_000.0).values,
            strict=True,
        )
    )

    assert by_ratio[None] == 2 * 128
    assert by_ratio[128] == 20 * (128 + 1000)


def test_full_layers_of_gemma_4_have_wider_and_fewer_heads():
    full = get_model("google/gemma-4-26B-A4B").layers_by_attention[1]

    assert (full.key_dim, full.kv_heads, full.value_is_key) == (512, 2, True)


def test_layers_of_a_searched_architecture_without_attention_cache_nothing():
    model = get_model("nvidia/Llama-3_3-Nemotron-Super-49B-v1")

    assert count_parameters(model).total == 49_867_145_216
    assert cached(model.id, 100.0) == 49 * 2 * 8 * 128 * 2 * 100


def test_a_model_that_nothing_confirms_says_so():
    assert "residuals" in get_model("moonshotai/Kimi-K3").note
    assert get_model("deepseek-ai/DeepSeek-V4-Pro").note is None
