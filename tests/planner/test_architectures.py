"""Layers of published and of small models by family: what they keep, hold and cost."""

import pytest

from planner.api import estimate, plan
from planner.catalog.models import get_model, list_models, model_from_config
from planner.cost.kv_cache import (
    cache_bytes,
    cached_tokens_by_layer_group,
    read_tokens_by_layer_group,
)
from planner.cost.parameters import count_parameters
from planner.cost.quantity import Ledger, Line
from planner.cost.roofline import pairs_by_layer_group
from planner.specs.base import BadConfigError, BadRequestError
from planner.specs.estimate import EstimateRequest, PlanRequest
from planner.specs.model import AttentionLayers, IndexLayers, LatentLayers, RecurrentLayers
from tests.planner.asking import TINY, ask, held
from tests.planner.family_configs import PUBLISHED

BF16 = 2.0


def cached(model_id: str, tokens: float, ranks: int = 1) -> float:
    model = get_model(model_id)
    kept = cached_tokens_by_layer_group(model, tokens, paged=False)
    return cache_bytes(model, kept, ranks, BF16, (Ledger(), Line("memory", "cache")))


def test_a_sequence_keeps_in_the_layers_of_each_model_what_they_need():
    # Latent attention caches one latent a token and layer.
    for model_id, bytes_per_token in [
        ("deepseek-ai/DeepSeek-V3", 61 * (512 + 64) * 2),
        ("moonshotai/Kimi-K2-Instruct", 61 * (512 + 64) * 2),
        ("deepseek-ai/DeepSeek-V3.2", 61 * ((512 + 64) * 2 + 128 + 4)),
        ("zai-org/GLM-5.3", 78 * (512 + 64) * 2 + 21 * (128 + 4)),
    ]:
        assert cached(model_id, 1000.0) == 1000 * bytes_per_token

    # Tensor parallelism does not split a latent cache.
    for model_id in ("deepseek-ai/DeepSeek-R1", "deepseek-ai/DeepSeek-V3"):
        assert cached(model_id, 100.0, ranks=8) == cached(model_id, 100.0)
    # Every second layer of gpt-oss keeps 128 tokens.
    per_layer = 2 * 8 * 64 * 2
    assert cached("openai/gpt-oss-120b", 10_000.0) == 18 * per_layer * (10_000 + 128)

    # Three of four layers of Llama 4 keep one chunk.
    per_layer = 2 * 8 * 128 * 2
    assert cached("meta-llama/Llama-4-Scout-17B-16E", 100_000.0) == per_layer * (
        36 * 8192 + 12 * 100_000
    )

    # Qwen3.5 caches tokens in every fourth layer and states in the others.
    state = 64 * 128 * 128 * 4 + (2 * 16 * 128 + 64 * 128) * 3 * 2
    assert cached("Qwen/Qwen3.5-397B-A17B", 1000.0) == 15 * 2 * 2 * 256 * 2 * 1000 + 45 * state

    # Nemotron keeps a Mamba state a sequence and keys in six layers.
    state = 64 * 64 * 128 * 4 + (64 * 64 + 2 * 8 * 128) * 3 * 2
    assert cached("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", 1000.0) == (
        6 * 2 * 2 * 128 * 2 * 1000 + 23 * state
    )

    # MiMo slides with wider heads in 39 layers.
    sliding, full = 39 * 8 * (192 + 128) * 2 * 128, 9 * 4 * (192 + 128) * 2
    assert cached("XiaomiMiMo/MiMo-V2-Flash", 5000.0) == sliding + full * 5000
    # Gemma 3 keeps a window in five of six layers.
    per_layer = 2 * 16 * 128 * 2
    assert cached("google/gemma-3-27b-it", 10_000.0) == per_layer * (52 * 1024 + 10 * 10_000)

    # DeepSeek-V4 caches a window and entries of 4 and of 128 tokens.
    entry, tokens = 512 * 2, 128_000.0
    windows, fours, wides = 43 * 128, 21 * tokens / 4, 20 * tokens / 128
    index = 21 * tokens / 4 * (128 + 4)
    assert cached("deepseek-ai/DeepSeek-V4-Flash", tokens) == (
        (windows + fours + wides) * entry + index
    )


