"""An encoder's classification head learns under DDP and ZeRO what one process learns."""

import json

import pytest
import torch

from runners.jobs.ranks import ALONE
from tests.system.jobs.harness import PROJECT
from tests.system.jobs.train.forked import run_script
from tests.system.jobs.train.laid_out import ENCODER, STEPS, run_case
from tests.system.jobs.train.test_equality import (
    LOSS_TOLERANCE,
    NORM_TOLERANCE,
    TERMS,
    WEIGHT_TOLERANCE,
)

pytestmark = [pytest.mark.equality, pytest.mark.slow]
DOCS_PAGE = PROJECT / "templates" / "docs" / "layouts.md"
NAMES = list(ENCODER[2])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("encoders")


@pytest.fixture(scope="module")
def alone(folder):
    return run_case("distilbert", None, ALONE, folder / "alone")


@pytest.fixture(scope="module")
def laid_out(folder):
    """Return what each of two ranks saw in each layout."""
    run_script("laid_out", folder, "encoder", seconds=280)
    return [json.loads((folder / f"2-{rank}.json").read_text()) for rank in range(2)]


def test_the_single_process_learns_something_to_compare_with(alone):
    assert len(alone["losses"]) == STEPS
    assert alone["losses"][-1] < 0.7 * alone["losses"][0]


@pytest.mark.parametrize("name", NAMES)
def test_a_layout_learns_what_one_process_learns(laid_out, alone, folder, name):
    lead, whole = laid_out[0][name], torch.load(folder / "alone" / "weights.pt")
    found = torch.load(folder / name / "weights.pt")

    assert lead["losses"] == pytest.approx(alone["losses"], abs=LOSS_TOLERANCE)
    assert lead["norms"] == pytest.approx(alone["norms"], rel=NORM_TOLERANCE)
    assert lead["is_training"]
    assert found.keys() == whole.keys()
    for weight, expected in whole.items():
        if weight.endswith("k_lin.bias"):
            continue  # softmax cancels it: its gradient is rounding alone, which Adam enlarges
        torch.testing.assert_close(found[weight], expected, rtol=0, atol=WEIGHT_TOLERANCE)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_halves_what_its_stage_shards(laid_out, alone, stage):
    halved = {"optimizer_states": 1, "gradients": 2, "weights": 3}

    for rank in laid_out:
        held = rank[f"encoder, ZeRO-{stage}"]
        for term, first in halved.items():
            share = 0.5 if stage >= first else 1.0
            assert held[term] == pytest.approx(share * alone[term], rel=0.02)


def test_the_documented_table_is_what_the_ranks_held(laid_out, alone):
    page = DOCS_PAGE.read_text()

    for name in NAMES:
        shares = [max(rank[name][term] for rank in laid_out) / alone[term] for term in TERMS]
        row = f"| {name} | 2 | {' | '.join(f'{100 * each:.0f} %' for each in shares)} |"
        assert row in page
