"""Every layout of a training learns what one process learns, and holds what the planner counts.

In fp32 a loss of about 5 nats is known to 5e-7; sums in another order move it by a few of those,
and four steps of Adam carry that on. What a layout does wrong shows far above: a gradient that is
averaged instead of summed moves the norm by its half, a missing piece of a sequence the loss.
"""

import json
import math
from itertools import pairwise

import pytest
import torch

from planner.cost.training import sharded_state_bytes
from runners.jobs.ranks import ALONE
from tests.plugins.extent import first
from tests.system.jobs.harness import PROJECT
from tests.system.jobs.train.forked import run_script
from tests.system.jobs.train.laid_out import (
    AVERAGED,
    CASES,
    FEWER,
    HIGH_SCALE,
    LESS,
    MODELS,
    SCALED,
    STEPS,
    micro_batches_of,
    model_of,
    run_case,
    run_chain,
    trainer_of,
)

pytestmark = [pytest.mark.equality, pytest.mark.slow]
DOCS_PAGE = PROJECT / "templates" / "docs" / "layouts.md"
# What other cases and the chain show too runs nightly alone.
SHOWN_TOO = ("ZeRO-1 and tensor", "ZeRO-3 and tensor", "data, tensor and pipeline")
NAMES = [
    (size, name)
    for size, cases in CASES.items()
    for name in cases
    if name not in SHOWN_TOO or name in first(SHOWN_TOO, 0)
]
LOSS_TOLERANCE = 5e-6  # nats: ten times the spacing of fp32 at 5
NORM_TOLERANCE = 1e-5  # relative
WEIGHT_TOLERANCE = 1e-5  # a thousandth of what one step moves a weight
# How far from one process's loss copies may come in four steps: with 8 and with 11 bits of a
# number lost, with 127 steps a bucket, and with matrices of rank 4 of 32 after three whole
# exchanges.
NEAR = {"fp16": 1e-3, "bf16": 5e-3, "int8": 5e-2, "powersgd": 0.2}
TERMS = ("weights", "gradients", "optimizer_states")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("layouts")


@pytest.fixture(scope="module")
def alone(folder):
    found = {name: run_case(name, None, ALONE, folder / f"alone {name}") for name in MODELS}
    found["fewer"] = run_case("llama", None, ALONE, folder / "alone fewer", micro_batches=FEWER)
    return found | {"chain": run_chain(ALONE, folder)}


@pytest.fixture(scope="module")
def laid_out(folder, alone):
    """Return what each rank of each layout saw: {ranks: {layout: [one of each rank]}}."""
    run_script("laid_out", folder, *(name for _, name in NAMES), *LESS, *SCALED, seconds=280)
    found = {}
    for size in CASES:
        said = [json.loads((folder / f"{size}-{rank}.json").read_text()) for rank in range(size)]
        found[size] = {name: [each[name] for each in said] for name in said[0]}
    return found


def weights(folder, name):
    return torch.load(folder / name / "weights.pt")


def test_the_single_process_learns_something_to_compare_with(alone):
    for name in MODELS:
        assert len(alone[name]["losses"]) == STEPS
        assert alone[name]["losses"][-1] < 0.9 * alone[name]["losses"][0]


@pytest.mark.parametrize(("size", "name"), NAMES, ids=[f"{s}-{n}" for s, n in NAMES])
def test_a_layout_learns_what_one_process_learns(laid_out, alone, folder, size, name):
    reference = model_of(name)
    if micro_batches_of(name, CASES[size][name]) == FEWER:
        reference = "fewer"
    lead, one = laid_out[size][name][0], alone[reference]
    whole = weights(folder, f"alone {reference}")
    found = weights(folder, name)

    assert lead["losses"] == pytest.approx(one["losses"], abs=LOSS_TOLERANCE)
    assert lead["norms"] == pytest.approx(one["norms"], rel=NORM_TOLERANCE)
    assert lead["is_training"]
    assert found.keys() == whole.keys()
    for weight, expected in whole.items():
        torch.testing.assert_close(found[weight], expected, rtol=0, atol=WEIGHT_TOLERANCE)


def test_a_checkpoint_goes_on_in_other_layouts_on_other_numbers_of_ranks(laid_out, alone, folder):
    two, four = (laid_out[size]["chain"][0]["losses"] for size in (2, 4))

    unbroken = alone["llama"]["losses"]
    assert [*alone["chain"]["losses"], *two, *four] == pytest.approx(unbroken, abs=LOSS_TOLERANCE)
    found, whole = weights(folder, "chain"), weights(folder, "alone llama")
    for weight, expected in whole.items():
        torch.testing.assert_close(found[weight], expected, rtol=0, atol=WEIGHT_TOLERANCE)


def test_copies_that_compress_nearly_learn_what_one_process_learns(laid_out, alone):
    losses = alone["llama"]["losses"]

    for name, near in NEAR.items():
        found = laid_out[2][name]
        assert found[0]["losses"] == pytest.approx(losses, abs=near), name
        assert found[0]["weights_sum"] == found[1]["weights_sum"], name


