"""The bench of compressions runs real jobs."""

import pytest

from runners.host.bench import BenchFailedError, run
from runners.jobspec import CompressSpec, FolderModel


def test_a_job_that_fails_ends_the_bench_with_its_own_words(tmp_path):
    spec = CompressSpec(model=FolderModel(path="nowhere"))

    with pytest.raises(BenchFailedError, match=r"gone: .*no model folder"):
        run(tmp_path, "gone", spec)
