"""A rank that falls silent without ending: the others wait as long as the job says, not longer."""

import json

import pytest

from tests.system.jobs.train.forked import run_script
from tests.system.jobs.train.silenced import (
    LAYOUTS,
    PATIENCE_SECONDS,
    SILENT_FROM,
    START_SECONDS,
)

pytestmark = [pytest.mark.equality, pytest.mark.slow]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("silenced")
    run_script("silenced", found, seconds=900)
    return found


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_other_rank_waits_as_long_as_the_job_says(name, folder):
    said = folder / f"{name}.json"
    assert said.is_file()
    found = json.loads(said.read_text())
    assert found["step"] == SILENT_FROM
    assert found["words"].startswith("rank 0 of 2: ")
    # On a machine that is busy with others it may notice late, but not after a start's time.
    assert PATIENCE_SECONDS / 2 < found["waited"] < START_SECONDS / 2
