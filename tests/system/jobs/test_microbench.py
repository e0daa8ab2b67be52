"""The micro-benchmark's one line, and that its rates are physically possible."""

import subprocess
import sys

import pytest
import torch

from runners.jobs.bench import device_rates
from runners.jobs.memory import Peak
from runners.shared.facts import Microbench


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    return device_rates.measure(short=True, folder=tmp_path_factory.mktemp("disk"))


def test_the_command_prints_one_valid_line():
    started = subprocess.Popen(
        [sys.executable, "-m", "runners.jobs.bench.device_rates", "--short"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    stdout, stderr = started.communicate(timeout=600)

    assert (started.returncode, stderr) == (0, "")
    assert stdout.count("\n") == 1
    Microbench.model_validate_json(stdout)


def test_every_dtype_is_measured_on_the_cpu(result):
    cpu = result.devices[0]

    assert cpu.device == "cpu"
    assert set(cpu.flops_per_second) == {"fp32", "bf16", "fp16", "int8"}
    assert all(rate > 1e6 for rate in cpu.flops_per_second.values())


def test_rates_are_within_what_any_machine_can_do(result):
    cpu = result.devices[0]

    assert 1e8 < cpu.memory_bandwidth_bytes_per_second < 1e13
    assert 1e-8 < cpu.op_overhead_seconds < 1e-2
    assert 1e5 < result.disk_write_bytes_per_second < 1e12


def test_it_says_with_how_many_threads_and_when(result):
    assert result.num_threads == torch.get_num_threads()
    assert result.measured_at_ms > 1_700_000_000_000
    assert result.torch_version == str(torch.__version__)


def test_what_a_job_holds_before_its_model_is_measured(result):
    held = result.devices[0].runtime_memory_bytes

    assert held is not None
    assert 100 * 2**20 < held < 4 * 2**30  # torch alone takes more than a hundred


def test_what_training_adds_beside_its_tensors_is_measured(result):
    added = result.devices[0].training_memory_bytes

    assert added is not None
    assert 0 <= added < 2**30


def test_the_tensors_of_the_probe_are_taken_off_its_peak(monkeypatch):
    class Still:
        def __init__(self, _device):
            pass

        def read(self):
            return Peak(bytes=2**40, start_bytes=0, how="")

    monkeypatch.setattr(device_rates, "PeakMeter", Still)

    small = device_rates.training_memory_bytes(device_rates.TINY)
    wide = device_rates.training_memory_bytes(
        device_rates.TINY.model_copy(update={"vocab_size": 512})
    )

    logits = 4 * 256 * device_rates.TRAINING_SEQUENCES * device_rates.TINY.max_position_embeddings
    assert small - wide >= 2 * logits  # kept for the backward pass, and their gradient


def test_a_processor_has_no_way_between_host_and_device(result):
    cpu = result.devices[0]

    assert (cpu.host_to_device_bytes_per_second, cpu.device_to_host_bytes_per_second) == (
        None,
        None,
    )
