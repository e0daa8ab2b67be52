"""Jobs in a Ray cluster: what is submitted, how bundles are placed and lost, and what is told."""

import argparse
import json
import sys
import time

import pytest

from runners.jobspec import DemoModel, GenerateSpec, TrainSpec
from runners.jobspec.generate import TensorSplit
from runners.launchers import node_command, ray_driver, scheduler
from runners.launchers.attempts import AttemptFolder, Verdict
from runners.launchers.launch import LaunchRefusedError
from runners.launchers.nodes import RENDEZVOUS, free_port
from runners.launchers.ray import RayLauncher, read_job, scheduler_facts
from runners.launchers.ray_api import RayUnreachableError
from runners.launchers.scheduler import Phase
from runners.shared import kubernetes, ray, slurm
from runners.shared.messages import Gang, RunDevice
from runners.shared.ray import RayArgumentError, RayConfig
from runners.shared.reasons import Reason
from runners.supervision import child
from tests.runners.pretended_ray.dashboard import TOKEN, Dashboard, node
from tests.runners.programs import FOREVER
from tests.runners.tools import Attempts, bodies, events_of, wait_for

GANG = Gang(node_rank=0, num_nodes=1, num_processes=2, master_address="127.0.0.1",
            master_port=29400, own_address="127.0.0.1", rendezvous_id="r")  # fmt: skip


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    made = Dashboard(tmp_path, "n1", "n2", "n3")
    for name in ("POLL_SECONDS", "AWAY_SECONDS", "SCHEDULER_SETTLE_SECONDS"):
        monkeypatch.setattr(scheduler, name, 0.05)
    monkeypatch.setattr(node_command, "POLL_SECONDS", 0.05)
    yield made
    made.close()


def config(cluster: Dashboard, **options: object) -> RayConfig:
    usual = {"address": cluster.address, "python": sys.executable, "gpus": 2, "cpus": 4}
    return RayConfig.model_validate(usual | options)


@pytest.fixture
def launcher(cluster) -> RayLauncher:
    return RayLauncher(config(cluster))


def verdict(launcher: RayLauncher, folder: AttemptFolder) -> Verdict:
    launcher.refresh([folder])
    return launcher.verdict_of(folder)


def becomes(launcher: RayLauncher, folder: AttemptFolder, *wanted: Verdict) -> None:
    wait_for(lambda: verdict(launcher, folder) in wanted)


def on_nodes(launcher: RayLauncher, folder: AttemptFolder, slots: int) -> None:
    """Make an attempt a training over some nodes, whose program is its own."""
    devices = tuple(RunDevice(kind="slot", index=each, uuid=f"s{each}") for each in range(slots))
    changed = {"gang": GANG, "devices": devices, "spec": TrainSpec()}
    request = folder.request().model_copy(update=changed)
    child.write_json(folder.spec, request.model_dump(mode="json"))
    document = child.read_json(folder.path / child.LAUNCH)
    child.write_json(folder.path / child.LAUNCH, launcher.adapt(document))


def test_an_attempt_runs_in_a_bundle_of_one_node_and_its_record_is_the_folders(
    launcher, cluster, attempts: Attempts
):
    folder = attempts.make(code="import os; print(os.environ['SLIPWAY_RAY_WORDS'])")
    document = child.read_json(folder.path / child.LAUNCH)
    child.write_json(folder.path / child.LAUNCH, launcher.adapt(document))
    launcher.launch(folder)
    becomes(launcher, folder, Verdict.FINISHED)
    assert folder.exit_record().reason == "ok"
    words = (folder.path / "stdout.log").read_text()
    assert words == f"Ray job slipway-{folder.attempt_id} runs on n1\n"
    (group,) = map(json.loads, cluster.groups.read_text().splitlines())
    assert (group["strategy"], group["bundles"]) == ("STRICT_PACK", [{"CPU": 4.0, "GPU": 2.0}])
    assert launcher.unrecorded_end(folder, Verdict.FINISHED) is None


