"""The sources that a training mixes: what each gives, as its page shows it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from pydantic import ValidationError

from runners.jobspec import FileData, MixedData, UploadedData
from runners.jobspec.data import OneSource, weights_of
from webapp.core.units import percent
from webapp.jobs.models import Attempt, Job
from webapp.metrics.read import read_raw

FIGURES = ("weight", "loss", "reference")
UNKNOWN = "\N{EM DASH}"


@dataclass(frozen=True)
class SourceRow:
    """One source, each figure as it is shown; shares are of the rows, losses in nats a token."""

    number: int
    text: str
    begun: str
    share: str = UNKNOWN
    loss: str = UNKNOWN
    reference: str = UNKNOWN


@dataclass(frozen=True)
class Mixture:
    """The sources in their order; ``moves``: their shares follow their losses."""

    rows: Sequence[SourceRow]
    moves: bool
    how: str


def mixture_of(job: Job) -> Mixture | None:
    """Return what a job mixes, with the shares now in force; None where it has one source.

    After a restart the newest attempt whose weights moved speaks.
    """
    data = _mixed(job.spec)
    if data is None:
        return None
    moves = data.weights == "dynamic"
    told = _newest(job, len(data.parts)) if moves else {}
    rows = [
        _row(number, _text(part.data), begun, told)
        for number, (part, begun) in enumerate(
            zip(data.parts, weights_of(data), strict=True), start=1
        )
    ]
    how = f"moves every {data.update_every_steps:,} steps" if moves else "fixed shares of the rows"
    return Mixture(rows, moves, how)


def _mixed(spec: Mapping[str, object]) -> MixedData | None:
    data = spec.get("data")
    if not isinstance(data, Mapping) or data.get("source") != "mixed":
        return None
    try:
        return MixedData.model_validate(data)
    except ValidationError:  # of another version: its charts are there all the same
        return None


def _row(number: int, text: str, begun: float, told: Mapping[str, float]) -> SourceRow:
    weight, loss, reference = (told.get(f"source{number}_{name}") for name in FIGURES)
    share = UNKNOWN if weight is None else percent(weight)
    losses = (UNKNOWN if each is None else f"{each:.3f}" for each in (loss, reference))
    return SourceRow(number, text, percent(begun), share, *losses)


def _newest(job: Job, count: int) -> dict[str, float]:
    """Return the last value of each figure of each source."""
    names = [f"source{number}_{name}" for number in range(1, count + 1) for name in FIGURES]
    for attempt in job.attempts.filter(node_rank=0).order_by("-number"):
        if found := _last(attempt, names):
            return found
    return {}


def _last(attempt: Attempt, names: Sequence[str]) -> dict[str, float]:
    found = {}
    for name in names:
        values = read_raw(attempt.pk, "job", name).value
        known = values[np.isfinite(values)]
        if not len(known):
            return {}
        found[name] = float(known[-1])
    return found


def _text(data: OneSource) -> str:
    if isinstance(data, FileData):
        return data.path
    return (
        data.name
        if isinstance(data, UploadedData)
        else "the host\N{RIGHT SINGLE QUOTATION MARK}s own text"
    )
