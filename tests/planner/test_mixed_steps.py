"""The schedule of closed loops, bursts and open loops, against the simulation of all steps."""

import numpy as np
import pytest

from planner.cost.quantity import NullLedger
from planner.specs.estimate import EstimateRequest
from planner.workload.arrivals import Batching, Traffic, _closed_loop
from planner.workload.mixed_steps import _schedule, load_of, mixed_steps_of
from planner.workload.resolve import resolve
from tests.planner.asking import ask

CALLS, LENGTHS = 10, 0.1  # those of the published sweeps


def setting_of(budget=8192, **workload):
    document = {
        "model": "meta-llama/Llama-3.1-8B",
        "cluster": {"device": "h100-sxm-80gb"},
        "workload": {"kind": "serve", **workload},
        "strategy": {"max_batch_tokens": budget},
        "engine": "vllm",
    }
    return resolve(EstimateRequest.model_validate(document))


def closed_form(callers, prompt, answer, budget):
    """Return prompt tokens read until a first token, mixed steps and prompt tokens a step."""
    setting = setting_of(budget, input_tokens=prompt, output_tokens=answer, concurrency=callers)
    load = load_of(setting, setting.workload, float(callers), (0.1, 0.01, 1.0))
    found = _schedule(setting, NullLedger(), load)
    return (
        found.steps * found.step_tokens,
        found.mixed_ratio,
        found.mixed_ratio * found.mixed_tokens,
    )


def simulated(callers, prompt, answer, budget):
    """Return the same from the simulated steps, of all calls but the first of each caller."""
    traffic = Traffic(float(prompt), answer, (0.0,) * callers, CALLS, LENGTHS)
    steps = _closed_loop.__wrapped__(Batching(callers, budget), traffic)
    read = np.concatenate([[0.0], np.cumsum(steps.read)])
    mixed = np.concatenate([[0.0], np.cumsum(steps.read > 0)])
    later = steps.sent > 0
    gaps = (steps.output_tokens - 1)[later]
    return (
        (read[steps.first] - read[steps.sent])[later].mean(),
        ((mixed[steps.done] - mixed[steps.first])[later] / gaps).mean(),
        ((read[steps.done] - read[steps.first])[later] / gaps).mean(),
    )


def test_the_schedule_of_a_closed_loop_is_that_of_its_simulated_steps():
    drawn = np.random.default_rng(7)
    apart = []
    for _ in range(40):
        callers = int(2 ** drawn.uniform(1, 8))
        prompt, answer = int(2 ** drawn.uniform(7, 14)), int(2 ** drawn.uniform(6, 10))
        load = callers, prompt, answer, int(drawn.choice([2048, 8192, 16384]))
        apart.append(np.array(closed_form(*load)) / np.array(simulated(*load)) - 1)
    errors = np.abs(apart)
    assert np.median(errors, axis=0).max() < 0.06
    assert np.quantile(errors, 0.9, axis=0).max() < 0.25


def test_one_caller_has_its_own_prompt_alone_and_more_callers_never_read_less():
    read, mixed, tokens = closed_form(1, 1024, 128, 8192)
    assert (read, mixed, tokens) == (1024.0, 0.0, 0.0)
    assert closed_form(1, 20_000, 128, 8192)[0] == 20_000.0
    for callers in (1, 4, 16, 64, 256):
        fewer, more = (np.array(closed_form(n, 2048, 256, 8192)) for n in (callers, callers * 2))
        assert np.all(more >= fewer), callers


def test_what_an_engine_takes_in_is_all_that_one_caller_waits_for_beside_its_prompt():
    found = ask(engine="vllm", workload={"kind": "serve", "input_tokens": 1024,
                "output_tokens": 128, "concurrency": 1}).performance  # fmt: skip
    assert 0 < found.ttft_seconds - found.prefill_seconds < 0.03


def test_a_loop_whose_prompts_fill_every_step_waits_until_all_are_read():
    """256 prompts of 8,192 tokens take 256 steps and more, an answer of 16 tokens takes 16."""
    callers, prompt, answer = 256, 8192, 16
    read, _, tokens = closed_form(callers, prompt, answer, 8192)
    assert read == pytest.approx(simulated(callers, prompt, answer, 8192)[0], rel=0.1)
    assert tokens <= 8192


def test_columns_of_loads_are_scheduled_as_each_alone():
    columns = np.array([1.0, 8.0, 200.0])
    lengths = {"input_tokens": 512, "output_tokens": 128}
    for arrivals in ({"concurrency": 8}, {"request_rate_per_second": 3.0}, {"burst_requests": 8}):
        setting = setting_of(**lengths, **arrivals)
        workload = setting.workload

        def found(running, setting=setting, workload=workload):
            load = load_of(setting, workload, running, (0.1, 0.01, 1.0))
            steps = mixed_steps_of(setting, workload, NullLedger(), load)
            between_s = steps.schedule.mixed_ratio * steps.between_s
            return [*steps.schedule, steps.until_first_s, between_s]

        alone = np.array([[float(each) for each in found(one)] for one in columns]).T
        together = [np.broadcast_to(each, columns.shape) for each in found(columns)]
        assert np.array(together) == pytest.approx(alone), arrivals
