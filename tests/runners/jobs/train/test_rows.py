"""Rows and their order: nothing is lost or told twice, and every rank finds the same."""

import itertools

import numpy as np
import pytest
import torch

from runners.jobs.loading import fresh_model
from runners.jobs.runtime import BadInputError
from runners.jobs.train.rows import (
    IGNORED,
    DataBatches,
    Rows,
    Stream,
    best_fit,
    rows_of,
    segments_of,
    windows_of,
)
from runners.jobs.train.samples import Documents
from runners.jobspec import SampleOptions
from tests.runners.jobs.tiny import TINY_CONFIG, tiny_training

PADDED, PACKED = SampleOptions(rows="padded"), SampleOptions()
LEFT_OUT = SampleOptions(too_long="leave_out")


def documents(*lengths, learnt_from=0):
    """Return samples of these many tokens, numbered through."""
    ids = np.arange(sum(lengths) + 1, dtype=np.int32) % 500
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    learnt = np.zeros(len(ids), dtype=np.uint8)
    for begin, end in itertools.pairwise(offsets):
        learnt[begin + learnt_from : end] = 1
    return Documents(ids, learnt, offsets)


def batches(found, options=PACKED, longest=16, **changes):
    fields = {"sequence_length": longest, "micro_batch_size": 2, "samples": options, **changes}
    pieces = segments_of(found, longest, options, is_text=False)
    rows = rows_of(found, pieces, longest, options)
    return DataBatches([Stream(rows)], tiny_training(**fields), 0)


def test_a_long_text_is_cut_so_that_each_token_is_one_label():
    found = documents(40, 5)

    pieces = segments_of(found, 16, PACKED, is_text=True)

    labels = [range(b + 1, b + 1 + n) for b, n in zip(*pieces[:2], strict=True)]
    assert [len(each) for each in labels] == [16, 16, 7, 4]
    assert [at for each in labels for at in each] == [*range(1, 40), *range(41, 45)]
    assert pieces.num_cut == 1


def test_of_a_long_answer_the_beginning_is_kept_and_one_without_labels_goes():
    late = segments_of(documents(40, 9, learnt_from=20), 16, PACKED, is_text=False)
    early = segments_of(documents(40, 9, learnt_from=5), 16, PACKED, is_text=False)

    assert (late.lengths.tolist(), late.num_cut, late.num_left_out) == ([], 1, 2)
    assert (early.lengths.tolist(), early.num_cut, early.num_left_out) == ([16, 8], 1, 0)


def test_what_is_too_long_may_be_left_out():
    pieces = segments_of(documents(40, 17, 18), 16, LEFT_OUT, is_text=True)

    assert (pieces.lengths.tolist(), pieces.num_left_out, pieces.num_cut) == ([16], 2, 0)


@pytest.mark.parametrize("seed", range(3))
def test_best_fit_loses_nothing_and_overfills_nothing(seed):
    lengths = np.random.default_rng(seed).integers(1, 65, 400).tolist()

    rows = best_fit(lengths, 64)

    assert sorted(each for row in rows for each in row) == list(range(400))
    assert all(sum(lengths[each] for each in row) <= 64 for row in rows)
    assert len(rows) <= 11 / 9 * np.ceil(sum(lengths) / 64) + 1


def test_windows_of_a_long_text_touch_each_other():
    found, pieces = windows_of(np.arange(40, dtype=np.int32), 16)

    assert pieces.begins.tolist() == [0, 16]
    assert len(Rows(found, pieces, [[0], [1]])) == 2


def test_labels_are_the_learnt_tokens_that_follow():
    batch = batches(documents(10, learnt_from=6), PADDED).micro_batch(0, 0)

    assert batch.input_ids[0].tolist() == list(range(9))
    assert batch.labels[0].tolist() == [IGNORED] * 5 + [6, 7, 8, 9]
    assert batch.position_ids is None


def test_padding_is_no_label_and_is_counted():
    found = batches(documents(17, 9), PADDED)

    batch = found.micro_batch(0, 0)

    assert batch.input_ids.shape == (2, 16)
    assert batch.num_labels == found.num_tokens(0, 0) == 24
    assert found.shares() == (0.25, 1.0)


