"""Where ranks stand, which parts they hold, and which share of a step messages take."""

import json
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from runners.jobs.loading import fresh_model
from runners.jobs.ranks import ALONE, Ranks
from runners.jobs.runtime import BadInputError
from runners.jobs.train.communication import (
    EVERY_STEPS,
    EXPOSED,
    FIRST_LOOK,
    HANDOVER,
    KINDS,
    TOTAL,
    Collective,
    CollectiveProfiler,
    RecordedCollective,
    Span,
    Timeline,
    communication_ratios,
    covered_microseconds,
    kind_of,
    merge_spans,
    timeline_of,
)
from runners.jobs.train.layout_pipeline import (
    Stage,
    check_model,
    sequences,
    stage_layers,
    visible_key_mask,
)
from runners.jobs.train.layout_states import check_world, mesh_coordinates, rank_tokens
from runners.jobs.train.layout_tensor import shard_rows, whole_slice
from runners.jobs.train.rows import IGNORED, Batch
from runners.jobspec.train import LayoutOptions
from tests.runners.jobs.cases import refused
from tests.system.jobs.train.forked import run_script
from tests.system.jobs.train.laid_out import LLAMA, MIXTRAL

CUBE = LayoutOptions(data_parallel_size=2, tensor_parallel_size=2, pipeline_parallel_size=2)
PIPELINE = LayoutOptions(pipeline_parallel_size=2)


@pytest.fixture
def model():
    found = fresh_model(LLAMA, torch.float32)
    found.set_attn_implementation("eager")
    return found


def test_ranks_of_one_sequence_or_tensor_are_neighbours_and_stages_far_apart():
    places = [mesh_coordinates(rank, CUBE) for rank in range(8)]
    assert [each.tensor for each in places] == [0, 1] * 4
    assert [each.data for each in places] == [0, 0, 1, 1] * 2
    assert [each.pipeline for each in places] == [0] * 4 + [1] * 4

    options = LayoutOptions(
        data_parallel_size=4, zero_stage=3, zero_shard_size=2, context_parallel_size=2
    )
    places = [mesh_coordinates(rank, options) for rank in range(8)]
    assert Counter(each.data for each in places) == dict.fromkeys(range(4), 2)
    assert [each.context for each in places] == [0, 1] * 4
    assert [(each.replicate, each.shard) for each in places[2:5]] == [(0, 2), (0, 3), (1, 0)]


def test_a_layout_takes_its_own_number_of_ranks_alone():
    check_world(LayoutOptions(), ALONE)
    for size in (1, 4, 16):
        with refused(BadInputError, rf"takes 8 ranks .* but {size} were started", size):
            check_world(CUBE, Ranks(0, size))


def test_shares_of_rows_are_those_of_torch_chunk_and_boxes_parts_of_the_whole():
    for length, count in ((8, 2), (7, 2), (3, 4), (1, 4), (9, 4)):
        chunks = [len(each) for each in torch.arange(length).chunk(count)]
        shares = [shard_rows(length, index, count) for index in range(count)]
        assert [size for _, size in shares if size] == chunks, (length, count)
        assert sum(size for _, size in shares) == length, (length, count)
    whole = torch.arange(12).view(4, 3)
    part = whole_slice("w", whole.shape).rows(1, 2).within(whole)
    assert torch.equal(part, whole[1:3])


def test_every_rank_has_both_ends_of_a_sequence_that_can_be_divided():
    pieces = rank_tokens(16, 2)
    assert pieces[0].tolist() == [0, 1, 2, 3, 12, 13, 14, 15]
    assert sorted(pieces.flatten().tolist()) == list(range(16))
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

    seen = visible_key_mask(places, places, 2)[0, 0]

    assert seen.int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [0, 1, 1, 0, 0],
        [0, 0, 0, 1, 0],
        [0, 0, 0, 1, 1],
    ]


def test_stages_and_packed_documents_give_the_logits_of_the_model(model):
    ids = torch.arange(10)[None]
    packed = Batch(ids, ids, torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5]]))
    given = sequences(packed)
    with torch.no_grad():
        whole = model(input_ids=ids, position_ids=packed.position_ids, use_cache=False).logits
        staged = Stage(model, range(4))(ids, **given.places)
    torch.testing.assert_close(staged, whole)

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


