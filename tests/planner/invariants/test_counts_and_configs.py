"""Laws of size: what a model has, and that every config of a covered family can be read."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.catalog.models import get_model, list_models, model_from_config
from planner.cost.parameters import count_parameters
from planner.specs.estimate import EstimateRequest
from planner.specs.model import ModelSpec
from tests.planner.asking import SERVE, ask, document
from tests.planner.invariants.drawing import configs, few, latent_models, sparse_configs

LAYER_BIASES = {"qwen2": ("q", "k", "v")}


def tensors(config):
    """Every tensor of a dense llama-like checkpoint, by name, written out shape by shape."""
    hidden, ffn, vocab = (
        config[name] for name in ("hidden_size", "intermediate_size", "vocab_size")
    )
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    width = hidden // heads
    out = {"q": heads * width, "k": kv_heads * width, "v": kv_heads * width}
    shapes = {"embed": (vocab, hidden), "norm": (hidden,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head"] = (vocab, hidden)
    for layer in range(config["num_hidden_layers"]):
        shapes |= {(layer, name): (size, hidden) for name, size in out.items()}
        shapes[layer, "o"] = (hidden, heads * width)
        shapes |= {(layer, name): (ffn, hidden) for name in ("gate", "up", "down")}
        shapes |= {(layer, name): (hidden,) for name in ("norm_1", "norm_2")}
        for name in LAYER_BIASES.get(config["model_type"], ()):
            shapes[layer, name, "bias"] = (out[name],)
        if config["model_type"] == "qwen3":
            shapes |= {(layer, name): (width,) for name in ("q_norm", "k_norm")}
    return shapes


def elements(shapes):
    return sum(shape[0] * (shape[1] if len(shape) > 1 else 1) for shape in shapes.values())


@few
@given(config=configs())
def test_the_count_is_the_sum_of_the_checkpoints_tensors(config):
    """llm-analysis always ties embeddings (69.50 B for 70.55 B); accelerate drops the head."""
    assert count_parameters(model_from_config(config)).total == elements(tensors(config))


@few
@given(config=configs())
def test_untying_the_embeddings_adds_exactly_one_head(config):
    """llm-analysis has no untied embeddings, accelerate's AutoModel no output head."""
    tied, untied = (
        count_parameters(model_from_config({**config, "tie_word_embeddings": is_tied})).total
        for is_tied in (True, False)
    )
    assert untied - tied == config["vocab_size"] * config["hidden_size"]


@few
@given(config=sparse_configs())
def test_a_token_visits_its_share_of_the_experts_and_all_of_the_rest(config):
    """llm-analysis leaves the experts per token out of a sparse model's work."""
    counts = count_parameters(model_from_config(config))
    share = config["num_experts_per_tok"] / config["num_experts"]
    assert counts.experts_active == pytest.approx(counts.experts * share)
    assert counts.active == counts.total - counts.experts + counts.experts_active


@few
@given(config=configs(), more=st.integers(1, 8))
def test_each_further_layer_adds_the_same(config, more):
    """EleutherAI's calculator takes 12 h^2 a layer, whatever the heads and the feed-forward."""
    sizes = [
        count_parameters(model_from_config({**config, "num_hidden_layers": layers})).total
        for layers in (1, 2, 2 + more)
    ]
    assert sizes[2] - sizes[1] == more * (sizes[1] - sizes[0])


@few
@given(config=configs())
def test_any_config_of_a_covered_family_can_be_estimated(config):
    """llm-analysis 0.2.2 cannot represent Llama-3 at all; HEAD fails when f/h is not 3.5."""
    found = ask(model=config, workload={**SERVE, "input_tokens": 64})
    assert found.performance.tpot_seconds > 0


@few
@given(config=sparse_configs())
def test_any_sparse_config_can_be_estimated(config):
    """Calculon and LLMCompass know neither grouped heads nor experts."""
    found = ask(model=config, workload={**SERVE, "input_tokens": 64})
    assert found.performance.ttft_seconds > 0


@few
@given(fields=latent_models())
def test_any_model_with_latents_can_be_estimated(fields):
    """fm-training-estimator counts multi-head attention alone."""
    found = ask(model=fields, devices=8, strategy={"tensor_parallel_size": 8}, engine="sglang")
    assert found.performance.tpot_seconds > 0


def test_every_model_of_the_catalog_loads_offline_and_can_be_costed():
    """hf-mem and accelerate ask a hub first; llm-analysis maps an unread config to a wrong one."""
    wrong = []
    for model_id in [entry.id for entry in list_models()]:
        stages = min(8, get_model(model_id).num_hidden_layers)
        answer = ask(
            model=model_id,
            device="b300-sxm",
            devices=8,
            strategy={"pipeline_parallel_size": stages},
        )
        if not answer.memory.per_device_peak_bytes > 0:
            wrong.append(model_id)
    assert not wrong, wrong


@few
@given(config=configs())
def test_every_answer_survives_json(config):
    """aiconfigurator and llm-analysis answer with objects whose figures JSON cannot hold."""
    found = ask(model=config, workload={**SERVE, "input_tokens": 64})
    assert type(found).model_validate_json(found.model_dump_json()) == found


@few
@given(fields=latent_models(), as_json=st.booleans())
def test_explicit_fields_are_taken_as_they_are_given(fields, as_json):
    """A config reader that guesses by family drops the fields that it does not know."""
    request = document(model=fields)
    if as_json:
        parsed = EstimateRequest.model_validate_json(json.dumps(request))
    else:
        parsed = EstimateRequest.model_validate(request)

    assert parsed.model == ModelSpec.model_validate(fields)
