"""An encoder with a classification head: its parameters, its memory and what it is not asked."""

import pytest

from planner.api import estimate, plan
from planner.catalog.hf_config import model_from_config
from planner.cost.parameters import count_parameters
from planner.cost.roofline import layer_pairs
from planner.errors import BadRequestError
from planner.specs.estimate import EstimateRequest, PlanRequest

DISTILBERT = {
    "model_type": "distilbert", "dim": 768, "hidden_dim": 3072, "n_layers": 6, "n_heads": 12,
    "vocab_size": 30522, "max_position_embeddings": 512,
}  # fmt: skip
TRAINING = {"kind": "train", "sequence_length": 128, "global_batch_size": 64, "method": "full"}
REQUEST = {
    "model": DISTILBERT, "cluster": {"device": "t4", "devices_per_node": 2},
    "workload": TRAINING, "engine": "torch",
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "published"),
    [  # transformers' DistilBertForSequenceClassification, summed over its parameters
        ({}, 66_955_010),
        ({"num_labels": 4}, 66_956_548),
        ({"id2label": {"0": "a", "1": "b", "2": "c"}}, 66_955_779),
        ({"tie_word_embeddings": False}, 66_955_010),
    ],
)
def test_parameters_equal_the_published_classifiers(changes, published):
    assert count_parameters(model_from_config(DISTILBERT | changes)).total == published


def test_every_token_sees_every_other():
    model = model_from_config(DISTILBERT)

    assert layer_pairs(model, 10.0).values == (600.0,)  # of six layers


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


@pytest.mark.parametrize(
    "workload",
    [
        {"kind": "serve", "input_tokens": 16, "output_tokens": 8},
        {"kind": "generate", "batch_size": 2, "input_tokens": 16, "output_tokens": 8},
        {"kind": "compress", "method": "int8_weight_only"},
    ],
)
def test_what_an_encoder_cannot_do_is_refused(workload):
    with pytest.raises(BadRequestError, match="head for 2 classes"):
        plan(PlanRequest.model_validate({**REQUEST, "workload": workload, "engine": None}))


def test_a_plan_of_an_encoder_trains_under_the_pinned_stage():
    pins = {"data_parallel_size": 2, "zero_stage": 2, "tensor_parallel_size": 1}

    best = plan(PlanRequest.model_validate({**REQUEST, "pins": pins})).plans[0]

    assert best.strategy.zero_stage == 2
    assert best.strategy.data_parallel_size == 2
