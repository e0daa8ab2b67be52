"""A checkpoint of 4 ranks goes on on 2 of them and then on one, and without one of two hosts."""

import json

import pytest
import torch

from runners.jobs.ranks import ALONE
from tests.system.jobs.train.forked import run_script
from tests.system.jobs.train.laid_out import MODELS, model_of, run_case
from tests.system.jobs.train.resharded import CASES, PARTS
from tests.system.jobs.train.test_equality import LOSS_TOLERANCE, WEIGHT_TOLERANCE


@pytest.mark.equality
@pytest.mark.slow
def test_fewer_ranks_and_fewer_hosts_learn_on_what_one_process_learns(tmp_path):
    unbroken = {name: run_case(name, None, ALONE, tmp_path / f"alone {name}") for name in MODELS}
    run_script("resharded", tmp_path, seconds=280)

    for name, parts in CASES.items():
        losses = []
        for at in PARTS:
            said = tmp_path / f"{at}-{len(parts[at].hosts)}-0.json"
            losses += json.loads(said.read_text())[name]
        model = model_of(name)
        assert losses == pytest.approx(unbroken[model]["losses"], abs=LOSS_TOLERANCE), name
        found = torch.load(tmp_path / "north" / name / "weights.pt")
        whole = torch.load(tmp_path / f"alone {model}" / "weights.pt")
        for weight, expected in whole.items():
            torch.testing.assert_close(found[weight], expected, rtol=0, atol=WEIGHT_TOLERANCE)
