"""A host as the planner sees it."""

import pytest

from planner.catalog.devices import DRIVER_NAMES, get_device
from tests.webapp.conftest import GIB, make_facts, make_microbench
from webapp.core.problems import ConflictProblem
from webapp.hosts.device import cluster_for_host, device_for_host
from webapp.hosts.models import Host
from webapp.hosts.pools import pool_ensure

pytestmark = pytest.mark.django_db

H100 = {"index": 0, "uuid": "GPU-1", "name": "NVIDIA H100 80GB HBM3", "memory_bytes": 80 * GIB}
UNKNOWN = {"index": 1, "uuid": "GPU-2", "name": "Homemade 9000", "memory_bytes": 6 * GIB}


def with_gpus(host: Host, *gpus: dict) -> Host:
    host.facts = make_facts(gpus=gpus).model_dump(mode="json")
    return host


def test_a_cpu_host_is_described_by_its_own_measurement(host):
    device = device_for_host(host)
    assert (device.kind, device.name, device.memory_bytes) == ("cpu", "Test CPU", 16 * GIB)
    assert device.memory_bandwidth_bytes_per_second == 12e9
    assert device.peak_flops_per_second["bf16"] == 30e9
    assert device.op_overhead_seconds == 8e-6
    assert device.runtime_overhead_bytes == 350_000_000
    assert device.training_overhead_bytes == 60_000_000


def test_a_measured_device_says_where_and_when(host):
    device = device_for_host(host)
    assert device.provenance == "measured"
    assert (device.source, device.as_of) == ("measured on Box", "2023-11-14")


def test_a_cpu_host_is_one_device_with_its_disk(host):
    cluster = cluster_for_host(host)
    assert (cluster.num_devices, cluster.disk_bandwidth_bytes_per_second) == (1, 400e6)


def test_a_gpu_of_the_catalog_keeps_its_published_figures(host):
    device = device_for_host(with_gpus(host, H100))
    assert (device.provenance, device.kind) == ("published", "gpu")
    assert device.memory_bytes == 80 * GIB  # what the driver reports


def test_like_gpus_make_a_node(host):
    cluster = cluster_for_host(with_gpus(host, H100, H100 | {"index": 1}, UNKNOWN))
    assert cluster.devices_per_node == 2


def test_a_die_of_a_board_has_half_of_the_boards_figures(host):
    board = get_device("mi250x")
    die = {"index": 0, "uuid": "GPU-1", "name": board.name, "memory_bytes": 64 * GIB}
    device = device_for_host(with_gpus(host, die))
    assert device.memory_bytes == 64 * GIB
    assert device.peak_flops_per_second["bf16"] * 2 == board.peak_flops_per_second["bf16"]
    assert device.memory_bandwidth_bytes_per_second * 2 == board.memory_bandwidth_bytes_per_second


def test_a_module_that_shares_the_hosts_memory_keeps_its_published_memory(host):
    spark = {"index": 0, "uuid": "GPU-1", "name": "NVIDIA GB10", "memory_bytes": 121 * GIB}
    device = device_for_host(with_gpus(host, spark | {"shares_host_memory": True}))
    assert device.memory_bytes == get_device("gb10-dgx-spark").memory_bytes


@pytest.mark.parametrize(
    ("part", "num_devices"), [({"parent_uuid": "GPU-0"}, 1), ({"partition": "CPX/NPS4"}, 2)]
)
def test_a_part_of_a_gpu_is_described_by_its_measurement(host, part, num_devices):
    devices = [{**make_microbench().devices[0].model_dump(), "device": "cuda:0"}]
    host.microbench |= {"devices": devices}
    first = H100 | {"memory_bytes": 10 * GIB} | part
    cluster = cluster_for_host(with_gpus(host, first, first | {"index": 1, "uuid": "MIG-2"}))
    assert (cluster.device.provenance, cluster.num_devices) == ("measured", num_devices)


def test_a_mig_instance_is_planned_with_its_share_of_the_datasheet(host):
    name = "NVIDIA H100 80GB HBM3 MIG 3g.40gb"
    instance = H100 | {"name": name, "memory_bytes": 39 * GIB, "parent_uuid": "GPU-0"}
    device = device_for_host(with_gpus(host, instance))
    whole = get_device("h100-sxm5-80gb").memory_bandwidth_bytes_per_second
    assert (device.provenance, device.memory_bytes) == ("published", 39 * GIB)
    assert device.memory_bandwidth_bytes_per_second * 2 == whole


def test_an_unknown_gpu_without_a_measurement_is_refused(host):
    with pytest.raises(ConflictProblem, match="not been measured"):
        device_for_host(with_gpus(host, UNKNOWN))


def test_an_unknown_gpu_is_described_by_its_measurement(host):
    cpu = make_microbench().devices[0]
    gpu = cpu.model_copy(update={"device": "cuda:0", "memory_bandwidth_bytes_per_second": 5e11})
    bench = make_microbench().model_copy(update={"devices": (cpu, gpu)})
    host.microbench = bench.model_dump(mode="json")
    device = device_for_host(with_gpus(host, UNKNOWN))
    assert device.memory_bandwidth_bytes_per_second == 5e11


def test_a_host_that_was_not_measured_is_refused(enrolled):
    with pytest.raises(ConflictProblem, match="not been measured"):
        device_for_host(enrolled[0])


def test_a_host_that_never_reported_is_refused(team):
    silent = Host.objects.create(
        team=team, name="Silent", slug="silent", pool=pool_ensure(team=team)
    )
    with pytest.raises(ConflictProblem, match="not reported"):
        cluster_for_host(silent)


@pytest.mark.parametrize(
    ("driver_name", "device_id"),
    [
        ("NVIDIA H100 80GB HBM3", "h100-sxm5-80gb"),
        ("NVIDIA H200", "h200-sxm-141gb"),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm4-80gb"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("Tesla V100-SXM2-32GB", "v100-sxm2-32gb"),
        ("NVIDIA L4", "l4"),
    ],
)
def test_the_drivers_name_finds_the_catalogs_device(host, driver_name, device_id):
    gpu = H100 | {"name": driver_name}
    assert device_for_host(with_gpus(host, gpu)).id == device_id


def test_every_driver_name_leads_into_the_catalog():
    assert all(get_device(device_id).id == device_id for device_id in DRIVER_NAMES.values())


def test_the_prices_of_a_hosts_labels_are_those_that_the_planner_reckons_with(host):
    host.labels = {"usd_per_hour": "3.00", "usd_per_kwh": "0.25"}
    cluster = cluster_for_host(with_gpus(host, H100, H100 | {"index": 1}))

    assert cluster.electricity_usd_per_kwh == 0.25
    assert cluster.device.price_usd_per_hour == 1.5
    assert cluster.device.price_source == "label usd_per_hour of Box, over its 2 devices"
    host.labels = {"usd_per_hour": "nan", "usd_per_kwh": "much"}
    assert cluster_for_host(with_gpus(host, H100)).electricity_usd_per_kwh is None
    assert device_for_host(host) == device_for_host(host).model_copy(
        update={"price_usd_per_hour": get_device("h100-sxm5-80gb").price_usd_per_hour}
    )
