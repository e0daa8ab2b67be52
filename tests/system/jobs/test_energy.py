"""Joules of a job: trapezoids, counters that begin anew, gaps that are named, tokens they made."""

import time

from runners.jobspec import DemoPrompts, GenerateSpec
from tests.runners.jobs.test_events import (  # noqa: F401 -- some are fixtures
    tree,
)
from tests.system.jobs.powercap_tree import RANGE, drawing, zone

WATTS = 40.0


def test_a_job_says_how_many_joules_its_tokens_took_by_the_hosts_counter(
    tree, host, trained_model
):
    counter = zone(tree, "intel-rapl:0", "package-0", RANGE - 20_000_000)  # begins anew meanwhile
    prompts = DemoPrompts(count=8, input_tokens=24)
    spec = GenerateSpec(model=trained_model, weight_dtype="fp32", prompts=prompts,
                        batch_size=4, output_tokens=32)  # fmt: skip
    began = time.monotonic()
    with drawing(counter, WATTS):
        run = host.run("energy-drawn", spec)
    seconds = time.monotonic() - began

    assert run.returncode == 0, run.stderr
    measured, notes = run.measured, run.bodies("result")[0]["notes"]
    generated = measured["output_tokens"] / measured["tokens_per_second"]
    per_token = measured["energy_joules_per_token"]
    assert 0.8 * WATTS * generated < per_token * measured["output_tokens"]
    assert per_token * measured["output_tokens"] < measured["energy_joules"] < WATTS * seconds
    assert measured["package_0_energy_joules"] == measured["energy_joules"]
    assert "by RAPL's counters" in notes["energy_joules"]


def test_a_job_on_a_host_without_a_sensor_says_so_and_gives_no_figure(tree, host, trained_model):
    prompts = DemoPrompts(count=1, input_tokens=8)
    spec = GenerateSpec(model=trained_model, weight_dtype="fp32", prompts=prompts,
                        batch_size=1, output_tokens=2)  # fmt: skip

    run = host.run("energy-none", spec)

    assert not [name for name in run.measured if "energy" in name]
    notes = run.bodies("result")[0]["notes"]
    assert notes["energy_joules"].startswith("not measured: this host has no power sensor")
