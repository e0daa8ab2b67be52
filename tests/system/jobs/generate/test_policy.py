"""A block whose weights, cache and activations lie by a policy writes what it writes anyway."""

import pytest

from runners.jobspec import DemoPrompts
from runners.jobspec.generate import PolicyOffload
from tests.runners.jobs.generate.test_policy import (
    SPREAD,
)
from tests.system.jobs.generate.reading import outputs

DEFAULTS = {
    "prompts": DemoPrompts(count=6, input_tokens=24, shortest=4),
    "batch_size": 6,
    "output_tokens": 12,
}


@pytest.fixture(scope="module")
def resident(generate):
    return generate("resident")


@pytest.mark.equality
def test_a_job_follows_its_policy_and_says_what_lay_where(generate, resident):
    policy = PolicyOffload(micro_batch_size=2, activations_cpu=0.5, **{**SPREAD, "kv_cpu": 0.5})

    run = generate("policy", offload=policy)

    assert outputs(run) == outputs(resident)
    measured = run.measured
    assert (measured["weights_cpu"], measured["weights_disk"]) == (0.5, 0.5)
    assert measured["kv_cpu"] == pytest.approx(0.5, abs=0.2)
    assert measured["layer_loads"] == 2 * DEFAULTS["output_tokens"]
    assert measured["kv_bytes_brought"] > 0
    said = run.bodies("result")[0]["notes"]["offload"]
    assert "0 of 2 layers stay; 1 come from host memory and 1 from disk" in said
    assert "no accelerator: host memory is the device's own" in said


def test_a_job_with_four_bit_weights_by_policy_holds_an_eighth_of_them(generate, resident):
    asked = {"weight_dtype": "int4", "kv_cache": "int4", "batching": "sorted"}

    run = generate("narrow", offload=PolicyOffload(kv_disk=1.0, group_size=16), **asked)

    assert (
        "4 bit, a scale and an offset for 16 weights"
        in (run.bodies("result")[0]["notes"]["weight_dtype"])
    )
    assert run.measured["parameter_bytes"] < 0.5 * resident.measured["parameter_bytes"]
    assert "kv_cache_bytes" not in run.measured  # none of it on the device
