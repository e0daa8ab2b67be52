"""The micro-benchmark's device: rates as the proof measures them, and training's own memory."""

import torch

from runners.jobs import device_rates, microbench


def test_a_device_is_measured_with_the_rates_of_the_proof(monkeypatch):
    monkeypatch.setattr(device_rates, "run_seconds", lambda *_args: [0.5, 0.25, 1.0])
    sizes = device_rates.SMALL
    measured = microbench.measure_device(torch.device("cpu"), sizes)

    assert measured.memory_bandwidth_bytes_per_second == 3 * sizes.elements * 4 / 0.5
    assert measured.flops_per_second == dict.fromkeys(
        ("fp32", "bf16", "fp16", "int8"), 2 * sizes.product**3 / 0.5
    )


def test_saved_tensors_are_counted_once_per_storage():
    weight = torch.ones(10, requires_grad=True)

    with microbench._saved_tensors() as saved:
        torch.autograd.backward((weight * weight).sum())

    assert sum(saved.values()) == 40


def test_a_single_device_has_no_neighbour_to_copy_to():
    assert list(microbench.device_links(1, device_rates.SMALL)) == []
