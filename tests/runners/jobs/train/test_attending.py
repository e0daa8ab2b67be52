"""Attention by blocks sees what the others see, in fewer blocks, and trains on GPUs alone."""

import itertools

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch.nn.functional import cross_entropy

from planner.cost.roofline import block_pairs
from planner.workload.training_kernels import FLEX_BLOCK_TOKENS
from runners.jobs.loading import attention, fresh_model
from runners.jobs.runtime import BadInputError
from runners.jobs.train.job import _kernel_notes
from runners.jobs.train.kernels import JUDGED, NAME, BlockAttention, attend
from runners.jobs.train.rows import IGNORED
from runners.jobs.train.trainer import Trainer
from runners.jobspec import SampleOptions
from tests.runners.jobs.tiny import TINY_CONFIG, tiny_training
from tests.runners.jobs.train.test_rows import batches, documents
from tests.runners.jobs.train.training import tiny_trainer

CPU = torch.device("cpu")
ROW = 640
LENGTHS = (131, 150, 97, 62, 200, 128, 113, 90, 140, 169)  # they end in the middle of blocks


def model_of(heads, keys, hidden, **changes):
    torch.manual_seed(5)
    shape = {"num_attention_heads": heads, "num_key_value_heads": keys, "hidden_size": hidden}
    config = {**TINY_CONFIG, **shape, "max_position_embeddings": ROW, **changes}
    return fresh_model(config, torch.float32).eval()


def packed():
    """Return two rows of several documents."""
    found = documents(*(each + 1 for each in LENGTHS))
    return batches(found, SampleOptions(), ROW).micro_batch(0, 0)


def loss_and_logits(model, batch, *, narrow):
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=narrow):
        logits = model(**batch.inputs).logits.float()
    return cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), ignore_index=IGNORED), (
        logits[batch.labels != IGNORED]
    )


def test_what_is_judged_attends_as_it_will_be_loaded_and_counts_no_blocks():
    model, batch = model_of(4, 4, 64), packed()
    blocks = BlockAttention(model)
    assert blocks.computed_ratio is None
    assert "blocks" not in blocks.note()

    with attention(model, JUDGED):
        assert model.config._attn_implementation == JUDGED
        loss_and_logits(model, batch, narrow=False)
    assert model.config._attn_implementation == NAME
    assert blocks.computed_ratio is None


def test_a_trainer_judges_aside_and_notes_what_its_masks_left_out(make_job):
    trainer: Trainer = tiny_trainer(make_job(tiny_training(max_steps=8)))
    trainer.blocks = blocks = BlockAttention(trainer.model)
    ways = []
    trainer.held_out.validation = lambda model: (
        ways.append(model.config._attn_implementation) or {"validation_loss": 1.0}
    )
    trainer.state.step = 4
    trainer.evaluator.after_step(trainer.state)

    assert (ways, trainer.model.config._attn_implementation) == ([JUDGED], NAME)
    assert _kernel_notes(trainer)["attention"] == blocks.note()


@pytest.mark.parametrize(("asked", "way"), [("auto", "eager"), ("flash", "sdpa"), ("eager",) * 2])
def test_the_other_ways_are_as_they_were(asked, way):
    model = model_of(4, 4, 64)

    assert attend(model, asked, CPU) is None
    assert model.config._attn_implementation == way


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"attention_dropout": 0.1}, "LlamaForCausalLM drops out 0.1 of its scores"),
        ({"head_dim": 8}, "has heads of 8 elements, and it takes 16 or more"),
    ],
)
def test_layers_that_cannot_are_refused_with_the_way_out(changes, words):
    with pytest.raises(BadInputError, match=rf"attention is flex, .*{words}.*; choose flash"):
        BlockAttention(model_of(4, 4, 64, **changes))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layout": {"context_parallel_size": 2}}, "a layout that divides layers, sequences"),
        ({"layout": {"tensor_parallel_size": 2}}, "a layout that divides layers, sequences"),
        ({"layout": {"pipeline_parallel_size": 2}}, "a layout that divides layers, sequences"),
        ({"compiled": True}, "compiled"),
        ({"activation_recomputation": "selective"}, "activation_recomputation selective"),
    ],
)
def test_what_attends_in_ways_of_its_own_is_refused_by_name(changes, words):
    with pytest.raises(ValidationError, match=f"flex does not go with {words}.*; choose flash"):
        tiny_training(attention="flex", **changes)
    shards = {"data_parallel_size": 2, "zero_stage": 3}
    kept = tiny_training(attention="flex", layout=shards, gradient_accumulation_steps=2)
    assert kept.attention == "flex"


@pytest.mark.parametrize(("mean", "spread"), [(200, 0.4), (700, 0.3), (2500, 0.5), (60, 0.2)])
def test_the_planner_counts_the_blocks_that_masks_of_packed_rows_have(mean, spread):
    """Its length is that of the document that a token is of: long ones weigh more."""
    row, draw = 8192, np.random.default_rng(mean)
    needed, weighted, size = 0, [], FLEX_BLOCK_TOKENS
    for _ in range(40):
        lengths = np.maximum(1, draw.lognormal(np.log(mean), spread, row).astype(int))
        ends = np.minimum(np.cumsum(lengths), row)
        begins = [0, *ends[ends < row].tolist()]
        whole = np.diff([*begins, row])
        weighted.append((whole**2).sum() / row)
        first = np.searchsorted(begins, np.arange(0, row, size), side="right") - 1
        starts = np.array(begins)[first] // size
        needed += int((np.arange(row // size) - starts + 1).sum())

    planned = block_pairs(
        row_tokens=row, document_tokens=round(np.mean(weighted)), block_tokens=size
    )

    assert planned == pytest.approx(needed / 40 * size**2, rel=0.1)
    plain = block_pairs(row_tokens=row, document_tokens=row, block_tokens=size)
    assert plain == pytest.approx(row * (row + size) / 2, rel=0.01)
    assert all(
        block_pairs(row_tokens=row, document_tokens=d, block_tokens=size)
        <= block_pairs(row_tokens=row, document_tokens=d + 1, block_tokens=size)
        for d, _ in itertools.pairwise(range(1, 1000, 37))
    )
