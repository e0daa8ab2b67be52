"""Each kept ratio of generation once more in small: its direction, by counts instead of time."""

import pytest
import torch

from runners.jobs.generate.batching import (
    POLICIES,
    CostModel,
    DraftSource,
    decode_speculatively,
    run_continuous,
)
from runners.jobs.generate.bench import (
    cap_of_two_layers,
    page_plans,
    run_batches,
    static_batches,
    without_cache,
)
from runners.jobs.generate.placement import StreamedLayers, held_bytes, load_with_device_map
from runners.jobs.generate.static import AnswerLimits, BatchSetup, run_batch
from runners.jobs.loading import LayerwiseModel, fresh_model, ready
from runners.jobspec.generate import LayerStreaming
from tests.runners.jobs.tiny import TINY_CONFIG
from tests.system.jobs.generate.counting import work_of

pytestmark = pytest.mark.proven
UNEVEN = [[7] * 40, *([at + 3] * 5 for at in range(7))]
PROMPT = [5, 7, 11, 13]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(3)
    return ready(fresh_model({**TINY_CONFIG, "max_position_embeddings": 256}, torch.float32))


@pytest.fixture(scope="module")
def uneven(model):
    """Twenty-four prompts, and ends that make few of their answers longer than one token."""
    pile = [[at + 1, at + 2, at + 3] for at in range(24)]
    found = run_batch(model, pile, AnswerLimits(2)).answers
    ends = frozenset(answer.ids[1] for at, answer in enumerate(found) if at % 8)
    return pile, AnswerLimits(40, ends)


def away_bytes(model):
    """What a pass brings: the parameters that are not in memory before it."""
    return sum(each.nbytes for each in model.parameters() if each.is_meta)


def test_with_a_cache_every_token_is_computed_once(model):
    anew = work_of(model, lambda: without_cache(model, PROMPT, AnswerLimits(10)))

    kept = work_of(model, lambda: run_batch(model, [PROMPT], AnswerLimits(10)))

    assert kept.passes == anew.passes == 10
    assert kept.positions == 4 + 9
    assert anew.positions == sum(range(4, 14))


def test_without_a_cache_the_text_is_the_same(model):
    assert without_cache(model, PROMPT, AnswerLimits(10)) == (
        run_batch(model, [PROMPT], AnswerLimits(10)).answers[0].ids
    )


def test_a_batch_takes_the_passes_of_one_prompt(model):
    pile = [PROMPT] * 6

    together = work_of(model, lambda: run_batch(model, pile, AnswerLimits(10)))
    alone = work_of(model, lambda: run_batches(model, [[ids] for ids in pile], AnswerLimits(10)))

    assert (together.passes, alone.passes) == (10, 60)


def test_no_position_is_computed_for_padding(model):
    padded = work_of(model, lambda: run_batch(model, UNEVEN, AnswerLimits(1)))

    packed = work_of(
        model, lambda: run_batch(model, UNEVEN, AnswerLimits(1), BatchSetup(is_packed=True))
    )

    assert packed.positions == sum(map(len, UNEVEN))
    assert padded.positions == 8 * 40


def test_the_dynamic_programme_computes_least_padding(model):
    pile = [*UNEVEN, *([9] * 20 for _ in range(3)), *([9] * 33 for _ in range(3))]
    lengths = [len(each) for each in pile]
    positions = {}
    for policy in ("given", "sorted", "turbo"):
        batches = POLICIES[policy](lengths, 8, CostModel(1.0, 1.0))
        cut = [[pile[at] for at in batch] for batch in batches]
        positions[policy] = work_of(
            model, lambda cut=cut: run_batches(model, cut, AnswerLimits(1))
        )

    assert positions["turbo"].positions < positions["sorted"].positions
    assert positions["sorted"].positions < positions["given"].positions


def test_right_guesses_save_passes(model):
    limits = AnswerLimits(60)

    plain = work_of(model, lambda: run_batch(model, [PROMPT], limits))
    guessed = work_of(model, lambda: decode_speculatively(model, PROMPT, DraftSource(5), limits))

    assert plain.passes == 60
    assert guessed.passes < 60


def test_at_one_cap_streamed_layers_bring_fewer_bytes_than_accelerates_map(tmp_path):
    torch.manual_seed(3)
    whole = fresh_model({**TINY_CONFIG, "num_hidden_layers": 6}, torch.float32)
    whole.save_pretrained(str(tmp_path / "model"))
    cap = cap_of_two_layers(whole)
    skeleton = LayerwiseModel(tmp_path / "model", torch.device("cpu"), torch.float32)
    asked = LayerStreaming(layers_resident=1, look_ahead=False)

    ours = StreamedLayers(skeleton, tmp_path / "model", asked).model
    theirs, _where = load_with_device_map(tmp_path / "model", torch.float32, cap, tmp_path)

    assert held_bytes(ours) <= cap
    assert away_bytes(ours) < away_bytes(theirs)


def test_continuous_batches_compute_less_than_static_ones(model, uneven):
    pile, limits = uneven
    reserved, _ = page_plans([len(each) for each in pile], limits.output_tokens)

    static = work_of(model, lambda: run_batches(model, static_batches(pile), limits))
    continuous = work_of(
        model, lambda: run_continuous(model, pile, reserved, limits, lambda _done: None)
    )

    assert continuous.positions < static.positions


def test_shared_pages_take_fewer_passes_than_reserved_ones_of_the_same_bytes(model):
    pile, longest, written = [[at + 1, at + 2, at + 3] for at in range(24)], 40, AnswerLimits(12)
    reserved, shared = page_plans([len(each) for each in pile], longest)

    one, other = (
        work_of(model, lambda p=pages: run_continuous(model, pile, p, written, lambda _done: None))
        for pages in (reserved, shared)
    )

    assert shared.bytes(model) == reserved.bytes(model)
    assert 1.5 * other.passes < one.passes
