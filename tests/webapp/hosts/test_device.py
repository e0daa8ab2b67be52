"""What a host's devices are, how well they are, who shares them, and its ledger's epoch."""

import pytest
from django.contrib.sessions.models import Session
from django.core.management import call_command

from planner.catalog.devices import DRIVER_NAMES, get_device
from runners.jobspec import TrainSpec
from runners.shared.messages import BeatReply, EpochShown
from tests.webapp.api.conftest import HostClient
from tests.webapp.conftest import (
    GIB,
    claim,
    client_of,
    enrol,
    make_beat,
    make_facts,
    make_job,
    make_microbench,
)
from webapp.accounts.tokens import token_find, token_make, token_revoke
from webapp.agents.heartbeats import host_beat
from webapp.audit.models import Event
from webapp.core.problems import BusyProblem, ConflictProblem, InvalidProblem
from webapp.hosts.epoch import epoch, epoch_advance, epoch_raise, epoch_with_proof, is_restored
from webapp.hosts.health import health_of, open_checks
from webapp.hosts.machines import cluster_for_host, device_for_host
from webapp.hosts.models import EnrolmentToken, Epoch, Host
from webapp.hosts.pools import pool_ensure, teams_of
from webapp.hosts.services import credential_revoke, token_create
from webapp.jobs.allocation import allocate_pool
from webapp.jobs.models import Allocation, Attempt, Job
from webapp.jobs.services import job_create, job_submit
from webapp.jobs.waiting import waiting_line

# A host as the planner sees it.


pytestmark = pytest.mark.django_db(databases="__all__")

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


def test_a_measured_device_says_where_and_when_and_is_one_with_its_disk(host):
    device = device_for_host(host)
    assert device.provenance == "measured"
    assert (device.source, device.as_of) == ("measured on Box", "2023-11-14")
    cluster = cluster_for_host(host)
    assert (cluster.num_devices, cluster.disk_bandwidth_bytes_per_second) == (1, 400e6)


def test_a_gpu_of_the_catalog_keeps_its_published_figures(host):
    device = device_for_host(with_gpus(host, H100))
    assert (device.provenance, device.kind) == ("published", "gpu")
    assert device.memory_bytes == 80 * GIB  # what the driver reports
    cluster = cluster_for_host(with_gpus(host, H100, H100 | {"index": 1}, UNKNOWN))
    assert cluster.devices_per_node == 2
    board = get_device("mi250x")
    die = {"index": 0, "uuid": "GPU-1", "name": board.name, "memory_bytes": 64 * GIB}
    device = device_for_host(with_gpus(host, die))
    assert device.memory_bytes == 64 * GIB
    assert device.peak_flops_per_second["bf16"] * 2 == board.peak_flops_per_second["bf16"]
    assert device.memory_bandwidth_bytes_per_second * 2 == board.memory_bandwidth_bytes_per_second
    spark = {"index": 0, "uuid": "GPU-1", "name": "NVIDIA GB10", "memory_bytes": 121 * GIB}
    device = device_for_host(with_gpus(host, spark | {"shares_host_memory": True}))
    assert device.memory_bytes == get_device("gb10-dgx-spark").memory_bytes
    name = "NVIDIA H100 80GB HBM3 MIG 3g.40gb"
    instance = H100 | {"name": name, "memory_bytes": 39 * GIB, "parent_uuid": "GPU-0"}
    device = device_for_host(with_gpus(host, instance))
    whole = get_device("h100-sxm5-80gb").memory_bandwidth_bytes_per_second
    assert (device.provenance, device.memory_bytes) == ("published", 39 * GIB)
    assert device.memory_bandwidth_bytes_per_second * 2 == whole


def test_a_part_of_a_gpu_is_described_by_its_measurement(host):
    for part, num_devices in [({"parent_uuid": "GPU-0"}, 1), ({"partition": "CPX/NPS4"}, 2)]:
        devices = [{**make_microbench().devices[0].model_dump(), "device": "cuda:0"}]
        host.microbench |= {"devices": devices}
        first = H100 | {"memory_bytes": 10 * GIB} | part
        cluster = cluster_for_host(with_gpus(host, first, first | {"index": 1, "uuid": "MIG-2"}))
        assert (cluster.device.provenance, cluster.num_devices) == ("measured", num_devices), part


def test_an_unknown_gpu_is_described_by_its_measurement_or_refused(host):
    with pytest.raises(ConflictProblem, match="not been measured"):
        device_for_host(with_gpus(host, UNKNOWN))
    cpu = make_microbench().devices[0]
    gpu = cpu.model_copy(update={"device": "cuda:0", "memory_bandwidth_bytes_per_second": 5e11})
    bench = make_microbench().model_copy(update={"devices": (cpu, gpu)})
    host.microbench = bench.model_dump(mode="json")
    device = device_for_host(with_gpus(host, UNKNOWN))
    assert device.memory_bandwidth_bytes_per_second == 5e11


