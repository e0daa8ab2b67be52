"""A training on the nodes of a Slurm job: what the allocation decides, and what a node is told."""

import os

import pytest

from runners.jobs.runtime import open_job
from runners.jobspec import DataParallel, TrainSpec
from runners.launchers import slurm_commands
from runners.launchers.launch import torchrun_argv
from runners.launchers.nodes import joined
from runners.launchers.slurm_commands import SlurmError
from runners.launchers.slurm_nodes import Allocation, srun_argv
from runners.shared.messages import GANG_VARIABLE
from runners.supervision import child

# As a batch job of Slurm 22.05.8 has them.
ENVIRONMENT = {"SLURM_JOB_ID": "17", "SLURM_NNODES": "3", "SLURM_JOB_NODELIST": "n[1-2,7]"}
NODE = "NodeName=n1 Gres=gpu:h100:4 NodeAddr={address} NodeHostName=vm Port=36077 State=IDLE\n"


def test_a_restart_meets_at_another_port_under_another_name():
    first = Allocation.of(ENVIRONMENT)
    again = Allocation.of(ENVIRONMENT | {"SLURM_RESTART_COUNT": "1"})
    other = Allocation.of(ENVIRONMENT | {"SLURM_JOB_ID": "18"})

    assert len({each.port for each in (first, again, other)}) == 3
    assert first.gang("127.0.0.1", 2).rendezvous_id != again.gang("127.0.0.1", 2).rendezvous_id
    assert (first.title, again.title) == ("Slurm job 17", "Slurm job 17, restart 1,")
    for job_id in ("1", "4294967295"):
        port = Allocation.of(ENVIRONMENT | {"SLURM_JOB_ID": job_id}).port
        assert 10_000 <= port < 32_768, job_id


def test_the_other_nodes_run_one_torchrun_each_that_joins_the_first():
    allocation = Allocation.of(ENVIRONMENT)
    gang = allocation.gang("127.0.0.1", 4)
    argv = srun_argv(allocation, "8", ["python"])

    assert {"--nodes=2", "--ntasks=2", "--relative=1", "--cpus-per-task=8"} <= set(argv)
    parts = [gang, joined(gang, 1), joined(gang, 2)]
    assert [each.node_rank for each in parts] == [0, 1, 2]
    assert {each.own_address for each in parts} == {"127.0.0.1"}
    for part in parts:
        written = torchrun_argv(["python", "job"], part, DataParallel())
        assert {"--nnodes=3:3", "--nproc-per-node=4"} <= set(written)
        assert f"--rdzv-endpoint=127.0.0.1:{allocation.port}" in written


def test_a_nodes_address_is_slurms_and_an_unknown_one_is_named(monkeypatch):
    for address, found in [("127.0.0.1", "127.0.0.1"), ("localhost", {"127.0.0.1", "::1"})]:
        said = NODE.format(address=address)
        monkeypatch.setattr(slurm_commands, "run", lambda *_argv, said=said: said)
        assert slurm_commands.node_address("n1") in found, address
    said = NODE.format(address="n1.invalid")
    monkeypatch.setattr(slurm_commands, "run", lambda *_argv: said)
    with pytest.raises(SlurmError, match=r"node n1: its address n1\.invalid is not resolved"):
        slurm_commands.node_address("n1")


def test_a_job_on_another_node_knows_its_part_and_leaves_the_folder_to_the_first(
    attempts, monkeypatch
):
    folder = attempts.make()
    request = folder.request().model_copy(update={"spec": TrainSpec()})
    child.write_json(folder.spec, request.model_dump(mode="json"))
    monkeypatch.setenv(child.EVENT_FD, str(os.open(os.devnull, os.O_WRONLY)))
    first = Allocation.of(ENVIRONMENT).gang("127.0.0.1", 4)
    for gang, owns_folder in [(first, True), (joined(first, 1), False)]:
        monkeypatch.setenv(GANG_VARIABLE, gang.model_dump_json())
        job = open_job(folder.path, "train")
        assert (job.request.gang, job.owns_folder) == (gang, owns_folder)
    monkeypatch.delenv(GANG_VARIABLE)
    job = open_job(folder.path, "train")
    assert (job.request.gang, job.owns_folder) == (None, True)
