"""Which share of a step messages take, by kind, as one step in many shows it."""

import json

import pytest

from runners.jobs.ranks import ALONE, Ranks
from runners.jobs.train.messages_watch import (
    EVERY_STEPS,
    FIRST_LOOK,
    KINDS,
    Message,
    MessagesWatch,
    covered,
    kind_of,
)
from tests.runners.jobs.train.forked import run_script
from tests.runners.jobs.train.watched import CASES, LATE_SECONDS, SLOW, STEPS


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
    assert covered([Message("send_recv", *each) for each in spans]) == microseconds


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
    run_script("watched", folder, seconds=300)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.equality
@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_every_layout_tells_the_share_of_its_messages_by_kind(found, name):
    lead, other = (each[name] for each in found)
    told = [each for each in lead["values"] if "communication_ratio" in each]
    kinds = {f"communication_{kind}_ratio" for kind in CASES[name][1]}

    assert len(lead["values"]) == STEPS
    assert len(told) == 1
    share = told[0]["communication_ratio"]
    by_kind = {key: told[0][key] for key in told[0] if key.startswith("communication_")}
    assert by_kind.keys() == kinds | {"communication_ratio"}
    assert 0 < max(by_kind[each] for each in kinds) <= share <= 1
    assert share <= sum(by_kind[each] for each in kinds) + 1e-9
    assert lead["figures"] == {"communication_ratio": share}
    assert f"over 1 of {STEPS} steps" in lead["note"]
    assert all(KINDS[kind] in lead["note"] for kind in CASES[name][1])
    assert other["figures"] == {}
    assert not any("communication_ratio" in each for each in other["values"])


@pytest.mark.equality
@pytest.mark.slow
def test_waiting_for_a_slow_peer_is_part_of_the_share(found):
    (told,) = (each for each in found[0][SLOW]["values"] if "communication_ratio" in each)

    seconds = found[0][SLOW]["step_seconds"][FIRST_LOOK]
    waited = told["communication_ratio"] * seconds
    assert waited >= 0.8 * LATE_SECONDS
    assert waited <= seconds
