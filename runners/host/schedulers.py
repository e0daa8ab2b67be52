"""The schedulers to which a host may hand its jobs: a row each, chosen by ``config.json``."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from runners.hub.settings import cache_folder
from runners.jobspec.base import SchedulerKind
from runners.launchers import kubernetes, observing, ray, slurm_commands, slurm_facts
from runners.launchers.kubernetes import KubernetesLauncher
from runners.launchers.ray import RayLauncher
from runners.launchers.scheduler import SchedulerLauncher
from runners.launchers.slurm import SlurmLauncher
from runners.launchers.slurm_commands import SlurmError
from runners.shared.facts import SchedulerFacts
from runners.shared.kubernetes import KubernetesConfig
from runners.shared.observed import ObservedJobReport
from runners.shared.ray import RayConfig
from runners.shared.slurm import SlurmConfig

SLURM_TIMEOUT_SECONDS = 200  # for a free node; otherwise retried later
# With which the client of Kubernetes finds its cluster: the benchmark's environment is its own.
OF_CLUSTER = ("HOME", "KUBECONFIG", "KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT")
ON_NODE = (sys.executable, "-m", "runners.launchers.node_command", ".")


class Scheduler(NamedTuple):
    """What an agent does with a scheduler, each of the host's settings of it."""

    launcher: Callable[[Any], SchedulerLauncher]
    facts: Callable[[Any], SchedulerFacts]
    problem: Callable[[Any], str]  # why a host cannot be enrolled with it, and the way out; or ""
    on_node: Callable[[Any, Sequence[str]], Sequence[str]]  # the command that runs one on a node
    # What it says of others' jobs by their ids; None: it has no such jobs.
    observe: Callable[[Any, Sequence[str]], list[ObservedJobReport]] | None


def _slurm_problem(_config: SlurmConfig) -> str:
    try:
        slurm_commands.partitions()
    except SlurmError as error:
        return f"{error}\nRun this on a machine on which `sinfo` answers, such as a login node."
    return ""


def _kubernetes_problem(config: KubernetesConfig) -> str:
    cache = cache_folder(os.environ)
    if not cache.resolve().is_relative_to(config.mount_path):
        return (
            f"the Hub's cache {cache} is not on the volume at {config.mount_path}: "
            "the pods would not see what the agent finds there. Set HF_HOME to a folder below it."
        )
    if problem := kubernetes.scheduler_facts(config).problem:
        return (
            f"{problem}\n"
            "The account needs create, get, list and delete of jobs, and list and "
            f"deletecollection of pods, in the namespace {config.namespace}."
        )
    return ""


def _by_srun(config: SlurmConfig, command: Sequence[str]) -> Sequence[str]:
    named = [f"SLURM_CONF={os.environ['SLURM_CONF']}"] if "SLURM_CONF" in os.environ else []
    cores = config.options.get("cpus-per-task", "1")
    return (
        "env", f"OMP_NUM_THREADS={cores}", *named,
        "srun", "--quiet", "--job-name=slipway-microbench", "--nodes=1", "--ntasks=1",
        f"--immediate={SLURM_TIMEOUT_SECONDS}", "--time=5", *config.argv(), *command,
    )  # fmt: skip


def _in_pod(_config: KubernetesConfig, command: Sequence[str]) -> Sequence[str]:
    named = [f"{name}={os.environ[name]}" for name in OF_CLUSTER if name in os.environ]
    return ("env", *named, *ON_NODE, *command)


def _ray_problem(config: RayConfig) -> str:
    facts = ray.scheduler_facts(config)
    if facts.problem:
        return (
            f"{facts.problem}\nRay does not answer at {config.address}. Name the address of its "
            "dashboard (ray start --head prints it; its usual port is 8265, and only with "
            "--dashboard-host it is open to other machines), and with --ray-token-file the token "
            "of a cluster that asks for one."
        )
    return ""


def _in_bundle(_config: RayConfig, command: Sequence[str]) -> Sequence[str]:
    return (*ON_NODE, *command)


SCHEDULERS: Mapping[SchedulerKind, Scheduler] = {
    "slurm": Scheduler(
        SlurmLauncher,
        slurm_facts.scheduler_facts,
        _slurm_problem,
        _by_srun,
        observing.observe_slurm,
    ),
    "kubernetes": Scheduler(
        KubernetesLauncher,
        kubernetes.scheduler_facts,
        _kubernetes_problem,
        _in_pod,
        observing.observe_pods,
    ),
    "ray": Scheduler(RayLauncher, ray.scheduler_facts, _ray_problem, _in_bundle, None),
}