@pytest.mark.parametrize("options", [PADDED, PACKED], ids=lambda o: o.rows)
def test_an_epoch_has_every_label_once_in_an_order_of_the_seed(options):
    found = documents(*range(2, 18))

    first, again, other = (batches(found, options, seed=seed) for seed in (1, 1, 2))

    count = len(first._rows[0])
    labels = [
        token
        for row in range(0, count, 2)
        for token in first.micro_batch(row // 2, 0).labels.flatten().tolist()
        if token != IGNORED
    ]
    starts = set(found.offsets.tolist())
    if count % 2 == 0:
        assert sorted(labels) == [at for at in range(found.offsets[-1]) if at not in starts]
    assert torch.equal(first.micro_batch(5, 0).input_ids, again.micro_batch(5, 0).input_ids)
    assert any(
        first.micro_batch(step, 0).input_ids.tolist()
        != other.micro_batch(step, 0).input_ids.tolist()
        for step in range(3)
    )


def test_of_two_sources_each_block_has_its_share():
    spec = tiny_training(sequence_length=16, micro_batch_size=4, samples=PADDED)
    streams = []
    for at, weight in enumerate((0.75, 0.25)):
        ids = np.full(100, at, dtype=np.int32)
        found, pieces = windows_of(ids, 16)
        streams.append(Stream(rows_of(found, pieces, 16, PADDED), weight))
    mixed = DataBatches(streams, spec, 9)

    drawn = torch.cat([mixed.micro_batch(step, 0).input_ids[:, 0] for step in range(256)])

    assert drawn.float().mean() == pytest.approx(0.25, abs=1e-3)
    assert 0 < drawn[:64].sum() < 64


def test_a_source_of_next_to_no_weight_is_refused():
    found, pieces = windows_of(np.arange(40, dtype=np.int32), 16)
    rows = rows_of(found, pieces, 16, PADDED)

    with pytest.raises(BadInputError, match="leave the source out, or give it more"):
        DataBatches([Stream(rows, 0.9999), Stream(rows, 0.0001)], tiny_training(), 0)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_packed_samples_see_nothing_of_each_other(attention):
    """A CPU trains with eager attention, whose mask must follow the positions as well."""
    torch.manual_seed(3)
    model = fresh_model(TINY_CONFIG, torch.float32).eval()
    model.set_attn_implementation(attention)
    found = documents(7, 6, 4)
    packed = batches(found, PACKED, 16, micro_batch_size=1).micro_batch(0, 0)
    assert packed.position_ids is not None
    assert (packed.position_ids == 0).sum() == 3

    with torch.no_grad():
        together = model(
            packed.input_ids, position_ids=packed.position_ids, use_cache=False
        ).logits[0]
        apart = {
            int(ids[0]): model(ids[None], use_cache=False).logits[0]
            for ids in (torch.arange(0, 6), torch.arange(7, 12), torch.arange(13, 16))
        }

    column = 0
    while column < 14:
        logits = apart[int(packed.input_ids[0, column])]
        assert torch.allclose(together[column : column + len(logits)], logits, atol=1e-5)
        column += len(logits)


def test_packed_and_padded_rows_have_the_same_loss():
    torch.manual_seed(3)
    model = fresh_model(TINY_CONFIG, torch.float32)
    found = documents(7, 6, 4)
    losses = []
    for options, size in ((PACKED, 1), (PADDED, 3)):
        batch = batches(found, options, 16, micro_batch_size=size).micro_batch(0, 0)
        logits = model(batch.input_ids, position_ids=batch.position_ids, use_cache=False).logits
        losses.append(
            torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), batch.labels.flatten(), ignore_index=IGNORED
            ).item()
        )

    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize("longest", [3, 16, 100])
def test_padded_batches_come_in_few_lengths_that_hold_their_rows(longest):
    """For each length that a batch has, libraries make kernels, and keep them."""
    drawn = np.random.default_rng(3).integers(2, longest + 1, size=120)
    found = batches(documents(*drawn.tolist(), longest), PADDED, longest, micro_batch_size=3)

    made = [found.micro_batch(step, 0) for step in range(80)]

    lengths = {batch.input_ids.shape[1] for batch in made}
    assert 1 < len(lengths) <= 8
    assert max(lengths) <= longest
    for step, batch in enumerate(made):
        rows = [found._rows[at].lengths[row] for at, row in found._row_indices(step, 0)]
        assert max(rows) <= batch.input_ids.shape[1] < max(rows) + max(1, longest / 8) + 1
        assert int((batch.labels == IGNORED).sum()) == 3 * batch.input_ids.shape[1] - (
            batch.num_labels
        )
