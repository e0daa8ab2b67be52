"""Rates of a device, and ratios that benches take in turns."""

import pytest
import torch

from runners.host.bench import LayoutBenchRequest, StepTime
from runners.jobs.bench import device_rates
from runners.jobs.bench.device_rates import CPU_DEVICE, SMALL
from runners.jobs.bench.layouts_bench import regret
from runners.jobs.bench.tuning_bench import fitting_ratios, memory_after_step, ratios
from runners.jobs.ratios import ratio_of, seconds_in_alternating_rounds
from runners.jobspec.base import LoraOptions
from runners.jobspec.train import LayoutOptions
from tests.runners.jobs.tiny import TINY

ONE_RUN = SMALL._replace(product=10, elements=100, copy_bytes=1000)


def test_a_rate_is_the_work_of_a_run_over_its_seconds(monkeypatch):
    for rates, work in (
        (lambda: device_rates.triad_rates(CPU_DEVICE, ONE_RUN), 3 * 100 * 4),
        (lambda: device_rates.memory_copy_rates(CPU_DEVICE, ONE_RUN), 2 * 100 * 4),
        (lambda: device_rates.transfer_rates(CPU_DEVICE, CPU_DEVICE, ONE_RUN), 1000),
        (lambda: device_rates.matmul_rates("fp32", CPU_DEVICE, ONE_RUN).samples, 2 * 10**3),
    ):
        monkeypatch.setattr(device_rates, "run_seconds", lambda *_args: [0.5, 0.25])
        assert rates() == [work / 0.5, work / 0.25], (rates, work)


def test_runs_and_products_are_limited(monkeypatch):
    runs = []
    times = device_rates.run_seconds(lambda: runs.append(1), CPU_DEVICE, 60.0, most=3)
    assert (len(times), len(runs)) == (3, 4)
    monkeypatch.setattr(device_rates, "run_seconds", lambda *_args: [0.02])
    assert device_rates.product_size("bf16", CPU_DEVICE, device_rates.CPU) == 256  # not 10 s
    monkeypatch.setattr(device_rates, "run_seconds", lambda *_args: [0.001])
    assert device_rates.product_size("bf16", CPU_DEVICE, device_rates.CPU) == 1024


def test_a_product_is_right_in_every_dtype_of_a_cpu_and_others_are_told():
    for name, tolerance in {"fp32": 1e-5, "bf16": 1e-2, "fp16": 1e-3, "int8": 0.0}.items():
        product = device_rates.product_of(name, CPU_DEVICE, 64)
        exact = product.left.double() @ product.right.double()
        error = (product.compute().double() - exact).norm() / exact.norm()
        assert error <= tolerance, name
    for name in ("tf32", "fp8"):
        with pytest.raises(device_rates.UnsupportedDtypeError):
            device_rates.product_of(name, CPU_DEVICE, 64)


def cache(folder, cpu: int, level: int, shared: str, kilobytes: int) -> None:
    place = folder / f"cpu{cpu}" / "cache" / f"index{level}"
    place.mkdir(parents=True)
    for name, text in (("level", level), ("shared_cpu_list", shared), ("size", f"{kilobytes}K")):
        (place / name).write_text(f"{text}\n")


def test_arrays_of_a_cpu_exceed_its_caches_but_not_its_memory(tmp_path, monkeypatch):
    for cpu in range(4):  # two L3 caches, each of two CPUs
        cache(tmp_path, cpu, 2, str(cpu), 2048)
        cache(tmp_path, cpu, 3, "0-1" if cpu < 2 else "2-3", 256 * 1024)
    assert device_rates.last_level_cache_bytes(tmp_path) == 512 * 2**20
    assert device_rates.last_level_cache_bytes(tmp_path / "none") == 0

    monkeypatch.setattr(device_rates, "last_level_cache_bytes", lambda: 512 * 2**20)
    for free, elements in ((2**40, 2**29), (2**34, 2**28), (None, device_rates.CPU.elements)):
        monkeypatch.setattr(device_rates, "free_host_bytes", lambda free=free: free)
        assert device_rates.sizes_for(CPU_DEVICE, is_small=False).elements == elements


def test_the_disk_file_is_gone_afterwards(tmp_path):
    assert device_rates.disk_write_rate(tmp_path, SMALL) > 0
    assert list(tmp_path.iterdir()) == []


# The micro-benchmark's device: rates as the validation measures them, and training's own memory.


def test_a_device_is_measured_with_the_rates_of_the_proof(monkeypatch):
    monkeypatch.setattr(device_rates, "run_seconds", lambda *_args: [0.5, 0.25, 1.0])
    sizes = device_rates.SMALL
    measured = device_rates.measure_device(torch.device("cpu"), sizes)
    assert measured.memory_bandwidth_bytes_per_second == 3 * sizes.elements * 4 / 0.5
    assert measured.flops_per_second == dict.fromkeys(
        ("fp32", "bf16", "fp16", "int8"), 2 * sizes.product**3 / 0.5
    )


