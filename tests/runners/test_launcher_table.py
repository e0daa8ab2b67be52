"""What each launcher can and cannot, found by asking it, is the table of the Slurm page."""

from collections.abc import Callable
from contextlib import closing
from itertools import count
from pathlib import Path

import pytest

from runners.jobspec import DemoModel, DrillSpec, GenerateSpec, TrainSpec
from runners.jobspec.generate import TensorSplit
from runners.launchers import slurm_commands
from runners.launchers.attempts import AttemptFolder, Verdict
from runners.launchers.kubernetes import KubernetesLauncher
from runners.launchers.kubernetes_objects import QUEUE
from runners.launchers.launch import Launcher, LaunchRefusedError, LocalLauncher
from runners.launchers.ray import RayLauncher
from runners.launchers.ray_driver import ORDER, STATE
from runners.launchers.slurm import SlurmLauncher
from runners.launchers.slurm_commands import SlurmJob
from runners.shared.kubernetes import KubernetesConfig
from runners.shared.messages import Gang, RunDevice, RunRequest
from runners.shared.ray import ACCELERATOR, RayConfig
from runners.shared.reasons import Reason
from runners.shared.slurm import SlurmConfig
from runners.supervision import child
from tests.runners.cluster.fake import FakeCluster
from tests.runners.pretended_ray.dashboard import Dashboard

PAGE = Path("templates/docs/slurm.md")
START, END = "<!-- launchers -->\n", "<!-- end of launchers -->\n"
COMMAND = ["python", "-m", "runners.jobs.train", "/attempt"]
JOB = "17"
PREEMPTED_POD = "PreemptionByScheduler"
CLUSTER = {"image": "slipway", "volume_claim": "slipway", "mount_path": "/"}


