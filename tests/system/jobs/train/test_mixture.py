"""Weights that move: by the published rule, alike on any ranks, and exact after a stop."""

import json
import math

import numpy as np
import pytest

from runners.jobs.ranks import ALONE
from runners.jobs.train import job as train
from tests.runners.jobs.tiny import tiny_training
from tests.runners.jobs.train.test_mixture import (  # noqa: F401 -- some are fixtures
    folder,
    two_sources,
    unbroken,
)
from tests.system.jobs.train.forked import run_script
from tests.system.jobs.train.mixed import (
    BROKEN_OFF,
    CASES,
    STEPS,
    run_case,
)

LOSS_TOLERANCE = 5e-6  # nats, as between other layouts


@pytest.mark.slow
def test_every_rank_of_every_layout_draws_what_one_process_draws(folder, unbroken):
    run_case(None, ALONE, folder / "chain", BROKEN_OFF)

    run_script("mixed", folder)

    ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]
    for name in (*CASES, "chain"):
        lead, other = (each[name] for each in ranks)
        rows = lead["rows"] | other["rows"]
        assert rows == {step: unbroken["rows"][step] for step in rows}, name
        steps = range(BROKEN_OFF if name == "chain" else 0, STEPS)
        assert len(rows) == 4 * len(steps), name
        assert lead["history"] == other["history"], name
        found = np.array(lead["history"])
        assert found == pytest.approx(np.array(unbroken["history"]), abs=1e-5), name
        assert lead["losses"] == pytest.approx(
            unbroken["losses"][-len(steps) :], abs=LOSS_TOLERANCE
        ), name


@pytest.fixture(scope="module", autouse=True)
def files(host):
    folder = host.path / "models" / "mixture"
    folder.mkdir()
    text = "".join(f"Number {n} is followed by {n + 1}.\n" * 80 + "\n" for n in range(40))
    (folder / "numbers.txt").write_text(text)


def test_a_job_tells_what_each_source_weighs_and_why(host, trained_model):
    data = two_sources("numbers.txt")
    spec = tiny_training(model=trained_model, data=data, max_steps=30, learning_rate=1e-3)

    done = host.run_here("mixture", spec, train.work)

    weights = np.array([done.metric(f"source{at}_weight") for at in (1, 2)])
    assert weights.shape == (2, 3)
    assert weights.sum(axis=0) == pytest.approx(1.0)
    own, read = (done.metric(f"source{at}_loss") for at in (1, 2))
    assert done.metric("source1_reference") == [own[0]] * 3
    assert read[-1] < read[0]
    begun = 1 / (1 + math.exp(max(0.0, read[0] - 2.0)))
    assert weights[0, 0] == pytest.approx(begun)
    assert "moved every 10 steps, 3 times, to" in done.bodies("result")[0]["notes"]["mixture"]
