"""Failures of long trainings: the formulas by simulation, published runs, and plans."""

import math

import numpy as np
import pytest
from scipy.optimize import minimize_scalar

from planner.api import estimate, plan
from planner.cost.failures import goodput_ratio, young_interval_seconds
from planner.exports.launch import MARGIN, SLURM, _limit
from planner.exports.megatron import MEGATRON
from planner.exports.registry import export_case
from planner.exports.train_script import TORCHTITAN
from planner.fitting.long_runs import runs
from planner.specs.estimate import Estimate, EstimateRequest, PlanRequest
from planner.workload.long_run import usual

HOUR, DAY = 3600.0, 86_400.0


def simulated_goodput(
    interval: float, stall: float, restart: float, mtbf: float, lag: float = 0.0
) -> float:
    """Return the goodput of 20,000 segments whose checkpoints count ``lag`` after their stall."""
    draw, segments = np.random.default_rng(0), 20_000
    now, failure = 0.0, draw.exponential(mtbf)
    saved = 0
    begun = 0.0  # of the segment that follows the last checkpoint on storage
    while saved < segments:
        if (counts := begun + interval + stall + lag) <= failure:
            now, begun, saved = counts, begun + interval + stall, saved + 1
            continue
        now = failure
        while (again := draw.exponential(mtbf)) < restart:
            now += again
        begun, failure = now + restart, now + again
    return segments * interval / now


def goodput(interval: float, stall: float, restart: float, mtbf: float, lag: float = 0.0) -> float:
    return float(
        goodput_ratio(
            interval_s=interval, checkpoint_s=stall, lag_s=lag, restart_s=restart, mtbf_s=mtbf
        )
    )


def young(stall: float, mtbf: float, write: float = 0.0, run: float = math.inf) -> float:
    return float(
        young_interval_seconds(checkpoint_s=stall, mtbf_s=mtbf, write_s=write, solve_s=run)
    )


def test_goodput_is_that_of_a_simulated_run():
    for case in (
        (600, 30, 300, 3 * HOUR),
        (3000, 60, 1200, 2 * HOUR),
        (60, 5, 600, 900),
        (600, 5, 300, HOUR, 590),  # written in the background, until the next one
        (60, 1, 60, 900, 240),
    ):
        found, drawn = goodput(*case), simulated_goodput(*case)
        assert found == pytest.approx(drawn, rel=0.02), case


def test_youngs_interval_loses_next_to_nothing_against_the_best_one():
    for stall, mtbf in ((2, 3 * HOUR), (40, 112 * HOUR), (60, 2 * HOUR), (300, 5 * HOUR)):
        best = minimize_scalar(
            lambda each, stall=stall, mtbf=mtbf: -goodput(each, stall, 660, mtbf),
            bounds=(1, 10 * mtbf),
            method="bounded",
        )
        assert goodput(young(stall, mtbf), stall, 660, mtbf) >= -best.fun * 0.998, (stall, mtbf)
    assert young(2, HOUR, write=900) == 900  # storage is not done before
    assert young(60, 1e6 * HOUR, run=DAY) == DAY


def test_formula_meets_three_published_runs_within_a_tenth():
    found = {run.name: run for run in runs()}
    assert len(found) == 3
    for name, run in found.items():
        assert abs(run.error) < 0.10, (name, run)
    assert abs(found["Llama 3 405B"].blind_error) < 0.10
    assert abs(found["BLOOM"].blind_error) < 0.10
    assert found["OPT-175B"].blind_error > 0.3  # restarts by hand are not the plan's to know


BLOOM = {
    "model": "bigscience/bloom",
    "engine": "megatron",
    "cluster": {"device": "a100-sxm-80gb", "nodes": 48, "devices_per_node": 8},
    "workload": {
        "kind": "train", "method": "pretrain", "sequence_length": 2048,
        "global_batch_size": 2048, "tokens": 341_000_000_000,
    },
    "strategy": {
        "tensor_parallel_size": 4, "pipeline_parallel_size": 12, "data_parallel_size": 8,
        "zero_stage": 1,
    },
}  # fmt: skip


def planned(cluster: dict[str, float] | None = None, **workload: float) -> Estimate:
    own = {
        "cluster": BLOOM["cluster"] | (cluster or {}),
        "workload": BLOOM["workload"] | workload,
    }
    return estimate(EstimateRequest.model_validate(BLOOM | own))


