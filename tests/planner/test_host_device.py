"""A host's device by its datasheet and with its measured rates."""

import pytest

from planner.catalog.devices import DriverDevice, MeasuredRates, get_device, host_device

RATES = MeasuredRates(
    1e12, {"bf16": 5e14}, "measured on Lab", host_to_device_bytes_per_second=2e10
)
H100 = DriverDevice("NVIDIA H100 80GB HBM3", "gpu", 85_000_000_000)


def test_measured_rates_replace_those_of_the_datasheet_and_leave_the_others():
    datasheet, measured = host_device(H100, RATES)
    published = get_device("h100-sxm5-80gb")
    assert datasheet == published.model_copy(update={"memory_bytes": H100.memory_bytes})
    assert measured.memory_bandwidth_bytes_per_second == 1e12
    assert measured.peak_flops_per_second == {**published.peak_flops_per_second, "bf16": 5e14}
    assert measured.host_to_device_bandwidth_bytes_per_second == 2e10
    assert (measured.provenance, measured.source) == ("measured", "measured on Lab")
    assert (measured.id, measured.memory_bytes) == (published.id, H100.memory_bytes)
    assert host_device(H100, None).measured is None


@pytest.mark.parametrize(
    "device",
    [
        DriverDevice("AMD EPYC", "cpu", 2**34),
        DriverDevice("Homemade 9000", "gpu", 2**34),
        DriverDevice("AMD Instinct MI300X", "gpu", 2**34, is_partition=True),
    ],
    ids=lambda device: device.name,
)
def test_a_device_without_a_datasheet_is_what_was_measured(device):
    datasheet, measured = host_device(device, RATES, device_id="host-lab")
    assert datasheet is None
    assert (measured.id, measured.name, measured.kind) == ("host-lab", device.name, device.kind)
    assert (measured.memory_bytes, measured.peak_flops_per_second) == (2**34, {"bf16": 5e14})


def test_unified_memory_stays_as_published():
    spark = DriverDevice("NVIDIA GB10", "gpu", 121 * 2**30)
    assert host_device(spark, None).datasheet == get_device("gb10-dgx-spark")
