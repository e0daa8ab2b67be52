"""A rank of a divided training is killed: the others notice, and the next start loses one step."""

import json
import signal

import pytest

from runners.jobs.ranks import Ranks
from runners.jobs.runtime import BadInputError
from runners.jobspec.train import LayoutOptions
from tests.plugins.extent import first
from tests.system.jobs.train.forked import EXIT_LOST, run_script
from tests.system.jobs.train.killed import KILLED_AT, KILLINGS, size_of
from tests.system.jobs.train.laid_out import STEPS, model_of, trainer_of

pytestmark = [pytest.mark.equality, pytest.mark.slow]
LOSS_TOLERANCE = 5e-6  # nats, as between layouts: ten times the spacing of fp32 at 5
# What other cases show too runs nightly alone.
SHOWN_TOO = (
    "ZeRO-3", "tensor and pipeline", "uneven stages, then even ones", "ZeRO-3 from 4 ranks to one",
)  # fmt: skip
NAMES = [name for name in KILLINGS if name not in SHOWN_TOO or name in first(SHOWN_TOO, 0)]
EACH = pytest.mark.parametrize("name", NAMES)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("killed")
    run_script("killed", found, *NAMES, seconds=420)
    return found


def losses(folder, name, part):
    return json.loads((folder / name / part / "0.json").read_text())["losses"]


@EACH
def test_whoever_is_left_ends_by_name_and_does_not_wait_for_ever(folder, name):
    ends, case = json.loads((folder / name / "ends.json").read_text()), KILLINGS[name]

    expected = [EXIT_LOST] * size_of(case.options)
    expected[case.victim] = -signal.SIGKILL
    assert ends["killed"] == expected
    assert ends["seconds"] < 60  # the time that a silent rank has
    for path in (folder / name / "killed").glob("*.lost"):
        assert path.read_text().startswith(f"rank {path.stem} of {len(expected)}: ")


@EACH
def test_the_loss_goes_on_unbroken_from_the_last_checkpoint(folder, name):
    undisturbed = losses(folder, model_of(name), "undisturbed")
    resumed = losses(folder, name, "resumed")

    assert len(undisturbed) == STEPS
    assert len(resumed) == STEPS - KILLED_AT
    assert resumed == pytest.approx(undisturbed[KILLED_AT:], abs=LOSS_TOLERANCE)
    assert resumed[-1] < 0.95 * undisturbed[0]


def test_every_rank_goes_on_at_the_leads_step(folder):
    for name in NAMES:
        said = (folder / name / "resumed").glob("*.json")
        steps = {json.loads(each.read_text())["resumed_at_step"] for each in said}

        assert steps == {KILLED_AT}, name


@pytest.mark.parametrize("name", ["ZeRO-3 from 4 ranks to 2", "tensor and pipeline"])
def test_a_layout_for_other_ranks_than_came_back_is_refused_by_name(tmp_path, name):
    with pytest.raises(BadInputError, match=r"takes 4 ranks .* but 2 were started; launch it on"):
        trainer_of("llama", KILLINGS[name].options, Ranks(0, 2), tmp_path)


def test_a_pipeline_that_may_shrink_divides_its_layers_among_those_that_are_left():
    whole = LayoutOptions(pipeline_parallel_size=4, pipeline_layers=(1, 2, 3, 2))

    assert whole.with_pipeline_ranks(4) == whole
    assert whole.with_pipeline_ranks(3) == LayoutOptions(pipeline_parallel_size=3)
    assert not LayoutOptions(pipeline_parallel_size=2, tensor_parallel_size=2).is_pipeline_alone


def test_experts_that_the_ranks_left_do_not_divide_are_refused_by_name(tmp_path):
    options = {"data_parallel_size": 3, "expert_parallel_size": 3}

    with pytest.raises(BadInputError, match=r"num_local_experts is 4, not divisible by .* 3;"):
        trainer_of("mixtral", options, Ranks(0, 3), tmp_path, gradient_accumulation_steps=3)
