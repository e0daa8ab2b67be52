"""The engines of a prefill/decode split, and the GPUs of each."""

import os
from collections.abc import Mapping
from typing import Literal, NamedTuple

from runners.jobs.runtime import BadInputError
from runners.jobspec.engine import EngineOptions, PhaseSplit

VISIBLE = "CUDA_VISIBLE_DEVICES"
Phase = Literal["prefill", "decode"]


class Part(NamedTuple):
    """One engine of several: its phase, its number from 1, and its GPU names."""

    phase: Phase
    number: int
    devices: tuple[str, ...]


def parts_of(
    split: PhaseSplit, options: EngineOptions, env: Mapping[str, str] = os.environ
) -> list[Part]:
    """Return the engines of a split, prefill first, each with its own GPUs.

    Raises:
        BadInputError: the job has fewer GPUs than the engines need.
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
    """Return the job's GPU names; indices if ``CUDA_VISIBLE_DEVICES`` is not set."""
    if VISIBLE not in env:
        return [str(index) for index in range(count)]
    names = [part.strip() for part in env[VISIBLE].split(",") if part.strip()]
    if len(names) < count:
        msg = (
            f"engine_options.split: its engines take {count} GPUs, and the job was given "
            f"{len(names)}; give it {count}, or fewer engines or smaller parallel sizes"
        )
        raise BadInputError(msg)
    return names
