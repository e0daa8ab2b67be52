"""Jobs in a Kubernetes cluster: the objects, what the cluster says, and attempts to their end."""

import argparse
import os
import signal
import sys
from pathlib import Path

import pytest

from runners.jobspec import DemoModel, GenerateSpec, TrainSpec
from runners.jobspec.generate import TensorSplit
from runners.launchers import kubernetes_nodes, node_command, scheduler
from runners.launchers.attempts import AttemptFolder, Verdict
from runners.launchers.kubernetes import KubernetesLauncher, scheduler_facts
from runners.launchers.kubernetes_objects import QUEUE, Work, job_object, read_job
from runners.launchers.launch import LaunchRefusedError
from runners.launchers.scheduler import Phase
from runners.shared import kubernetes
from runners.shared.config import HostConfig
from runners.shared.kubernetes import KubernetesArgumentError, KubernetesConfig
from runners.shared.messages import Gang, RunDevice
from runners.shared.reasons import Reason
from runners.supervision import child
from tests.runners.cluster.fake import FakeCluster
from tests.runners.cluster.types import faults
from tests.runners.programs import FOREVER
from tests.runners.tools import Attempts, wait_for

RELEASES = ("1.34", "1.35", "1.36")
PLAIN = {"image": "registry.example/slipway:1", "volume_claim": "slipway", "mount_path": "/"}
EVERYTHING = {
    **PLAIN,
    "namespace": "ml",
    "gpu_resource": "amd.com/gpu",
    "gpus": 8,
    "cpus": 64,
    "memory": "900Gi",
    "queue": "team-a",
    "node_selector": {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"},
    "tolerations": ["nvidia.com/gpu"],
    "priority_class": "low",
    "runtime_class": "nvidia",
    "service_account": "runner",
    "image_pull_secret": "registry",
}
WORK = Work("slipway-a1", ["python", "x"], "/data/a1", 3600, 45, (1000, 1000), "a1")


def test_every_job_is_strictly_valid_in_three_releases():
    for stated in (PLAIN, {**PLAIN, "gpus": 0}, EVERYTHING):
        config = KubernetesConfig.model_validate(stated)
        for work in (WORK, WORK._replace(nodes=4), WORK._replace(attempt_id="")):
            for release in RELEASES:
                assert not list(faults(job_object(work, config), release)), (stated, release)
    job = job_object(WORK._replace(nodes=4), KubernetesConfig.model_validate(EVERYTHING))
    pod = job["spec"]["template"]["spec"]
    assert pod["containers"][0]["resources"]["limits"] == {
        "amd.com/gpu": "8", "cpu": "64", "memory": "900Gi",
    }  # fmt: skip
    assert (job["metadata"]["labels"][QUEUE], job["spec"]["suspend"]) == ("team-a", True)
    assert (job["spec"]["completions"], job["spec"]["backoffLimit"]) == (4, 0)
    assert (pod["activeDeadlineSeconds"], "activeDeadlineSeconds" in job["spec"]) == (3600, False)
    job["spec"]["template"]["spec"]["gpus"] = 1
    del job["spec"]["template"]["spec"]["containers"][0]["name"]
    assert [each.partition(":")[0].rpartition(".")[2] for each in faults(job, "1.36")] == [
        "name", "gpus",
    ]  # fmt: skip


def condition(kind: str, reason: str = "") -> dict:
    return {"type": kind, "status": "True", "reason": reason}


def pod(phase: str, **status: object) -> dict:
    return {"spec": {"nodeName": "n1"}, "status": {"phase": phase, **status}}


def container(**state: object) -> list[dict]:
    return [{"state": state}]


FAILED = {"conditions": [condition("Failed", "BackoffLimitExceeded")]}
STATES = [  # status of the Job, its pods -> phase, state, why it waits
    ({}, [], Phase.WAITING, "Pending", "no pod yet"),
    ({}, [pod("Pending")], Phase.WAITING, "Pending", "its pod starts"),
    ({}, [pod("Pending", conditions=[{"type": "PodScheduled", "status": "False",
                                      "message": "0/3 nodes: Insufficient nvidia.com/gpu."}])],
     Phase.WAITING, "Pending", "0/3 nodes: Insufficient nvidia.com/gpu."),
    ({}, [pod("Pending", containerStatuses=container(
        waiting={"reason": "ImagePullBackOff", "message": "not found"}))],
     Phase.WAITING, "Pending", "ImagePullBackOff: not found"),
    ({}, [pod("Running")], Phase.ACTIVE, "Running", ""),
    ({"conditions": [condition("Complete")]}, [pod("Succeeded")], Phase.ENDED, "Complete", ""),
    ({}, [pod("Failed")], Phase.ACTIVE, "Running", ""),  # its Job will say so
    (FAILED, [pod("Failed")], Phase.ENDED, "BackoffLimitExceeded", ""),
    (FAILED, [pod("Failed"), pod("Running")], Phase.ACTIVE, "Running", ""),
    (FAILED, [pod("Failed", reason="Evicted")], Phase.ENDED, "Evicted", ""),
    (FAILED, [pod("Failed", containerStatuses=container(terminated={"reason": "OOMKilled"}))],
     Phase.ENDED, "OOMKilled", ""),
    (FAILED, [pod("Failed", conditions=[condition("DisruptionTarget", "PreemptionByScheduler")])],
     Phase.ENDED, "PreemptionByScheduler", ""),
    ({"conditions": [condition("Failed", "DeadlineExceeded")]}, [], Phase.ENDED,
     "DeadlineExceeded", ""),
]  # fmt: skip


def test_what_the_cluster_says_of_a_job_becomes_a_phase_and_words():
    for status, pods, *expected in STATES:
        job = {"metadata": {"name": "slipway-a1"}, "spec": {}, "status": status}
        found = read_job(job, pods)
        assert [found.phase, found.state, found.detail] == expected, (status, pods)
    queued = {"metadata": {"name": "slipway-a1"}, "spec": {"suspend": True}, "status": {}}
    assert read_job(queued, []).detail == "suspended until its queue admits it"
    deleted = {"metadata": {"name": "a", "deletionTimestamp": "now"}, "spec": {}}
    assert read_job(deleted, [pod("Running")]).phase is Phase.ACTIVE


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    made = FakeCluster(tmp_path)
    monkeypatch.setenv("KUBECONFIG", str(made.kubeconfig))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setattr(node_command, "POLL_SECONDS", 0.05)
    for name in ("POLL_SECONDS", "AWAY_SECONDS"):
        monkeypatch.setattr(scheduler, name, 0.05)
    monkeypatch.setattr(scheduler, "SCHEDULER_SETTLE_SECONDS", 0.2)
    yield made
    made.close()


@pytest.fixture
def launcher(cluster) -> KubernetesLauncher:
    return KubernetesLauncher(KubernetesConfig.model_validate(PLAIN))


def verdict(launcher: KubernetesLauncher, folder: AttemptFolder) -> Verdict:
    launcher.refresh([folder])
    return launcher.verdict_of(folder)


def becomes(launcher: KubernetesLauncher, folder: AttemptFolder, *wanted: Verdict) -> None:
    wait_for(lambda: verdict(launcher, folder) in wanted)


def test_an_attempt_runs_as_a_job_and_its_record_is_the_folders(launcher, attempts: Attempts):
    folder = attempts.make(code="print('from a pod')")
    launcher.launch(folder)
    becomes(launcher, folder, Verdict.FINISHED)
    assert folder.exit_record().reason == "ok"
    assert "from a pod" in (folder.path / "stdout.log").read_text()
    assert launcher.unrecorded_end(folder, Verdict.FINISHED) is None


def test_a_job_is_stopped_with_its_grace_and_its_own_record(launcher, cluster, attempts):
    folder = attempts.make(code=FOREVER)
    launcher.launch(folder)
    wait_for((folder.path / child.SUPERVISOR).exists)
    becomes(launcher, folder, Verdict.RUNNING)
    child.write_json(folder.path / child.STOP, {"reason": "stopped_by_user", "grace_seconds": 5.0})
    becomes(launcher, folder, Verdict.FINISHED)
    assert folder.exit_record().reason == "stopped_by_user"
    # The agent deletes the Job, unless the supervisor, who reads the order too, has ended it.
    wait_for(
        lambda: (
            verdict(launcher, folder)
            and all(each.get("status", {}).get("conditions") for each in cluster.jobs.values())
        )
    )


def test_a_waiting_job_says_why_and_is_taken_back(launcher, cluster, attempts):
    cluster.is_holding = True
    folder = attempts.make()
    launcher.launch(folder)
    becomes(launcher, folder, Verdict.WAITING)
    (name,) = cluster.jobs
    cluster.pods[name], pods = [], cluster.pods[name]
    cluster.events[name] = "exceeded quota: gpus, requested: 8, used: 8, limited: 8"
    wait_for(lambda: verdict(launcher, folder) and "quota" in launcher.waits_for(folder))
    cluster.pods[name] = pods
    pods[0].status = STATES[2][1][0]["status"]
    becomes(launcher, folder, Verdict.WAITING)
    wait_for(lambda: verdict(launcher, folder) and "Insufficient" in launcher.waits_for(folder))
    assert launcher.waits_for(folder).startswith(f"Kubernetes (job {name}): 0/3 nodes")
    child.write_json(folder.path / child.STOP, {"reason": "stopped_by_user"})
    becomes(launcher, folder, Verdict.NEVER_STARTED)
    lost = launcher.unrecorded_end(folder, Verdict.NEVER_STARTED)
    assert lost.reason is Reason.STOPPED_BY_USER


def test_an_agent_killed_before_it_noted_the_job_adopts_it(launcher, cluster, attempts):
    folder = attempts.make(code=FOREVER)
    launcher.launch(folder)
    (folder.path / KubernetesLauncher.TICKET).unlink()
    again = KubernetesLauncher(KubernetesConfig.model_validate(PLAIN))
    becomes(again, folder, Verdict.RUNNING)
    assert len(cluster.jobs) == 1
    assert (folder.path / KubernetesLauncher.TICKET).exists()


def test_how_the_cluster_ended_a_job_becomes_a_reason(launcher, cluster, attempts):
    for number, (status, pods, reason) in enumerate([
        (FAILED, [pod("Failed", reason="Evicted")], Reason.KILLED_EXTERNALLY),
        (FAILED, [pod("Failed", reason="DeadlineExceeded")], Reason.MAX_DURATION),
        (FAILED, STATES[10][1], Reason.OOM_HOST),
        (FAILED, STATES[11][1], Reason.KILLED_EXTERNALLY),
        (STATES[12][0], [], Reason.MAX_DURATION),
    ]):  # fmt: skip
        folder = attempts.make(f"{attempts.first_id}-{number}", FOREVER)
        launcher.launch(folder)
        wait_for(lambda folder=folder: (folder.path / child.SUPERVISOR).exists())
        name = launcher.job_name(folder)
        for each, said in zip(cluster.pods[name], pods, strict=False):
            each.status = said["status"]
        cluster.pods[name][0].signal(signal.SIGKILL)
        cluster.jobs[name]["status"] = status
        becomes(launcher, folder, Verdict.SUPERVISOR_LOST)
        lost = launcher.unrecorded_end(folder, Verdict.SUPERVISOR_LOST)
        assert lost.reason is reason, lost
        assert lost.explanation.startswith(f"Kubernetes job {name} ended")


ENDS = [  # two pods' metadata and status -> the words
    ({}, {"reason": "Evicted", "message": "The node was low on resource: memory."},
     "pod a-1 on n1: Evicted: The node was low on resource: memory."),
    ({}, {"conditions": [condition("DisruptionTarget", "PreemptionByScheduler")],
          "containerStatuses": container(terminated={"reason": "Error"})},
     "pod a-1 on n1: PreemptionByScheduler"),
    ({}, {"containerStatuses": container(terminated={"reason": "OOMKilled"})},
     "pod a-1 on n1: OOMKilled"),
    ({}, {"containerStatuses": container(terminated={"reason": "Error"})}, "pod a-0 on n1: deleted"),
]  # fmt: skip


def test_the_pod_that_the_cluster_ended_says_more_than_those_that_went_with_it():
    job = {"metadata": {"name": "a"}, "spec": {}, "status": FAILED}
    gone = {"name": "a-0", "deletionTimestamp": "now"}
    for metadata, status, expected in ENDS:
        pods = [{**pod("Failed"), "metadata": gone},
                {**pod("Failed", **status), "metadata": {"name": "a-1", **metadata}}]  # fmt: skip
        assert read_job(job, pods).end_words == expected
    assert read_job({"metadata": {"name": "a"}, "spec": {}}, [pod("Running")]).end_words == ""


def test_a_pod_that_is_ended_from_outside_asks_the_agent_who_did_it(
    launcher, cluster, attempts, monkeypatch
):
    said = "Eviction API: evicting"
    evicted = attempts.make(f"{attempts.first_id}-0", FOREVER)
    untold = attempts.make(f"{attempts.first_id}-1", FOREVER)  # by a person in the pod
    for folder in (evicted, untold):
        document = child.read_json(folder.path / child.LAUNCH)
        child.write_json(folder.path / child.LAUNCH, launcher.adapt(document))
        launcher.launch(folder)
        wait_for((folder.path / child.SUPERVISOR).exists)
    monkeypatch.setattr(scheduler, "POLL_SECONDS", 60.0)  # the agent looks as soon as it is asked
    launcher.refresh([evicted, untold])
    name = launcher.job_name(evicted)
    cluster.pods[name][0].disrupt("EvictionByEvictionAPI", said, 20.0)
    cluster.pods[launcher.job_name(untold)][0].signal(signal.SIGTERM)
    for folder in (evicted, untold):
        wait_for(lambda folder=folder: launcher.refresh([evicted, untold]) or folder.exit_record())
        assert folder.exit_record().reason is Reason.KILLED_EXTERNALLY
    assert evicted.exit_record().last_lines[-1:] == (
        f"Kubernetes ended job {name}: pod {name}-0 on n1: EvictionByEvictionAPI: {said}",
    )
    assert not untold.exit_record().last_lines
    logged = "".join(each.read_text() for each in (untold.path / child.SPOOL).iterdir())
    assert "who ended it is not known: the scheduler shows no reason" in logged


REFUSALS = [(400, "unknown field"), (403, "jobs.batch is forbidden"), (404, "no namespace ml"),
            (422, "Invalid value")]  # fmt: skip
PASSING = ["close", (401, "Unauthorized"), (408, "timeout"), (429, "too many requests"),
           (500, "etcdserver: leader changed"), (502, "bad gateway"), (503, "unavailable"),
           (200, "<html>")]  # fmt: skip


def told(answer):
    """Return an answer of the server in the form of its own errors."""
    if answer == "close" or answer[0] == 200:
        return answer
    return answer[0], {"kind": "Status", "message": answer[1]}


def test_a_server_that_refuses_ends_the_attempt_and_one_that_fails_is_asked_again(
    launcher, cluster, attempts
):
    listed = 2  # requests before a Job is made: its pods and Jobs
    for number, answer in enumerate(REFUSALS):
        folder = attempts.make(f"{attempts.first_id}-{number}")
        cluster.answers = [(200, {"items": []})] * listed + [told(answer)]
        with pytest.raises(LaunchRefusedError, match=answer[1]):
            launcher.launch(folder)
        cluster.answers = [told(answer)]  # the list of pods, already
        with pytest.raises(LaunchRefusedError, match=answer[1]):
            launcher.launch(folder)
        assert not cluster.jobs
    cluster.is_holding = True
    for number, answer in enumerate(PASSING):
        folder = attempts.make(f"{attempts.first_id}-p{number}")
        for before in range(listed + 1):
            cluster.answers = [(200, {"items": []})] * before + [told(answer)]
            launcher.launch(folder)
        becomes(launcher, folder, Verdict.WAITING)
        wait_for(lambda folder=folder: verdict(launcher, folder) and launcher._job(folder))
    assert len(cluster.jobs) == len(PASSING)
    cluster.answers = ["close"] * 999
    wait_for(lambda: verdict(launcher, folder) and "does not answer" in launcher.waits_for(folder))
    assert verdict(launcher, folder) is Verdict.WAITING


def test_a_training_of_several_slots_is_an_indexed_job(launcher, cluster, attempts):
    cluster.is_holding = True
    folder = attempts.make()
    gang = Gang(node_rank=0, num_nodes=1, num_processes=2, master_address="127.0.0.1",
                master_port=29400, own_address="127.0.0.1", rendezvous_id="r")  # fmt: skip
    devices = tuple(RunDevice(kind="slot", index=each, uuid=f"slot-{each}") for each in range(3))
    request = folder.request().model_copy(
        update={"gang": gang, "devices": devices, "spec": TrainSpec()}
    )
    argv, _env = launcher.command(request, request.spec, ["python", "-m", "train"], folder.path)
    assert argv == ["python", "-m", "runners.launchers.kubernetes_nodes", str(folder.path), "3", "1",
                    "-m", "train"]  # fmt: skip
    child.write_json(folder.spec, request.model_dump(mode="json"))
    launcher.launch(folder)
    (job,) = cluster.jobs.values()
    assert (job["spec"]["completionMode"], job["spec"]["parallelism"]) == ("Indexed", 3)
    for wrong, spec in [
        (
            request.model_copy(update={"gang": gang.model_copy(update={"num_nodes": 2})}),
            TrainSpec(),
        ),
        (request, GenerateSpec(model=DemoModel(), split=TensorSplit())),
    ]:
        with pytest.raises(LaunchRefusedError, match="takes a training over several nodes alone"):
            launcher.command(wrong, spec, ["python"], folder.path)


def test_the_other_pods_get_the_jobs_environment_and_keep_their_own_devices(
    attempts, monkeypatch, tmp_path
):
    folder = attempts.make().path
    became = []
    monkeypatch.setattr(
        kubernetes_nodes, "become_torchrun", lambda *given: became.append((*given, {**os.environ}))
    )
    monkeypatch.setattr(os, "environ", {"SLIPWAY_POD_IP": "127.0.0.1", "NVIDIA_VISIBLE_DEVICES": "0",
                                        "SLIPWAY_MODEL_ROOTS": "/slipway/hub"})  # fmt: skip
    kubernetes_nodes._lead(folder, 2, 4, ["-m", "train"])
    monkeypatch.setattr(os, "environ", {"NVIDIA_VISIBLE_DEVICES": "3", "PATH": "/bin"})
    kubernetes_nodes._join(folder, 1)
    (_, first, *_), (_, second, program, _cpus, environment) = became
    assert (first.node_rank, second.node_rank, program) == (0, 1, ("-m", "train"))
    assert environment == {
        "NVIDIA_VISIBLE_DEVICES": "3", "PATH": "/bin", "SLIPWAY_MODEL_ROOTS": "/slipway/hub",
    }  # fmt: skip


def test_a_job_gets_the_queue_and_the_class_of_its_launch_and_no_option_of_slurm(
    launcher, cluster, attempts
):
    cluster.is_holding = True
    folder = attempts.make()
    request = folder.request()
    spec = request.spec.model_copy(
        update={"scheduler_options": {"queue": "team-b", "priority_class": "low"}}
    )
    child.write_json(
        folder.spec, request.model_copy(update={"spec": spec}).model_dump(mode="json")
    )
    launcher.launch(folder)
    (job,) = cluster.jobs.values()
    assert (job["metadata"]["labels"][QUEUE], job["spec"]["suspend"]) == ("team-b", True)
    assert job["spec"]["template"]["spec"]["priorityClassName"] == "low"
    other = spec.model_copy(update={"scheduler_options": {"partition": "gpu"}})
    with pytest.raises(LaunchRefusedError, match=r"takes queue, priority_class .* not partition"):
        launcher.command(request, other, ["python"], folder.path)


def named(name: str, **fields: object) -> dict:
    return {"metadata": {"name": name}, **fields}


def test_what_a_host_reports_of_its_cluster(cluster, tmp_path, monkeypatch):
    config = KubernetesConfig.model_validate(PLAIN)
    facts = scheduler_facts(config)
    (kind,) = facts.partitions
    assert (facts.kind, facts.version, facts.problem) == ("kubernetes", "v1.36.1", "")
    assert (kind.name, kind.nodes, kind.gres) == ("NVIDIA-H100-80GB-HBM3", 2, "nvidia.com/gpu:8")
    assert (facts.queues, facts.priority_classes, facts.unread) == ((), (), ())  # without Kueue
    stopped = {"conditions": [{"type": "Active", "status": "False"}]}
    active = {"conditions": [{"type": "Active", "status": "True"}]}
    cluster.queues = [named("night", status=stopped), named("team-b"), named("a", status=active)]
    cluster.classes = [named("system-node-critical"), named("low")]
    for prefers in (True, False):
        cluster.prefers_a_version = prefers
        facts = scheduler_facts(config)
        assert facts.offered == {"queue": ("a", "team-b"), "priority_class": ("low",)}, prefers
    for text, gpus in (("8", 8), ("two", 0), ("", 0), ("9" * 5000, 0)):
        options = {"nvidia.com/gpu": text, "image": "a/b"}
        assert facts.model_copy(update={"options": options}).gpus_per_node == gpus, text[:9]
    forbidden = [told((403, f"{each} is forbidden"))
                 for each in ("nodes", "queues", "classes", "pods")]  # fmt: skip
    cluster.answers = [(200, {"gitVersion": "v1.35"}), (200, {"items": []}), *forbidden]
    facts = scheduler_facts(config)
    assert (facts.partitions, facts.offered) == ((), {"queue": (), "priority_class": ()})
    assert facts.unread == (
        "nodes: nodes is forbidden", "queues of Kueue: queues is forbidden",
        "priority classes: classes is forbidden", "pods of others: pods is forbidden",
    )  # fmt: skip
    cluster.answers = [(200, {"gitVersion": "v1.35"}), told((403, "jobs.batch is forbidden"))]
    assert "forbidden" in scheduler_facts(config).problem
    (tmp_path / "half").write_text("clusters: [{name: c, cluster")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "half"))
    assert "no cluster is set up here" in scheduler_facts(config).problem