def test_a_job_is_stopped_with_its_grace_and_its_own_record(launcher, cluster, attempts):
    folder = attempts.make(code=FOREVER)
    launcher.launch(folder)
    wait_for((folder.path / child.SUPERVISOR).exists)
    becomes(launcher, folder, Verdict.RUNNING)
    child.write_json(folder.path / child.STOP, {"reason": "stopped_by_user", "grace_seconds": 5.0})
    becomes(launcher, folder, Verdict.FINISHED)
    assert folder.exit_record().reason == "stopped_by_user"
    (job,) = cluster.jobs.values()
    assert int(job["runtime_env"]["env_vars"]["RAY_JOB_STOP_WAIT_TIME_S"]) >= 5


def test_a_waiting_job_says_what_is_missing_and_is_taken_back(launcher, cluster, attempts):
    for name in ("n1", "n2"):
        cluster.change(name, busy=True)
    cluster.change("n3", Alive=False)
    folder = attempts.make()
    launcher.launch(folder)
    told = f"Ray (job slipway-{folder.attempt_id}): 1 node with CPU 4, GPU 2: they are in use"
    wait_for(lambda: verdict(launcher, folder) and launcher.waits_for(folder) == told)
    assert verdict(launcher, folder) is Verdict.WAITING
    child.write_json(folder.path / child.STOP, {"reason": "stopped_by_user"})
    becomes(launcher, folder, Verdict.NEVER_STARTED)
    lost = launcher.unrecorded_end(folder, Verdict.NEVER_STARTED)
    assert lost.reason is Reason.STOPPED_BY_USER
    assert "as STOPPED" in lost.explanation


def test_an_agent_killed_before_it_noted_the_job_adopts_it(launcher, cluster, attempts):
    folder = attempts.make(code=FOREVER)
    launcher.launch(folder)
    (folder.path / RayLauncher.TICKET).unlink()
    becomes(RayLauncher(config(cluster)), folder, Verdict.RUNNING)
    assert len(cluster.jobs) == 1
    assert (folder.path / RayLauncher.TICKET).exists()


def test_a_job_of_one_node_ends_with_its_node_which_is_named(launcher, cluster, attempts):
    folder = attempts.make(code=FOREVER)
    launcher.launch(folder)
    wait_for((folder.path / child.SUPERVISOR).exists)
    becomes(launcher, folder, Verdict.RUNNING)
    cluster.change("n1", Alive=False)
    becomes(launcher, folder, Verdict.SUPERVISOR_LOST)
    lost = launcher.unrecorded_end(folder, Verdict.SUPERVISOR_LOST)
    assert lost.reason is Reason.HOST_REBOOTED
    assert lost.explanation.endswith("ended on n1 as NODE_LOST: node n1 was lost")


# Stands for torchrun: it writes where it runs, and goes on until a file says that all is done.
RANKS = """
import os, sys, time
folder, rank = sys.argv[1:3]
print("ranks", rank, "in run", os.environ["SLIPWAY_RAY_RUN"], flush=True)
failing = f"{folder}/fail"
while not os.path.exists(f"{folder}/done"):
    if os.environ["SLIPWAY_RAY_RUN"] == rank == "0" and os.path.exists(failing):
        sys.exit("ncclRemoteError: Connection reset by peer")
    time.sleep(0.05)
"""


@pytest.fixture
def over_nodes(tmp_path):
    """Return a program that is ``ray_nodes`` with small programs for its torchrun."""
    stand_in = tmp_path / "stand_in.py"
    stand_in.write_text(
        "import os, runners.launchers.nodes as nodes, runners.launchers.ray_nodes as ray_nodes\n"
        "import sys\n"
        f"code = {RANKS!r}\n"
        "made = lambda folder, gang, program: ["
        "sys.executable, '-c', code, str(folder), str(gang.node_rank)]\n"
        "nodes.torchrun_of = ray_nodes.torchrun_of = made\n"
        "sys.exit(ray_nodes.main(sys.argv[1:]))\n"
    )
    return stand_in