def test_a_host_that_was_not_measured_or_never_reported_is_refused(enrolled, team):
    with pytest.raises(ConflictProblem, match="not been measured"):
        device_for_host(enrolled[0])
    silent = Host.objects.create(
        team=team, name="Silent", slug="silent", pool=pool_ensure(team=team)
    )
    with pytest.raises(ConflictProblem, match="not reported"):
        cluster_for_host(silent)


def test_the_drivers_name_finds_the_catalogs_device(host):
    for driver_name, device_id in [
        ("NVIDIA H100 80GB HBM3", "h100-sxm5-80gb"),
        ("NVIDIA H200", "h200-sxm-141gb"),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm4-80gb"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("Tesla V100-SXM2-32GB", "v100-sxm2-32gb"),
        ("NVIDIA L4", "l4"),
    ]:
        gpu = H100 | {"name": driver_name}
        assert device_for_host(with_gpus(host, gpu)).id == device_id, driver_name
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


# How well a host is, judged by what it counted.


GPU = {"index": 1, "uuid": "GPU-1", "name": "H100", "memory_bytes": 80 * 2**30, "has_ecc": True}


def judged(host, **gpu):
    host.facts = host.facts | {"gpus": [{**GPU, **gpu}]}
    health = health_of(host)
    return health.level, " ".join(reason.words for reason in health.reasons)


def test_each_fault_has_its_level_names_its_gpu_and_the_worst_comes_first(host):
    assert judged(host) == ("ok", "")
    for gpu, level, words in [
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
        ({"pcie_width": 1, "pcie_max_width": 16, "shares_host_memory": True}, "ok", ""),
        ({"is_partitioned": True}, "warn", "MIG"),
        ({"is_partitioned": True, "parent_uuid": "GPU-0"}, "ok", ""),
        ({"fabric_state": "not started"}, "bad", "start nvidia-fabricmanager"),
        ({"fabric_state": "completed"}, "ok", ""),
        ({"compute_mode": "prohibited"}, "bad", "nvidia-smi -c DEFAULT"),
    ]:
        found, reasons = judged(host, **gpu)
        assert found == level, gpu
        assert words in reasons, gpu
    host.facts = host.facts | {"gpus": [{**GPU, "has_ecc": False, "is_worn_out": True}]}
    assert [reason.level for reason in health_of(host).reasons] == ["bad", "warn"]
    host.facts = host.facts | {"device_problems": ["GPU 3 does not answer: GPU is lost"]}
    assert judged(host) == ("warn", "GPU 3 does not answer: GPU is lost.")
    host.facts = {}
    assert health_of(host) is None


def test_a_nearly_full_disk_and_a_wrong_clock_are_told(host):
    host.last_beat["disk_free_bytes"], host.clock_offset_ms = 10**9, 9000
    assert {reason.level for reason in health_of(host).reasons} == {"warn"}
    assert len(health_of(host).reasons) == 2


def test_the_page_shows_gpus_topology_disks_interfaces_and_what_is_wrong(host, alice):
    gpus = [{**GPU, "index": index, "uuid": f"GPU-{index}", "xids": [79]} for index in range(2)]
    host.facts |= {"gpus": gpus, "topology": [["X", "NV18"], ["NV18", "X"]]}
    host.save()
    page = client_of(alice).get(f"/hosts/{host.slug}/").content.decode()
    assert "Needs repair" in page
    assert "fell off the bus" in page
    assert '<td class="fast">NV18</td>' in page
    assert "GPU-1" in page
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


def test_a_host_that_runs_nothing_has_nothing_to_mend(host):
    for field, value in (("kind", "virtual"), ("state", "retired")):
        host.refresh_from_db()
        setattr(host, field, value)
        assert open_checks(host) == [], field


# A host runs the jobs of one team, and of others only where somebody shared its pool.


def test_a_new_pool_serves_its_own_team_alone_until_it_is_shared(host, team, other_team, charlie):
    assert teams_of(host.pool) == {team.pk}
    with pytest.raises(InvalidProblem, match="belongs to another team"):
        make_job(other_team, charlie, host)
    with pytest.raises(InvalidProblem):
        job_create(
            team=other_team, owner=charlie, pool=host.pool, spec=TrainSpec(), name="T", model_name="m"
        )  # fmt: skip
    assert not Job.objects.exists()
    host.pool.shared_with.add(other_team)
    job = job_submit(job=make_job(other_team, charlie, host), by="charlie")
    assert Attempt.objects.get(job=job).host == host


@pytest.fixture
def guest(host, job, other_team, charlie) -> Job:
    """A job of another team that waits behind alice's, in a pool that was shared with it."""
    host.pool.shared_with.add(other_team)
    return job_submit(job=make_job(other_team, charlie, host), by="charlie")


