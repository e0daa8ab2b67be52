"""The rates of a device: what a run counts as, the sizes, and dtypes that a device has not."""

import pytest

from runners.jobs import device_rates
from runners.jobs.device_rates import CPU_DEVICE, SMALL

ONE_RUN = SMALL._replace(product=10, elements=100, copy_bytes=1000)


@pytest.mark.parametrize(
    ("rates", "work"),
    [
        (lambda: device_rates.triad_rates(CPU_DEVICE, ONE_RUN), 3 * 100 * 4),
        (lambda: device_rates.memory_copy_rates(CPU_DEVICE, ONE_RUN), 2 * 100 * 4),
        (lambda: device_rates.transfer_rates(CPU_DEVICE, CPU_DEVICE, ONE_RUN), 1000),
        (lambda: device_rates.matmul_rates("fp32", CPU_DEVICE, ONE_RUN).samples, 2 * 10**3),
    ],
    ids=["triad", "copy", "transfer", "matmul"],
)
def test_a_rate_is_the_work_of_a_run_over_its_seconds(monkeypatch, rates, work):
    monkeypatch.setattr(device_rates, "run_seconds", lambda *_args: [0.5, 0.25])

    assert rates() == [work / 0.5, work / 0.25]


def test_the_first_run_is_dropped_and_the_number_of_runs_limited():
    runs = []
    times = device_rates.run_seconds(lambda: runs.append(1), CPU_DEVICE, 60.0, most=3)

    assert (len(times), len(runs)) == (3, 4)


def test_a_dtype_that_a_device_multiplies_slowly_is_measured_with_a_smaller_product(monkeypatch):
    monkeypatch.setattr(device_rates, "run_seconds", lambda *_args: [0.02])

    assert device_rates.product_size("bf16", CPU_DEVICE, device_rates.CPU) == 256  # not 10 s
    monkeypatch.setattr(device_rates, "run_seconds", lambda *_args: [0.001])
    assert device_rates.product_size("bf16", CPU_DEVICE, device_rates.CPU) == 1024


@pytest.mark.parametrize("name", ["tf32", "fp8"])
def test_a_dtype_without_units_says_so(name):
    with pytest.raises(device_rates.UnsupportedDtypeError):
        device_rates.product_of(name, CPU_DEVICE, 64)


def test_a_product_is_right_in_every_dtype_of_a_cpu():
    for name, tolerance in {"fp32": 1e-5, "bf16": 1e-2, "fp16": 1e-3, "int8": 0.0}.items():
        product = device_rates.product_of(name, CPU_DEVICE, 64)
        exact = product.left.double() @ product.right.double()
        error = (product.compute().double() - exact).norm() / exact.norm()
        assert error <= tolerance, name


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
