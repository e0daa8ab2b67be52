"""Attention by blocks sees what the others see, in fewer blocks, and trains on GPUs alone."""

import numpy as np
import pytest
import torch
from torch.nn.functional import pad

from planner.workload.training_exchange import FLEX_BLOCK_TOKENS
from runners.jobs.evaluation import evaluate
from runners.jobs.runtime import BadInputError
from runners.jobs.train import job as train
from runners.jobs.train.kernels import BlockAttention, set_attention
from tests.plugins.extent import first
from tests.runners.jobs.tiny import TINY_CONFIG, tiny_training
from tests.runners.jobs.train.test_attending import (  # noqa: F401 -- some are fixtures
    CPU,
    LENGTHS,
    ROW,
    loss_and_logits,
    model_of,
    packed,
)

HEADS = {  # query heads, key heads, hidden
    "keys of four": (8, 2, 128),
    "each its own keys": (4, 4, 64),
    "three, no power of two": (6, 2, 96),
}


def blocks_needed(batch):
    """Return how many blocks hold a pair that is seen, and how many one document would have."""
    places, size = batch.position_ids, FLEX_BLOCK_TOKENS
    width, count = places.shape[1], -(-places.shape[1] // size)
    owner = torch.cumsum(places == 0, dim=1)
    seen = (owner[:, :, None] == owner[:, None, :]) & torch.ones(width, width).tril().bool()
    seen = pad(seen, (0, count * size - width) * 2)
    blocks = seen.reshape(len(places), count, size, count, size).any(dim=4).any(dim=2)
    return int(blocks.sum()), len(places) * count * (count + 1) // 2


@pytest.mark.parametrize(
    ("heads", "narrow"),
    [("keys of four", True), *((each, False) for each in first(HEADS))],  # each is compiled anew
)
def test_packed_rows_have_the_logits_and_loss_of_the_other_kernels(heads, narrow):
    model, batch, near = model_of(*HEADS[heads]), packed(), 2e-2 if narrow else 2e-5
    found = {}
    for way in ("eager", "sdpa"):
        model.set_attn_implementation(way)
        found[way] = loss_and_logits(model, batch, narrow=narrow)
    blocks = BlockAttention(model)
    loss, logits = loss_and_logits(model, batch, narrow=narrow)

    for other_loss, other_logits in found.values():
        assert loss.item() == pytest.approx(other_loss.item(), rel=near / 10)
        assert (logits - other_logits).norm() < near * other_logits.norm()
    needed, whole = blocks_needed(batch)
    assert needed < 0.9 * whole
    assert blocks.computed_ratio == needed / whole
    assert f"; {needed / whole:.0%} of the blocks were computed" in blocks.note()


@pytest.mark.soak
def test_held_out_text_has_the_same_perplexity():
    """No training judges by blocks: this asks the kernel for rows of one document."""
    model = model_of(8, 2, 128, max_position_embeddings=256)
    ids = np.random.default_rng(2).integers(0, TINY_CONFIG["vocab_size"], 3000).astype(np.int32)
    plain = evaluate(model, ids, 1024)
    blocks = BlockAttention(model)

    assert evaluate(model, ids, 1024).value == pytest.approx(plain.value, rel=1e-5)
    assert blocks.computed_ratio == 1.0  # each window is one document


def test_a_processor_has_no_backward_pass_which_torch_says_and_the_job_before_it(host):
    model, batch = model_of(4, 4, 64), packed()
    BlockAttention(model)
    with pytest.raises(Exception, match="does not support backward on CPU"):
        model(**batch.inputs)

    way_out = r"attention is flex.* on a cpu device; choose flash \(SDPA\), or a host with a GPU"
    with pytest.raises(BadInputError, match=way_out):
        set_attention(model, "flex", CPU)
    with pytest.raises(BadInputError, match=way_out):
        host.run_here("flex", tiny_training(attention="flex", max_steps=2), train.work)
