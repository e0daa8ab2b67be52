"""Pipeline formulas against schedules that are executed pass by pass."""

import pytest

from planner.cost.training import pipeline_in_flight, step_seconds
from tests.planner.schedules import BACKWARD, FORWARD, execute, gpipe, interleaved, one_f_one_b

SECONDS = {FORWARD: 1.0, BACKWARD: 2.0}
SHAPES = [(1, 4), (2, 2), (2, 8), (3, 12), (4, 4), (4, 8), (4, 32), (8, 8), (8, 64)]
SCHEDULES = {"gpipe": gpipe, "1f1b": one_f_one_b}


def predicted_seconds(stages, micro_batches, chunks=1):
    return step_seconds(
        micro_batches=micro_batches,
        stages=stages,
        micro_batch_s=SECONDS[FORWARD] + SECONDS[BACKWARD],
        exposed_s=0.0,
        update_s=0.0,
        chunks=chunks,
    )


@pytest.mark.parametrize(("stages", "micro_batches"), SHAPES)
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_step_takes_as_long_as_its_schedule(name, stages, micro_batches):
    run = execute(SCHEDULES[name], stages, micro_batches, SECONDS)

    assert predicted_seconds(stages, micro_batches) == pytest.approx(run.seconds)


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 4), (2, 8), (4, 8), (4, 16), (8, 32)])
@pytest.mark.parametrize("chunks", [2, 4])
def test_interleaving_divides_the_bubble_by_the_chunks(stages, micro_batches, chunks):
    run = execute(interleaved(chunks), stages, micro_batches, SECONDS, chunks)

    found = predicted_seconds(stages, micro_batches, chunks)
    assert found == pytest.approx(run.seconds, rel=1e-9)


@pytest.mark.parametrize(("stages", "micro_batches"), SHAPES)
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_stage_holds_what_its_schedule_has_in_flight(name, stages, micro_batches):
    run = execute(SCHEDULES[name], stages, micro_batches, SECONDS)

    for stage, most in enumerate(run.most_held):
        held = pipeline_in_flight(name, stage, stages, micro_batches)
        assert held == most


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 8), (4, 16), (8, 32)])
@pytest.mark.parametrize("chunks", [2, 4])
def test_every_stage_of_an_interleaved_pipeline_runs_far_ahead(stages, micro_batches, chunks):
    """Even the last stage holds nearly as many micro-batches as there are stages."""
    run = execute(interleaved(chunks), stages, micro_batches, SECONDS, chunks)

    for stage, most in enumerate(run.most_held):
        held = pipeline_in_flight("interleaved", stage, stages, micro_batches, chunks)
        assert held == pytest.approx(most / chunks)


def test_interleaving_buys_its_speed_with_memory():
    plain = execute(one_f_one_b, 4, 16, SECONDS)
    woven = execute(interleaved(2), 4, 16, SECONDS, 2)

    assert woven.seconds < plain.seconds
    assert woven.most_held[0] / 2 > plain.most_held[0]


def test_gpipe_is_as_fast_as_1f1b_and_holds_everything():
    first, second = execute(gpipe, 4, 16, SECONDS), execute(one_f_one_b, 4, 16, SECONDS)

    assert first.seconds == second.seconds
    assert (max(first.most_held), max(second.most_held)) == (16, 4)
