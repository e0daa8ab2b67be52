"""Parameter counts equal what the checkpoints hold: a peer counts 69.50 B for Llama-3.1-70B."""

import pytest

from planner.catalog.families import FAMILIES
from planner.catalog.models import get_entry, get_model, list_models, model_from_config
from planner.cost.parameters import count_parameters
from tests.planner.family_configs import CONFIGS, PUBLISHED, SMALL

CHECKPOINTS = {entry.id: entry.published_parameters for entry in list_models()}


def test_parameter_count_equals_the_published_checkpoint():
    wrong = []
    for model_id in [name for name, count in CHECKPOINTS.items() if count]:
        model = get_model(model_id)
        if count_parameters(model).total - model.tower_parameters != CHECKPOINTS[model_id]:
            wrong.append(model_id)
    assert not wrong, wrong


def test_the_three_sizes_of_llama_3_1_are_exact():
    for model_id, published in (
        ("meta-llama/Llama-3.1-8B", 8_030_261_248),
        ("meta-llama/Llama-3.1-70B", 70_553_706_496),
        ("meta-llama/Llama-3.1-405B", 405_853_388_800),
    ):
        assert count_parameters(get_model(model_id)).total == published, (model_id, published)


def test_tied_embeddings_count_once():
    config = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128}
    config |= {"num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 1000}
    untied = count_parameters(model_from_config({**config, "tie_word_embeddings": False}))
    tied = count_parameters(model_from_config({**config, "tie_word_embeddings": True}))
    assert untied.total - tied.total == 64 * 1000


def test_experts_weigh_in_full_and_work_in_part():
    counts = count_parameters(get_model("mistralai/Mixtral-8x7B-v0.1"))
    assert counts.total == 46_702_792_704
    assert counts.active == pytest.approx(12.88e9, rel=0.01)


def test_a_dense_model_is_active_as_a_whole():
    counts = count_parameters(get_model("meta-llama/Llama-3.1-8B"))
    assert counts.active == counts.total


def test_a_quantised_variant_has_the_shape_of_its_original():
    original = count_parameters(get_model("Qwen/Qwen3-32B")).total
    assert count_parameters(get_model("nvidia/Qwen3-32B-NVFP4")).total == original


# Families without an implementation in transformers: their published counts hold them instead.
ELSEWHERE = {
    "diffusion_gemma_text",
    "mistral4",
    "arctic",
    "baichuan",
    "bailing_moe",
    "bailing_moe_v2",
    "ernie4_5_moe_vl",
    "ernie4_5_vl_moe_text",
    "exaone",
    "glm4v_moe_text",
    "glm4v_text",
    "qwen2_5_omni_text",
    "qwen3_omni_moe_text",
    "grok-1",
    "openelm",
    "plamo2",
    "step3",
    "step3_text",
    "step3_vl",
    "youtu_llm",
    "chatglm",
    "qwen",
    "mimo",
    "qwen2_vl",
    "qwen2_vl_text",
    "qwen2_5_vl",
    "qwen2_5_vl_text",
    "qwen3_vl_text",
    "qwen3_vl_moe_text",
    "kimi_k2",
    "dbrx",
    "internlm",
    "internlm2",
    "mistral3",
    "mimo_v2_flash",
    "deepseek_ref",
    "minimax_m3",
    "minimax_m3_vl",
    "nemotron-nas",
    "step3p7",
    "mimo_v2",
    "muse_glimmer_text",
    "step3p5",
}
# Corrections of the router that checkpoints hold but no optimiser trains.
ROUTER_BIASES = ("e_score_correction_bias", "feed_forward.expert_bias")


def test_a_familys_count_equals_its_own_implementation():
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

    wrong = []
    for model_type in sorted(set(FAMILIES) - ELSEWHERE):
        config = AutoConfig.for_model(model_type, **CONFIGS.get(model_type, SMALL))
        is_encoder = model_type == "distilbert"
        kind = AutoModelForSequenceClassification if is_encoder else AutoModelForCausalLM
        with torch.device("meta"):
            model = kind.from_config(config)

        counted = count_parameters(model_from_config(config.to_dict())).total

        held = [
            *model.parameters(),
            *(b for n, b in model.named_buffers() if n.endswith(ROUTER_BIASES)),
        ]
        if counted != sum(tensor.numel() for tensor in held):
            wrong.append((model_type, counted))
    assert not wrong, wrong


def test_a_published_config_has_the_published_parameters():
    for name in PUBLISHED:
        published = PUBLISHED[name]
        counts = count_parameters(model_from_config(published["config"]))
        # A card rounds to its last digit; 314 B of Grok 1 leave out the embedding of 0.8 B.
        assert counts.total / 1e9 == pytest.approx(published["billions"], rel=0.01), name
        if published["active_billions"]:
            active = published["active_billions"]
            assert counts.active / 1e9 == pytest.approx(active, rel=0.05), name


def test_every_alias_leads_to_its_entry():
    for entry in list_models():
        for alias in entry.aliases:
            assert get_entry(alias.upper()).id == entry.id
