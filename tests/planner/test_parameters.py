"""Parameters, towers and zeros: counts and bytes equal what checkpoints hold, rank by rank."""

import itertools
import json

import pytest

from planner.catalog.devices import get_device
from planner.catalog.families import FAMILIES
from planner.catalog.models import get_entry, get_model, list_models, model_from_config
from planner.cost.parameters import count_parameters
from planner.cost.weights import GEMM_SPEEDUP, has_sparse_cores, stored_bits
from planner.specs.base import BadConfigError, NotCoveredError
from tests.planner.asking import LLAMA_8B, LLAMA_70B, LLAMA_405B, MIXTRAL, TINY, ask, held
from tests.planner.family_configs import CONFIGS, PUBLISHED, SMALL
from tests.planner.tensors import all_tensors, bytes_on_a_rank, cached_bytes
from tests.plugins.extent import sample

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


def test_embeddings_experts_and_variants_count_as_they_are_held():
    config = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128}
    config |= {"num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 1000}
    untied = count_parameters(model_from_config({**config, "tie_word_embeddings": False}))
    tied = count_parameters(model_from_config({**config, "tie_word_embeddings": True}))
    assert untied.total - tied.total == 64 * 1000

    counts = count_parameters(get_model("mistralai/Mixtral-8x7B-v0.1"))
    assert counts.total == 46_702_792_704
    assert counts.active == pytest.approx(12.88e9, rel=0.01)

    counts = count_parameters(get_model("meta-llama/Llama-3.1-8B"))
    assert counts.active == counts.total

    original = count_parameters(get_model("Qwen/Qwen3-32B")).total
    assert count_parameters(get_model("nvidia/Qwen3-32B-NVFP4")).total == original


# Families without an implementation in transformers: their published counts hold them instead.
ELSEWHERE = {
    "diffusion_gemma_text", "mistral4", "arctic", "baichuan", "bailing_moe", "bailing_moe_v2",
    "ernie4_5_moe_vl", "ernie4_5_vl_moe_text", "exaone", "glm4v_moe_text", "glm4v_text",
    "qwen2_5_omni_text", "qwen3_omni_moe_text", "grok-1", "openelm", "plamo2", "step3",
    "step3_text", "step3_vl", "youtu_llm", "chatglm", "qwen", "mimo", "qwen2_vl", "qwen2_vl_text",
    "qwen2_5_vl", "qwen2_5_vl_text", "qwen3_vl_text", "qwen3_vl_moe_text", "kimi_k2", "dbrx",
    "internlm", "internlm2", "mistral3", "mimo_v2_flash", "deepseek_ref", "minimax_m3",
    "minimax_m3_vl", "nemotron-nas", "step3p7", "mimo_v2", "muse_glimmer_text", "step3p5",
}  # fmt: skip
# Corrections of the router that checkpoints hold but no optimiser trains.
ROUTER_BIASES = ("e_score_correction_bias", "feed_forward.expert_bias")


def test_a_familys_count_equals_its_own_implementation():
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

    wrong = []
    for model_type in sample(sorted(set(FAMILIES) - ELSEWHERE), share=0.4):
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


def test_a_published_config_has_the_published_parameters_under_every_alias():
    for name in PUBLISHED:
        published = PUBLISHED[name]
        counts = count_parameters(model_from_config(published["config"]))
        # A card rounds to its last digit; 314 B of Grok 1 leave out the embedding of 0.8 B.
        assert counts.total / 1e9 == pytest.approx(published["billions"], rel=0.01), name
        if published["active_billions"]:
            active = published["active_billions"]
            assert counts.active / 1e9 == pytest.approx(active, rel=0.05), name

    for entry in list_models():
        for alias in entry.aliases:
            assert get_entry(alias.upper()).id == entry.id


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
    "qwen2_5_vl": (TEXT, {"hidden_size": 1280, "intermediate_size": 3456, "out_hidden_size": 256}),
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


def test_a_composite_models_count_is_near_its_own_implementation():
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    for model_type in sorted(COMPOSITES):
        text, vision = COMPOSITES[model_type]
        config = AutoConfig.for_model(model_type, text_config=text, vision_config=vision)
        with torch.device("meta"):
            own = AutoModelForImageTextToText.from_config(config)
        held = sum(parameter.numel() for parameter in own.parameters())
        model = model_from_config(json.loads(config.to_json_string(use_diff=False)))
        assert count_parameters(model).total == pytest.approx(held, rel=0.01), model_type
        assert model.tower_parameters > 0.7 * held, model_type


def test_a_composite_model_of_the_catalog_holds_its_whole_checkpoint():
    for model_id, published in (
        ("Qwen/Qwen3-VL-2B-Instruct", 2_127_532_032),
        ("Qwen/Qwen3-VL-30B-A3B-Instruct", 31_070_754_032),
        ("google/gemma-3-27b-it", 27_432_406_640),
        ("google/gemma-4-31B-it", 31_273_086_512),
        ("google/gemma-4-E2B-it", 5_104_297_504),
        ("mistralai/Mistral-Small-3.1-24B-Instruct-2503", 24_011_361_280),
        ("zai-org/GLM-4.5V", 107_710_933_120),
    ):
        total = count_parameters(get_model(model_id)).total
        assert total == pytest.approx(published, rel=0.001), (model_id, published)


def test_the_weights_of_encoders_are_held_and_no_token_of_text_uses_them():
    config = PUBLISHED["Qwen/Qwen2.5-VL-72B-Instruct"]["config"]
    counts, model = count_parameters(model_from_config(config)), model_from_config(config)
    assert model.tower_parameters == pytest.approx(0.7046e9, rel=0.001)
    assert counts.active == counts.total - model.tower_parameters
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


def test_parts_without_sizes_are_named_and_unknown_structures_counted_as_transformers():
    parts = {"vision_config": {"model_type": "new"}, "qformer_config": {"hidden_size": 64}}
    model = model_from_config({**TINY, **parts})
    assert model.uncounted == ("vision_config", "qformer_config")
    assert any(
        "weights of vision_config" in text for text in ask(model={**TINY, **parts}).warnings
    )

    sizes = {"width": 64, "layers": 2, "mlp_ratio": 4.0, "patch_size": 14}
    model = model_from_config({**TINY, "vision_config": {"model_type": "new", **sizes}})
    blocks, patches, projector = 2 * 12 * 64 * 64, 3 * 14 * 14 * 64, 256 * (64 + 256)
    assert model.tower_parameters == pytest.approx(blocks + patches + projector, rel=0.02)
    assert model.note == "vision_config is counted as a plain vision transformer"


def test_nested_language_models_are_read_through_their_thinker_and_defaults():
    model = model_from_config(PUBLISHED["Qwen/Qwen3-Omni-30B-A3B-Thinking"]["config"])
    assert (model.model_type, model.num_experts) == ("qwen3_omni_moe_text", 128)
    assert model.uncounted == ("talker_config", "code2wav_config")
    text = {"model_type": "mistral", "hidden_size": 5120, "num_hidden_layers": 40}
    model = model_from_config({"model_type": "mistral3", "text_config": text})
    assert (model.num_attention_heads, model.num_key_value_heads) == (32, 8)
    with pytest.raises(BadConfigError, match="num_attention_heads"):
        model_from_config(text)


def test_an_encoder_is_refused_by_name_and_never_read_as_a_decoder():
    for wrong in ("big", [1], 3):
        with pytest.raises(BadConfigError) as caught:
            model_from_config({**TINY, "vision_config": wrong})
        assert caught.value.field == "model.vision_config", wrong

    for config in (
        {**TINY, "model_type": "bert", "hidden_act": "gelu"},
        {**TINY, "model_type": "xlm-roberta", "hidden_act": "gelu"},
        {**TINY, "model_type": "whisper", "is_encoder_decoder": True},
        {"model_type": "clip", "text_config": {**TINY, "hidden_act": "gelu"}},
        {"model_type": "siglip", "text_config": {**TINY, "model_type": "siglip_text_model"}},
        {"model_type": "mllama", "text_config": {**TINY, "model_type": "mllama_text_model"}},
    ):
        with pytest.raises(NotCoveredError, match=config["model_type"]):
            model_from_config(config)

    for field in ("type_vocab_size", "is_encoder_decoder"):
        with pytest.raises(BadConfigError, match="not known"):
            model_from_config({**TINY, "model_type": "new", "hidden_act": "gelu", field: 2})


WITHOUT_BIASES = [
    LLAMA_8B, LLAMA_70B, LLAMA_405B, MIXTRAL, "meta-llama/Llama-3.2-1B",
    "mistralai/Mistral-7B-v0.1", "Qwen/Qwen3-8B", "Qwen/Qwen3-30B-A3B", "google/gemma-2b",
]  # fmt: skip
FOUR_GIB = 4 * 1024**3
BIG = {
    "id": "roomy",
    "memory_bytes": 2**42,
    "memory_bandwidth_bytes_per_second": 3e12,
    "peak_flops_per_second": {"bf16": 1e15, "fp8": 2e15, "int8": 2e15},
    "intra_node_bandwidth_bytes_per_second": 450e9,
}
SERVE = {"kind": "serve", "input_tokens": 1000, "output_tokens": 24, "concurrency": 16}
STEP = {"kind": "train", "sequence_length": 2048, "global_batch_size": 16, "method": "full"}


def tensor_sizes(model_id):
    model = get_model(model_id)
    return [
        ranks
        for ranks in (1, 2, 4, 8, 16)
        if model.num_attention_heads % ranks == 0
        and max(model.num_key_value_heads, ranks) % min(model.num_key_value_heads, ranks) == 0
    ]


CASES = [(model, ranks) for model in WITHOUT_BIASES for ranks in tensor_sizes(model)]


def on_ranks(model, ranks, workload, **strategy):
    layout = {"tensor_parallel_size": ranks, "data_parallel_size": 1, **strategy}
    return ask(model=model, device=BIG, devices=16, workload=workload, strategy=layout)


def test_the_tensors_of_a_checkpoint_add_up_and_a_rank_holds_its_cut():
    for model in WITHOUT_BIASES:
        spec = get_model(model)
        listed = sum(tensor.elements for tensor in all_tensors(spec))
        assert count_parameters(spec).total == listed, model

    wrong = []
    for model, ranks in CASES:
        found = on_ranks(model, ranks, SERVE, weight_dtype="bf16")
        listed = bytes_on_a_rank(get_model(model), ranks, 2)
        if held(found, "weights") != pytest.approx(listed, rel=1e-6):
            wrong.append((model, ranks, held(found, "weights")))
    assert not wrong, wrong


def test_a_rank_caches_whole_heads_of_every_token():
    wrong = []
    for model, ranks in CASES:
        spec = get_model(model)
        if any(group.window for group in spec.layers_by_attention):
            # Windows have tests of their own.
            spec = spec.model_copy(update={"attention_layers": ()})
        found = on_ranks(spec.model_dump(exclude_none=True), ranks, SERVE, weight_dtype="bf16")
        # 1,000 + 24 tokens are 64 whole pages of 16, so that paging adds nothing.
        listed = cached_bytes(spec, [1024] * 16, ranks, 2)
        if held(found, "kv_cache") != pytest.approx(listed, rel=0.02):
            wrong.append((model, ranks, held(found, "kv_cache")))
    assert not wrong, wrong


def test_zero_divides_what_its_stage_shards_and_nothing_else():
    """Sixteen devices: weights in bf16, gradients in fp32, two moments and a master in fp32."""
    for model, ranks, stage in itertools.product(
        (LLAMA_8B, LLAMA_70B, "Qwen/Qwen3-8B"), (1, 2, 4, 8), (0, 1, 2, 3)
    ):
        data = 16 // ranks
        found = ask(
            model=model,
            device=BIG,
            devices=16,
            workload=STEP,
            engine="megatron",
            strategy={
                "tensor_parallel_size": ranks,
                "data_parallel_size": data,
                "zero_stage": stage,
                "weight_dtype": "bf16",
                "gradient_dtype": "fp32",
            },
        )

        elements = bytes_on_a_rank(get_model(model), ranks, 1)
        shards = [data if stage >= first else 1 for first in (1, 2, 3)]
        assert held(found, "optimizer_states") == pytest.approx(
            12 * elements / shards[0], rel=1e-6
        )
        assert held(found, "gradients") == pytest.approx(4 * elements / shards[1], rel=1e-6)
        assert held(found, "weights") == pytest.approx(2 * elements / shards[2], rel=1e-6)


def test_the_stages_of_a_pipeline_hold_every_weight_once():
    for model in (LLAMA_8B, LLAMA_70B, MIXTRAL):
        spec = get_model(model)
        whole = sum(tensor.elements for tensor in all_tensors(spec)) * 2
        stages = 4

        piped = ask(
            model=model,
            device=BIG,
            devices=stages,
            workload=SERVE,
            strategy={"pipeline_parallel_size": stages, "weight_dtype": "bf16"},
        )

        assert whole / stages < held(piped, "weights") < whole / stages * 1.2, model


def test_a_narrow_type_shrinks_matrices_but_no_norm_and_no_vocabulary():
    spec = get_model(LLAMA_8B)
    for dtype, bytes_each in (("bf16", 2), ("fp8", 1), ("int8", 1)):
        matrices = sum(
            t.elements for t in all_tensors(spec) if ".attention" in t.name or ".mlp" in t.name
        )
        rest = sum(t.elements for t in all_tensors(spec)) - matrices
        found = on_ranks(LLAMA_8B, 1, SERVE, weight_dtype=dtype)
        scales = 0.01 * matrices if bytes_each < 2 else 0
        exact = matrices * bytes_each + rest * 2
        assert exact - 1 <= held(found, "weights") <= exact + scales, (dtype, bytes_each)


def pruned(sparsity=0.5, **fields):
    return ask(strategy={"sparsity": sparsity}, **{"engine": "vllm", **fields})


def of_linear(found, group="prefill"):
    return next(t.value for t in found.terms if t.key == "linear" and t.group == group)


def test_half_of_the_weights_in_fours_saves_memory_reads_and_time():
    for bits, stored in ((16, 9), (8, 5), (4, 3)):
        assert stored_bits(bits) == stored, (bits, stored)
    dense, half = ask(engine="vllm"), pruned()
    assert 0.56 < held(half, "weights") / held(dense, "weights") < 0.65
    assert of_linear(half, "decode") < 0.6 * of_linear(dense, "decode")
    ratio = of_linear(ask(engine="vllm")) / of_linear(pruned())
    assert ratio == pytest.approx(GEMM_SPEEDUP)


def test_zeros_that_nothing_skips_save_nothing_and_the_answer_says_why():
    for fields, reason in (
        ({"sparsity": 0.6}, "two zeros in every four"),
        ({"engine": "llama_cpp"}, "has no 2:4 kernels"),
        ({"device": "v100"}, "no sparse tensor cores"),
        ({"device": "mi300x"}, "no sparse tensor cores"),
    ):
        found = pruned(**fields)
        dense = ask(**{"engine": "vllm", **{k: v for k, v in fields.items() if k != "sparsity"}})
        assert any("saves neither" in w and reason in w for w in found.warnings), (fields, reason)
        assert found.memory == dense.memory, (fields, reason)
        assert found.performance == dense.performance, (fields, reason)


def test_sparse_cores_came_with_ampere():
    for device, has in (("a100", True), ("l4", True), ("t4", False)):
        assert has_sparse_cores(get_device(device)) is has, (device, has)
