"""Which of a job's GPUs each of several engines gets, and what it does."""

import os
from collections.abc import Mapping
from typing import Literal, NamedTuple

from runners.jobs.runtime import BadInputError
from runners.jobspec.engine import EngineOptions, PhaseSplit

VISIBLE = "CUDA_VISIBLE_DEVICES"
Phase = Literal["prefill", "decode"]


class Part(NamedTuple):
    """One engine of several: what it does, its number from 1, and its GPUs by name."""

    phase: Phase
    number: int
    devices: tuple[str, ...]


def parts_of(
    split: PhaseSplit, options: EngineOptions, env: Mapping[str, str] = os.environ
) -> list[Part]:
    """Return the engines of a split, those that read first, each with GPUs of its own.

    Raises:
        BadInputError: the job was given fewer GPUs than they take.
    """
    names, each = _devices(options.num_devices, env), options.devices_each
    phases: list[tuple[Phase, int]] = [
        *(("prefill", number) for number in range(1, split.prefill_engines + 1)),
        *(("decode", number) for number in range(1, split.decode_engines + 1)),
    ]
    return [
        Part(phase, number, tuple(names[at * each : (at + 1) * each]))
        for at, (phase, number) in enumerate(phases)
    ]


def _devices(count: int, env: Mapping[str, str]) -> list[str]:
    """Return the names of the GPUs that the job was given; where it was given none, numbers."""
    if VISIBLE not in env:
        return [str(index) for index in range(count)]
    found = [name.strip() for name in env[VISIBLE].split(",") if name.strip()]
    if len(found) < count:
        msg = (
            f"engine_options.split: its engines take {count} GPUs, and the job was given "
            f"{len(found)}; give it {count}, or fewer engines or smaller parallel sizes"
        )
        raise BadInputError(msg)
    return found