@pytest.mark.slow  # real processes of a node that is silent, until it counts as lost
def test_a_lost_node_is_named_and_the_attempt_goes_on_elsewhere(
    launcher, cluster, attempts, over_nodes
):
    for lost in ("n2", "n1"):  # another than the first, and the first
        cluster.set_nodes(node("head", CPU=1.0), *map(node, ("n1", "n2", "n3")))
        folder = start_over_two(launcher, attempts, over_nodes, lost)
        out = folder.path / "stdout.log"
        cluster.change(lost, Alive=False)
        wait_for(lambda out=out: "ranks 0 in run 1" in out.read_text())
        assert verdict(launcher, folder) is Verdict.RUNNING
        (folder.path / "done").touch()
        becomes(launcher, folder, Verdict.FINISHED)
        assert folder.exit_record().reason == "ok"
        said = "".join(each["text"] for each in bodies(folder, "log"))
        others = ", ".join(name for name in ("n1", "n2", "n3") if name != lost)
        assert f"restart 1, runs on {others} after node {lost} was lost" in said
        assert (f"node {lost} was lost: the attempt is placed again" in said) == (lost == "n2")
        kinds = [each["kind"] for each in events_of(folder)]
        assert (kinds.count("started"), kinds.count("exited")) == (2, 1)
        groups = list(map(json.loads, cluster.groups.read_text().splitlines()))
        assert {(each["strategy"], len(each["bundles"])) for each in groups} == {
            ("STRICT_SPREAD", 2)
        }


def start_over_two(launcher, attempts, over_nodes, name):
    """Launch a training over two nodes and return its folder when its ranks run."""
    folder = attempts.make(f"{attempts.first_id}-{name}")
    argv = [sys.executable, str(over_nodes), str(folder.path), "2", "1", "program"]
    document = child.read_json(folder.path / child.LAUNCH)
    child.write_json(folder.path / child.LAUNCH, document | {"argv": argv})
    on_nodes(launcher, folder, 2)
    launcher.launch(folder)
    out = folder.path / "stdout.log"
    wait_for(lambda: out.exists() and "ranks 0 in run 0" in out.read_text())
    return folder


@pytest.mark.slow  # real processes of a node that is silent, until it counts as lost
def test_a_node_out_of_reach_is_no_lost_one_and_the_first_hears_of_it_when_ray_knows(
    launcher, cluster, attempts, over_nodes
):
    folder = start_over_two(launcher, attempts, over_nodes, "short")
    for name in ("n1", "n2"):
        cluster.change(name, out_of_reach=True)
    time.sleep(3 * ray_driver.POLL_SECONDS)
    for name in ("n1", "n2"):
        cluster.change(name, out_of_reach=False)
    cluster.change("n2", out_of_reach=True)
    (folder.path / "fail").touch()  # what the first node's ranks meet before Ray knows
    wait_for((folder.path / ray_driver.ASK).exists)
    time.sleep(3 * ray_driver.POLL_SECONDS)
    assert not (folder.path / ray_driver.ANSWER).exists()
    cluster.change("n2", Alive=False)
    out = folder.path / "stdout.log"
    wait_for(lambda: "ranks 0 in run 1" in out.read_text())
    (folder.path / "done").touch()
    becomes(launcher, folder, Verdict.FINISHED)
    assert folder.exit_record().reason == "ok"


def test_an_actor_that_ray_ends_for_memory_is_the_reason_and_is_not_placed_again(
    launcher, cluster, attempts, over_nodes
):
    folder = start_over_two(launcher, attempts, over_nodes, "memory")
    cluster.change("n1", low_on_memory=True)
    becomes(launcher, folder, Verdict.SUPERVISOR_LOST)
    lost = launcher.unrecorded_end(folder, Verdict.SUPERVISOR_LOST)
    assert lost.reason is Reason.OOM_HOST
    assert "as OUT_OF_MEMORY: the process on n1 (Task was killed due to" in lost.explanation


def test_a_lost_node_alone_places_an_attempt_again_and_not_without_end(tmp_path):
    child.write_json(tmp_path / ray_driver.ORDER, {"restarts": True})
    driver = ray_driver.Driver(tmp_path)
    node, memory, worker = (
        ray_driver.LostBundle(0, "", phase)
        for phase in (ray_driver.NODE_LOST, ray_driver.OUT_OF_MEMORY, ray_driver.WORKER_LOST)
    )
    most = ray_driver.MOST_RESTARTS
    asked = [(node, 0), (node, most - 1), (node, most), (memory, 0), (worker, 0)]
    assert [driver.is_placed_again(*each) for each in asked] == [True, True, False, False, False]
    driver.on_sigterm()
    assert not driver.is_placed_again(node, 0)


