"""A ratio of a baseline to a technique, measured in one run: above 1 the technique brings less.

Less of what is in ``of``: processor seconds, bytes, passes. A run says with each ratio when and
where it was taken, so that a kept one stands by itself.
"""

import datetime as dt
import importlib.metadata
import os
import platform
from collections.abc import Mapping
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict, PositiveFloat, PositiveInt

SHARED_LOAD = 0.5  # of a core: below it nobody else worked here to speak of
LIBRARIES = ("torch", "transformers", "accelerate", "torchao", "bitsandbytes", "peft")


class Ratio(NamedTuple):
    """One comparison; ``low`` and ``high`` bound it with 95 % certainty over ``n`` samples."""

    name: str
    value: float
    low: float
    high: float
    n: int
    of: str

    @classmethod
    def exact(cls, name: str, baseline: float, technique: float, of: str) -> "Ratio":
        """Return the ratio of two amounts that every run finds the same."""
        value = baseline / technique
        return cls(name, value, value, value, 1, of)


class KeptRatio(BaseModel):
    """A ratio with when, where and by which command it was measured."""

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
        """Return a ratio that was measured here a moment ago; ``load`` was there before it."""
        return cls(
            **ratio._asdict(),
            date=dt.datetime.now(dt.UTC).date(),
            versions=versions(),
            machine=machine_class(load),
            command=command,
        )


def versions() -> dict[str, str]:
    """Return the versions of Python and of the libraries that jobs compute with."""
    found = {"python": platform.python_version()}
    for name in LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def machine_class(load: float = 0.0) -> str:
    """Return what kind of machine this is, without a name of its own, and whether it was shared.

    ``load`` is how many others computed on average in the minute before.
    """
    cores = len(os.sched_getaffinity(0))
    kind = f"{cores} cores, {platform.machine()}, {platform.system()}"
    return f"{kind}, shared (load {load:.1f} before)" if load >= SHARED_LOAD else kind
