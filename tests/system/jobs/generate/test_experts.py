"""Experts that come when they are asked for write what experts in memory write."""

import pytest

from runners.jobspec import DemoPrompts, FolderModel
from runners.jobspec.generate import ExpertCache
from tests.runners.jobs.generate.test_techniques import (  # noqa: F401 -- some are fixtures
    EXPERT_BYTES,
    mixtral,
)
from tests.system.jobs.generate.reading import outputs

DEFAULTS = {"prompts": DemoPrompts(count=5, input_tokens=20, shortest=4), "output_tokens": 10}


@pytest.mark.equality
@pytest.mark.parametrize("source", ["disk", "host_memory"])
def test_a_job_with_cached_experts_writes_the_same_and_says_what_it_brought(
    generate, mixtral, source
):
    model = FolderModel(path=mixtral.name)
    resident = generate("all-experts", model=model)
    asked = ExpertCache(experts_resident=3, experts_from=source)

    run = generate(f"experts-{source}", model=model, offload=asked)

    assert outputs(run) == outputs(resident)
    assert 0 < run.measured["expert_hit_ratio"] < 1
    assert 0 < run.measured["expert_guess_ratio"] <= 1
    assert run.measured["expert_bytes_brought"] == run.measured["experts_brought"] * EXPERT_BYTES
    assert run.measured["parameter_bytes"] < resident.measured["parameter_bytes"] / 2
    assert "3 of 8 experts of each layer stay" in run.bodies("result")[0]["notes"]["offload"]
