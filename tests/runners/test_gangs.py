"""A job on several hosts: torchrun's command, this host's addresses, waiting for the others."""

import json
import socket
from importlib.util import find_spec
from types import SimpleNamespace

import psutil
import pytest
from pydantic import ValidationError

from runners.host.inventory import host_facts
from runners.jobspec import BenchmarkSpec, DataParallel, DemoModel, GenerateSpec, TrainSpec
from runners.jobspec.generate import StageChain, TensorSplit
from runners.launchers import launch
from runners.launchers.attempts import AttemptFolder, Verdict
from runners.launchers.launch import (
    LaunchRefusedError,
    NoSuchAddressError,
    endpoint,
    gang_command,
    gang_env,
    interface_of,
    torchrun_argv,
)
from runners.shared.addresses import own_addresses
from runners.shared.config import HostConfig, HostConfigError
from runners.shared.messages import ClaimReply, Gang, Needs, RunRequest, WantedAttempt
from runners.shared.reasons import Reason
from runners.supervision import child, procfs
from tests.runners.programs import FOREVER
from tests.runners.tools import ids_of
from tests.stack import free_port

A1, _ = ids_of(__name__)

COMMAND = ["python", "-m", "runners.jobs.train", "/attempt"]


def gang(**changes: object) -> Gang:
    fields = {
        "node_rank": 0,
        "num_nodes": 3,
        "master_address": "127.0.0.1",
        "master_port": 29400,
        "own_address": "127.0.0.1",
        "rendezvous_id": "a1",
    }
    return Gang(**{**fields, **changes})


def options(parallel: DataParallel, **changes: object) -> dict[str, str]:
    argv = torchrun_argv(COMMAND, gang(**changes), parallel)
    return dict(part[2:].split("=", 1) for part in argv if part.startswith("--"))


def test_torchrun_stands_between_the_interpreter_and_the_job_once_the_meeting_point_is_there():
    argv = torchrun_argv(COMMAND, gang(), DataParallel())
    assert argv[:3] == ["python", "-m", "torch.distributed.run"]
    assert argv[-3:] == COMMAND[1:]
    argv = torchrun_argv(COMMAND, gang(node_rank=1), DataParallel(rank_timeout_seconds=30))
    assert argv[:6] == ["python", "-m", launch.MEETING, "127.0.0.1", "29400", "600"]
    assert argv[-3:] == COMMAND[1:]
    assert find_spec(launch.MEETING)


def test_how_many_hosts_must_be_there_and_how_often_it_starts_again():
    for asked, nodes, restarts in [
        ({"on_lost_rank": "stop", "min_hosts": 1}, "3:3", "0"),
        ({"on_lost_rank": "shrink", "min_hosts": 2}, "2:3", "1"),  # for each it may lose
        ({"on_lost_rank": "restart", "min_hosts": 1, "max_restarts": 7}, "3:3", "7"),
        ({"on_lost_rank": "shrink", "min_hosts": 9}, "3:3", "0"),  # no more than there are
    ]:
        found = options(DataParallel(**asked))
        assert (found["nnodes"], found["max-restarts"]) == (nodes, restarts), asked


def test_the_first_host_holds_the_meeting_point_and_waits_as_long_as_ranks_do():
    for node_rank, is_host in [(0, "true"), (2, "false")]:
        waits = options(DataParallel(), node_rank=node_rank)["rdzv-conf"]
        assert f"is_host={is_host}," in waits, (node_rank, is_host)
    waits = options(DataParallel(rank_timeout_seconds=60))["rdzv-conf"]
    assert "read_timeout=60" in waits
    assert "keep_alive_interval=10,keep_alive_max_attempt=3" in waits


def test_a_start_takes_as_long_as_slow_disks_do_however_short_a_silence_may_be():
    for patience, start in [(30, 600), (300, 600), (7200, 7200)]:
        parallel = DataParallel(rank_timeout_seconds=patience)
        assert parallel.start_timeout_seconds == start, (patience, start)
        assert f"join_timeout={start}," in options(parallel)["rdzv-conf"], (patience, start)


def test_an_address_of_version_6_stands_in_brackets_and_anothers_is_refused():
    assert endpoint("fd00::7", 29400) == "[fd00::7]:29400"
    assert endpoint("10.0.0.7", 29400) == "10.0.0.7:29400"
    with pytest.raises(NoSuchAddressError, match=r"192\.0\.2\.77 is not an address of this host"):
        interface_of("192.0.2.77")


def test_a_place_names_addresses_and_a_rendezvous_plainly_and_nothing_else():
    for address in ["--nproc-per-node", "host; rm -rf /", "", "10.0.0.7:1"]:
        with pytest.raises(ValidationError):
            gang(master_address=address)
    for name in ["a b", "a/../b", "x" * 65, "a\nb"]:
        with pytest.raises(ValidationError):
            gang(rendezvous_id=name)


def test_both_backends_use_the_interface_that_has_the_address_or_the_operators(monkeypatch):
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    found = gang_env(gang())
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    chosen = gang_env(gang())
    assert [found[name] for name in names] == ["lo", "lo"]
    assert [chosen[name] for name in names] == ["lo", "ib0"]


