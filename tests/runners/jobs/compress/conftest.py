"""One small linear layer with inputs that depend on each other, as a model's do."""

import pytest
import torch

from runners.jobs.compress.quantization import InputStatistics

NUM_INPUTS = 192
NUM_OUTPUTS = 48


@pytest.fixture(scope="session")
def layer():
    generator = torch.Generator().manual_seed(17)
    mixing = torch.randn(NUM_INPUTS, NUM_INPUTS, generator=generator) / NUM_INPUTS**0.5
    sizes = torch.logspace(-1, 0.7, NUM_INPUTS)[torch.randperm(NUM_INPUTS, generator=generator)]
    statistics = InputStatistics(NUM_INPUTS)
    for _ in range(4):
        statistics.add((torch.randn(256, NUM_INPUTS, generator=generator) @ mixing) * sizes)
    weight = torch.randn(NUM_OUTPUTS, NUM_INPUTS, generator=generator)
    weight[torch.rand(weight.shape, generator=generator) < 0.005] *= 8
    return weight, statistics
