"""Norms that follow what rounding did to their layer, and groups as coarse as a matrix allows."""

import pytest
import torch

from runners.jobs.compress.engine import Passage, channel_loss, norm_weights, tweak_norms
from runners.jobs.compress.quantization import Grid, finequant, round_to_nearest


class Block(torch.nn.Module):
    """A norm before a linear layer, as a decoder layer has two of."""

    def __init__(self):
        super().__init__()
        self.input_layernorm = torch.nn.RMSNorm(32)
        self.proj = torch.nn.Linear(32, 32, bias=False)

    def forward(self, hidden):
        return hidden + self.proj(self.input_layernorm(hidden))


@pytest.fixture
def rounded():
    """Return a block at 2 bits and what it made of some text before."""
    torch.manual_seed(3)
    block, inputs = Block(), torch.randn(8, 16, 32)
    with torch.no_grad():
        passage = Passage(inputs, {}, block(inputs))
        weight = block.proj.weight
        weight.copy_(round_to_nearest(weight, Grid(2, 32), torch.float32).weight())
    return block, passage


def test_norms_bring_the_outputs_distribution_nearer_to_that_before(rounded):
    block, passage = rounded

    losses = tweak_norms(block, passage, passes=10, learning_rate=5e-3)

    assert losses["norm_loss"] < 0.95 * losses["norm_loss_before"]
    found = torch.stack([channel_loss(block(some), goal) for some, goal in passage.batches()])
    assert found.mean().item() == pytest.approx(losses["norm_loss"], rel=1e-5)


def test_matrices_stay_as_they_were_rounded(rounded):
    block, passage = rounded
    before = block.proj.weight.clone()

    tweak_norms(block, passage, passes=2, learning_rate=5e-3)

    assert torch.equal(block.proj.weight, before)
    assert not torch.equal(block.input_layernorm.weight, torch.ones(32))


def test_norms_that_no_pass_improves_stay_as_they_were(rounded):
    block, passage = rounded

    losses = tweak_norms(block, passage, passes=1, learning_rate=50.0)

    assert losses["norm_loss"] == losses["norm_loss_before"]
    assert torch.equal(block.input_layernorm.weight, torch.ones(32))


def test_only_norms_are_named(rounded):
    assert list(norm_weights(rounded[0])) == ["input_layernorm.weight"]


def test_outputs_that_are_alike_have_no_loss():
    wanted = torch.randn(2, 8, 4)

    assert channel_loss(wanted, wanted) == 0
    assert channel_loss(wanted + 1, wanted).item() == pytest.approx(1.0, rel=1e-4)


SHUFFLED = torch.randperm(128, generator=torch.Generator().manual_seed(2))


def group_size(weight, least_gain=0.3):
    return finequant(weight, Grid(4, 16), torch.float32, least_gain).grid.group_size


def test_a_matrix_of_even_rows_keeps_one_scale_a_row():
    assert group_size(torch.linspace(-1, 1, 128).repeat(4, 1)[:, SHUFFLED]) == 128


def test_a_matrix_whose_parts_differ_gets_the_groups_that_part_them():
    sizes = torch.tensor([1.0, 20.0, 0.1, 5.0]).repeat_interleave(32)

    even = torch.rand(16, 128, generator=torch.Generator().manual_seed(2))
    assert group_size(even.add(0.1) * sizes) == 32


def test_groups_get_no_smaller_than_they_may():
    normal = torch.randn(64, 128, generator=torch.Generator().manual_seed(2))

    assert group_size(normal, least_gain=0.02) == 16
