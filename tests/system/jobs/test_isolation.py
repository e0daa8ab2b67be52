"""Parts that run in a fork: their value, their errors and their events come back."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from runners.jobs.events import read_events
from runners.jobs.memory import PeakMeter
from runners.jobs.ratios import run_isolated
from runners.jobs.runtime import BadInputError
from tests.runners.jobs.tiny import tiny_training


@pytest.fixture
def job(make_job):
    return make_job(tiny_training())


def test_the_value_comes_back_from_another_process(job):
    assert run_isolated(job, lambda _job: os.getpid()) != os.getpid()


def test_bad_input_found_inside_is_raised_outside(job):
    def work(_job):
        raise BadInputError("no such thing")

    with pytest.raises(BadInputError, match="no such thing"):
        run_isolated(job, work)


def test_events_of_the_part_reach_the_same_reader(job, events_path):
    run_isolated(job, lambda own: own.emitter.phase("inside"))
    job.emitter.phase("outside")
    job.emitter.close()

    assert [each["body"]["name"] for each in read_events(events_path)] == ["inside", "outside"]


def test_a_crash_inside_ends_the_job_with_its_exit_code(job, capfd):
    def work(_job):
        raise RuntimeError("broken")

    with pytest.raises(SystemExit) as ended:
        run_isolated(job, work)

    assert ended.value.code == 1
    assert "broken" in capfd.readouterr().err


def test_threads_inside_may_all_begin_with_torch_at_once(job):
    """A model's loader does; the pool that was forked is of no use to any of them."""

    def work(_job):
        together = threading.Barrier(8)

        def cast(_at):
            together.wait()
            return torch.ones(64, 64).to(torch.bfloat16).numel()

        with ThreadPoolExecutor(8) as threads:
            return sum(threads.map(cast, range(8)))

    torch.set_num_threads(torch.get_num_threads())  # there is a pool, as in a prepared process

    assert [run_isolated(job, work) for _ in range(10)] == [8 * 64 * 64] * 10


def test_the_peak_of_one_part_is_not_counted_for_the_next(job):
    def work(megabytes, _job):
        meter = PeakMeter(torch.device("cpu"))
        held = torch.ones(megabytes * 2**20 // 4)
        return meter.read().bytes - held.numel()

    large = run_isolated(job, lambda own: work(256, own))
    small = run_isolated(job, lambda own: work(1, own))

    assert large - small > 100 * 2**20
