"""How a host hands its jobs to Slurm, and the arguments of ``enroll`` for it."""

import argparse
import re
from collections.abc import Mapping
from typing import Annotated, ClassVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PositiveInt, ValidationError

from runners.jobspec.base import SchedulerKind, SchedulerOption
from runners.shared.facts import MAX_JOBS
from runners.shared.schedulers import gpus_of_gres

# Options of sbatch and srun for placement, accounting and resources. None of them names a
# program, a file or an environment, which only the agent sets.
ALLOWED = (
    "account", "constraint", "cpus-per-task", "exclude", "gpus", "gres", "licenses", "mem",
    "nodelist", "partition", "qos", "reservation", "tmp",
)  # fmt: skip
VALUE = re.compile(r"[A-Za-z0-9_.:=,@+\[\]&|*/()-]{1,200}")


def checked_options(options: dict[str, str]) -> dict[str, str]:
    """Return the options if they are allowed.

    Raises:
        ValueError: an option is not on the list, or has an invalid value.
    """
    for name, value in options.items():
        if name not in ALLOWED:
            raise ValueError(f"--{name} is not among the options allowed: {', '.join(ALLOWED)}")
        if not VALUE.fullmatch(value):
            raise ValueError(f"--{name}={value!r} is not a valid value of that option")
    return options


Options = Annotated[dict[str, str], AfterValidator(checked_options)]


class SlurmConfig(BaseModel):
    """Slurm submission settings of this host; part of config.json."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    KIND: ClassVar[SchedulerKind] = "slurm"

    options: Options = Field(default_factory=dict)
    time_limit_minutes: PositiveInt = 24 * 60
    max_jobs: int = Field(default=1, ge=1, le=MAX_JOBS)  # how many may be in Slurm at once
    # How many tasks of one array run at once, the rest waits in Slurm; None: as Slurm decides.
    array_limit: int | None = Field(default=None, ge=1, le=MAX_JOBS)

    @property
    def gpus_per_node(self) -> int:
        """Return how many GPUs ``gres`` requests of each node, such as ``gpu:h100:4``."""
        return gpus_of_gres(self.options.get("gres", ""))

    def argv(self, chosen: Mapping[SchedulerOption, str] | None = None) -> list[str]:
        """Return the options as arguments; those that a job chose come before the host's."""
        options = self.options | {str(name): value for name, value in (chosen or {}).items()}
        return [f"--{name}={value}" for name, value in sorted(options.items())]


# The Slurm arguments of ``python -m runners enroll``.


OPTION = "--slurm-option"


class SlurmArgumentError(Exception):
    """An argument is invalid; the text names it, its value and the remedy."""


def add(command: argparse.ArgumentParser) -> None:
    """Add the arguments to a parser."""
    group = command.add_argument_group("on a Slurm login node")
    group.add_argument("--slurm", action="store_true", help="hand jobs to Slurm with sbatch")
    for name, words in (
        ("partition", "where jobs run; default: the cluster's own"),
        ("account", "whom they are charged to"),
        ("qos", "their quality of service"),
        ("gres", "what each takes of a node, such as gpu:1"),
    ):
        group.add_argument(f"--{name}", help=words)
    group.add_argument(
        OPTION, action="append", default=[], metavar="NAME=VALUE",
        help=f"another option of every job; allowed: {', '.join(ALLOWED)}",
    )  # fmt: skip
    group.add_argument("--time-limit-minutes", type=int, help="of a job; default: a day")
    group.add_argument("--max-jobs", type=int, help="how many are in Slurm at once; default: 1")
    group.add_argument(
        "--array-limit", type=int,
        help="how many of the jobs that are sent as one array run at once; default: no limit",
    )  # fmt: skip


def read(options: argparse.Namespace) -> SlurmConfig | None:
    """Return the Slurm configuration of the arguments, or None without ``--slurm``.

    Raises:
        SlurmArgumentError: the arguments are invalid, or given without ``--slurm``.
    """
    named = {name: getattr(options, name) for name in ("partition", "account", "qos", "gres")}
    chosen = {name: value for name, value in named.items() if value}
    for text in options.slurm_option:
        name, equals, value = text.removeprefix("--").partition("=")
        if not equals:
            raise SlurmArgumentError(f"{OPTION} {text!r} is not of the form NAME=VALUE")
        chosen[name] = value
    names = ("time_limit_minutes", "max_jobs", "array_limit")
    limits = {name: getattr(options, name) for name in names}
    limits = {name: value for name, value in limits.items() if value is not None}
    if not options.slurm:
        if chosen or limits:
            given = ", ".join([*chosen, *limits])
            raise SlurmArgumentError(f"{given}: these hold for Slurm alone; add --slurm")
        return None
    try:
        return SlurmConfig.model_validate({"options": chosen, **limits})
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise SlurmArgumentError(
            f"{field}: {first['msg'].removeprefix('Value error, ')}"
        ) from None
