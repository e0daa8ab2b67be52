"""MIG instances by the names of their driver: their part of the GPU's datasheet."""

import pytest

from planner.catalog.devices import device_of_driver, get_device


@pytest.mark.parametrize(
    ("name", "gpu", "memory", "compute"),
    [
        ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", "a100-sxm4-80gb", 4 / 8, 42 / 108),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb+me", "a100-sxm4-40gb", 1 / 8, 14 / 108),
        ("NVIDIA A100-SXM4-40GB MIG 7g.40gb", "a100-sxm4-40gb", 1.0, 98 / 108),
        ("H100 80GB HBM3 MIG 1g.10gb", "h100-sxm5-80gb", 1 / 8, 16 / 132),
        ("NVIDIA H100 80GB HBM3 MIG 1g.20gb", "h100-sxm5-80gb", 2 / 8, 26 / 132),
        ("NVIDIA H200 MIG 3g.71gb", "h200-sxm-141gb", 4 / 8, 60 / 132),
        ("NVIDIA B200 MIG 1g.23gb", "b200-sxm", 1 / 8, 1 / 7),
        ("NVIDIA A30 MIG 2g.12gb", "a30", 2 / 4, 2 / 4),
    ],
)
def test_an_instance_has_its_part_of_memory_bandwidth_and_multiprocessors(
    name, gpu, memory, compute
):
    whole, instance = get_device(gpu), device_of_driver(name)
    assert instance.memory_bytes == int(whole.memory_bytes * memory)
    assert instance.memory_bandwidth_bytes_per_second == pytest.approx(
        whole.memory_bandwidth_bytes_per_second * memory
    )
    for dtype, rate in whole.peak_flops_per_second.items():
        assert instance.peak_flops_per_second[dtype] == pytest.approx(rate * compute)
    assert (instance.provenance, "MIG User Guide" in instance.source) == ("published", True)
    assert (instance.tdp_watts, instance.price_usd_per_hour, instance.link) == (None, None, None)
    assert instance.architecture == whole.architecture


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA A100-SXM4-80GB MIG 1c.3g.40gb",  # a part of an instance
        "NVIDIA A100-SXM4-80GB MIG 5g.40gb",
        "NVIDIA A100-SXM4-80GB MIG 3g.20gb",  # of an A100 with 40 GB
        "NVIDIA L4 MIG 1g.3gb",  # without MIG
        "Homemade 9000 MIG 1g.10gb",
    ],
)
def test_an_instance_that_no_gpu_has_is_unknown(name):
    assert device_of_driver(name) is None