def test_pods_of_others_are_read_and_never_touched(cluster):
    gpu = {"resources": {"limits": {"nvidia.com/gpu": "8", "cpu": "4"}}}
    cluster.others = [
        {"metadata": {"name": "serve-0", "namespace": "ml",
                      "ownerReferences": [{"kind": "StatefulSet", "name": "serve"}]},
         "spec": {"nodeName": "n1", "containers": [gpu, {}], "activeDeadlineSeconds": 3600},
         "status": {"phase": "Running", "startTime": "2026-01-01T00:00:00Z"}},
        {"metadata": {"name": "a"}, "spec": {"containers": [gpu, gpu]}, "status": {
            "phase": "Pending", "conditions": [{"type": "PodScheduled", "status": "False",
                                                "message": "Insufficient nvidia.com/gpu"}]}},
        {"metadata": {"name": "done"}, "spec": {}, "status": {"phase": "Succeeded"}},
    ]  # fmt: skip
    running, waiting = scheduler_facts(KubernetesConfig.model_validate(PLAIN)).other_jobs
    assert (running.job_id, running.user, running.nodes, running.devices) == (
        "serve-0", "StatefulSet/serve", "n1", 8,
    )  # fmt: skip
    assert (running.time_limit_seconds, running.elapsed_seconds > 0) == (3600, True)
    assert (waiting.detail, waiting.devices) == ("Insufficient nvidia.com/gpu", 16)
    assert {each.partition(" ")[0] for each in cluster.requests} == {"GET"}


