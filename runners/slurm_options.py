"""Allowed options of our Slurm jobs: a closed list with plain values."""

import re
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PositiveInt

from runners.scheduler_messages import MAX_JOBS

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
            raise ValueError(f"--{name}={value!r} is no value of that option")
    return options


Options = Annotated[dict[str, str], AfterValidator(checked_options)]


class SlurmConfig(BaseModel):
    """Slurm submission settings of this host; part of config.json."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    options: Options = Field(default_factory=dict)
    time_limit_minutes: PositiveInt = 24 * 60
    max_jobs: int = Field(default=1, ge=1, le=MAX_JOBS)  # how many may be in Slurm at once

    def argv(self) -> list[str]:
        """Return the options as arguments."""
        return [f"--{name}={value}" for name, value in sorted(self.options.items())]
