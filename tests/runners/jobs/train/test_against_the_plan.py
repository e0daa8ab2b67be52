"""What a step's tensors really hold, against the planner's terms for the same step."""

import pytest

from planner.api import estimate
from planner.specs.estimate import EstimateRequest
from runners.jobs.loading import demo_config
from runners.jobs.tuning_bench import step_of
from runners.jobspec import DemoModel

ROWS = 2
SHAPE = DemoModel(
    hidden_size=256,
    intermediate_size=768,
    num_hidden_layers=3,
    vocab_size=1024,
    max_position_embeddings=128,
)


def planned(how="none", **workload):
    """Return the planner's bytes by tensor class."""
    request = {
        "model": demo_config(SHAPE),
        "cluster": {"device": "rtx-4090", "devices_per_node": 1, "nodes": 1},
        "workload": {
            "kind": "train",
            "sequence_length": SHAPE.max_position_embeddings,
            "global_batch_size": ROWS,
            **workload,
        },
        "engine": "torch",
        "strategy": {
            "activation_recomputation": how,
            "micro_batch_size": ROWS,
            "weight_dtype": "int8" if workload.get("method") == "qft" else "fp32",
            "compute_dtype": "bf16",
            "attention": "eager",
        },
    }
    return estimate(EstimateRequest.model_validate(request)).memory.breakdown_bytes


@pytest.fixture(scope="module")
def held():
    return {how: step_of(SHAPE, ROWS, "adamw", how) for how in ("none", "selective", "full")}


def test_activations_that_are_kept_are_those_planned(held):
    """The planner has autocast's copies of the weights as buffers; here a step keeps them."""
    expected = planned("none")

    assert held["none"].activations == pytest.approx(
        expected["activations"] + expected["buffers"], rel=0.1
    )


def test_what_full_recomputation_leaves_is_as_planned(held):
    expected = planned("full")

    assert held["full"].activations == pytest.approx(
        expected["activations"] + expected["buffers"], rel=0.1
    )


def test_selective_recomputation_keeps_products_alone_as_planned(held):
    expected = planned("selective")

    assert held["selective"].activations == pytest.approx(
        expected["activations"] + expected["buffers"], rel=0.1
    )
    assert held["full"].activations < held["selective"].activations < held["none"].activations


@pytest.mark.parametrize("name", ["adamw", "adamw_8bit"])
def test_states_are_as_planned(held, name):
    states = held["none"] if name == "adamw" else step_of(SHAPE, 1, name)

    expected = planned(optimizer=name)["optimizer_states"]
    assert states.optimizer_states == pytest.approx(expected, rel=0.05)


def test_lomo_holds_no_state_and_the_least(held):
    lomo = step_of(SHAPE, ROWS, "lomo", "full")

    assert "optimizer_states" not in planned("full", method="lomo")
    assert lomo.optimizer_states == 0
    assert lomo.peak < held["full"].peak < held["selective"].peak < held["none"].peak