def test_a_long_training_says_what_failures_cost():
    own = planned()
    found, seconds = own.reliability, own.performance.duration_seconds
    assert found.checkpoint_bytes == pytest.approx(2.3 * 2**40, rel=0.03)  # as published
    assert found.checkpoint_write_seconds == pytest.approx(40, rel=0.1)
    assert found.mean_time_between_failures_seconds * 384 == usual().device_mtbf_seconds
    assert found.wall_seconds == pytest.approx(seconds / found.goodput_ratio)
    assert found.expected_failures == pytest.approx(
        found.wall_seconds / found.mean_time_between_failures_seconds
    )
    steps = found.checkpoint_interval_steps * own.performance.step_seconds
    assert found.checkpoint_interval_seconds == pytest.approx(steps)
    low, high = found.wall_interval
    assert low < own.interval["duration_seconds"][0] * 1.05
    assert found.goodput_interval[0] < found.goodput_ratio < found.goodput_interval[1] < 1
    assert low < found.wall_seconds < high
    terms = [term for term in own.terms if term.group == "failures"]
    assert [term.provenance for term in terms if term.key == "job_mtbf_seconds"] == ["published"]
    assert all(term.source for term in terms if term.provenance == "published")


def test_what_is_stated_replaces_what_is_published():
    usual_run = planned().reliability
    rare = planned({"mean_time_between_failures_hours": 1e6}).reliability
    assert rare.goodput_ratio > usual_run.goodput_ratio
    assert rare.checkpoint_interval_seconds > usual_run.checkpoint_interval_seconds
    slow = planned(restart_seconds=5 * HOUR, checkpoint_seconds=600.0).reliability
    assert (slow.restart_seconds, slow.checkpoint_seconds) == (5 * HOUR, 600.0)
    assert slow.goodput_ratio < usual_run.goodput_ratio
    disk = planned({"disk_bandwidth_bytes_per_second": 0.6e9}).reliability
    assert disk.checkpoint_write_seconds == pytest.approx(2 * usual_run.checkpoint_write_seconds)
    # A stated time between failures leaves chance alone: the more failures, the less of it.
    widths = [
        math.log(high / low)
        for hours in (5_000, 50_000)
        for low, high in [
            planned({"mean_time_between_failures_hours": hours}).reliability.wall_interval
        ]
    ]
    assert all(width > 0 for width in widths)


def test_short_trainings_say_nothing_of_failures_unless_asked():
    short = {"tokens": 1_000_000_000}
    assert planned(**short).reliability is None
    assert planned(tokens=None).reliability is None
    stated = planned({"mean_time_between_failures_hours": 20_000.0}, **short).reliability
    assert stated.goodput_ratio < 1


def test_a_checkpoint_that_is_being_written_does_not_count_yet():
    slow = {"disk_bandwidth_bytes_per_second": 0.05e9}
    in_step, background = (
        estimate(
            EstimateRequest.model_validate(
                BLOOM
                | {"cluster": BLOOM["cluster"] | slow}
                | {"strategy": BLOOM["strategy"] | {"checkpoint_writing": mode}}
            )
        ).reliability
        for mode in ("in_step", "background")
    )
    write = background.checkpoint_write_seconds
    assert write == in_step.checkpoint_seconds > 10 * background.checkpoint_seconds
    expected = goodput(
        background.checkpoint_interval_seconds, background.checkpoint_seconds,
        background.restart_seconds, background.mean_time_between_failures_seconds, write,
    )  # fmt: skip
    assert background.goodput_ratio == pytest.approx(expected)
    assert background.checkpoint_interval_seconds >= write


def test_whole_steps_are_no_shorter_than_the_writing_and_no_longer_than_the_run():
    for disk, stop in ((1e9, 1.0), (0.05e9, 1.0), (0.01e9, 1.0), (1e3, 1.0), (1e9, 1e-6)):
        own = planned(
            {"mean_time_between_failures_hours": 1e6, "disk_bandwidth_bytes_per_second": disk},
            tokens=10_000_000_000, checkpoint_seconds=stop,
        )  # fmt: skip
        found, step = own.reliability, own.performance.step_seconds
        run = math.ceil(own.performance.duration_seconds / step)
        least = min(run, math.ceil(found.checkpoint_write_seconds / step))
        assert least <= found.checkpoint_interval_steps <= run, (disk, stop)