class Trial:
    """One launcher with one attempt; ``sent`` are the options of its submissions."""

    def __init__(
        self,
        kind: str,
        folder: AttemptFolder,
        twin: AttemptFolder,
        cluster: FakeCluster,
        dashboard: Dashboard,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        self.folder, self.twin = folder, twin
        self.cluster, self.sent = cluster, list[list[str]]()
        self.dashboard = dashboard
        self.queue: list[SlurmJob] = []
        self.ran: list[tuple[str, ...]] = []
        self.ended: SlurmJob | None = None
        monkeypatch.setattr(slurm_commands, "queue", lambda: self.queue)
        monkeypatch.setattr(slurm_commands, "submit", self._submit)
        monkeypatch.setattr(slurm_commands, "run", lambda *words: self.ran.append(words) or "")
        monkeypatch.setattr(slurm_commands, "ended_job", lambda _: self.ended)
        cluster.is_holding = dashboard.is_holding = True
        minutes = count(step=60.0)  # between two looks: nothing has to wait
        launchers: dict[str, Callable[[], Launcher]] = {
            "Plain host": lambda: LocalLauncher("boot"),
            "Slurm": lambda: SlurmLauncher(SlurmConfig(max_jobs=3), clock=minutes.__next__),
            "Kubernetes": lambda: KubernetesLauncher(KubernetesConfig.model_validate(CLUSTER)),
            "Ray": lambda: RayLauncher(RayConfig(address=dashboard.address)),
        }
        self.launcher = launchers[kind]()

    def _submit(self, options: list[str], _script: Path) -> str:
        self.sent.append(options)
        return JOB

    def _ask(self, spec: object, slots: int = 1, **gang: int) -> RunRequest:
        ranks = Gang(
            node_rank=0, master_address="127.0.0.1", master_port=29400,
            own_address="127.0.0.1", rendezvous_id="r",
            **{"num_nodes": 1, "num_processes": 2, **gang},
        )  # fmt: skip
        devices = [
            RunDevice(kind="slot", index=each, uuid=f"slot-{each}") for each in range(slots)
        ]
        told = {"gang": ranks if gang else None, "devices": tuple(devices), "spec": spec}
        return self.folder.request().model_copy(update=told)

    def _is_taken(self, spec: object, **gang: int) -> bool:
        request = self._ask(spec, **gang)
        try:
            self.launcher.command(request, request.spec, COMMAND, self.folder.path)
        except LaunchRefusedError:
            return False
        return True

    def runs_one_process(self) -> bool:
        return self._is_taken(DrillSpec())

    def trains_over_ranks(self) -> bool:
        return self._is_taken(TrainSpec(), num_processes=2)

    def generates_over_ranks(self) -> bool:
        split = GenerateSpec(model=DemoModel(), split=TensorSplit())
        return self._is_taken(split, num_processes=2)

    def joins_hosts(self) -> bool:
        return self._is_taken(TrainSpec(), num_nodes=2)

    def _submitted(self, request: RunRequest) -> list[str]:
        if isinstance(self.launcher, LocalLauncher):
            return []  # it starts a process: there is nothing to submit
        child.write_json(self.folder.spec, request.model_dump(mode="json"))
        self.launcher.launch(self.folder)
        if isinstance(self.launcher, SlurmLauncher):
            self.launcher.refresh([self.folder])
            return self.sent[-1]
        if isinstance(self.launcher, RayLauncher):
            order = child.read_json(self.folder.path / ORDER)
            kinds = [each.removeprefix(ACCELERATOR) for each in order["bundle"]]
            again = ["--requeue"] if order["restarts"] else []
            return [
                f"--nodes={order['nodes']}",
                *(f"--partition={each}" for each in kinds),
                *again,
            ]
        job = self.cluster.jobs[self.launcher.job_name(self.folder)]
        queue = job["metadata"]["labels"].get(QUEUE, "")
        return [f"--nodes={job['spec'].get('parallelism', 1)}", f"--queue={queue}"]

    def takes_several_nodes_as_one_job(self) -> bool:
        return "--nodes=3" in self._submitted(self._ask(TrainSpec(), slots=3, num_processes=2))

    def requeues_by_itself_when_a_node_is_lost(self) -> bool:
        return "--requeue" in self._submitted(self._ask(TrainSpec(), slots=3, num_processes=2))

    def takes_partition_of_a_launch(self) -> bool:
        return self._takes({"partition": "H100"})

    def takes_account_qos_reservation_of_a_launch(self) -> bool:
        return self._takes({"account": "lab", "qos": "high", "reservation": "night"})

    def takes_queue_and_priority_class_of_a_launch(self) -> bool:
        return self._takes({"queue": "gpu"})

    def _takes(self, options: dict[str, str]) -> bool:
        request = self._ask(TrainSpec(scheduler_options=options))
        try:
            self.launcher.command(request, request.spec, COMMAND, self.folder.path)
        except LaunchRefusedError:
            return False
        return {f"--{name}={value}" for name, value in options.items()} <= set(
            self._submitted(request)
        )

    def says_why_a_job_waits(self) -> bool:
        self._submitted(self._ask(DrillSpec()))
        self.queue = [SlurmJob(JOB, "PENDING", "Resources", f"slipway-{self.folder.attempt_id}")]
        for pods in self.cluster.pods.values():
            told = {"type": "PodScheduled", "status": "False", "message": "Insufficient Resources"}
            pods[0].status = {"phase": "Pending", "conditions": [told]}
        for job in self.dashboard.jobs.values():
            job["status"] = "RUNNING"
        told = {"phase": "waiting", "detail": "Resources are in use", "nodes": []}
        child.write_json(self.folder.path / STATE, told)
        self.launcher.refresh([self.folder])
        return "Resources" in self.launcher.waits_for(self.folder)

    def limits_time_without_a_limit_of_the_job(self) -> bool:
        return bool(self.launcher.adapt({}).get("max_duration_seconds"))

    def tells_a_preemption_from_a_failure(self) -> bool:
        self._submitted(self._ask(DrillSpec()))
        self.ended = SlurmJob(JOB, "PREEMPTED", "", f"slipway-{self.folder.attempt_id}")
        if isinstance(self.launcher, KubernetesLauncher):
            name = self.launcher.job_name(self.folder)
            told = {"type": "DisruptionTarget", "status": "True", "reason": PREEMPTED_POD}
            failed = {"type": "Failed", "status": "True", "reason": "BackoffLimitExceeded"}
            self.cluster.pods[name][0].status = {"phase": "Failed", "conditions": [told]}
            self.cluster.jobs[name]["status"] = {"conditions": [failed]}
        self.launcher.refresh([self.folder])
        end = self.launcher.unrecorded_end(self.folder, Verdict.SUPERVISOR_LOST)
        return end is not None and end.reason is Reason.KILLED_EXTERNALLY

    def cancels_what_waits_in_a_scheduler(self) -> bool:
        self._submitted(self._ask(DrillSpec()))
        self.queue = [SlurmJob(JOB, "PENDING", "Resources", f"slipway-{self.folder.attempt_id}")]
        child.write_json(self.folder.path / child.STOP, {"reason": "stopped_by_user"})
        self.launcher.refresh([self.folder])
        self.launcher.stop(self.folder)
        if isinstance(self.launcher, KubernetesLauncher):
            job = self.cluster.jobs.get(self.launcher.job_name(self.folder))
            return job is None or "deletionTimestamp" in job["metadata"]
        return ("scancel", "--state=PENDING", JOB) in self.ran

    def runs_in_a_container(self) -> bool:
        sent = self._submitted(self._ask(DrillSpec()))
        if isinstance(self.launcher, KubernetesLauncher):
            job = self.cluster.jobs[self.launcher.job_name(self.folder)]
            containers = job["spec"]["template"]["spec"]["containers"]
            return bool(containers[0]["image"] == CLUSTER["image"])
        return any(each.startswith("--container") for each in sent)

    def says_who_ended_a_job(self) -> bool:
        return bool(self.launcher.adapt({}).get("explain_kill"))

    def submits_a_sweep_as_one_array(self) -> bool:
        if isinstance(self.launcher, LocalLauncher):
            return False
        self.launcher.refresh([self.folder, self.twin])
        return any(each.startswith("--array") for options in self.sent for each in options)


ABILITIES: dict[str, Callable[[Trial], bool]] = {
    "One process on one device": Trial.runs_one_process,
    "A training over several ranks of a node": Trial.trains_over_ranks,
    "A generation split over several ranks": Trial.generates_over_ranks,
    "A gang of several enrolled hosts": Trial.joins_hosts,
    "Several nodes as one job": Trial.takes_several_nodes_as_one_job,
    "Starts again by itself when a node is lost": Trial.requeues_by_itself_when_a_node_is_lost,
    "Partition, or kind of nodes, of a launch": Trial.takes_partition_of_a_launch,
    "Account, QOS and reservation of a launch": Trial.takes_account_qos_reservation_of_a_launch,
    "Queue and priority class of a launch": Trial.takes_queue_and_priority_class_of_a_launch,
    "Says what a job waits for outside of Slipway's queue": Trial.says_why_a_job_waits,
    "Cancels a job that waits in a scheduler": Trial.cancels_what_waits_in_a_scheduler,
    "Tells a preemption by others from a failure": Trial.tells_a_preemption_from_a_failure,
    "Says who ended a job from outside": Trial.says_who_ended_a_job,
    "Ends a job that has no limit of its own": Trial.limits_time_without_a_limit_of_the_job,
    "Each job in a container of its own": Trial.runs_in_a_container,
    "A sweep as one array job": Trial.submits_a_sweep_as_one_array,
}
LAUNCHERS = ("Plain host", "Slurm", "Kubernetes", "Ray")


def test_the_table_of_launchers_is_what_they_answer(monkeypatch, attempts, tmp_path, is_rewriting):
    rows = [f"| What | {' | '.join(LAUNCHERS)} |", "|---|---|---|---|---|"]
    with closing(FakeCluster(tmp_path)) as cluster, closing(Dashboard(tmp_path)) as dashboard:
        monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig))
        for number, (words, ask) in enumerate(ABILITIES.items()):
            cells = []
            for kind in LAUNCHERS:
                folder = attempts.make(f"{kind[0].lower()}{number}")
                twin = attempts.make(f"{kind[0].lower()}{number}-twin")
                trial = Trial(kind, folder, twin, cluster, dashboard, monkeypatch)
                cells.append("yes" if ask(trial) else "no")
            rows.append(f"| {words} | {' | '.join(cells)} |")
    table = "\n".join(rows) + "\n"
    text = PAGE.read_text()
    before, _, rest = text.partition(START)
    said, _, after = rest.partition(END)
    if is_rewriting:
        PAGE.write_text(before + START + table + END + after)
        return
    assert said == table