def test_a_training_of_several_slots_is_one_job_and_nothing_else_is(launcher, attempts):
    folder = attempts.make()
    on_nodes(launcher, folder, 3)
    request = folder.request()
    argv, _env = launcher.command(request, request.spec, ["python", "-m", "train"], folder.path)
    assert argv == ["python", "-m", "runners.launchers.ray_nodes", str(folder.path), "3", "2",
                    "-m", "train"]  # fmt: skip
    two = request.model_copy(update={"gang": GANG.model_copy(update={"num_nodes": 2})})
    for wrong, spec in [
        (two, TrainSpec()),
        (request, GenerateSpec(model=DemoModel(), split=TensorSplit())),
    ]:
        with pytest.raises(LaunchRefusedError, match="takes a training over several nodes alone"):
            launcher.command(wrong, spec, ["python"], folder.path)
    other = TrainSpec(scheduler_options={"queue": "gpu"})
    with pytest.raises(LaunchRefusedError, match="Ray takes partition of a launch, not queue"):
        launcher.command(request, other, ["python"], folder.path)


REFUSALS = [(400, "Traceback\nTypeError: unexpected keyword argument 'x'\n"), (403, "Forbidden"),
            (500, "RuntimeError: Request failed with status code 400: ValueError: no\n.\n")]  # fmt: skip
PASSING = ["close", (401, "Unauthorized"), (429, "later"), (500, "TimeoutError: no agent\n"),
           (502, "bad gateway"), (200, "<html>")]  # fmt: skip


def test_a_cluster_that_refuses_ends_the_attempt_and_one_that_fails_is_asked_again(
    launcher, cluster, attempts
):
    listed = [(200, "[]")]
    for number, answer in enumerate(REFUSALS):
        folder = attempts.make(f"{attempts.first_id}-{number}")
        for before in ([], listed):
            cluster.answers = [*before, answer]
            words = answer[1].strip(".\n").splitlines()[-1]
            with pytest.raises(LaunchRefusedError, match=words.partition(":")[2].strip() or words):
                launcher.launch(folder)
        assert not cluster.jobs
    cluster.is_holding = True
    for number, answer in enumerate(PASSING):
        folder = attempts.make(f"{attempts.first_id}-p{number}")
        for before in ([], listed):
            cluster.answers = [*before, answer]
            launcher.launch(folder)
        becomes(launcher, folder, Verdict.WAITING)
        wait_for(lambda folder=folder: verdict(launcher, folder) and launcher._job(folder))
    assert len(cluster.jobs) == len(PASSING)
    launcher.submit(folder)  # a second one of this name is ours
    cluster.answers = ["close"] * 999
    wait_for(lambda: verdict(launcher, folder) and "does not answer" in launcher.waits_for(folder))
    assert verdict(launcher, folder) is Verdict.WAITING


def test_what_ray_and_the_driver_say_becomes_a_phase(tmp_path):
    failed = "Job entrypoint command failed with exit code 1"
    for status, told, *expected in [
        ("PENDING", None, Phase.WAITING, "PENDING", "Job has not started yet."),
        ("RUNNING", None, Phase.WAITING, "RUNNING", ""),
        ("RUNNING", ("waiting", "2 nodes"), Phase.WAITING, "RUNNING", "2 nodes"),
        ("RUNNING", ("running", ""), Phase.ACTIVE, "RUNNING", ""),
        ("SUCCEEDED", ("running", ""), Phase.ENDED, "SUCCEEDED", ""),
        ("FAILED", ("node_lost", "node n1"), Phase.ENDED, "NODE_LOST", "node n1"),
        ("FAILED", ("worker_lost", "it"), Phase.ENDED, "WORKER_LOST", "it"),
        ("FAILED", ("waiting", "2 nodes"), Phase.ENDED, "FAILED", f"{failed}: No module ray"),
        ("SUCCEEDED", ("waiting", "2 nodes"), Phase.ENDED, "SUCCEEDED", ""),
        ("STOPPED", None, Phase.ENDED, "STOPPED", ""),
    ]:
        path = tmp_path / ray_driver.STATE
        path.unlink(missing_ok=True)
        if told:
            child.write_json(path, {"phase": told[0], "detail": told[1], "nodes": []})
        job = {
            "submission_id": "slipway-a",
            "status": status,
            "message": f"{failed}, last available logs (truncated to 20,000 chars):\nin x\nNo module ray"
            if status == "FAILED"
            else "Job has not started yet.",
        }
        found = read_job(job, tmp_path)
        assert [found.phase, found.state, found.detail or found.end_words] == expected, told


