"""Encoders of images and sounds: counted from their configs, named where they cannot be."""

import json

import pytest

from planner.catalog.models import get_model, model_from_config
from planner.cost.parameters import count_parameters
from planner.errors import BadConfigError, NotCoveredError
from tests.planner.asking import TINY, ask
from tests.planner.family_configs import PUBLISHED

TEXT = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 128,
    "vocab_size": 1000,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
SIGLIP = {
    "model_type": "siglip_vision_model",
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "patch_size": 14,
    "image_size": 448,
    "projection_dim": 256,
    "vision_use_head": False,
}
# The language model and the encoder of a small composite model, by its model type.
COMPOSITES = {
    "qwen2_vl": (TEXT, {"hidden_size": 256}),
    "qwen2_5_vl": (
        TEXT,
        {"hidden_size": 1280, "intermediate_size": 3456, "out_hidden_size": 256},
    ),
    "qwen3_vl": (TEXT, {"out_hidden_size": 256}),
    "qwen3_vl_moe": ({**TEXT, **EXPERTS}, {"out_hidden_size": 256}),
    "qwen3_5": (TEXT, {"out_hidden_size": 256}),
    "gemma3": (TEXT, SIGLIP),
    "gemma4": ({**TEXT, "hidden_size_per_layer_input": 0, "global_head_dim": 128}, {}),
    "paligemma": ({**TEXT, "model_type": "gemma"}, SIGLIP),
    "llava": (
        {**TEXT, "model_type": "llama"},
        {**SIGLIP, "model_type": "clip_vision_model", "hidden_size": 1024},
    ),
    "mistral3": (
        {**TEXT, "model_type": "mistral"},
        {"model_type": "pixtral", "num_hidden_layers": 3},
    ),
    "internvl": ({**TEXT, "model_type": "qwen2"}, {"model_type": "internvl_vision"}),
    "glm4v": (TEXT, {"out_hidden_size": 256}),
    "glm4v_moe": (
        {
            **TEXT,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "n_group": 1,
            "topk_group": 1,
        },
        {"out_hidden_size": 256},
    ),
    "ernie4_5_vl_moe": (
        {
            **TEXT,
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_intermediate_size": [64, 32],
            "moe_num_shared_experts": 2,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 500000.0,
                "mrope_section": [22, 22, 20],
            },
        },
        {},
    ),
    "llama4": ({**TEXT, "num_local_experts": 4, "intermediate_size_mlp": 256}, {}),
}


@pytest.mark.parametrize("model_type", sorted(COMPOSITES))
def test_a_composite_models_count_is_near_its_own_implementation(model_type):
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    text, vision = COMPOSITES[model_type]
    config = AutoConfig.for_model(model_type, text_config=text, vision_config=vision)
    with torch.device("meta"):
        own = AutoModelForImageTextToText.from_config(config)

    held = sum(parameter.numel() for parameter in own.parameters())
    model = model_from_config(json.loads(config.to_json_string(use_diff=False)))
    assert count_parameters(model).total == pytest.approx(held, rel=0.01)
    assert model.tower_parameters > 0.7 * held


@pytest.mark.parametrize(
    ("model_id", "published"),
    [
        ("Qwen/Qwen3-VL-2B-Instruct", 2_127_532_032),
        ("Qwen/Qwen3-VL-30B-A3B-Instruct", 31_070_754_032),
        ("google/gemma-3-27b-it", 27_432_406_640),
        ("google/gemma-4-31B-it", 31_273_086_512),
        ("google/gemma-4-E2B-it", 5_104_297_504),
        ("mistralai/Mistral-Small-3.1-24B-Instruct-2503", 24_011_361_280),
        ("zai-org/GLM-4.5V", 107_710_933_120),
    ],
)
def test_a_composite_model_of_the_catalog_holds_its_whole_checkpoint(model_id, published):
    total = count_parameters(get_model(model_id)).total

    assert total == pytest.approx(published, rel=0.001)


def test_no_token_of_text_uses_the_encoders():
    config = PUBLISHED["Qwen/Qwen2.5-VL-72B-Instruct"]["config"]
    counts, model = count_parameters(model_from_config(config)), model_from_config(config)

    assert model.tower_parameters == pytest.approx(0.7046e9, rel=0.001)
    assert counts.active == counts.total - model.tower_parameters


