"""Measured ratios of a baseline to a technique: above 1 the technique uses less.

``of`` is the quantity: processor seconds, bytes, passes. Each stored ratio includes when and
where it was measured.
"""

import datetime as dt
import importlib.metadata
import os
import platform
from collections.abc import Mapping
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict, PositiveFloat, PositiveInt

SHARED_LOAD = 0.5  # of a core: below it the machine counts as idle
LIBRARIES = ("torch", "transformers", "accelerate", "torchao", "bitsandbytes", "peft")


class Ratio(NamedTuple):
    """One comparison; ``low`` and ``high`` are its 95 % confidence interval over ``n`` samples."""

    name: str
    value: float
    low: float
    high: float
    n: int
    of: str

    @classmethod
    def exact(cls, name: str, baseline: float, technique: float, of: str) -> "Ratio":
        """Return the ratio of two deterministic amounts."""
        value = baseline / technique
        return cls(name, value, value, value, 1, of)


class KeptRatio(BaseModel):
    """A ratio with date, machine and command of its measurement."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    value: PositiveFloat
    low: PositiveFloat
    high: PositiveFloat
    n: PositiveInt
    of: str
    date: dt.date
    versions: Mapping[str, str]
    machine: str
    command: str

    @classmethod
    def taken_now(cls, ratio: Ratio, command: str, load: float = 0.0) -> "KeptRatio":
        """Return a just measured ratio with its context; ``load`` is the load before it."""
        return cls(
            **ratio._asdict(),
            date=dt.datetime.now(dt.UTC).date(),
            versions=versions(),
            machine=machine_class(load),
            command=command,
        )


def versions() -> dict[str, str]:
    """Return the versions of Python and of the jobs' libraries."""
    installed = {"python": platform.python_version()}
    for name in LIBRARIES:
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return installed


def machine_class(load: float = 0.0) -> str:
    """Return an anonymous description of this machine, and whether it was shared.

    ``load`` is the load average of the preceding minute.
    """
    cores = len(os.sched_getaffinity(0))
    kind = f"{cores} cores, {platform.machine()}, {platform.system()}"
    return f"{kind}, shared (load {load:.1f} before)" if load >= SHARED_LOAD else kind