def test_a_model_that_the_layout_does_not_divide_is_refused_by_name():
    for config, options, why in (
        ({"tie_word_embeddings": True}, PIPELINE, "output is its embedding"),
        (
            {},
            LayoutOptions(data_parallel_size=2, expert_parallel_size=2),
            "a 'llama' model has no experts",
        ),
        (
            {},
            LayoutOptions(tensor_parallel_size=3),
            "num_attention_heads is 4, not divisible by tensor",
        ),
        (
            MIXTRAL,
            LayoutOptions(data_parallel_size=3, expert_parallel_size=3),
            "num_local_experts is 4, not divisible by expert_parallel_size 3",
        ),
        (MIXTRAL, LayoutOptions(tensor_parallel_size=2), "a model with 4 experts is divided by"),
    ):
        with refused(BadInputError, why, (config, options, why)):
            check_model(fresh_model({**LLAMA, **config}, torch.float32), options)

    config = {
        "model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": 16,
        "n_positions": 8,
    }  # fmt: skip
    with pytest.raises(BadInputError, match="a 'gpt2' model cannot be laid out so, as llama"):
        check_model(fresh_model(config, torch.float32), LayoutOptions(tensor_parallel_size=2))


# Which share of a step messages take, by kind and axis, and which of it nothing hides.

SUMS = "all_reduce"


def test_exchanges_are_known_by_their_names_and_count_once():
    for name, kind in (
        ("gloo:all_reduce", "all_reduce"),
        ("gloo:reduce_scatter", "reduce_scatter"),
        ("gloo:all_to_all", "all_to_all"),
        ("gloo:send", "send_recv"),
        ("gloo:broadcast", "other"),
        (
            "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
            "all_reduce",
        ),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL", "reduce_scatter"),
        ("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t", "send_recv"),
        ("c10d::allreduce_", None),
        ("aten::mm", None),
    ):
        assert kind_of(name) == kind, (name, kind)
        assert kind is None or kind in KINDS, (name, kind)


def test_what_passes_together_counts_once():
    for spans, microseconds in (
        ([], 0.0),
        ([(0, 10)], 10.0),
        ([(5, 8), (0, 10)], 10.0),
        ([(0, 4), (2, 6), (10, 11)], 7.0),
        ([(0, 1), (0, 1), (1, 2)], 2.0),
    ):
        assert covered_microseconds(Span(*each) for each in spans) == microseconds, (
            spans,
            microseconds,
        )
        assert (
            covered_microseconds(merge_spans(Span(*each) for each in reversed(spans)))
            == microseconds
        ), spans


def test_exposed_is_what_no_computing_hides():
    for message, computing, waited, uncovered in (
        ((0, 9e3), [], 9e3, 9e3),
        ((0, 9e3), [(0, 9e3)], 0, 0),
        ((0, 9e3), [(1e3, 6e3), (9e3, 12e3)], 3e3, 4e3),  # a thread that computes does not wait
        ((5e3, 9e3), [(0, 2e3), (20e3, 21e3)], 4e3, 4e3),  # and a pause goes on for other reasons
        ((0, 9e3), [(1e3, 4e3), (9e3 - HANDOVER / 2, 30e3)], 4.5e3, 5.5e3),  # noted a moment late
        ((0, 9e3), [(1e3, 4e3), (9e3 - HANDOVER * 2, 30e3)], 0, 4e3),
        ((0, 9e3), [(1e3, 2e3), (2.1e3, 30e3)], 0, 1.1e3),
    ):
        sums = Collective(SUMS, Span(*map(float, message)), "data")
        spans = [Span(*map(float, each)) for each in computing]

        for on_device, exposed in ((False, waited), (True, uncovered)):
            found = communication_ratios(Timeline([sums], spans, on_device=on_device), 10e3)
            assert found[EXPOSED] == pytest.approx(exposed / 10e3)
            assert found["exposed_communication_data_ratio"] == found[EXPOSED]
            assert (
                found[TOTAL]
                == found["communication_data_ratio"]
                == covered_microseconds([sums.span]) / 10e3
            )