def test_layers_are_grouped_as_their_families_build_them():
    # Published models are grouped by the kinds of their layers.
    for model_id, kinds in [
        ("deepseek-ai/DeepSeek-V3", [LatentLayers]),
        ("deepseek-ai/DeepSeek-V3.2", [LatentLayers, IndexLayers]),
        ("Qwen/Qwen3.5-27B", [RecurrentLayers, AttentionLayers]),
        ("openai/gpt-oss-20b", [AttentionLayers, AttentionLayers]),
    ]:
        assert [type(group) for group in get_model(model_id).layers_by_attention] == kinds

    # The first layers of DeepSeek are dense.
    model = get_model("deepseek-ai/DeepSeek-V3")
    assert (model.num_feed_forward_layers, model.num_moe_layers) == (3, 58)
    # Every second layer of Maverick is dense and none of Scout.
    maverick = get_model("meta-llama/Llama-4-Maverick-17B-128E")
    assert maverick.num_feed_forward_layers == maverick.num_moe_layers == 24
    assert get_model("meta-llama/Llama-4-Scout-17B-16E").num_moe_layers == 48

    # Nemotron layers mix tokens or feed forward but never both.
    model = get_model("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16")
    counts = {group.kind: group.count for group in model.layers_by_attention}
    assert counts == {"recurrent": 23, "none": 23, "full": 6}
    assert (model.num_moe_layers, model.num_feed_forward_layers) == (23, 0)

    # Command R7B keeps a window in three of four layers.
    model = get_model("CohereLabs/c4ai-command-r7b-12-2024")
    assert [(g.kind, g.count) for g in model.layers_by_attention] == [("sliding", 24), ("full", 8)]
    # Experts on a latent are narrower than the model.
    model = get_model("nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-FP8")
    assert model.expert_hidden_size == 1024 < model.hidden_size
    # Full layers of Gemma 4 have wider and fewer heads.
    full = get_model("google/gemma-4-26B-A4B").layers_by_attention[1]
    assert (full.key_dim, full.kv_heads, full.value_is_key) == (512, 2, True)
    # Layers of a searched architecture without attention cache nothing.
    model = get_model("nvidia/Llama-3_3-Nemotron-Super-49B-v1")
    assert count_parameters(model).total == 49_867_145_216
    assert cached(model.id, 100.0) == 49 * 2 * 8 * 128 * 2 * 100


def test_active_parameters_are_those_of_the_model_card():
    for model_id, billions in [
        ("deepseek-ai/DeepSeek-V3", 37.0),
        ("moonshotai/Kimi-K2-Instruct", 32.0),
        ("openai/gpt-oss-120b", 5.1),
        ("openai/gpt-oss-20b", 3.6),
        ("Qwen/Qwen3.5-397B-A17B", 17.0),
        ("meta-llama/Llama-4-Maverick-17B-128E", 17.0),
    ]:
        counts = count_parameters(get_model(model_id))
        # Cards count with or without the embedding, and never the biases of idle experts.
        assert 0.985 * (counts.active - counts.embedding) <= billions * 1e9 <= counts.active


def test_weights_of_gpt_oss_are_read_as_stored_unless_a_strategy_says_otherwise():
    # Attention of gpt-oss is read in 16 bits and its experts in 4.
    found = ask(model="openai/gpt-oss-120b", engine="vllm")
    terms = [t for t in found.terms if t.key == "weights" and t.group == "memory"]
    assert [term.name for term in terms] == ["Weights", "Weights kept in bf16"]

    # A strategy with a dtype of its own ignores how the checkpoint was stored.
    found = ask(
        model="openai/gpt-oss-20b", engine="vllm", strategy={"weight_dtype": "bf16"}, devices=1
    )
    counts = count_parameters(get_model("openai/gpt-oss-20b"))
    assert held(found, "weights") == pytest.approx(2 * counts.total, rel=1e-6)