def test_saved_tensors_are_counted_once_per_storage():
    weight = torch.ones(10, requires_grad=True)
    with device_rates._saved_tensors() as saved:
        torch.autograd.backward((weight * weight).sum())
    assert sum(saved.values()) == 40


def test_a_single_device_has_no_neighbour_to_copy_to():
    assert list(device_rates.device_links(1, device_rates.SMALL)) == []


# Ratios of runs in turns: their mean, and what they bound.


def test_every_way_runs_once_a_round_in_turns_and_once_before():
    calls = []
    taken = seconds_in_alternating_rounds(
        [lambda: calls.append("a"), lambda: calls.append("b")], 4
    )
    assert [len(each) for each in taken] == [4, 4]
    assert sorted(calls) == ["a"] * 5 + ["b"] * 5
    calls.clear()
    seconds_in_alternating_rounds([lambda: calls.append("a"), lambda: calls.append("b")], 3)
    assert "".join(calls) == "baabbaab"


def test_the_ratio_is_the_geometric_mean_and_rounds_bound_it_as_they_agree():
    found = ratio_of("old / new", [4.0, 1.0], [1.0, 1.0])
    assert found.value == pytest.approx(2.0)
    assert (found.n, found.of) == (2, "processor seconds")

    found = ratio_of("old / new", [2.0, 2.02, 1.98], [1.0, 1.0, 1.0])
    assert 1.9 < found.low < found.value < found.high < 2.1

    found = ratio_of("old / new", [3.0, 0.5, 2.0], [1.0, 1.0, 1.0])
    assert found.low < 1 < found.high

    found = ratio_of("old / new", [2.0], [1.0])
    assert found.value == pytest.approx(2.0)
    assert found.low < 1e-6


# The bench of layouts: real ranks that are forked, timed in turns, and judged.


def times(**seconds):
    return [
        StepTime(layout=name, round=at, seconds=each)
        for name, own in seconds.items()
        for at, each in enumerate(own)
    ]


def test_the_regret_is_against_the_fastest_other_of_all_rounds():
    found = regret("chosen", times(chosen=[1.1, 1.1], other=[1.0, 1.0], slow=[2.0, 2.0]))
    assert found.name == "other"
    assert found.value == pytest.approx(1 / 1.1)
    assert (found.n, found.of) == (2, "step seconds")

    found = regret("chosen", times(chosen=[1.0, 1.0], lucky=[0.9], other=[1.2, 1.3]))
    assert found.name == "other"
    assert found.low < found.value < found.high
    assert found.value == pytest.approx((1.2 * 1.3) ** 0.5)

    found = regret("chosen", times(chosen=[1.0, 1.0, 1.0], early=[2.0], late=[1.5, 1.6]))
    assert (found.name, found.n) == ("late", 2)


def test_one_process_takes_one_rank_and_a_layout_its_own():
    layouts = {"alone": None, "pair": LayoutOptions(data_parallel_size=2)}
    asked = LayoutBenchRequest(config={}, training={}, layouts=layouts, first_choice="pair")
    assert (asked.ranks_of("alone"), asked.ranks_of("pair")) == (1, 2)
    assert asked.always == {"pair"}


# The bench of adapters: what it counts is what one step really holds.


def test_an_adapter_trains_and_holds_far_less_than_the_whole_model():
    found = {each.name: each.low for each in ratios(TINY, rank=4)}
    assert found["full / LoRA trained parameters"] > 5
    assert found["full / LoRA gradients"] > 5
    assert found["full / LoRA optimiser states"] > 5


def test_each_trained_number_has_a_gradient_and_two_moments():
    for options in (None, LoraOptions(rank=2)):
        found = memory_after_step(TINY, options)
        assert found.gradients == 4 * found.trained_parameters, options
        assert found.optimizer_states == pytest.approx(2 * found.gradients, rel=0.05), options


@pytest.fixture(scope="module")
def fitting():
    shape = TINY.model_copy(update={"vocab_size": 1024})
    return {each.name: each.low for each in fitting_ratios(shape, rows=2)}


def test_what_makes_training_fit_holds_less(fitting):
    for name, floor in (
        ("AdamW / LOMO peak of a step", 1.2),
        ("AdamW / AdamW 8-bit states", 3.0),
        ("AdamW / Lion 8-bit states", 6.0),
        ("kept / selective recomputation's activations", 1.1),
        ("kept / full recomputation's activations", 1.2),
        ("kept / swapped activations", 1.3),
    ):
        assert fitting[name] > floor, (name, floor)

    full, selective = (
        fitting[f"kept / {how} recomputation's activations"] for how in ("full", "selective")
    )
    assert full > selective
