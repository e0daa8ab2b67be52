"""Which share of a step messages take, by kind and axis, and which of it nothing hides."""

import pytest

from runners.jobs.train.communication import AXES, EXPOSED, FIRST_LOOK, KINDS, TOTAL
from tests.runners.jobs.train.test_layouts import (  # noqa: F401 -- some are fixtures
    found,
)
from tests.system.jobs.train.watched import CASES, FOUR, LATE_SECONDS, SLOW, STEPS


def told(values):
    (found,) = (each for each in values if TOTAL in each)
    return found


@pytest.mark.equality
@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_every_layout_tells_the_share_of_its_messages_by_kind_and_axis(found, name):
    (lead, other), (_, kinds, axes) = (each[name] for each in found), CASES[name]
    shares = told(lead["values"])
    by_kind = {kind: shares.get(f"communication_{kind}_ratio") for kind in kinds}
    seen = {each for each in AXES if f"communication_{each}_ratio" in shares}

    assert len(lead["values"]) == STEPS
    assert 0 < max(by_kind.values()) <= shares[TOTAL] <= 1
    assert shares[TOTAL] <= sum(by_kind.values()) + 1e-9
    assert not any(f"communication_{each}_ratio" in shares for each in KINDS.keys() - kinds)
    assert seen == axes
    assert 0 < shares[EXPOSED] <= shares[TOTAL]
    for axis in axes:
        exposed = shares[f"exposed_communication_{axis}_ratio"]
        assert exposed <= min(shares[f"communication_{axis}_ratio"], shares[EXPOSED]) + 1e-9
    assert lead["figures"] == {key: shares[key] for key in (TOTAL, EXPOSED)}
    assert all(f"over 1 of {STEPS} steps" in each for each in lead["notes"].values())
    assert all(KINDS[kind] in lead["notes"][TOTAL] for kind in kinds)
    assert all(AXES[axis] in lead["notes"][EXPOSED] for axis in axes)
    assert other["figures"] == other["notes"] == {}
    assert not any(TOTAL in each for each in other["values"])


@pytest.mark.equality
@pytest.mark.slow
def test_waiting_for_a_slow_peer_is_part_of_the_share_and_nothing_hides_it(found):
    shares = told(found[0][SLOW]["values"])
    seconds = found[0][SLOW]["step_seconds"][FIRST_LOOK]

    for name in (TOTAL, EXPOSED, "exposed_communication_data_ratio"):
        assert 0.8 * LATE_SECONDS <= shares[name] * seconds <= seconds


@pytest.mark.equality
@pytest.mark.slow
def test_a_message_that_is_computed_beside_is_hidden_and_an_awaited_one_is_not(found):
    hidden, awaited = found[0]["hidden"], found[0]["awaited"]

    assert min(hidden[TOTAL], awaited[TOTAL]) > 0.8  # a step is nothing but the late message
    assert hidden[EXPOSED] < 0.1 * hidden[TOTAL]
    assert awaited[EXPOSED] > 0.9 * awaited[TOTAL]
    assert found[1]["hidden"] == {}


@pytest.mark.equality
@pytest.mark.slow
def test_tensor_parallel_ranks_wait_for_their_messages(found):
    for name in ("tensor", FOUR):
        shares = told(found[0][name]["values"])
        whole = shares["communication_tensor_ratio"]

        # On busy cores a rank's other thread may compute during a message: 0.49 was seen.
        assert shares["exposed_communication_tensor_ratio"] > 0.3 * whole