def test_compressed_gradients_are_as_many_bytes_as_their_type_has(laid_out, alone):
    whole = alone["llama"]["gradients"]
    sent = {name: laid_out[2][name][0]["figures"]["gradient_bytes_sent"] for name in NEAR}

    assert sent["fp16"] == sent["bf16"] == whole / 2
    assert whole / 4 < sent["int8"] < whole / 4 + 100  # and a scale a bucket
    assert sent["powersgd"] < whole / 2


def test_divided_in_fp16_all_ranks_skip_the_same_steps_and_learn_on(laid_out, folder):
    """Where scaled gradients overflow on one rank, all skip the step and halve their scale."""
    alone = {
        times: run_case(
            "llama",
            None,
            ALONE,
            folder / f"scaled, {times}",
            scale=times * HIGH_SCALE,
            micro_batches=FEWER,
        )
        for times in (1, 2)
    }

    assert 0 < sum(alone[1]["skipped"]) < len(alone[1]["skipped"]) / 2
    assert alone[1]["losses"][-1] < 0.9 * alone[1]["losses"][0]
    for name in SCALED:
        times = 2 if name in AVERAGED else 1
        one, ranks = alone[times], laid_out[2][name]
        assert ranks[0]["losses"] == pytest.approx(one["losses"], abs=NEAR["bf16"]), name
        for rank in ranks:
            assert (rank["skipped"], times * rank["scale"]) == (one["skipped"], one["scale"]), name


def test_copies_that_meet_every_other_step_are_the_mean_of_two_that_learn_alone(laid_out, folder):
    pair = [trainer_of("llama", None, ALONE, folder / f"half {rank}") for rank in range(2)]
    for rank, each in enumerate(pair):
        each.layout.share = every_other(rank)
        each.model.train()
    losses = []
    for step in range(STEPS):
        losses.append(sum(float(each.make_step()["loss"]) for each in pair) / 2)
        for each in pair:
            each.state.step += 1
        if step % 2:
            meet(*(each.model for each in pair))

    both = laid_out[2]["local"]
    assert both[0]["losses"] == pytest.approx(losses, abs=LOSS_TOLERANCE)
    assert both[0]["weights_sum"] == both[1]["weights_sum"]
    for name, weight in weights(folder, "local").items():
        expected = pair[0].model.get_parameter(name).detach()
        torch.testing.assert_close(weight, expected, rtol=0, atol=WEIGHT_TOLERANCE)


def every_other(first):
    return lambda count: range(first, count, 2)


@torch.no_grad()
def meet(one, other):
    for mine, theirs in zip(one.parameters(), other.parameters(), strict=True):
        mean = (mine + theirs) / 2
        mine.copy_(mean)
        theirs.copy_(mean)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_each_rank_holds_the_bytes_that_the_planner_counts_for_zero(laid_out, alone, stage, size):
    name = f"ZeRO-{stage}" if size == 2 else f"ZeRO-{stage} on {size}"
    parameters = alone["llama"]["weights"] / 4
    expected = {
        "weights": sharded_state_bytes(
            parameters=parameters, bytes_per_element=4, shards=size if stage == 3 else 1
        ),
        "gradients": sharded_state_bytes(
            parameters=parameters, bytes_per_element=4, shards=size if stage >= 2 else 1
        ),
        "optimizer_states": sharded_state_bytes(
            parameters=parameters, bytes_per_element=8, shards=size
        ),
    }

    for rank in laid_out[size][name]:
        held = {term: rank[term] for term in TERMS}
        assert held == pytest.approx(expected, rel=0.01)  # each weight's count of updates


@pytest.mark.parametrize(("size", "name"), NAMES, ids=[f"{s}-{n}" for s, n in NAMES])
def test_the_ranks_together_hold_at_least_one_of_everything(laid_out, alone, size, name):
    for term in TERMS:
        together = sum(rank[term] for rank in laid_out[size][name])
        assert together > 0.999 * alone[model_of(name)][term]  # rotary tables are no weights


def test_the_documented_table_is_what_the_ranks_held(laid_out, alone):
    page = DOCS_PAGE.read_text()

    missing = [row for row in table(laid_out, alone) if row not in page]
    assert not missing, "\n".join(missing)


def table(laid_out, alone):
    """Return the rows of the page: what the fullest rank holds of what one process would."""
    rows = []
    for size, name in NAMES:
        one, ranks = alone[model_of(name)], laid_out[size][name]
        shares = [max(rank[term] for rank in ranks) / one[term] for term in TERMS]
        rows.append(
            f"| {name} | {size} | {' | '.join(f'{100 * each:.0f} %' for each in shares)} |"
        )
    return rows


def test_tolerances_are_far_below_what_a_mistake_moves(alone):
    losses = alone["llama"]["losses"]

    moved = min(abs(b - a) for a, b in pairwise(losses))
    assert moved > 1000 * LOSS_TOLERANCE
    assert all(math.isfinite(each) for each in alone["llama"]["norms"])
