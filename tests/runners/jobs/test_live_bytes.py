"""Counting the bytes of living tensors: exact, whatever the allocator does."""

import torch

from runners.jobs.memory import LiveBytes, activations_counted

KILO = 1024


def test_what_goes_is_taken_off_and_the_peak_stays():
    with LiveBytes() as live:
        first = torch.zeros(KILO, dtype=torch.uint8)
        second = torch.zeros(2 * KILO, dtype=torch.uint8)
        del first
        third = torch.zeros(KILO // 2, dtype=torch.uint8)

    assert (live.now, live.peak) == (2.5 * KILO, 3 * KILO)
    assert len(second) + len(third) == 2.5 * KILO


def test_views_and_writing_in_place_make_nothing():
    before = torch.zeros(KILO, dtype=torch.uint8)

    with LiveBytes([before]) as live:
        before.add_(1)
        view = before.reshape(2, -1)[0]

    assert live.peak == 0
    assert view[0] == 1


def test_of_two_passes_gradients_are_no_activations():
    layer = torch.nn.Linear(64, 32, bias=False)
    inputs = torch.ones(8, 64)

    with activations_counted(layer) as live:
        layer(inputs).sum().backward()

    assert layer.weight.grad is not None
    assert live.now == 0
    assert live.peak >= 8 * 32 * 4
