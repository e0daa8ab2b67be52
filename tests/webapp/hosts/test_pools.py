"""Pools, and the devices that hosts say they have."""

import pytest

from tests.webapp.conftest import GIB, make_beat, make_facts
from webapp.hosts.heartbeats import host_beat
from webapp.hosts.models import Device, Host, Pool
from webapp.hosts.pools import devices_sync, pool_ensure

pytestmark = pytest.mark.django_db


def gpu(index: int, uuid: str = "") -> dict:
    return {
        "index": index,
        "uuid": uuid or f"GPU-{index}",
        "name": "NVIDIA L4",
        "memory_bytes": 24 * GIB,
    }


def devices(host: Host, **wanted) -> list[tuple[str, int, str]]:
    rows = Device.objects.filter(host=host, **wanted).order_by("index")
    return [(row.kind, row.index, row.uuid) for row in rows]


def test_a_host_without_a_gpu_has_its_processor_as_its_only_device(enrolled):
    host, _ = enrolled
    assert devices(host) == [("cpu", 0, "cpu")]
    assert host.devices.get().memory_bytes == 16 * GIB


def test_a_host_with_gpus_has_them_and_not_its_processor(enrolled):
    devices_sync(enrolled[0], make_facts(gpus=[gpu(0), gpu(1)]))
    present = devices(enrolled[0], is_present=True)
    assert present == [("gpu", 0, "GPU-0"), ("gpu", 1, "GPU-1")]


def test_a_gpu_that_is_pulled_out_stays_as_absent(enrolled):
    devices_sync(enrolled[0], make_facts(gpus=[gpu(0), gpu(1)]))
    devices_sync(enrolled[0], make_facts(gpus=[gpu(0)]))
    assert ("gpu", 1, "GPU-1") in devices(enrolled[0], is_present=False)


def test_a_gpu_that_moved_to_another_slot_is_the_same_device(enrolled):
    devices_sync(enrolled[0], make_facts(gpus=[gpu(0, "GPU-a")]))
    devices_sync(enrolled[0], make_facts(gpus=[gpu(3, "GPU-a")]))
    assert devices(enrolled[0], uuid="GPU-a") == [("gpu", 3, "GPU-a")]


def test_a_cordon_outlives_new_facts(enrolled):
    devices_sync(enrolled[0], make_facts(gpus=[gpu(0)]))
    Device.objects.filter(uuid="GPU-0").update(cordon_reason="ECC errors")
    devices_sync(enrolled[0], make_facts(gpus=[gpu(0)]))
    assert Device.objects.get(uuid="GPU-0").cordon_reason == "ECC errors"


def test_a_beat_with_facts_brings_the_devices(enrolled):
    host_beat(host=enrolled[0], beat=make_beat(facts=make_facts(gpus=[gpu(0)])))
    assert devices(enrolled[0], is_present=True) == [("gpu", 0, "GPU-0")]


def test_two_teams_have_pools_of_the_same_name_each(team, other_team):
    assert pool_ensure(team=team).pk != pool_ensure(team=other_team).pk
    assert pool_ensure(team=team).pk == pool_ensure(team=team).pk
    assert Pool.objects.count() == 2