def test_no_figure_is_infinite_and_a_run_that_never_ends_is_named():
    for cluster, workload in (
        ({"mean_time_between_failures_hours": 1e-9}, {}),
        ({"mean_time_between_failures_hours": 1.0}, {}),
        ({"mean_time_between_failures_hours": 1e300}, {}),
        ({"mean_time_between_failures_hours": 200.0}, {}),
        ({}, {"restart_seconds": 1e300}),
        ({}, {"restart_seconds": 1e-300, "checkpoint_seconds": 1e-300}),
        ({}, {"checkpoint_seconds": 1e300}),
        ({"disk_bandwidth_bytes_per_second": 1.0}, {}),
    ):
        own = planned(cluster, **workload)
        if (found := own.reliability) is None:
            (words,) = [each for each in own.warnings if "it does not finish" in each]
            assert "a failure comes every" in words
            assert "a restart takes" in words
            continue
        figures = [found.goodput_ratio, found.expected_failures, found.wall_seconds]
        figures += [*found.goodput_interval, *found.wall_interval]
        assert all(math.isfinite(each) and each > 0 for each in figures), (cluster, workload)
    assert planned({"mean_time_between_failures_hours": 1.0}).reliability is None
    assert planned({"mean_time_between_failures_hours": 1e300}).reliability.goodput_ratio > 0.99


def test_a_run_of_a_stated_time_trains_fewer_tokens_and_takes_no_longer():
    budget = 60 * DAY
    own = planned(tokens=None, time_budget_seconds=budget)
    ideal = own.performance.tokens_per_second * budget
    assert own.performance.duration_seconds == own.reliability.wall_seconds == budget
    assert own.performance.trained_tokens == pytest.approx(ideal * own.reliability.goodput_ratio)


def test_devices_that_only_generate_fail_too():
    work = {
        "kind": "train", "objective": "grpo", "sequence_length": 4096, "global_batch_size": 512,
        "max_completion_length": 3072, "tokens": 10**11,
    }  # fmt: skip
    request = {
        "model": "Qwen/Qwen3-8B", "engine": "nemo_rl", "workload": work,
        "cluster": {"device": "h100-sxm-80gb", "nodes": 4, "devices_per_node": 8},
        "strategy": {"rollout": {"devices": 16}, "zero_stage": 3, "micro_batch_size": 1},
    }  # fmt: skip
    found = estimate(EstimateRequest.model_validate(request)).reliability
    assert found.mean_time_between_failures_seconds * 32 == usual().device_mtbf_seconds


def test_a_single_writer_that_sets_the_interval_is_warned_of():
    work = {
        "kind": "train", "method": "pretrain", "sequence_length": 4096,
        "global_batch_size": 512, "tokens": 10**12,
    }  # fmt: skip
    request = {
        "model": "meta-llama/Llama-3.1-8B", "engine": "torch", "workload": work,
        "cluster": {
            "device": "h100-sxm-80gb", "nodes": 8, "devices_per_node": 8,
            "mean_time_between_failures_hours": 2000.0,
        },
        "strategy": {"zero_stage": 3, "micro_batch_size": 1},
    }  # fmt: skip
    for disk, is_warned in ((0.2e9, True), (50e9, False)):
        request["cluster"]["disk_bandwidth_bytes_per_second"] = disk
        words = " ".join(estimate(EstimateRequest.model_validate(request)).warnings)
        assert ("one of 8 nodes writes the checkpoints" in words) == is_warned, disk


def test_every_export_of_a_long_training_says_which_save_interval_to_set():
    answer = plan(
        PlanRequest.model_validate(
            {
                "model": "meta-llama/Llama-3.1-8B",
                "cluster": {"device": "h100-sxm-80gb", "nodes": 8, "devices_per_node": 8},
                "workload": {
                    "kind": "train", "method": "pretrain", "sequence_length": 4096,
                    "global_batch_size": 512, "tokens": 1_000_000_000_000,
                },
                "pins": {"tensor_parallel_size": 1, "pipeline_parallel_size": 1},
                "engine": "megatron",
                "top": 1,
            }
        )
    )  # fmt: skip
    best = answer.plans[0]
    steps = best.reliability.checkpoint_interval_steps
    case = export_case(answer.request, best)
    for made in (MEGATRON, TORCHTITAN, SLURM):
        text = made.text(case)
        assert f"save a checkpoint every {steps} steps" in text, made.key
        assert "goodput 9" in text, made.key
    assert f"--save-interval {steps}" in MEGATRON.text(case).replace("\\\n", " ").replace(
        "  ", " "
    )
    assert f"checkpoint.interval = {steps}" in TORCHTITAN.text(case)
    limit = _limit(best.reliability.wall_interval[1] * MARGIN)
    assert f"--time={limit}" in SLURM.text(case)