def test_a_latent_cache_serves_far_more_than_heads_would_and_is_read_as_latents():
    # Decoding with a latent cache attends to latents and prefill to decompressed keys.
    found = ask(
        model="deepseek-ai/DeepSeek-V3", device="h200-sxm-141gb", devices=8, engine="sglang"
    )
    equations = {
        term.group: term.equation for term in found.terms if term.key == "attention_flops"
    }
    assert "d_rope" in equations["decode"]
    assert "d_rope" not in equations["prefill"]

    # The latent cache lets eight cards serve far more than heads would.
    found = ask(
        model="deepseek-ai/DeepSeek-V3",
        device="h200-sxm-141gb",
        devices=8,
        engine="sglang",
        strategy={"tensor_parallel_size": 8},
    )
    assert found.performance.max_concurrency > 100


def test_every_model_of_the_catalog_can_be_served():
    for entry in list_models():
        model = get_model(entry.id)
        kept = cached_tokens_by_layer_group(model, 4096.0, paged=True)
        record = (Ledger(), Line("memory", "cache"))
        assert cache_bytes(model, kept, 8, BF16, record) > 0, entry.id


def test_deepseek_v4_attends_to_its_window_and_what_the_index_chose():
    model = get_model("deepseek-ai/DeepSeek-V4-Flash")
    by_ratio = dict(
        zip(
            [getattr(group, "ratio", 0) for group in model.layers_by_attention],
            read_tokens_by_layer_group(model, 128_000.0).values,
            strict=True,
        )
    )
    assert by_ratio[None] == 2 * 128
    assert by_ratio[128] == 20 * (128 + 1000)


def test_a_model_that_nothing_confirms_says_so():
    assert "residuals" in get_model("moonshotai/Kimi-K3").note
    assert get_model("deepseek-ai/DeepSeek-V4-Pro").note is None


SLIDE, FULL = "sliding_attention", "full_attention"
GEMMA_4 = {
    **TINY, "model_type": "gemma4_text", "head_dim": 32, "global_head_dim": 64,
    "sliding_window": 100, "layer_types": [SLIDE, SLIDE, FULL, SLIDE, SLIDE, FULL],
}  # fmt: skip
LLAMA_4 = {
    **TINY, "model_type": "llama4_text", "num_hidden_layers": 8, "num_local_experts": 4,
    "num_experts_per_tok": 1, "intermediate_size_mlp": 512,
}  # fmt: skip
ERNIE = {
    **TINY, "model_type": "ernie4_5_moe", "num_hidden_layers": 10, "moe_num_experts": 8,
    "moe_k": 2, "moe_intermediate_size": 64,
}  # fmt: skip
MINIMAX_3 = {
    **TINY,
    "model_type": "minimax_m3",
    "dense_intermediate_size": 512,
    "intermediate_size": 64,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sparse_attention_config": {
        "sparse_attention_freq": [0, 0, 1, 1, 1, 1],
        "sparse_index_dim": 16,
        "sparse_num_index_heads": 2,
        "sparse_topk_blocks": 4,
        "sparse_block_size": 32,
    },
}
SEARCHED = {
    **{name: value for name, value in TINY.items() if name != "intermediate_size"},
    "model_type": "nemotron-nas",
    "num_hidden_layers": 3,
    "block_configs": [
        {
            "attention": {"no_op": False, "n_heads_in_group": 2},
            "ffn": {"no_op": False, "ffn_mult": 3.0},
        },
        {"attention": {"no_op": True}, "ffn": {"no_op": False, "ffn_mult": 1.5}},
        {"attention": {"no_op": False, "n_heads_in_group": 8}, "ffn": {"no_op": True}},
    ],
}
MIMO = {
    **TINY, "model_type": "mimo_v2_flash", "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 64, "moe_layer_freq": [0, 1, 1, 1, 1, 1],
    "hybrid_layer_pattern": [0, 1, 1, 1, 1, 0], "sliding_window_size": 64, "head_dim": 24,
    "v_head_dim": 16, "swa_head_dim": 24, "swa_v_head_dim": 16, "swa_num_attention_heads": 8,
    "swa_num_key_value_heads": 2,
}  # fmt: skip
FALCON = {
    "model_type": "falcon", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8,
    "vocab_size": 100,
}  # fmt: skip


def shape(config: dict) -> list[tuple[str, int]]:
    return [(group.kind, group.count) for group in model_from_config(config).layers_by_attention]


