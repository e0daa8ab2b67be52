"""The bench of adapters: what it counts is what one step really holds."""

import pytest

from runners.jobs.tuning_bench import fitting_ratios, held, ratios
from runners.jobspec.base import LoraOptions
from tests.runners.jobs.tiny import TINY


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


@pytest.fixture(scope="module")
def fitting():
    shape = TINY.model_copy(update={"vocab_size": 1024})
    return {each.name: each.low for each in fitting_ratios(shape, rows=2)}


@pytest.mark.parametrize(
    ("name", "floor"),
    [
        ("AdamW / LOMO peak of a step", 1.2),
        ("AdamW / AdamW 8-bit states", 3.0),
        ("AdamW / Lion 8-bit states", 6.0),
        ("kept / selective recomputation's activations", 1.1),
        ("kept / full recomputation's activations", 1.2),
        ("kept / swapped activations", 1.3),
    ],
)
def test_what_makes_training_fit_holds_less(fitting, name, floor):
    assert fitting[name] > floor


def test_full_recomputation_holds_less_than_selective(fitting):
    full, selective = (
        fitting[f"kept / {how} recomputation's activations"] for how in ("full", "selective")
    )

    assert full > selective
