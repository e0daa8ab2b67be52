"""The micro-benchmark's one line, and that its rates are physically possible."""

import torch

from runners.jobs import microbench


def test_the_disk_file_is_gone_afterwards(tmp_path):
    microbench.disk_write_rate(tmp_path, microbench.SHORT)

    assert list(tmp_path.iterdir()) == []


def test_a_product_of_n_takes_two_n_cubed_operations(monkeypatch):
    monkeypatch.setattr(microbench, "_median_seconds", lambda *_: 0.5)
    effort = microbench.Effort(gemm_size=10, triad_elements=1, seconds_each=0.0, disk_bytes=1)

    rate = microbench.gemm_rate(torch.device("cpu"), torch.float32, effort)

    assert rate == 2 * 10**3 / 0.5


def test_the_triad_moves_three_arrays(monkeypatch):
    monkeypatch.setattr(microbench, "_median_seconds", lambda *_: 0.5)
    effort = microbench.Effort(gemm_size=1, triad_elements=100, seconds_each=0.0, disk_bytes=1)

    assert microbench.triad_bandwidth(torch.device("cpu"), effort) == 3 * 100 * 4 / 0.5


def test_saved_tensors_are_counted_once_per_storage():
    weight = torch.ones(10, requires_grad=True)

    with microbench._saved_tensors() as saved:
        torch.autograd.backward((weight * weight).sum())

    assert sum(saved.values()) == 40


def test_a_copy_moves_what_it_says_and_is_timed():
    here = torch.device("cpu")
    rate = microbench.copy_rate(here, here, microbench.SHORT)

    assert 1e6 < rate < 1e13


def test_a_single_device_has_no_neighbour_to_copy_to():
    assert list(microbench.device_links(1, microbench.SHORT)) == []