def test_gemma_4_has_wider_full_layers_and_reuses_caches():
    # Full layers of Gemma 4 are wider than its windows.
    model = model_from_config(GEMMA_4)
    widths = {group.kind: (group.count, group.key_dim) for group in model.layers_by_attention}
    assert widths == {"sliding": (4, 32), "full": (2, 64)}

    # The last layers of a small Gemma 4 reuse what earlier ones cached.
    model = model_from_config({**GEMMA_4, "num_kv_shared_layers": 3})
    found = [(g.kind, g.count, g.reuses_cache) for g in model.layers_by_attention]
    assert found == [
        ("sliding", 2, False),
        ("full", 1, False),
        ("sliding", 2, True),
        ("full", 1, True),
    ]

    # Values that are keys take the head count of the full layers.
    config = {**GEMMA_4, "attention_k_eq_v": True, "num_global_key_value_heads": 2}
    full = next(g for g in model_from_config(config).layers_by_attention if g.kind == "full")
    assert full.value_is_key
    assert full.kv_heads == 2


def test_llama_4_has_experts_and_chunks_where_it_is_told():
    # Llama 4 has experts in every so manyth layer or where it is told.
    for fields, moe_layers in [
        ({"interleave_moe_layer_step": 1}, 8),
        ({"interleave_moe_layer_step": 2}, 4),
        ({"moe_layers": [1, 3]}, 2),
        ({"moe_layers": [0, 7, 99]}, 2),
    ]:
        model = model_from_config({**LLAMA_4, **fields})
        assert model.num_moe_layers == moe_layers
        assert model.num_dense_layers == 8 - moe_layers

    # The dense and the sparse layers of Llama 4 have widths of their own.
    model = model_from_config(LLAMA_4)
    assert (model.intermediate_size, model.moe_intermediate_size) == (512, 768)
    assert model.shared_intermediate_size == 768
    # Llama 4 without chunks sees everything in every layer.
    assert shape(LLAMA_4) == [("full", 8)]
    assert shape({**LLAMA_4, "attention_chunk_size": 64}) == [("chunked", 6), ("full", 2)]


def test_experts_and_indices_lie_in_the_layers_that_the_config_marks():
    # Ernie has experts from a first to a last layer.
    for fields, moe_layers in [
        ({"moe_layer_start_index": 0}, 10),
        ({"moe_layer_start_index": 3}, 7),
        ({"moe_layer_start_index": 3, "moe_layer_end_index": 5}, 3),
        ({"moe_layer_start_index": 3, "moe_layer_end_index": -1}, 7),
        ({"moe_layer_start_index": 0, "moe_layer_interval": 2}, 5),
    ]:
        assert model_from_config({**ERNIE, **fields}).num_moe_layers == moe_layers

    # MiniMax 3 indexes the layers that its nested part marks.
    model = model_from_config(MINIMAX_3)
    full, indexed, index = model.layers_by_attention
    assert (full.count, indexed.count, index.count) == (2, 4, 4)
    assert (full.top_k, indexed.top_k) == (None, 4 * 32)
    # Two index heads and one index key of 16, from 256 channels.
    assert index.linear_parameters == 256 * 16 * 2 + 256 * 16

    # MiMo has narrower values and its own heads in its windows.
    model = model_from_config(MIMO)
    full, sliding = model.layers_by_attention
    assert (full.count, full.kv_heads, full.key_dim, full.value_dim) == (2, 4, 24, 16)
    assert (sliding.count, sliding.kv_heads, sliding.window) == (4, 2, 64)
    assert (full.sinks, sliding.sinks) == (False, True)
    assert model.num_dense_layers == 1


def test_a_searched_architecture_is_counted_block_by_block():
    model = model_from_config(SEARCHED)
    counts = count_parameters(model)
    # Widths: 2/3 of 3 x 256 is 512; 2/3 of 1.5 x 256 is 256; the third layer has none.
    attention = 2 * 2 * 256 * 256 + 2 * 256 * 32 * (4 + 1)
    blocks = 3 * 256 * (512 + 256)
    norms = (1 + 1 + 0 + 1 + 1 + 0 + 1) * 256
    vocabulary = 2 * 4096 * 256
    assert counts.total == attention + blocks + norms + vocabulary
    assert shape(SEARCHED) == [("full", 1), ("none", 1), ("full", 1)]

    # A searched architecture without any attention is refused.
    blocks = [SEARCHED["block_configs"][1]] * 3
    with pytest.raises(BadConfigError, match="no layer with attention") as caught:
        model_from_config({**SEARCHED, "block_configs": blocks})
    assert caught.value.field == "model.block_configs"


