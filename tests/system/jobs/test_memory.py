"""Bytes that tensors hold, exactly, and the peak that a process reached."""

import subprocess
import sys

import pytest
import torch

from runners.jobs.memory import PeakMeter
from tests.system.jobs.harness import PROJECT


def test_a_new_meter_forgets_the_peak_of_the_last():
    big = torch.ones(256 * 2**20 // 4)
    del big

    peak = PeakMeter(torch.device("cpu")).read()

    if "process began" not in peak.how:
        assert peak.bytes - peak.start_bytes < 64 * 2**20


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="reads the CUDA allocator")
def test_on_a_gpu_the_peak_is_the_allocators():
    meter = PeakMeter(torch.device("cuda"))

    torch.ones(2**20, device="cuda")

    assert meter.read().bytes >= 4 * 2**20


def test_large_blocks_that_are_freed_are_given_back_between_small_ones():
    left = {}
    for way in ("apart", "usual"):
        command = [sys.executable, "-m", "tests.system.jobs.held_apart", way]
        process = subprocess.Popen(command, cwd=PROJECT, stdout=subprocess.PIPE, text=True)
        held, left[way] = map(int, process.communicate(timeout=600)[0].split())
        assert held > 16 * 16 * 2**20

    assert left["apart"] < 32 * 2**20
    assert left["usual"] > 5 * left["apart"]