def test_what_only_this_machine_can_reach_is_not_offered(monkeypatch):
    def card(address: str) -> SimpleNamespace:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        return SimpleNamespace(family=family, address=address)

    stats = {"eth0": SimpleNamespace(isup=True), "eth1": SimpleNamespace(isup=False)}
    here = [card("fd00::7"), card("fe80::1%eth0"), card("169.254.1.1"), card("10.9.8.7")]
    monkeypatch.setattr(psutil, "net_if_stats", lambda: stats)
    found = {"eth0": here, "eth1": [card("10.1.1.1")]}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: found)

    assert own_addresses() == ("10.9.8.7", "fd00::7")
    assert own_addresses("fd00::7") == ("fd00::7", "10.9.8.7")


def test_a_host_says_its_addresses_and_the_ports_that_may_be_reserved(host_dir):
    facts = host_facts(host_dir.path, HostConfig(address="127.0.0.1", first_gang_port=30000))
    assert facts.addresses[0] == "127.0.0.1"
    assert (facts.first_gang_port, facts.last_gang_port) == (30000, 29499)


def test_choosing_an_address_keeps_other_settings_and_no_address_makes_them_invalid(host_dir):
    (host_dir.path / "config.json").write_text('{"min_free_bytes": 7}')
    host_dir.save_address("10.0.0.7")
    assert json.loads((host_dir.path / "config.json").read_text()) == {
        "min_free_bytes": 7,
        "address": "10.0.0.7",
    }
    (host_dir.path / "config.json").write_text('{"address": "the-blue-one"}')
    with pytest.raises(HostConfigError, match="address"):
        host_dir.config()


def request(place: Gang | None, **changes: object) -> RunRequest:
    fields = {"attempt_id": A1, "job_id": "j1", "number": 1, "fence": "f", "spec": TrainSpec()}
    return RunRequest(**{**fields, "gang": place, **changes})


def test_one_process_and_servers_of_a_chain_run_without_torchrun_and_a_split_model_with_it():
    assert gang_command(request(None), TrainSpec(), COMMAND) == (COMMAND, {})
    spec = GenerateSpec(model=DemoModel(), weight_dtype="fp32", split=TensorSplit())
    argv, env = gang_command(request(gang(), spec=spec), spec, COMMAND)
    assert argv[:3] == ["python", "-m", "torch.distributed.run"]
    assert env["GLOO_SOCKET_IFNAME"] == "lo"
    spec = GenerateSpec(model=DemoModel(), weight_dtype="fp32", split=StageChain())
    argv, _env = gang_command(request(gang(), spec=spec), spec, COMMAND)
    assert argv == COMMAND


def test_what_cannot_be_shared_out_here_is_refused_before_anything_starts():
    spec = BenchmarkSpec(model=DemoModel())
    with pytest.raises(LaunchRefusedError, match="runs on one device") as refused:
        gang_command(request(gang(), spec=spec), spec, COMMAND)
    assert refused.value.reason is Reason.VERSION_INCOMPATIBLE
    with pytest.raises(LaunchRefusedError, match="choose another on the host's page") as refused:
        gang_command(request(gang(own_address="192.0.2.77")), TrainSpec(), COMMAND)
    assert refused.value.reason is Reason.PREFLIGHT_FAILED


# Claiming together


@pytest.fixture
def reconciler(reconciling):
    return reconciling(FOREVER, min_free_bytes=0)


@pytest.fixture
def answered(acceptor):
    """Let the server answer claims with places in turn; return what it was asked."""
    asked = []

    def answer(*places: tuple[Gang, bool]):
        turns = list(places)
        acceptor.want(A1, TrainSpec())

        def claim(_attempt_id, said):
            asked.append(said)
            place, may_start = turns.pop(0) if len(turns) > 1 else turns[0]
            run = acceptor.attempts[A1].request.model_copy(update={"gang": place})
            return 200, ClaimReply(request=run, may_start=may_start)

        acceptor.claim = claim
        return asked

    return answer


def wanted(acceptor, **needs: object) -> WantedAttempt:
    fence = acceptor.attempts[A1].fence
    return WantedAttempt(attempt_id=A1, fence=fence, needs=Needs(kind="train", **needs))


def test_a_host_that_waits_for_the_others_starts_nothing(acceptor, reconciler, answered, host_dir):
    asked = answered((gang(node_rank=1), False))
    reconciler.claim(wanted(acceptor))
    reconciler.retry_claims()
    assert AttemptFolder(host_dir.attempts / A1).verdict(procfs.boot_id()) is Verdict.CLAIMING
    assert len(asked) == 2
    assert asked[0].claim_id == asked[1].claim_id


def test_the_first_host_tries_the_next_port_where_one_is_taken(acceptor, reconciler, answered):
    with socket.create_server(("", 0)) as other:
        taken, free = other.getsockname()[1], free_port()
        asked = answered((gang(master_port=free), False))
        reconciler.claim(wanted(acceptor, ports=(taken,)))
    found = [{each.name: each.ok for each in said.checks}["ports"] for said in asked]
    assert found == [False, True]


def test_once_all_are_there_torchrun_starts_with_the_place(
    acceptor, reconciler, answered, host_dir
):
    answered((gang(node_rank=1, num_nodes=2), True))
    reconciler.claim(wanted(acceptor))
    written = child.read_json(host_dir.attempts / A1 / child.LAUNCH)
    assert launch.MEETING in written["argv"]
    assert written["env"]["GLOO_SOCKET_IFNAME"] == "lo"
