"""The bench of adapters: what it counts is what one step really holds."""

import pytest

from runners.adapter_options import LoraOptions
from runners.jobs.tuning_bench import held, ratios
from tests.runners.jobs.harness import TINY


def test_an_adapter_trains_and_holds_far_less_than_the_whole_model():
    found = {each.name: each.low for each in ratios(TINY, rank=4)}

    assert found["full / LoRA trained parameters"] > 5
    assert found["full / LoRA gradients"] > 5
    assert found["full / LoRA optimiser states"] > 5


@pytest.mark.parametrize("options", [None, LoraOptions(rank=2)])
def test_each_trained_number_has_a_gradient_and_two_moments(options):
    found = held(TINY, options)

    assert found.gradients == 4 * found.trained_parameters
    assert found.optimizer_states == pytest.approx(2 * found.gradients, rel=0.05)
