"""Where ranks stand, which parts they hold, and which models and numbers of ranks are refused."""

from collections import Counter

import pytest
import torch

from runners.jobs.loading import fresh_model
from runners.jobs.ranks import ALONE, Ranks
from runners.jobs.runtime import BadInputError
from runners.jobs.train.layouts.axes import check_world, place_of
from runners.jobs.train.layouts.context import rank_tokens
from runners.jobs.train.layouts.stage import Stage, check_model, sequences, stage_layers, visible
from runners.jobs.train.layouts.tensor import share_of, whole_slice
from runners.jobs.train.rows import IGNORED, Batch
from runners.jobspec.train import LayoutOptions
from tests.system.jobs.train.laid_out import LLAMA, MIXTRAL

CUBE = LayoutOptions(data_parallel_size=2, tensor_parallel_size=2, pipeline_parallel_size=2)
PIPELINE = LayoutOptions(pipeline_parallel_size=2)


@pytest.fixture
def model():
    found = fresh_model(LLAMA, torch.float32)
    found.set_attn_implementation("eager")
    return found


def test_tensor_ranks_are_neighbours_and_stages_far_apart():
    places = [place_of(rank, CUBE) for rank in range(8)]

    assert [each.tensor for each in places] == [0, 1] * 4
    assert [each.data for each in places] == [0, 0, 1, 1] * 2
    assert [each.pipeline for each in places] == [0] * 4 + [1] * 4


def test_ranks_of_one_sequence_share_the_states_of_neighbouring_copies():
    options = LayoutOptions(
        data_parallel_size=4, zero_stage=3, zero_shard_size=2, context_parallel_size=2
    )

    places = [place_of(rank, options) for rank in range(8)]

    assert Counter(each.data for each in places) == dict.fromkeys(range(4), 2)
    assert [each.context for each in places] == [0, 1] * 4
    assert [(each.replicate, each.shard) for each in places[2:5]] == [(0, 2), (0, 3), (1, 0)]


@pytest.mark.parametrize("size", [1, 4, 16])
def test_another_number_of_ranks_is_refused_with_both(size):
    with pytest.raises(BadInputError, match=rf"takes 8 ranks .* but {size} were started"):
        check_world(CUBE, Ranks(0, size))


def test_the_ranks_of_a_layout_may_be_as_many_as_it_takes():
    check_world(LayoutOptions(), ALONE)


@pytest.mark.parametrize(("length", "count"), [(8, 2), (7, 2), (3, 4), (1, 4), (9, 4)])
def test_shares_of_rows_are_those_of_torch_chunk(length, count):
    chunks = [len(each) for each in torch.arange(length).chunk(count)]

    shares = [share_of(length, index, count) for index in range(count)]

    assert [size for _, size in shares if size] == chunks
    assert sum(size for _, size in shares) == length


def test_a_box_of_rows_is_that_part_of_the_whole():
    whole = torch.arange(12).view(4, 3)

    part = whole_slice("w", whole.shape).rows(1, 2).within(whole)

    assert torch.equal(part, whole[1:3])


def test_every_rank_has_both_ends_of_a_sequence_and_all_have_all_of_it():
    pieces = rank_tokens(16, 2)

    assert pieces[0].tolist() == [0, 1, 2, 3, 12, 13, 14, 15]
    assert sorted(pieces.flatten().tolist()) == list(range(16))


def test_a_sequence_that_cannot_be_divided_is_refused_with_a_length_that_can():
    with pytest.raises(BadInputError, match=r"sequence_length is 18, .* a multiple of 4"):
        rank_tokens(18, 2)


def test_a_token_sees_its_document_before_it_and_no_farther_than_the_window():
    places = sequences(
        Batch(
            torch.zeros(1, 5, dtype=torch.long),
            torch.full((1, 5), IGNORED),
            torch.tensor([[0, 1, 2, 0, 1]]),
        )
    ).queries

    seen = visible(places, places, 2)[0, 0]

    assert seen.int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [0, 1, 1, 0, 0],
        [0, 0, 0, 1, 0],
        [0, 0, 0, 1, 1],
    ]


def test_packed_documents_give_the_logits_of_the_library(model):
    ids = torch.arange(10)[None]
    packed = Batch(ids, ids, torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5]]))
    given = sequences(packed)

    with torch.no_grad():
        whole = model(input_ids=ids, position_ids=packed.position_ids, use_cache=False).logits
        staged = Stage(model, range(4))(ids, **given.places)

    torch.testing.assert_close(staged, whole)


def test_stages_one_after_another_are_the_model(model):
    ids = torch.arange(8)[None]
    given = sequences(Batch(ids, ids))
    first, last = (Stage(model, layers) for layers in stage_layers(PIPELINE, 4))

    with torch.no_grad():
        found = last(first(ids, **given.places), **given.places)

    torch.testing.assert_close(found, model(input_ids=ids, use_cache=False).logits)


def test_stages_have_the_layers_that_were_named_for_them():
    uneven = LayoutOptions(pipeline_parallel_size=2, pipeline_layers=(3, 1))

    assert stage_layers(uneven, 4) == [range(3), range(3, 4)]
    with pytest.raises(BadInputError, match="pipeline_layers names 4 layers, and the model has 6"):
        stage_layers(uneven, 6)


@pytest.mark.parametrize(
    ("config", "options", "why"),
    [
        ({"tie_word_embeddings": True}, PIPELINE, "output is its embedding"),
        (
            {},
            LayoutOptions(data_parallel_size=2, expert_parallel_size=2),
            "a 'llama' model has no experts",
        ),
        ({}, LayoutOptions(tensor_parallel_size=3), "num_attention_heads is 4, which tensor"),
        (
            MIXTRAL,
            LayoutOptions(data_parallel_size=3, expert_parallel_size=3),
            "num_local_experts is 4, which expert_parallel_size 3",
        ),
        (MIXTRAL, LayoutOptions(tensor_parallel_size=2), "a model with 4 experts is divided by"),
    ],
)
def test_a_model_that_the_layout_does_not_divide_is_refused_by_name(config, options, why):
    with pytest.raises(BadInputError, match=why):
        check_model(fresh_model({**LLAMA, **config}, torch.float32), options)


def test_an_architecture_of_another_shape_is_refused_by_name():
    config = {
        "model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": 16,
        "n_positions": 8,
    }  # fmt: skip

    with pytest.raises(BadInputError, match="a 'gpt2' model cannot be laid out so, as llama"):
        check_model(fresh_model(config, torch.float32), LayoutOptions(tensor_parallel_size=2))