def test_older_families_have_the_widths_and_norms_of_their_code():
    # Falcon shares one key value head unless its switches say otherwise.
    for fields, kv_heads, norms in [
        ({}, 1, 1),
        ({"multi_query": False}, 8, 1),
        ({"parallel_attn": False}, 1, 2),
        ({"new_decoder_architecture": True, "num_kv_heads": 2}, 2, 2),
    ]:
        model = model_from_config({**FALCON, **fields})
        assert (model.num_key_value_heads, model.norms_per_layer) == (kv_heads, norms)
        assert model.intermediate_size == 4 * 64

    # MPT may be wider inside than four times.
    config = {"model_type": "mpt", "d_model": 64, "n_layers": 2, "n_heads": 4, "vocab_size": 100}
    plain, wide = model_from_config(config), model_from_config({**config, "expansion_ratio": 5})
    assert (plain.intermediate_size, wide.intermediate_size) == (256, 320)

    # One width of Qwen 1 is gate and up together.
    model = model_from_config({**TINY, "model_type": "qwen", "intermediate_size": 1536})
    assert model.intermediate_size == 768
    assert model.attention_bias
    assert not model.attention_output_bias

    # Bloom ignores a width that its code never reads.
    config = {**TINY, "model_type": "bloom", "intermediate_size": 1}
    assert model_from_config(config).intermediate_size == 4 * 256

    # A parallel StableLM has one norm a layer.
    config = {**TINY, "model_type": "stablelm"}
    parallel = model_from_config({**config, "use_parallel_residual": True})
    assert model_from_config(config).norms_per_layer == 2
    assert parallel.norms_per_layer == 1

    # OPT learns two more positions than its context.
    model = model_from_config({**TINY, "model_type": "opt", "ffn_dim": 1024})
    assert model.learned_positions == 4096 + 2
    assert model.tie_word_embeddings

    # Norms count by the family.
    for family, norms in [("olmo", 0), ("olmo2", 2), ("gemma2", 4)]:
        model = model_from_config({**TINY, "model_type": family, "sliding_window": None})
        assert model.norms_per_layer == norms
        # Without learnt norms the last one has no weights either.
        plain = count_parameters(model).small - (6 * norms + (norms > 0)) * 256
        assert plain == (6 * (256 + 128) if family == "olmo2" else 0)


def test_biases_and_gates_are_as_long_as_what_they_are_added_to():
    # Llama has biases on all four projections where its switch is on.
    off, on = model_from_config(TINY), model_from_config({**TINY, "attention_bias": True})
    more = count_parameters(on).total - count_parameters(off).total
    assert more == 6 * (256 + 128 + 128 + 256)
    # A block bias is as long as what it is added to.
    off, on = model_from_config(TINY), model_from_config({**TINY, "mlp_bias": True})
    more = count_parameters(on).total - count_parameters(off).total
    assert more == 6 * (768 + 768 + 256)

    # Qwen 2 MoE weighs its shared expert by one gate.
    config = {
        **TINY,
        "model_type": "qwen2_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 128,
    }
    shared, alone = (
        model_from_config(config),
        model_from_config({**config, "shared_expert_intermediate_size": 0}),
    )
    more = count_parameters(shared).total - count_parameters(alone).total
    assert more == 6 * (3 * 256 * 128 + 256)
    assert (shared.num_shared_experts, alone.num_shared_experts) == (1, 0)


