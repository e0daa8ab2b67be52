"""Generations over the trained demo model, in the test's own process."""

from collections.abc import Callable

import pytest

from runners.jobs.generate.job import work
from runners.jobspec import GenerateSpec
from tests.system.jobs.harness import Finished


@pytest.fixture(scope="module")
def generate(request, host, trained_model) -> Callable[..., Finished]:
    """Run one in fp32, with the module's ``DEFAULTS`` where a test says nothing else."""
    prefix = request.module.__name__.rpartition(".test_")[2]

    def run(name: str, **fields: object) -> Finished:
        base = {"model": trained_model, "weight_dtype": "fp32", **request.module.DEFAULTS}
        return host.run_here(f"{prefix}-{name}", GenerateSpec.model_validate(base | fields), work)

    return run
