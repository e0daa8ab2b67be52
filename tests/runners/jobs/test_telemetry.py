"""GPU figures: which devices are read, and that nothing is emitted without one."""

import time

import pytest
import torch

from runners.jobs import telemetry
from runners.jobs.events import read_events
from tests.runners.jobs.tiny import tiny_training


@pytest.fixture
def job(make_job):
    return make_job(tiny_training())


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    monkeypatch.setattr(telemetry, "INTERVAL_SECONDS", 0.01)


def test_samples_come_from_source_gpu_while_the_block_runs(job, emitter, events_path):
    with telemetry.job_telemetry(job, lambda: lambda: {"gpu0_utilization": 0.5}):
        time.sleep(0.2)
    emitter.close()

    first = read_events(events_path)[0]["body"]

    assert (first["source"], first["values"]) == ("gpu", {"gpu0_utilization": 0.5})


def test_nothing_is_emitted_after_the_block(job, events_path):
    with telemetry.job_telemetry(job, lambda: lambda: {"gpu0_utilization": 0.5}):
        time.sleep(0.05)
    time.sleep(0.05)
    before = events_path.read_bytes()
    time.sleep(0.1)

    assert events_path.read_bytes() == before


def test_a_host_without_cuda_has_no_sampler(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    assert telemetry.nvml_sample() is None
