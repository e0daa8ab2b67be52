"""What a Slurm job of ours may ask for: a closed list of options with plain values."""

import re
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PositiveInt

# Options of sbatch and srun that choose where, for whom and with what a job runs. None of them
# names a program, a file or an environment: those are ours to set.
ALLOWED = (
    "account", "constraint", "cpus-per-task", "exclude", "gpus", "gres", "licenses", "mem",
    "nodelist", "partition", "qos", "reservation", "tmp",
)  # fmt: skip
VALUE = re.compile(r"[A-Za-z0-9_.:=,@+\[\]&|*/()-]{1,200}")


def checked_options(options: dict[str, str]) -> dict[str, str]:
    """Return the options.

    Raises:
        ValueError: one is not on the list, or has a value that none of them takes.
    """
    for name, value in options.items():
        if name not in ALLOWED:
            raise ValueError(f"--{name} is not among the options allowed: {', '.join(ALLOWED)}")
        if not VALUE.fullmatch(value):
            raise ValueError(f"--{name}={value!r} is no value of that option")
    return options


Options = Annotated[dict[str, str], AfterValidator(checked_options)]


class SlurmConfig(BaseModel):
    """How jobs of this host are handed to Slurm; part of config.json."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    options: Options = Field(default_factory=dict)
    time_limit_minutes: PositiveInt = 24 * 60
    max_jobs: int = Field(default=1, ge=1, le=256)  # how many may be in Slurm at once

    def argv(self) -> list[str]:
        """Return the options as arguments."""
        return [f"--{name}={value}" for name, value in sorted(self.options.items())]
