"""Which share of a step messages take, by kind and axis, and which of it nothing hides."""

import json
from types import SimpleNamespace

import pytest

from runners.jobs.ranks import ALONE, Ranks
from runners.jobs.train.communication import (
    EVERY_STEPS,
    EXPOSED,
    FIRST_LOOK,
    HANDOVER,
    KINDS,
    TOTAL,
    Message,
    MessagesWatch,
    Recorded,
    Span,
    Timeline,
    covered,
    kind_of,
    merged,
    shares_of,
    timeline_of,
)
from tests.system.jobs.train.forked import run_script

SUMS = "all_reduce"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
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
    ],
)
def test_exchanges_are_known_by_their_names_and_count_once(name, kind):
    assert kind_of(name) == kind
    assert kind is None or kind in KINDS


@pytest.mark.parametrize(
    ("spans", "microseconds"),
    [
        ([], 0.0),
        ([(0, 10)], 10.0),
        ([(5, 8), (0, 10)], 10.0),
        ([(0, 4), (2, 6), (10, 11)], 7.0),
        ([(0, 1), (0, 1), (1, 2)], 2.0),
    ],
)
def test_what_passes_together_counts_once(spans, microseconds):
    assert covered(Span(*each) for each in spans) == microseconds
    assert covered(merged(Span(*each) for each in reversed(spans))) == microseconds


@pytest.mark.parametrize(
    ("message", "computing", "waited", "uncovered"),
    [
        ((0, 9e3), [], 9e3, 9e3),
        ((0, 9e3), [(0, 9e3)], 0, 0),
        ((0, 9e3), [(1e3, 6e3), (9e3, 12e3)], 3e3, 4e3),  # a thread that computes does not wait
        ((5e3, 9e3), [(0, 2e3), (20e3, 21e3)], 4e3, 4e3),  # and a pause goes on for other reasons
        ((0, 9e3), [(1e3, 4e3), (9e3 - HANDOVER / 2, 30e3)], 4.5e3, 5.5e3),  # noted a moment late
        ((0, 9e3), [(1e3, 4e3), (9e3 - HANDOVER * 2, 30e3)], 0, 4e3),
        ((0, 9e3), [(1e3, 2e3), (2.1e3, 30e3)], 0, 1.1e3),
    ],
)
def test_exposed_is_what_no_computing_hides(message, computing, waited, uncovered):
    sums = Message(SUMS, Span(*map(float, message)), "data")
    spans = [Span(*map(float, each)) for each in computing]

    for on_device, exposed in ((False, waited), (True, uncovered)):
        found = shares_of(Timeline([sums], spans, on_device=on_device), 10e3)
        assert found[EXPOSED] == pytest.approx(exposed / 10e3)
        assert found["exposed_communication_data_ratio"] == found[EXPOSED]
        assert found[TOTAL] == found["communication_data_ratio"] == covered([sums.span]) / 10e3


def test_shares_by_axis_are_those_of_their_messages_and_unknown_ones_are_in_the_whole():
    parts = [("tensor", 0, 2), ("tensor", 1, 3), ("data", 2, 6), ("", 8, 9)]
    messages = [Message(SUMS, Span(begin, end), axis) for axis, begin, end in parts]

    found = shares_of(Timeline(messages, [Span(2.5, 5)], on_device=True), 10)

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
    assert found.exposed(found.messages) == 2 + 1
    assert found.exposed(found.messages[:1]) == 2


def test_an_axis_is_told_only_where_the_groups_tell_it():
    sends = [event("gloo:send", 0, 1), event("gloo:recv", 1, 2)]
    sums = [event("gloo:all_reduce", at, at + 1, thread=5) for at in (3, 5, 7)]
    asked = [Recorded("gloo:all_reduce", each) for each in ("0", "aside", "4", "0")]

    def axes_of(axes, recorded):
        return [each.axis for each in timeline_of([*sends, *sums], axes, recorded).messages]

    ring = {"0": "agreement", "4": "context"}
    assert axes_of(ring, asked[:2]) == ["context", "context", "", "", ""]
    assert axes_of(ring | {"5": "pipeline"}, []) == ["", "", "", "", ""]
    # A thread is of one group, though another group's message was asked for in between.
    assert axes_of(ring, asked) == ["context"] * 2 + ["agreement"] * 3


def test_one_step_in_many_is_looked_at_and_none_of_one_process():
    def looked_at(ranks: Ranks) -> list[int]:
        watch, found = MessagesWatch(ranks), []
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
    watch = MessagesWatch(Ranks(0, 2))
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
