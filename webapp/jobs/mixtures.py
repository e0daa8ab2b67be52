"""The data sources that a training mixes: their shares, records and losses."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from pydantic import ValidationError

from runners.jobspec import FileData, HubData, MixedData, UploadedData
from runners.jobspec.base import OneSource, weights_of
from webapp.core.display import percent
from webapp.jobs.models import Attempt, Job
from webapp.metrics.store import read_raw

FIGURES = ("weight", "loss", "reference")
UNKNOWN = "\N{EM DASH}"


@dataclass(frozen=True)
class SourceRow:
    """One data source as displayed; shares are of rows, losses in nats per token."""

    number: int
    text: str
    begun: str
    share: str = UNKNOWN
    loss: str = UNKNOWN
    reference: str = UNKNOWN


@dataclass(frozen=True)
class Mixture:
    """The sources in order; ``moves``: their shares follow their losses."""

    rows: Sequence[SourceRow]
    moves: bool
    how: str


def mixture_of(job: Job) -> Mixture | None:
    """Return a job's data mixture with its current shares; None for a single source.

    After a restart, the newest attempt with reported weights counts.
    """
    data = _mixed(job.spec)
    if data is None:
        return None
    moves = data.weights == "dynamic"
    latest = _newest(job, len(data.parts)) if moves else {}
    rows = [
        _training_row(number, _source_text(part.data), initial, latest)
        for number, (part, initial) in enumerate(
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
    except ValidationError:  # of another version: its charts still work
        return None


def _training_row(
    number: int, text: str, initial: float, latest: Mapping[str, float]
) -> SourceRow:
    weight, loss, reference = (latest.get(f"source{number}_{name}") for name in FIGURES)
    share = UNKNOWN if weight is None else percent(weight)
    losses = (UNKNOWN if each is None else f"{each:.3f}" for each in (loss, reference))
    return SourceRow(number, text, percent(initial), share, *losses)


def _newest(job: Job, count: int) -> dict[str, float]:
    """Return the last value of each figure of each source."""
    names = [f"source{number}_{name}" for number in range(1, count + 1) for name in FIGURES]
    for attempt in job.attempts.filter(node_rank=0).order_by("-number"):
        if latest := _last(attempt, names):
            return latest
    return {}


def _last(attempt: Attempt, names: Sequence[str]) -> dict[str, float]:
    latest = {}
    for name in names:
        values = read_raw(attempt.pk, "job", name).value
        finite = values[np.isfinite(values)]
        if not len(finite):
            return {}
        latest[name] = float(finite[-1])
    return latest


def _source_text(data: OneSource) -> str:
    if isinstance(data, FileData):
        return data.path
    if isinstance(data, HubData):
        return data.name
    return (
        data.name
        if isinstance(data, UploadedData)
        else "the host\N{RIGHT SINGLE QUOTATION MARK}s own text"
    )
