"""How a host hands its jobs to a Ray cluster, and the arguments of ``enroll`` for it."""

import argparse
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
)
from pydantic import PositiveInt as Positive

from runners.jobspec.base import SchedulerKind, SchedulerOption
from runners.shared.facts import MAX_JOBS


def _check_address(text: str) -> str:
    """Return an address that has a host, and a port below 65,536 if it has one.

    Raises:
        ValueError: it has not.
    """
    parts = urlsplit(text)
    if not parts.hostname or parts.port == 0:
        raise ValueError("the address needs a host, and its port is a number from 1 to 65,535")
    return text


Address = Annotated[
    str,
    StringConstraints(pattern=r"^https?://[A-Za-z0-9.\[\]:_-]+(/[A-Za-z0-9._~/-]*)?$"),
    AfterValidator(_check_address),
]
Program = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_./+-]{1,500}$")]
Quantity = Annotated[str, StringConstraints(pattern=r"^[1-9][0-9]{0,9}[KMGT]i$")]
# The name of Ray's resource without its prefix, such as H100 or TPU-V5P.
AcceleratorType = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]{1,60}$")]
UNITS = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
ACCELERATOR = "accelerator_type:"  # of Ray's resources; a task takes a thousandth of it
SHARE = 0.001


class RayConfig(BaseModel):
    """Settings of this host's jobs in a Ray cluster; part of config.json."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    KIND: ClassVar[SchedulerKind] = "ray"

    address: Address  # of the dashboard and the Jobs API, such as http://head:8265
    python: Program = "python"  # the cluster's own on its head node: the one that has Ray
    token_file: Path | None = None  # of a cluster with RAY_AUTH_MODE=token
    gpus: int = Field(default=1, ge=0, le=64)  # of each node of a job
    cpus: int = Field(default=1, ge=1, le=4096)
    memory: Quantity | None = None
    accelerator_type: AcceleratorType | None = None  # None: any node with the resources
    autoscaling: bool = False  # the cluster adds nodes: it may take more than it has now
    time_limit_minutes: Positive = 24 * 60
    max_jobs: int = Field(default=1, ge=1, le=MAX_JOBS)  # how many may be there at once

    def with_options(self, chosen: Mapping[SchedulerOption, str]) -> "RayConfig":
        """Return the settings of a job that chose its kind of nodes."""
        kind = chosen.get("partition")
        return self.model_copy(update={"accelerator_type": kind}) if kind else self

    @property
    def gpus_per_node(self) -> int:
        """Return how many GPUs a job gets of each node."""
        return self.gpus

    @property
    def bundle(self) -> dict[str, float]:
        """Return what a job takes of each node, by the names of Ray's resources; memory in bytes.

        https://docs.ray.io/en/latest/ray-core/scheduling/resources.html
        """
        memory = self.memory and int(self.memory[:-2]) * UNITS[self.memory[-2:]]
        stated = {"CPU": self.cpus, "GPU": self.gpus, "memory": memory or 0}
        bundle = {name: float(size) for name, size in stated.items() if size}
        if self.accelerator_type:
            bundle[f"{ACCELERATOR}{self.accelerator_type}"] = SHARE
        return bundle

    @property
    def options(self) -> dict[str, str]:
        """Return what is set of every job, in words."""
        chosen = {
            "address": self.address,
            "gpus": str(self.gpus),
            "cpus": str(self.cpus),
            "memory": self.memory or "",
            "partition": self.accelerator_type or "",
        }
        return {name: value for name, value in chosen.items() if value}


class RayArgumentError(Exception):
    """An argument is invalid; the text names it, its value and the remedy."""


OWN = ("ray_python", "ray_token_file", "ray_autoscaling", "accelerator_type")
SHARED = ("gpus", "cpus", "memory", "time_limit_minutes", "max_jobs")
# Arguments of the other schedulers.
OTHERS = (
    "slurm", "partition", "account", "qos", "gres", "slurm_option", "kubernetes", "image",
    "volume_claim", "mount_path", "namespace", "context", "gpu_resource", "queue",
    "priority_class", "runtime_class", "service_account", "image_pull_secret", "node_selector",
    "toleration",
)  # fmt: skip


def add(command: argparse.ArgumentParser) -> None:
    """Add the arguments to a parser; those of a job's size are Kubernetes', too."""
    group = command.add_argument_group("in a Ray cluster")
    group.add_argument(
        "--ray",
        metavar="ADDRESS",
        help="hand jobs to the cluster at its dashboard, such as http://head:8265",
    )
    group.add_argument(
        "--ray-python",
        metavar="PROGRAM",
        help="the Python of the head node that has Ray; default: python",
    )
    group.add_argument(
        "--ray-token-file",
        type=Path,
        metavar="FILE",
        help="with the token of a cluster that asks for one",
    )
    group.add_argument(
        "--ray-autoscaling",
        action="store_true",
        help="the cluster adds nodes: a launch may ask for more than it has",
    )
    group.add_argument(
        "--accelerator-type",
        metavar="TYPE",
        help="of the nodes that take jobs, as Ray names it: H100; default: any",
    )


def read(options: argparse.Namespace) -> RayConfig | None:
    """Return the configuration of the arguments, or None without ``--ray``.

    Raises:
        RayArgumentError: the arguments are invalid, or given without ``--ray``.
    """
    if not options.ray:
        if given := [name for name in OWN if getattr(options, name)]:
            raise RayArgumentError(f"{_words(given)}: only for Ray; add --ray ADDRESS")
        return None
    if given := [name for name in OTHERS if getattr(options, name)]:
        raise RayArgumentError(f"{_words(given)}: of another scheduler, which --ray excludes")
    stated = {name: getattr(options, name) for name in (*OWN, *SHARED)}
    named = {name.removeprefix("ray_"): value for name, value in stated.items()}
    token_file = named["token_file"]
    if token_file is not None:
        named["token_file"] = token_file.expanduser().resolve()
        if not named["token_file"].is_file():
            raise RayArgumentError(f"--ray-token-file {token_file}: there is no such file")
    chosen = {name: value for name, value in named.items() if value is not None}
    try:
        return RayConfig.model_validate({"address": options.ray.rstrip("/"), **chosen})
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        argument = {"address": "ray", "python": "ray_python"}.get(name, name)
        raise RayArgumentError(
            f"{_words([argument])} {first['input']!r}: {_remedy(first)}"
        ) from None


def _words(names: list[str]) -> str:
    return ", ".join(f"--{re.sub('_', '-', name)}" for name in names)


def _remedy(fault: Mapping[str, object]) -> str:
    """Return what to write instead: of the two with a form of their own, an example."""
    examples = {
        "address": "write the address of its dashboard, such as http://head:8265",
        "memory": "write a whole number with Ki, Mi, Gi or Ti, such as 64Gi",
    }
    where = fault["loc"]
    name = str(where[0]) if isinstance(where, tuple) else ""
    return examples.get(name, str(fault["msg"]))
