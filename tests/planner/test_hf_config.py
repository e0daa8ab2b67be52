"""Any pasted config.json is a model, or a refusal that names a field."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.catalog.gguf import packed_format
from planner.catalog.layer_groups import SPELLINGS, ConfigReader
from planner.catalog.models import get_model, model_from_config
from planner.catalog.quality import family_of
from planner.cost.parameters import count_parameters
from planner.specs.base import BadConfigError, NotCoveredError, PlannerError, UnknownNameError
from planner.specs.model import ModelSpec
from tests.planner.asking import TINY, ask
from tests.planner.family_configs import PUBLISHED

SHIPPED = sorted(Path("planner/catalog/data/configs").glob("*.json"))


def test_a_llama_config_is_read_by_its_own_names():
    model = model_from_config(TINY, "demo")
    assert (model.hidden_size, model.head_dim, model.num_key_value_heads) == (256, 32, 4)
    assert model.id == "demo"
    # Heads without grouping each have their own keys.
    config = {name: value for name, value in TINY.items() if name != "num_key_value_heads"}
    assert model_from_config(config).num_key_value_heads == 8
    # The quantisation of the checkpoint becomes the default weight format.
    quantised = {**TINY, "quantization_config": {"quant_method": "fp8"}}
    assert model_from_config(quantised).weight_dtype == "fp8"
    # A multimodal config is read through its text part.
    outer = {"model_type": "qwen3_vl", "text_config": {**TINY, "model_type": "qwen3_vl_text"}}
    assert model_from_config(outer).model_type == "qwen3_vl_text"


def test_a_missing_field_is_named_as_its_family_spells_it():
    for name in ["hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"]:
        config = {key: value for key, value in TINY.items() if key != name}
        with pytest.raises(BadConfigError, match=name) as caught:
            model_from_config(config)
        assert caught.value.field == f"model.{name}"

    with pytest.raises(BadConfigError, match="n_embd"):
        model_from_config({"model_type": "gpt2", "n_layer": 2, "n_head": 2, "vocab_size": 9})
    # A config without model type says what to give.
    with pytest.raises(BadConfigError, match="no model_type"):
        model_from_config({"hidden_size": 5})

    # A family with layers of its own names what it needs.
    for fields, named in [
        ({"model_type": "nemotron-nas", "block_configs": []}, "model.block_configs"),
        ({"model_type": "deepseek_v4", "compress_ratios": []}, "model.compress_ratios"),
    ]:
        with pytest.raises(BadConfigError) as caught:
            model_from_config({**TINY, **fields})
        assert caught.value.field == named


def test_an_unknown_family_is_a_plain_decoder_or_refused():
    # An unknown family names the nearest known ones.
    with pytest.raises(BadConfigError, match=r"nearest of the .* are: llama4_text"):
        model_from_config({**TINY, "model_type": "llama9_text"})

    # An unknown family that spells a plain decoder out is read as one.
    config = {**TINY, "model_type": "brand_new", "hidden_act": "silu"}
    model = model_from_config(config)
    assert model.intermediate_size == TINY["intermediate_size"]
    assert "brand_new is not known: it is read as a dense decoder" in model.note

    # An estimate warns of a family that had to be guessed.
    assert any("brand_new" in warning for warning in ask(model=config).warnings)

    # An unknown family with more than a plain decoder is refused.
    for name in ["num_experts", "kv_lora_rank", "ssm_state_size"]:
        config = {**TINY, "model_type": "brand_new", "hidden_act": "silu", name: 8}
        with pytest.raises(BadConfigError, match="'brand_new' is not known"):
            model_from_config(config)

    # A family without formulas is refused by what it lacks.
    with pytest.raises(NotCoveredError, match="recurrence without attention"):
        model_from_config({**TINY, "model_type": "rwkv"})


def test_what_is_no_name_of_a_family_is_refused_whatever_the_rest():
    for name in ("../../etc", "/etc/passwd", "a b", "<b>", "llama\n", "-rf", "x" * 81, "\u0430b"):
        with pytest.raises(BadConfigError, match="not the name of a model family"):
            model_from_config({**TINY, "model_type": name, "architectures": ["LlamaForCausalLM"]})
    plain = {**TINY, "hidden_act": "silu", "model_type": "my-own_decoder.2"}
    assert model_from_config(plain).hidden_size == 256


def test_sizes_and_kinds_of_layers_that_cannot_be_are_refused_by_name():
    short = {"layer_types": ["full_attention"] * 5, "sliding_window": 8}
    for fields, words in [
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3"),
        (short, "layer_types has 5 entries, but the model has 6"),
        ({"layer_types": ["telepathy"] * 6}, "layer_types names telepathy"),
        ({"layer_types": ["linear_attention"] * 6}, "recurrent layers"),
        *(({"hidden_size": wrong}, "hidden_size is") for wrong in (-1, "many", 2.5, True)),
    ]:
        with pytest.raises(BadConfigError, match=words):
            model_from_config({**TINY, **fields})

    with pytest.raises(BadConfigError) as caught:
        model_from_config({**TINY, "num_hidden_layers": 0})
    assert caught.value.field == "model.num_hidden_layers"

    # A rotary scaling of another type is refused by name.
    for wrong in ["yarn", [1], {"type": "linear", "factor": "4"}]:
        with pytest.raises(BadConfigError) as caught:
            model_from_config({**TINY, "rope_scaling": wrong})
        assert caught.value.field.startswith("model.rope_scaling")


def test_windows_are_those_of_the_family_and_its_switches():
    # Gemma 3 slides in five of six layers.
    config = {**TINY, "model_type": "gemma3_text", "sliding_window": 64}
    groups = model_from_config(config).attention_layers
    assert [(group.kind, group.count) for group in groups] == [("sliding", 5), ("full", 1)]
    # Every second layer of Gemma 2 slides.
    config = {**TINY, "model_type": "gemma2", "sliding_window": 64}
    groups = model_from_config(config).attention_layers
    assert [(g.kind, g.count, g.window) for g in groups] == [("sliding", 3, 64), ("full", 3, None)]
    # A sliding window that is off is no window.
    config = {**TINY, "model_type": "qwen2", "sliding_window": 64, "use_sliding_window": False}
    assert model_from_config(config).attention_layers == ()
    # Entries past the last layer describe predictors and are left out.
    config = {**TINY, "sliding_window": 8}
    config["layer_types"] = ["full_attention"] * 6 + ["sliding_attention"] * 2
    assert model_from_config(config).attention_layers == ()


def test_what_configs_leave_out_or_repeat_is_filled_in_as_their_code_does():
    # What gemma 3 configs leave out is filled in as its own code does.
    config = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240}
    model = model_from_config({**config, "num_hidden_layers": 34, "sliding_window": 1024})
    assert (model.num_attention_heads, model.head_dim, model.vocab_size) == (8, 256, 262208)
    # A size that every layer repeats is read as one.
    config = {**TINY, "model_type": "hunyuan_v1_moe", "num_experts": 4, "moe_topk": [2] * 6}
    assert model_from_config(config).num_experts_per_tok == 2

    # A table of learned positions keeps its own size.
    config = {"model_type": "opt", "hidden_size": 64, "ffn_dim": 96, "num_hidden_layers": 2}
    config |= {"num_attention_heads": 4, "vocab_size": 320, "max_position_embeddings": 128}
    model = model_from_config({**config, "rope_scaling": {"type": "linear", "factor": 2.0}})
    assert (model.learned_positions, model.max_position_embeddings) == (130, 256)


def test_every_shipped_config_loads():
    models = {path.stem: model_from_config(json.loads(path.read_text())) for path in SHIPPED}
    wrong = [name for name, model in models.items() if model.vocab_size <= 0]
    assert models
    assert not wrong, wrong


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


def scaled(kind, factor, original=None, name="rope_type"):
    known = {} if original is None else {"original_max_position_embeddings": original}
    return {"rope_scaling": {name: kind, "factor": factor, **known}}


# What a config says beside its max_position_embeddings, and the context of engines.
CONTEXTS = [
    (32768, {"rope_scaling": YARN}, 131072),
    (32768, scaled("yarn", 2, name="type"), 65536),
    (131072, {"rope_scaling": YARN}, 131072),
    (4096, {"rope_scaling": None}, 4096),
    (4096, {"sliding_window": 2047}, 4096),
    # Llama 3.1
    (131072, scaled("llama3", 8.0, 8192), 131072),
    # Phi-3 128k
    (
        131072,
        {
            "original_max_position_embeddings": 4096,
            "rope_scaling": {"type": "longrope", "short_factor": [1], "long_factor": [1]},
        },
        131072,
    ),
    # gpt-oss, DeepSeek-V3
    (131072, scaled("yarn", 32.0, 4096), 131072),
    (163840, scaled("yarn", 40, 4096, name="type"), 163840),
    # deepseek-coder, InternLM 2, Qwen2-VL
    (16384, scaled("linear", 4.0, name="type"), 65536),
    (32768, scaled("dynamic", 2.0, name="type"), 65536),
    (32768, {"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}, 32768),
    # The per-layer form of transformers 5, and Gemma 3, whose length is the extended one.
    (
        32768,
        {
            "rope_parameters": {
                "full_attention": {**YARN, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            }
        },
        131072,
    ),
    (131072, {"model_type": "gemma3_text", **scaled("linear", 8.0)}, 131072),
    # Command-R; Qwen
    (8192, {"model_max_length": 131072}, 131072),
    (32768, {"seq_length": 8192}, 8192),
]


def test_the_context_is_what_engines_derive_from_the_config():
    found = [
        model_from_config({**TINY, "max_position_embeddings": positions, **fields})
        for positions, fields, _ in CONTEXTS
    ]
    wrong = [
        (row, model.max_position_embeddings)
        for row, model in zip(CONTEXTS, found, strict=True)
        if model.max_position_embeddings != row[-1]
    ]
    assert not wrong, wrong


def reader(**fields) -> ConfigReader:
    return ConfigReader({"model_type": "demo", "num_hidden_layers": 3, **fields})


def test_a_field_is_read_by_any_of_its_spellings_and_asked_for_by_the_familys():
    # Every spelling of a field is found by its common name.
    found = {
        (name, other): ConfigReader({"model_type": "demo", other: 7}).get(name)
        for name, others in SPELLINGS.items()
        for other in others
    }
    assert found == dict.fromkeys(found, 7)

    # The own spelling of a family wins over the common one.
    found = reader(ffn_dim=512, intermediate_size=256)
    found.names = {"intermediate_size": "ffn_dim"}
    assert found.integer("intermediate_size") == 512
    assert found.config_key("intermediate_size") == "ffn_dim"
    assert found.config_key("vocab_size") == "vocab_size"

    # A missing number is asked for in the own spelling of the family.
    found = reader()
    found.names = {"intermediate_size": "ffn_dim"}
    with pytest.raises(BadConfigError, match="model_type demo lacks ffn_dim") as caught:
        found.integer("intermediate_size")
    assert caught.value.field == "model.ffn_dim"


def test_a_number_is_a_whole_number_a_default_or_one_for_every_layer():
    # A field without a value is not there.
    for nothing in [None, 0, "", [], {}, False]:
        assert not reader(sliding_window=nothing).has("sliding_window")

    # A number is a whole number and nothing that looks like one.
    for wrong in ["7", 7.0, -7, True, {"a": 7}]:
        with pytest.raises(BadConfigError) as caught:
            reader(vocab_size=wrong).integer("vocab_size")
        assert f"vocab_size is {wrong!r}" in caught.value.message

    # A null takes the default and a zero stays zero.
    assert reader(head_dim=None).integer("head_dim", 64) == 64
    assert reader(head_dim=0).integer("head_dim", 64) == 0
    # A list of one number for every layer is that number.
    assert reader(moe_topk=[8, 8, 8]).integer("num_experts_per_tok") == 8

    # A switch that is not told takes the default of the family.
    for default in [True, False]:
        assert reader().flag("attention_bias", default=default) is default
        assert reader(attention_bias=None).flag("attention_bias", default=default) is default
        assert (
            reader(attention_bias=not default).flag("attention_bias", default=default)
            is not default
        )


def test_a_list_has_one_entry_for_each_layer_or_none():
    for given_, read in [(None, ()), ([], ()), ("full", ()), ([1, 2, 3, 4], (1, 2, 3))]:
        assert reader(layer_types=given_).listed("layer_types") == read

    # A list that is too short is refused with both lengths.
    with pytest.raises(
        BadConfigError, match="has 2 entries, but the model has 3 layers"
    ) as caught:
        reader(layer_types=["a", "b"]).listed("layer_types")
    assert caught.value.field == "model.layer_types"


def test_a_list_or_size_of_kimis_linear_layers_is_refused_under_its_own_name():
    config = json.loads(
        Path(
            "planner/catalog/data/configs/moonshotai--Kimi-Linear-48B-A3B-Instruct.json"
        ).read_text()
    )
    own = config["linear_attn_config"]

    for changed, field, message in [
        (
            {"linear_attn_config": own | {"kda_layers": list(range(1, 41))}},
            "model.linear_attn_config.kda_layers",
            "linear_attn_config.kda_layers has 40 entries, but the model has 27 layers",
        ),
        (
            {"linear_attn_config": own | {"kda_layers": []}, "layer_types": ["linear_attention"]},
            "model.layer_types",
            "layer_types has 1 entries, but the model has 27 layers",
        ),
        (
            {"linear_attn_config": own | {"head_dim": None}},
            "model.linear_attn_config.head_dim",
            "linear_attn_config lacks head_dim",
        ),
        (
            {"linear_attn_config": None, "layer_types": ["linear_attention"] * 27},
            "model.linear_num_heads",
            "lacks linear_num_heads",
        ),
    ]:
        with pytest.raises(BadConfigError) as caught:
            model_from_config(config | changed)
        assert message in caught.value.message
        assert caught.value.field == field

    # Without the list, the entries of layer_types count.
    counted = model_from_config(
        config
        | {"linear_attn_config": own | {"kda_layers": []}}
        | {"layer_types": ["linear_attention"] * 20 + ["full_attention"] * 7}
    )
    assert [group.count for group in counted.layers_by_attention] == [20, 7]


CONFIGS = {path.stem: json.loads(path.read_text()) for path in SHIPPED}
CONFIGS |= {name: published["config"] for name, published in PUBLISHED.items()}
MISSING = object()
WORDS = ("big", "two", "", "false", "MXM*-M", "re:(", "128")
NUMBERS = (-1, 0, 3, 1.5, 1e308, 10**18, True, False)
SPOILT: st.SearchStrategy[Any] = st.one_of(
    st.sampled_from([MISSING, None, *WORDS, *NUMBERS, [], {}, [1], ["x"], [None], [{}], [[1]]]),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=2)
        ),
        max_leaves=4,
    ),
)
LONGEST_MESSAGE = 1500


def places(config: Any, before: tuple = ()) -> list[tuple]:
    """Return where every field of a config lies, those of its inner objects too."""
    found: list[tuple] = []
    if isinstance(config, dict):
        for name, value in config.items():
            found += [(*before, name), *places(value, (*before, name))]
    if isinstance(config, list) and config and isinstance(config[0], dict):
        found += places(config[0], (*before, 0))
    return found


def spoil(config: dict, place: tuple, value: Any) -> dict:
    changed = copy.deepcopy(config)
    inner = changed
    for name in place[:-1]:
        inner = inner[name]
    if value is MISSING:
        del inner[place[-1]]
    else:
        inner[place[-1]] = value
    return changed


PLACES = {name: places(config) for name, config in CONFIGS.items()}


@given(st.sampled_from(sorted(CONFIGS)), st.data(), SPOILT)
def test_a_spoilt_config_is_a_model_or_refused_by_a_name(name, data, value):
    config = spoil(CONFIGS[name], data.draw(st.sampled_from(PLACES[name])), value)
    try:
        found: object = count_parameters(model_from_config(config)).total
    except PlannerError as refusal:
        found = refusal
    named = isinstance(found, PlannerError) and (found.field or "").startswith("model")
    assert named or (isinstance(found, int) and found > 0)
    assert len(str(found)) < LONGEST_MESSAGE


@given(st.recursive(st.none() | st.integers() | st.text(), st.lists, max_leaves=3))
def test_what_is_no_object_is_no_config(value):
    with pytest.raises(BadConfigError, match="must be an object"):
        model_from_config(value)


MIXTURE = {
    **TINY, "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
}  # fmt: skip
HYBRID = CONFIGS["nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"]


def test_a_wrong_field_is_named_as_the_config_names_it():
    for config, field in [
        ({**TINY, "model_type": "mistral", "sliding_window": "big"}, "sliding_window"),
        ({**TINY, "model_type": "cohere2", "sliding_window_pattern": [1, 2]}, "sliding_window_p"),
        ({**HYBRID, "hybrid_override_pattern": "MXM*-M"}, "hybrid_override_pattern"),
        ({**MIXTURE, "decoder_sparse_step": "two"}, "decoder_sparse_step"),
        ({**MIXTURE, "mlp_only_layers": 3}, "mlp_only_layers"),
        ({**TINY, "tie_word_embeddings": "false"}, "tie_word_embeddings"),
        ({**TINY, "attention_bias": "no"}, "attention_bias"),
        ({**TINY, "num_attention_heads": 4, "num_key_value_heads": 3}, "num_attention_heads"),
        ({**TINY, "num_hidden_layers": 10**12}, "num_hidden_layers"),
        ({**MIXTURE, "num_experts": 1}, "num_experts_per_tok"),
        ({**MIXTURE, "num_local_experts": "8", "num_experts": MISSING}, "num_local_experts"),
    ]:
        given_ = {name: value for name, value in config.items() if value is not MISSING}
        with pytest.raises(BadConfigError) as caught:
            model_from_config(given_)
        assert caught.value.field.startswith(f"model.{field}")

    # A contradiction between fields is told without the whole model.
    with pytest.raises(BadConfigError) as caught:
        model_from_config({**MIXTURE, "num_experts_per_tok": 9})
    assert str(caught.value).startswith("num_experts_per_tok is 9, but num_experts is 8")


def test_a_field_that_is_null_takes_what_its_family_fills_in():
    nas = CONFIGS["nvidia--Llama-3_3-Nemotron-Super-49B-v1"]
    left_out = {name: value for name, value in nas.items() if name != "intermediate_size"}
    null = model_from_config({**nas, "intermediate_size": None})
    assert null == model_from_config(left_out)


def test_families_with_other_layers_are_refused_by_what_they_are():
    for model_type in ["mamba", "falcon_h1", "jetmoe", "phi4_multimodal", "rwkv", "jamba"]:
        with pytest.raises(NotCoveredError, match=model_type) as caught:
            model_from_config({**TINY, "hidden_act": "silu", "model_type": model_type})
        assert caught.value.field == "model.model_type"

    # An unknown family with states is no plain decoder.
    for field in ["mamba_d_ssm", "state_size", "conv_kernel", "lru_width"]:
        config = {**TINY, "hidden_act": "silu", "model_type": "new_one"}
        with pytest.raises(BadConfigError, match="new_one"):
            model_from_config({**config, field: 16})
        assert "not known" in model_from_config(config).note


def test_a_format_without_a_method_or_bits_is_refused():
    for name in [":4", "exl2:", ":", "exl2:nan"]:
        with pytest.raises(UnknownNameError):
            packed_format(name)


def test_a_token_does_not_visit_the_biases_of_experts_that_it_skips():
    model = get_model("openai/gpt-oss-20b")
    counts = count_parameters(model)
    every = {"num_experts_per_tok": model.num_experts}
    all_visited = count_parameters(ModelSpec(**(model.model_dump() | every)))
    one = 3 * model.hidden_size * model.moe_intermediate_size
    biases = 2 * model.moe_intermediate_size + model.hidden_size
    skipped = model.num_hidden_layers * (model.num_experts - model.num_experts_per_tok)
    assert all_visited.active == all_visited.total
    assert all_visited.active - counts.active == skipped * (one + biases)


def test_a_family_is_known_by_its_whole_number():
    for name, family in [
        ("huggyllama/llama-30b", "llama-1"),
        ("codellama/CodeLlama-34b-hf", "llama-2"),
        ("meta-llama/Llama-3.2-3B", "llama-3"),
        ("meta-llama/Llama-2-70b", "llama-2"),
        ("microsoft/phi-2", "phi"),
        ("facebook/opt-30b", "opt"),
    ]:
        assert family_of(name) == family