def test_a_job_that_waits_starts_only_once_its_pool_is_shared_again(guest, host, other_team):
    host.pool.shared_with.clear()
    Allocation.objects.all().delete()
    assert allocate_pool(host.pool) == []
    line = waiting_line(guest)
    assert line is not None
    assert "no longer shared with yours" in line.sentence
    allocate_pool(host.pool)
    host.pool.shared_with.add(other_team)
    assert [job.pk for job in allocate_pool(host.pool)] == [guest.pk]


# A database that is an old backup is noticed, and what was revoked does not come back.


def beat(host: Host, seen: EpochShown | None = None) -> BeatReply:
    return host_beat(host=host, beat=make_beat(epoch=seen, microbench=make_microbench()))


def restore(number: int = 1) -> None:
    """Put the database back to where it was: a host may have seen more."""
    Epoch.objects.update(number=number, highest_seen=0)
    Host.objects.update(epoch_seen=0)


def test_every_beat_takes_the_epoch_home_which_revoking_and_enrolling_raise(host):
    assert beat(host).epoch == epoch_with_proof(epoch().number)
    before = epoch().number
    credential_revoke(host=host, by="olga")
    enrol(host.team, name="Next")
    assert epoch().number == before + 2


def test_a_host_that_saw_more_tells_that_this_is_a_backup(host):
    seen = epoch_with_proof(9)
    restore()
    for _ in range(3):
        beat(host, seen)
        assert is_restored()
    assert Event.objects.get(kind="site.restored").detail == {"seen": 9}  # told once


def test_a_host_that_made_an_epoch_up_or_saw_no_more_is_no_sign(host):
    beat(host, EpochShown(number=999, proof="0" * 64))
    assert not is_restored()
    host.refresh_from_db()
    assert host.epoch_seen == 0
    epoch_advance()
    beat(host, epoch_with_proof(epoch().number))
    beat(host, epoch_with_proof(1))
    assert not is_restored()


def test_a_backup_starts_nothing(draft, host):
    restore()
    beat(host, epoch_with_proof(9))
    job = job_submit(job=draft, by="alice")
    assert not Attempt.objects.filter(job=job).exists()
    assert beat(host, epoch_with_proof(9)).wanted == ()


def test_a_backup_gives_no_spec_says_so_and_goes_on_once_it_was_raised(job, host, alice):
    restore()
    beat(host, epoch_with_proof(9))
    assert beat(host, epoch_with_proof(9)).wanted == ()
    with pytest.raises(BusyProblem, match="epoch raise"):
        claim(job.current_attempt)
    assert "Restored from a backup: nothing starts" in client_of(alice).get("/").content.decode()
    epoch_raise(by="root")
    reply = beat(host, epoch_with_proof(9))
    assert [each.attempt_id for each in reply.wanted] == [job.current_attempt_id]
    assert reply.epoch == epoch_with_proof(10)


def test_a_credential_that_was_revoked_after_the_backup_does_not_come_back(team):
    honest, _ = enrol(team, name="Honest")
    stolen, credential = enrol(team, name="Stolen")
    kept = Host.objects.get(pk=stolen.pk)
    seen_before = epoch_with_proof(epoch().number)
    credential_revoke(host=stolen, by="olga")
    seen_after = epoch_with_proof(epoch().number)
    restore(number=seen_before.number)
    kept.save()
    assert (
        HostClient(credential).post("/hosts/beat", make_beat(epoch=seen_before)).status_code == 200
    )
    beat(honest, seen_after)
    assert [host.name for host in epoch_raise(by="root")] == ["Stolen"]
    assert HostClient(credential).post("/hosts/beat", make_beat()).status_code == 401
    assert Host.objects.get(pk=honest.pk).credential_hash


def test_sessions_and_tokens_end_with_a_backup_alone(host, alice, team):
    client_of(alice)
    _, text = token_make(team=team, by=alice, name="laptop", scope="read")
    assert epoch_raise(by="root") == []
    assert Session.objects.exists()
    assert token_find(text)
    client_of(alice)
    token_create(team=team, by=None, name="Old")
    restore()
    beat(host, epoch_with_proof(9))
    epoch_raise(by="root")
    assert not Session.objects.exists()
    assert not EnrolmentToken.objects.filter(used_at=None, revoked_at=None).exists()
    assert token_find(text) is None


def test_a_revoked_access_token_tells_that_this_is_a_backup(host, alice, team):
    before = beat(host).epoch.number
    token_revoke(token=token_make(team=team, by=alice, name="x", scope="read")[0], by=alice)
    assert beat(host).epoch.number == before + 1


def test_the_command_says_where_the_site_stands(host, capsys):
    restore()
    beat(host, epoch_with_proof(9))
    call_command("epoch", "show")
    assert "1 hosts have seen 9" in capsys.readouterr().out
    call_command("epoch", "raise")
    assert "This site's epoch is 10." in capsys.readouterr().out