def test_a_short_command_runs_in_a_pod(cluster, host_dir, capsys):
    host_dir.save_scheduler(KubernetesConfig.model_validate(PLAIN))
    command = [sys.executable, "-c", "import os; print(os.environ['SLIPWAY_POD_IP'])"]
    assert node_command.main([str(host_dir.path), *command]) == 0
    assert capsys.readouterr().out == "127.0.0.1\n"
    assert node_command.main([str(host_dir.path), sys.executable, "-c", "1/0"]) == 1
    assert "the job ended as Failed" in capsys.readouterr().err
    assert not list(host_dir.path.glob(".slipway-run*"))


# The arguments of ``enroll``.


def read(*words: str, folder: Path = Path("/data/host")) -> KubernetesConfig | None:
    parser = argparse.ArgumentParser()
    kubernetes.add(parser)
    for name in ("time-limit-minutes", "max-jobs"):
        parser.add_argument(f"--{name}", type=int)
    for name in ("slurm", "partition", "account", "qos", "gres"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--slurm-option")
    parser.add_argument("--array-limit")
    return kubernetes.read(parser.parse_args(words), folder)


NEEDED = ("--kubernetes", "--image", "i:1", "--volume-claim", "v", "--mount-path", "/data")


def test_arguments_become_settings_or_a_sentence():
    config = read(*NEEDED, "--node-selector", "pool=gpu", "--toleration", "gpu", "--max-jobs", "4")
    assert (config.node_selector, config.tolerations, config.max_jobs) == (
        {"pool": "gpu"}, ("gpu",), 4,
    )  # fmt: skip
    assert read() is None
    for words, sentence in [
        (("--image", "i:1"), "add --kubernetes"),
        (("--kubernetes",), "needs --image"),
        ((*NEEDED, "--node-selector", "gpu"), "write LABEL=VALUE"),
        ((*NEEDED, "--gpus", "-1"), "--gpus -1"),
        ((*NEEDED, "--namespace", "A_b"), "--namespace 'A_b'"),
        ((*NEEDED, "--gres", "gpu:1"), "--gres: of Slurm"),
    ]:
        with pytest.raises(KubernetesArgumentError, match=sentence):
            read(*words)
    with pytest.raises(KubernetesArgumentError, match="not on the volume"):
        read(*NEEDED, folder=Path("/home/me"))


def test_a_host_has_one_scheduler(host_dir):
    host_dir.save_scheduler(KubernetesConfig.model_validate(EVERYTHING))
    assert host_dir.config().scheduler == KubernetesConfig.model_validate(EVERYTHING)
    both = {"slurm": {}, "kubernetes": PLAIN}
    with pytest.raises(ValueError, match="one scheduler"):
        HostConfig.model_validate(both)
