"""Real configs with one field spoilt: a model, or a refusal that names a field."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.catalog.gguf import packed_format
from planner.catalog.models import get_model, model_from_config
from planner.catalog.quality import family_of
from planner.cost.parameters import count_parameters
from planner.errors import BadConfigError, NotCoveredError, PlannerError, UnknownNameError
from planner.specs.model import ModelSpec
from tests.planner.asking import TINY
from tests.planner.family_configs import PUBLISHED

FOLDER = Path("planner/catalog/data/configs")
CONFIGS = {path.stem: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))}
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
    **TINY,
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
}
HYBRID = CONFIGS["nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"]


@pytest.mark.parametrize(
    ("config", "field"),
    [
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
    ],
)
def test_a_wrong_field_is_named_as_the_config_names_it(config, field):
    given_ = {name: value for name, value in config.items() if value is not MISSING}

    with pytest.raises(BadConfigError) as caught:
        model_from_config(given_)

    assert caught.value.field.startswith(f"model.{field}")


def test_a_field_that_is_null_takes_what_its_family_fills_in():
    nas = CONFIGS["nvidia--Llama-3_3-Nemotron-Super-49B-v1"]
    left_out = {name: value for name, value in nas.items() if name != "intermediate_size"}

    null = model_from_config({**nas, "intermediate_size": None})

    assert null == model_from_config(left_out)


def test_a_contradiction_between_fields_is_told_without_the_whole_model():
    with pytest.raises(BadConfigError) as caught:
        model_from_config({**MIXTURE, "num_experts_per_tok": 9})

    assert str(caught.value).startswith("num_experts_per_tok is 9, but num_experts is 8")


@pytest.mark.parametrize(
    "model_type", ["mamba", "falcon_h1", "jetmoe", "phi4_multimodal", "rwkv", "jamba"]
)
def test_a_family_with_other_layers_is_refused_by_what_they_are(model_type):
    with pytest.raises(NotCoveredError, match=model_type) as caught:
        model_from_config({**TINY, "hidden_act": "silu", "model_type": model_type})

    assert caught.value.field == "model.model_type"


@pytest.mark.parametrize("field", ["mamba_d_ssm", "state_size", "conv_kernel", "lru_width"])
def test_an_unknown_family_with_states_is_no_plain_decoder(field):
    config = {**TINY, "hidden_act": "silu", "model_type": "new_one"}

    with pytest.raises(BadConfigError, match="new_one"):
        model_from_config({**config, field: 16})

    assert "not known" in model_from_config(config).note


@pytest.mark.parametrize("name", [":4", "exl2:", ":", "exl2:nan"])
def test_a_format_without_a_method_or_bits_is_refused(name):
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


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("huggyllama/llama-30b", "llama-1"),
        ("codellama/CodeLlama-34b-hf", "llama-2"),
        ("meta-llama/Llama-3.2-3B", "llama-3"),
        ("meta-llama/Llama-2-70b", "llama-2"),
        ("microsoft/phi-2", "phi"),
        ("facebook/opt-30b", "opt"),
    ],
)
def test_a_family_is_known_by_its_whole_number(name, family):
    assert family_of(name) == family