def test_an_estimate_holds_the_weights_of_the_encoders():
    config = PUBLISHED["Qwen/Qwen2.5-VL-3B-Instruct"]["config"]
    text = {name: value for name, value in config.items() if name != "vision_config"}

    weights = [ask(model=one).memory.breakdown_bytes["weights"] for one in (config, text)]

    assert weights[0] - weights[1] == pytest.approx(2 * 0.6686e9, rel=0.001)


def test_the_experts_of_images_are_split_like_those_of_text():
    """The whole of the checkpoint is what transformers' own class counts on the meta device."""
    counts = count_parameters(get_model("baidu/ERNIE-4.5-VL-28B-A3B-PT"))
    weights = [
        ask(
            model="baidu/ERNIE-4.5-VL-28B-A3B-PT",
            devices=ranks,
            strategy={"tensor_parallel_size": ranks},
        ).memory.breakdown_bytes["weights"]
        for ranks in (1, 4)
    ]

    assert counts.total == pytest.approx(29_399_294_336, rel=0.0001)
    assert counts.experts_of_images == 27 * 64 * 3 * 2560 * 512
    assert counts.active == pytest.approx(3.0e9, rel=0.15)
    assert weights[1] < 0.3 * weights[0]


def test_parts_without_sizes_are_named_in_a_warning():
    parts = {"vision_config": {"model_type": "new"}, "qformer_config": {"hidden_size": 64}}
    model = model_from_config({**TINY, **parts})

    assert model.uncounted == ("vision_config", "qformer_config")
    assert any(
        "weights of vision_config" in text for text in ask(model={**TINY, **parts}).warnings
    )


def test_an_encoder_of_unknown_structure_is_counted_as_a_vision_transformer():
    sizes = {"width": 64, "layers": 2, "mlp_ratio": 4.0, "patch_size": 14}
    model = model_from_config({**TINY, "vision_config": {"model_type": "new", **sizes}})

    blocks, patches, projector = 2 * 12 * 64 * 64, 3 * 14 * 14 * 64, 256 * (64 + 256)
    assert model.tower_parameters == pytest.approx(blocks + patches + projector, rel=0.02)
    assert model.note == "vision_config is counted as a plain vision transformer"


def test_an_omni_model_is_read_through_its_thinker():
    model = model_from_config(PUBLISHED["Qwen/Qwen3-Omni-30B-A3B-Thinking"]["config"])

    assert (model.model_type, model.num_experts) == ("qwen3_omni_moe_text", 128)
    assert model.uncounted == ("talker_config", "code2wav_config")


def test_only_a_nested_language_model_takes_its_defaults_from_transformers():
    text = {"model_type": "mistral", "hidden_size": 5120, "num_hidden_layers": 40}

    model = model_from_config({"model_type": "mistral3", "text_config": text})
    assert (model.num_attention_heads, model.num_key_value_heads) == (32, 8)
    with pytest.raises(BadConfigError, match="num_attention_heads"):
        model_from_config(text)


@pytest.mark.parametrize("wrong", ["big", [1], 3])
def test_an_encoder_that_is_no_object_is_refused_by_name(wrong):
    with pytest.raises(BadConfigError) as caught:
        model_from_config({**TINY, "vision_config": wrong})

    assert caught.value.field == "model.vision_config"


@pytest.mark.parametrize(
    "config",
    [
        {**TINY, "model_type": "bert", "hidden_act": "gelu"},
        {**TINY, "model_type": "xlm-roberta", "hidden_act": "gelu"},
        {**TINY, "model_type": "whisper", "is_encoder_decoder": True},
        {"model_type": "clip", "text_config": {**TINY, "hidden_act": "gelu"}},
        {"model_type": "siglip", "text_config": {**TINY, "model_type": "siglip_text_model"}},
        {"model_type": "mllama", "text_config": {**TINY, "model_type": "mllama_text_model"}},
    ],
)
def test_an_encoder_is_not_read_as_a_decoder(config):
    with pytest.raises(NotCoveredError, match=config["model_type"]):
        model_from_config(config)


@pytest.mark.parametrize("field", ["type_vocab_size", "is_encoder_decoder"])
def test_an_unknown_encoder_is_no_plain_decoder(field):
    with pytest.raises(BadConfigError, match="not known"):
        model_from_config({**TINY, "model_type": "new", "hidden_act": "gelu", field: 2})
