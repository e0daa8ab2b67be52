"""How well a host is, judged by what it counted."""

import pytest

from tests.webapp.conftest import client_of
from webapp.hosts.checks import open_checks
from webapp.hosts.health import health_of

pytestmark = pytest.mark.django_db(databases=["default", "metrics"])
GPU = {"index": 1, "uuid": "GPU-1", "name": "H100", "memory_bytes": 80 * 2**30, "has_ecc": True}


def judged(host, **gpu):
    host.facts = host.facts | {"gpus": [{**GPU, **gpu}]}
    health = health_of(host)
    return health.level, " ".join(reason.words for reason in health.reasons)


def test_a_host_that_said_nothing_yet_is_not_judged(host):
    host.facts = {}
    assert health_of(host) is None


def test_a_host_without_fault_is_healthy(host):
    assert judged(host) == ("ok", "")


def test_a_gpu_that_does_not_answer_is_named(host):
    host.facts = host.facts | {"device_problems": ["GPU 3 does not answer: GPU is lost"]}
    assert judged(host) == ("warn", "GPU 3 does not answer: GPU is lost.")


@pytest.mark.parametrize(
    ("gpu", "level", "words"),
    [
        ({"ecc_uncorrected_errors": 2}, "bad", "GPU 1: 2 memory errors"),
        ({"ecc_corrected_errors": 9}, "ok", ""),
        ({"is_worn_out": True}, "bad", "exchanged"),
        ({"needs_reset": True}, "warn", "nvidia-smi -r"),
        ({"has_ecc": False}, "warn", "switched off"),
        ({"xids": [79]}, "bad", "error 79 since boot: it fell off the bus"),
        ({"xids": [31, 31]}, "warn", "GPU 1: the driver noted error 31 since boot."),
        ({"xids": None}, "ok", ""),
        ({"pcie_width": 4, "pcie_max_width": 16}, "warn", "4 of 16 PCIe lanes"),
        ({"pcie_width": 16, "pcie_max_width": 16}, "ok", ""),
        (
            {"pcie_width": 1, "pcie_max_width": 16, "shares_host_memory": True},
            "ok",
            "",
        ),
        ({"is_partitioned": True}, "warn", "MIG"),
        ({"is_partitioned": True, "parent_uuid": "GPU-0"}, "ok", ""),
        ({"fabric_state": "not started"}, "bad", "start nvidia-fabricmanager"),
        ({"fabric_state": "completed"}, "ok", ""),
        ({"compute_mode": "prohibited"}, "bad", "nvidia-smi -c DEFAULT"),
    ],
)
def test_each_fault_has_its_level_and_says_which_gpu(host, gpu, level, words):
    found, reasons = judged(host, **gpu)
    assert found == level
    assert words in reasons


def test_the_worst_reason_comes_first(host):
    host.facts = host.facts | {"gpus": [{**GPU, "has_ecc": False, "is_worn_out": True}]}
    assert [reason.level for reason in health_of(host).reasons] == ["bad", "warn"]


def test_a_nearly_full_disk_and_a_wrong_clock_are_told(host):
    host.last_beat["disk_free_bytes"], host.clock_offset_ms = 10**9, 9000
    assert {reason.level for reason in health_of(host).reasons} == {"warn"}
    assert len(health_of(host).reasons) == 2


def test_the_page_shows_gpus_topology_and_what_is_wrong(host, alice):
    gpus = [{**GPU, "index": index, "uuid": f"GPU-{index}", "xids": [79]} for index in range(2)]
    host.facts |= {"gpus": gpus, "topology": [["X", "NV18"], ["NV18", "X"]]}
    host.save()

    page = client_of(alice).get(f"/hosts/{host.slug}/").content.decode()

    assert "Needs repair" in page
    assert "fell off the bus" in page
    assert '<td class="fast">NV18</td>' in page
    assert "GPU-1" in page


def test_the_page_names_disks_and_interfaces(host, alice):
    disk = {"path": "/data", "filesystem": "ext4", "total_bytes": 2**40, "free_bytes": 2**39}
    nic = {"name": "eth0", "addresses": ["10.0.0.7"], "bytes_per_second": 1.25e9}
    host.facts |= {"disks": [disk], "nics": [nic]}
    host.save()

    page = client_of(alice).get(f"/hosts/{host.slug}/").content.decode()

    assert all(word in page for word in ("/data", "ext4", "eth0", "10.0.0.7"))


def test_what_is_to_be_mended_stands_on_the_hosts_page_and_comes_with_updates(host, olga):
    page = client_of(olga).get(f"/hosts/{host.slug}/").content.decode()
    update = client_of(olga).get(f"/hosts/{host.slug}/", headers={"HX-Request": "true"})

    assert "not installed on the host" in page  # torch
    assert f"/hosts/{host.slug}/recheck/" in page
    assert "not installed on the host" in update.content.decode()


@pytest.mark.parametrize(("field", "value"), [("kind", "virtual"), ("state", "retired")])
def test_a_host_that_runs_nothing_has_nothing_to_mend(host, field, value):
    setattr(host, field, value)
    assert open_checks(host) == []