def test_hybrids_count_their_convolutions_halves_and_shared_blocks():
    # LFM2 caches in its attention layers and keeps the last inputs in the others.
    model = model_from_config(PUBLISHED["LiquidAI/LFM2-1.2B"]["config"])
    convolution, attention = model.layers_by_attention
    assert (attention.count, attention.kv_heads, attention.key_dim) == (6, 8, 64)
    assert (convolution.count, convolution.state_elements) == (10, 0)
    assert convolution.conv_elements == 2048 * 2
    assert model.intermediate_size == 8192

    # A layer of LongCat is two layers of which one has experts.
    model = model_from_config(PUBLISHED["meituan-longcat/LongCat-Flash-Chat"]["config"])
    assert (model.num_hidden_layers, model.num_dense_layers, model.num_moe_layers) == (56, 28, 28)
    # Of 12 experts that a token selects of 768, 8 are among the 512 with weights.
    assert (model.num_experts, model.num_experts_per_tok) == (512, 8)
    # A hybrid of Granite without experts has its shared block alone.
    fields = {"num_local_experts": 0, "layer_types": ["attention"] * 6}
    config = {**TINY, "model_type": "granitemoehybrid", "shared_intermediate_size": 96, **fields}
    assert model_from_config(config).intermediate_size == 96


def test_a_derived_shape_names_the_field_that_it_cannot_read():
    for fields, named in [
        ({"model_type": "openelm"}, "model.num_query_heads"),
        (
            {
                "model_type": "step3_text",
                "moe_num_experts": 4,
                "moe_top_k": 2,
                "moe_layers_enum": "4,five",
            },
            "model.moe_layers_enum",
        ),
        ({"model_type": "lfm2", "block_multiple_of": 0}, "model.block_multiple_of"),
    ]:
        with pytest.raises(BadConfigError) as caught:
            model_from_config({**TINY, **fields})

        assert caught.value.field == named


DISTILBERT = {
    "model_type": "distilbert", "dim": 768, "hidden_dim": 3072, "n_layers": 6, "n_heads": 12,
    "vocab_size": 30522, "max_position_embeddings": 512,
}  # fmt: skip
TRAINING = {"kind": "train", "sequence_length": 128, "global_batch_size": 64, "method": "full"}
REQUEST = {
    "model": DISTILBERT, "cluster": {"device": "t4", "devices_per_node": 2},
    "workload": TRAINING, "engine": "torch",
}  # fmt: skip


def test_an_encoder_is_a_published_classifier_that_sees_everything():
    # Parameters equal the published classifiers.
    # Those of transformers' DistilBertForSequenceClassification, summed.
    for changes, published in [
        ({}, 66_955_010),
        ({"num_labels": 4}, 66_956_548),
        ({"id2label": {"0": "a", "1": "b", "2": "c"}}, 66_955_779),
        ({"tie_word_embeddings": False}, 66_955_010),
    ]:
        assert count_parameters(model_from_config(DISTILBERT | changes)).total == published

    # Every token sees every other.
    model = model_from_config(DISTILBERT)
    assert pairs_by_layer_group(model, 10.0).values == (600.0,)  # of six layers


def test_the_vocabulary_costs_no_logits():
    wide = {**REQUEST, "model": DISTILBERT | {"vocab_size": 300_000}}
    strategy = {"data_parallel_size": 2, "micro_batch_size": 16}
    narrow, wider = (
        estimate(
            EstimateRequest.model_validate({**each, "strategy": strategy})
        ).memory.breakdown_bytes
        for each in (REQUEST, wide)
    )
    assert wider["activations"] == narrow["activations"]
    assert wider["weights"] > narrow["weights"]


def test_an_encoder_trains_and_does_nothing_else():
    # What an encoder cannot do is refused.
    for workload in [
        {"kind": "serve", "input_tokens": 16, "output_tokens": 8},
        {"kind": "generate", "batch_size": 2, "input_tokens": 16, "output_tokens": 8},
        {"kind": "compress", "method": "int8_weight_only"},
    ]:
        with pytest.raises(BadRequestError, match="head for 2 classes"):
            plan(PlanRequest.model_validate({**REQUEST, "workload": workload, "engine": None}))

    # A plan of an encoder trains under the pinned stage.
    pins = {"data_parallel_size": 2, "zero_stage": 2, "tensor_parallel_size": 1}
    best = plan(PlanRequest.model_validate({**REQUEST, "pins": pins})).plans[0]
    assert best.strategy.zero_stage == 2
    assert best.strategy.data_parallel_size == 2