def test_shares_by_axis_are_those_of_their_messages_and_unknown_ones_are_in_the_whole():
    parts = [("tensor", 0, 2), ("tensor", 1, 3), ("data", 2, 6), ("", 8, 9)]
    messages = [Collective(SUMS, Span(begin, end), axis) for axis, begin, end in parts]

    found = communication_ratios(Timeline(messages, [Span(2.5, 5)], on_device=True), 10)

    assert found == {
        TOTAL: 0.7,
        EXPOSED: pytest.approx(0.45),
        "communication_all_reduce_ratio": 0.7,
        "communication_tensor_ratio": 0.3,
        "communication_data_ratio": 0.4,
        "exposed_communication_tensor_ratio": 0.25,
        "exposed_communication_data_ratio": pytest.approx(0.15),
    }


def event(name, begin, end, device="CPU", group="", thread=1):
    """An event as torch's profiler gives it; no GPU is here that would."""
    return SimpleNamespace(
        name=name, time_range=SimpleNamespace(start=begin, end=end), thread=thread,
        device_type=SimpleNamespace(name=device), is_user_annotation=False,
        event_metadata=SimpleNamespace(process_group_name=group) if group else None,
    )  # fmt: skip


def test_on_a_gpu_kernels_hide_messages_and_copies_and_the_threads_that_start_them_do_not():
    nccl = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL"
    events = [
        event("aten::mm", 0, 10),
        event("Memcpy DtoH (Device -> Pinned)", 0, 10, "CUDA"),
        event("ampere_bf16_s16816gemm", 2, 5, "CUDA"),
        event(nccl, 1, 6, "CUDA", group="7"),
        event(nccl, 8, 9, "CUDA", group="9"),
    ]

    found = timeline_of(events, {"7": "tensor"}, [])

    assert [each.axis for each in found.messages] == ["tensor", ""]
    assert found.exposed_microseconds(found.messages) == 2 + 1
    assert found.exposed_microseconds(found.messages[:1]) == 2


def test_an_axis_is_told_only_where_the_groups_tell_it():
    sends = [event("gloo:send", 0, 1), event("gloo:recv", 1, 2)]
    sums = [event("gloo:all_reduce", at, at + 1, thread=5) for at in (3, 5, 7)]
    asked = [RecordedCollective("gloo:all_reduce", each) for each in ("0", "aside", "4", "0")]

    def axes_of(axes, recorded):
        return [each.axis for each in timeline_of([*sends, *sums], axes, recorded).messages]

    ring = {"0": "agreement", "4": "context"}
    assert axes_of(ring, asked[:2]) == ["context", "context", "", "", ""]
    assert axes_of(ring | {"5": "pipeline"}, []) == ["", "", "", "", ""]
    # A thread is of one group, though another group's message was asked for in between.
    assert axes_of(ring, asked) == ["context"] * 2 + ["agreement"] * 3


def test_one_step_in_many_is_looked_at_and_none_of_one_process():
    def looked_at(ranks: Ranks) -> list[int]:
        watch, found = CollectiveProfiler(ranks), []
        for step in range(FIRST_LOOK + EVERY_STEPS + 1):
            with watch.step():
                pass
            if watch.news():
                found.append(step)
        return found

    assert looked_at(Ranks(0, 2)) == [FIRST_LOOK, FIRST_LOOK + EVERY_STEPS]
    assert looked_at(Ranks(1, 2)) == []
    assert looked_at(ALONE) == []


def test_an_error_within_a_step_that_is_looked_at_passes_on():
    watch = CollectiveProfiler(Ranks(0, 2))
    for _step in range(FIRST_LOOK):
        with watch.step():
            pass
    with pytest.raises(RuntimeError, match="lost"), watch.step():
        raise RuntimeError("lost")
    assert watch.figures() == {}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("watched")
    run_script("watched", folder, seconds=400)
    two = [json.loads((folder / f"2-{rank}.json").read_text()) for rank in range(2)]
    four = [json.loads((folder / f"4-{rank}.json").read_text()) for rank in range(4)]
    return [{**of_two, **of_four} for of_two, of_four in zip(two, four, strict=False)]