def test_ray_forgets_a_job_that_ended_a_day_ago(launcher, cluster, attempts):
    cluster.is_holding = True
    for age_hours, name in ((25, "old"), (1, "new")):
        launcher.submit(attempts.make(f"{attempts.first_id}-{name}"))
        cluster.jobs[f"slipway-{attempts.first_id}-{name}"] |= {
            "status": "SUCCEEDED", "end_time": (time.time() - age_hours * 3600) * 1000,
        }  # fmt: skip
    cluster.jobs["other-old"] = {"submission_id": "other-old", "status": "FAILED", "end_time": 1}
    listed = launcher._api.jobs()
    cluster.answers = [(200, json.dumps(listed)), (500, "TimeoutError: no agent\n")]
    assert len(launcher.list_jobs()) == 2  # one that it cannot forget hides no job
    assert len(cluster.jobs) == 3
    launcher.list_jobs()
    assert set(cluster.jobs) == {f"slipway-{attempts.first_id}-new", "other-old"}


def test_a_reply_of_another_form_says_nothing_of_a_job(launcher, cluster, attempts):
    cluster.is_holding = True
    folder = attempts.make()
    launcher.launch(folder)
    listed = json.dumps([{"submission_id": f"slipway-{folder.attempt_id}"}])
    for reply in ("null", "{}", "[null]", "[3]", listed):
        cluster.answers = [(200, reply)]
        with pytest.raises(RayUnreachableError, match="the list of jobs has another form"):
            launcher.list_jobs()
        cluster.answers = [(200, reply)]
        with pytest.raises(RayUnreachableError, match="a job has another form"):
            launcher.ended_job("slipway-a")
    for reply in ("null", "{}", '{"ray_version": null}'):
        cluster.answers = [(200, reply)]
        assert "its version has another form" in scheduler_facts(config(cluster)).problem
    for reply in ("null", '{"data": null}', '{"data": {"result": {"result": [{}]}}}'):
        cluster.answers = [(200, '{"ray_version": "2.60.0"}'), (200, "[]"), (200, reply)]
        facts = scheduler_facts(config(cluster))
        assert facts.unread == ("nodes: the scheduler did not answer",), reply


def test_what_a_host_reports_of_its_cluster(cluster, tmp_path):
    cluster.set_nodes(
        node("head", CPU=8.0, memory=2.0**35),
        node("n1"),
        {**node("n2"), "Resources": {**node("n2")["Resources"], "memory": 2.0**34 - 2**22}},
        node("small", CPU=4.0, GPU=1.0, memory=2.0**34, **{"accelerator_type:A10G": 1.0}),
    )
    facts = scheduler_facts(config(cluster, memory="8Gi"))
    assert (facts.kind, facts.version, facts.problem) == ("ray", "2.60.0", "")
    assert facts.options["memory"] == "8Gi"
    assert facts.gpus_per_node == 2
    found = [(each.name, each.nodes, each.gres, each.is_up) for each in facts.partitions]
    assert found == [
        ("", 1, "", False), ("A10G", 1, "gpu:1", False), ("H100", 2, "gpu:2", True),
    ]  # fmt: skip
    assert facts.partitions[2].memory_mib == "16380"
    assert facts.offered == {"partition": ("H100",)}
    grows = scheduler_facts(config(cluster, autoscaling=True))
    assert (facts.autoscaling, grows.autoscaling) == (False, True)
    assert grows.offered == {"partition": None}
    assert "autoscaler" in grows.unread[0]
    cluster.answers = [(200, '{"ray_version": "2.9"}'), (200, "[]"), (404, "no State API")]
    facts = scheduler_facts(config(cluster))
    assert (facts.partitions, facts.unread) == ((), ("nodes: no State API",))
    cluster.asks_for_token = True
    assert "Missing authentication token" in scheduler_facts(config(cluster)).problem
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    assert not scheduler_facts(config(cluster, token_file=str(tmp_path / "token"))).problem


