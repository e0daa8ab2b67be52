"""What a spec allows, in words that name the field and the limit."""

import pytest
from pydantic import TypeAdapter, ValidationError

from runners.jobspec import ArtefactModel, BenchmarkSpec, JobSpec, QuantizeSpec, TrainSpec

MODEL = ArtefactModel(attempt_id="a1")
SPECS = [TrainSpec(), QuantizeSpec(model=MODEL), BenchmarkSpec(model=MODEL)]


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.kind)
def test_every_spec_survives_its_json(spec):
    adapter = TypeAdapter(JobSpec)

    assert adapter.validate_json(adapter.dump_json(spec)) == spec


def test_a_field_that_nobody_knows_is_refused():
    with pytest.raises(ValidationError, match="commandd"):
        TrainSpec(commandd="rm -rf /")


def test_training_without_an_end_is_refused_with_the_way_out():
    with pytest.raises(ValidationError, match="give max_steps or time_budget_seconds"):
        TrainSpec(max_steps=None, time_budget_seconds=None)


def test_the_demo_model_is_small_enough_for_two_minutes():
    demo = TrainSpec().model
    attention = demo.hidden_size**2 * (2 + 2 * demo.num_key_value_heads / demo.num_attention_heads)
    layer = attention + 3 * demo.hidden_size * demo.intermediate_size

    total = demo.num_hidden_layers * layer + 2 * demo.vocab_size * demo.hidden_size

    assert 2_000_000 < total < 15_000_000
