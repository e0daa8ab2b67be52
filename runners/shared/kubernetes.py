"""How a host hands its jobs to a Kubernetes cluster, and the arguments of ``enroll`` for it."""

import argparse
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError
from pydantic import PositiveInt as Positive

from runners.jobspec.base import SchedulerKind, SchedulerOption
from runners.shared.facts import MAX_JOBS

# https://kubernetes.io/docs/concepts/overview/working-with-objects/names/ and /labels/
Name = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$")]
Key = Annotated[
    str, StringConstraints(pattern=r"^([a-z0-9.-]{1,253}/)?[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")
]
Value = Annotated[str, StringConstraints(pattern=r"^([A-Za-z0-9]([A-Za-z0-9._-]{0,62})?)?$")]
Image = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/:@-]{0,500}$")]
Quantity = Annotated[str, StringConstraints(pattern=r"^[0-9]+(\.[0-9]+)?([EPTGMk]i?|Ki|m)?$")]
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")  # in a pod: its own


class KubernetesConfig(BaseModel):
    """Settings of this host's Jobs in a cluster; part of config.json."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    KIND: ClassVar[SchedulerKind] = "kubernetes"

    image: Image  # the agent's own: the same Python at the same path
    volume_claim: Name  # holds the host's folder, and is mounted on every node (ReadWriteMany)
    mount_path: Path  # of the volume: here and in the pods
    namespace: Name = "default"
    context: str = Field(default="", max_length=253)  # of kubeconfig; "": the current one
    gpu_resource: Key = "nvidia.com/gpu"
    gpus: int = Field(default=1, ge=0, le=64)  # of each pod
    cpus: int | None = Field(default=None, ge=1, le=4096)
    memory: Quantity | None = None
    queue: Name | None = None  # a LocalQueue of Kueue
    node_selector: dict[Key, Value] = Field(default_factory=dict)
    tolerations: tuple[Key, ...] = ()  # keys of taints
    priority_class: Name | None = None
    runtime_class: Name | None = None
    service_account: Name | None = None
    image_pull_secret: Name | None = None
    time_limit_minutes: Positive = 24 * 60
    max_jobs: int = Field(default=1, ge=1, le=MAX_JOBS)  # how many may be there at once

    def with_options(self, chosen: Mapping[SchedulerOption, str]) -> "KubernetesConfig":
        """Return the settings of a job that chose its queue or priority class."""
        return self.model_copy(update={str(name): value for name, value in chosen.items()})

    @property
    def gpus_per_node(self) -> int:
        """Return how many GPUs a pod gets: several pods of a job are on nodes apart."""
        return self.gpus

    @property
    def options(self) -> dict[str, str]:
        """Return what is set of every job, in words."""
        resources = {self.gpu_resource: str(self.gpus)} if self.gpus else {}
        chosen = {
            "namespace": self.namespace,
            "image": self.image,
            **resources,
            "cpus": str(self.cpus or ""),
            "memory": self.memory or "",
            "queue": self.queue or "",
            "priority class": self.priority_class or "",
            "nodes": ", ".join(f"{key}={value}" for key, value in self.node_selector.items()),
        }
        return {name: value for name, value in chosen.items() if value}


class KubernetesArgumentError(Exception):
    """An argument is invalid; the text names it, its value and the remedy."""


TEXTS = {
    "image": "of the agent and of every job: it has this Python at this path",
    "volume-claim": "with the host's folder; its access mode is ReadWriteMany",
    "mount-path": "of that volume, here and in the pods",
    "namespace": "of the jobs; default: the agent's own, else default",
    "context": "of kubeconfig; default: the current one",
    "gpu-resource": "such as amd.com/gpu; default: nvidia.com/gpu",
    "memory": "of each pod, such as 64Gi",
    "queue": "a LocalQueue of Kueue",
    "priority-class": "of the pods",
    "runtime-class": "of the pods",
    "service-account": "of the pods; they get no token of it",
    "image-pull-secret": "to fetch the image with",
}


def add(command: argparse.ArgumentParser) -> None:
    """Add the arguments to a parser."""
    group = command.add_argument_group("in a Kubernetes cluster")
    group.add_argument("--kubernetes", action="store_true", help="hand jobs to the cluster")
    for name, words in TEXTS.items():
        group.add_argument(f"--{name}", help=words)
    group.add_argument("--gpus", type=int, help="of each pod; default: 1")
    group.add_argument("--cpus", type=int, help="of each pod")
    group.add_argument("--node-selector", action="append", metavar="LABEL=VALUE",
                       help="a label of the nodes that take jobs; may be repeated")  # fmt: skip
    group.add_argument("--toleration", action="append", metavar="KEY",
                       help="key of a taint of those nodes; may be repeated")  # fmt: skip


def read(options: argparse.Namespace, folder: Path) -> KubernetesConfig | None:
    """Return the configuration of the arguments, or None without ``--kubernetes``.

    ``folder`` is the host's, which has to be on the volume.

    Raises:
        KubernetesArgumentError: the arguments are invalid, or given without ``--kubernetes``.
    """
    names = [*(name.replace("-", "_") for name in TEXTS), "gpus", "cpus"]
    given = {name: getattr(options, name) for name in names}
    stated = {name: value for name, value in given.items() if value is not None}
    pairs = [text.partition("=") for text in options.node_selector or ()]
    if not options.kubernetes:
        lists = [name for name in ("node_selector", "toleration") if getattr(options, name)]
        if stated or lists:
            words = ", ".join(f"--{name.replace('_', '-')}" for name in [*stated, *lists])
            raise KubernetesArgumentError(f"{words}: only for Kubernetes; add --kubernetes")
        return None
    other = ("slurm", "partition", "account", "qos", "gres", "slurm_option", "array_limit")
    if slurms := [name for name in other if getattr(options, name)]:
        words = ", ".join(f"--{name.replace('_', '-')}" for name in slurms)
        raise KubernetesArgumentError(f"{words}: of Slurm, which --kubernetes excludes")
    if unpaired := [key for key, equals, _ in pairs if not equals]:
        raise KubernetesArgumentError(f"--node-selector {unpaired[0]!r}: write LABEL=VALUE")
    if "namespace" not in stated and ACCOUNT.is_file():
        stated["namespace"] = ACCOUNT.read_text().strip()
    limits = {name: getattr(options, name) for name in ("time_limit_minutes", "max_jobs")}
    stated |= {name: value for name, value in limits.items() if value is not None}
    selector = {key: value for key, _, value in pairs}
    chosen = {"node_selector": selector, "tolerations": options.toleration or ()}
    try:
        config = KubernetesConfig.model_validate(stated | chosen)
    except ValidationError as error:
        raise KubernetesArgumentError(_first_fault(error)) from None
    if not folder.expanduser().resolve().is_relative_to(config.mount_path):
        raise KubernetesArgumentError(
            f"--dir {folder} is not on the volume at {config.mount_path}: the pods would not see "
            f"it. Choose a folder below that path"
        )
    return config


def _first_fault(error: ValidationError) -> str:
    first = error.errors()[0]
    name = re.sub("_", "-", str(first["loc"][0]))
    if first["type"] == "missing":
        return f"--kubernetes needs --{name}: {TEXTS[name]}"
    return f"--{name} {first['input']!r}: {first['msg']}"