def test_a_chosen_kind_of_nodes_is_a_resource_of_the_bundle(cluster):
    assert config(cluster, memory="2Gi").with_options({"partition": "H100"}).bundle == {
        "CPU": 4.0, "GPU": 2.0, "memory": 2.0**31, "accelerator_type:H100": 0.001,
    }  # fmt: skip
    assert config(cluster, gpus=0).with_options({}).bundle == {"CPU": 4.0}


def test_a_short_command_runs_in_a_bundle(cluster, host_dir, capsys):
    host_dir.save_scheduler(config(cluster))
    command = [sys.executable, "-c", "import os; print(os.environ['SLIPWAY_NODE_IP'])"]
    assert node_command.main([str(host_dir.path), *command]) == 0
    assert capsys.readouterr().out == "127.0.0.1\n"
    assert node_command.main([str(host_dir.path), sys.executable, "-c", "1/0"]) == 1
    assert "as FAILED: Job entrypoint command failed with exit code 1" in capsys.readouterr().err
    assert not list(host_dir.path.glob(".slipway-run*"))


def test_the_ranks_of_a_placement_meet_on_a_free_port():
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        assert free_port("127.0.0.1", range(port, port + 50), 0) != port
        with pytest.raises(OSError, match="in use"):
            free_port("127.0.0.1", range(port, port + 1), 0)


# The arguments of ``enroll``.


def read(*words: str) -> RayConfig | None:
    parser = argparse.ArgumentParser()
    slurm.add(parser)
    kubernetes.add(parser)
    ray.add(parser)
    return ray.read(parser.parse_args(words))


def test_arguments_become_settings_or_a_sentence(tmp_path):
    made = read("--ray", "http://head:8265/", "--gpus", "8", "--memory", "64Gi", "--max-jobs", "4")
    assert made == RayConfig(address="http://head:8265", gpus=8, memory="64Gi", max_jobs=4)
    assert read() is None
    for words, sentence in [
        (("--accelerator-type", "H100"), "--accelerator-type: only for Ray; add --ray ADDRESS"),
        (("--ray", "head:8265"), "--ray 'head:8265': write the address of its dashboard"),
        (("--ray", "http://head:99999"), "write the address of its dashboard"),
        (("--ray", "http://head:abc"), "write the address of its dashboard"),
        (("--ray", "http://[::1"), "write the address of its dashboard"),
        (("--ray", "http://:8265"), "write the address of its dashboard"),
        (("--ray", "http://h", "--memory", "64"), "--memory '64': write a whole number with Ki"),
        (("--ray", "http://h", "--gpus", "-1"), "--gpus -1"),
        (("--ray", "http://h", "--ray-python", "a b"), "--ray-python 'a b'"),
        (("--ray", "http://h", "--gres", "gpu:1"), "--gres: of another scheduler"),
        (("--ray", "http://h", "--kubernetes"), "--kubernetes: of another scheduler"),
        (("--ray", "http://h", "--ray-token-file", str(tmp_path / "no")), "there is no such file"),
    ]:
        with pytest.raises(RayArgumentError, match=sentence):
            read(*words)


def test_a_stale_rendezvous_of_an_earlier_placement_is_not_taken(attempts, tmp_path):
    from runners.launchers.nodes import Rendezvous

    folder = attempts.make().path
    Rendezvous.write(folder, GANG.model_copy(update={"rendezvous_id": "ray-a-0"}), ["x"], ())
    assert Rendezvous.wait(folder, "ray-a-0").program == ("x",)
    child.write_exit_record(folder, AttemptFolder._reaper_record(Reason.INTERNAL, ""))
    with pytest.raises(SystemExit, match="ended before its ranks started"):
        Rendezvous.wait(folder, "ray-a-1")
    assert (folder / RENDEZVOUS).exists()
