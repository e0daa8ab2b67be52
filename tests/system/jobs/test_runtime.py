"""How every job process begins and ends: its folder, its threads, its exit code."""

import os
import signal

import pytest

from runners.jobs.ratios import run_isolated
from runners.jobs.runtime import open_job
from tests.runners.jobs.tiny import tiny_training


@pytest.mark.faults
def test_a_part_that_is_killed_takes_the_job_with_it_by_the_same_signal(host):
    job = open_job(host.attempt("oom", tiny_training()), "train")
    pid = os.fork()
    if not pid:  # the job's own process
        run_isolated(job, lambda _job: os.kill(os.getpid(), signal.SIGKILL))
        os._exit(0)

    _, status = os.waitpid(pid, 0)

    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
