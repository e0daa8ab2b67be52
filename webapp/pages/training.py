"""Parts of a training's page: the data sources that it mixes, and its text samples."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
from pydantic import ValidationError

from runners.jobspec import FileData, MixedData, UploadedData
from runners.jobspec.base import OneSource, weights_of
from webapp.core.display import percent
from webapp.jobs.models import Artefact, Attempt, Job
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
    return (
        data.name
        if isinstance(data, UploadedData)
        else "the host\N{RIGHT SINGLE QUOTATION MARK}s own text"
    )


# Text samples that a training generated, for its page.


NAME = "samples"
LONGEST = 2000  # characters shown per text
MOST_ROWS = 60
BLANK_LINES = re.compile(r"\n{4,}")  # untrained models may generate long runs of blank lines


class Sample(NamedTuple):
    """A prompt and its continuation."""

    prompt: str
    continuation: str


class SampledStep(NamedTuple):
    """The samples of one step; ``is_final``: by the final weights."""

    step: int
    is_final: bool
    samples: tuple[Sample, ...]


class Samples(NamedTuple):
    """The sampled steps, newest first, and how they were generated."""

    steps: tuple[SampledStep, ...]
    how: str


def samples_of(job: Job) -> Samples | None:
    """Return the text samples of the job's current attempt; None if none is readable.

    All values from a host are treated as plain text.
    """
    artefact = Artefact.objects.filter(
        attempt=job.current_attempt, name=NAME, kind="report"
    ).first()
    facts = artefact.facts if artefact and isinstance(artefact.facts, dict) else {}
    stored = facts.get("samples")
    rows = [each for each in stored if _is_sample(each)] if isinstance(stored, list) else []
    steps = [
        SampledStep(step, is_final, tuple(map(_sample, step_rows)))
        for (step, is_final), step_rows in groupby(rows[-MOST_ROWS:], _written_by)
    ]
    how = facts.get("how")
    return (
        Samples(tuple(steps[::-1]), _text(how) if isinstance(how, str) else "") if rows else None
    )


def _written_by(row: Mapping[str, Any]) -> tuple[int, bool]:
    return row["step"], row.get("is_final") is True


def _sample(row: Mapping[str, Any]) -> Sample:
    return Sample(_text(row["prompt"]), _text(row["continuation"]))


def _is_sample(each: object) -> bool:
    if not isinstance(each, Mapping):
        return False
    is_step = isinstance(each.get("step"), int) and not isinstance(each["step"], bool)
    return is_step and all(isinstance(each.get(key), str) for key in ("prompt", "continuation"))


def _text(text: str) -> str:
    text = BLANK_LINES.sub(lambda run: f"\n↵ \N{MULTIPLICATION SIGN} {len(run[0])}\n", text)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}\N{HORIZONTAL ELLIPSIS}"
