"""The text that a training run generated at its validations."""

import re
from collections.abc import Mapping
from itertools import groupby
from typing import Any, NamedTuple

from webapp.jobs.models import Artefact, Job

NAME = "samples"
LONGEST = 2000  # characters shown per text
MOST_ROWS = 60
BLANK_LINES = re.compile(r"\n{4,}")  # untrained models may generate long runs of blank lines


class Sample(NamedTuple):
    """A prompt and its continuation; ``note``: what is known of it, such as its reward."""

    prompt: str
    continuation: str
    note: str


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
    note = row.get("note")
    texts = row["prompt"], row["continuation"], note if isinstance(note, str) else ""
    return Sample(*map(_text, texts))


def _is_sample(each: object) -> bool:
    if not isinstance(each, Mapping):
        return False
    is_step = isinstance(each.get("step"), int) and not isinstance(each["step"], bool)
    return is_step and all(isinstance(each.get(key), str) for key in ("prompt", "continuation"))


def _text(text: str) -> str:
    text = BLANK_LINES.sub(lambda run: f"\n↵ \N{MULTIPLICATION SIGN} {len(run[0])}\n", text)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}\N{HORIZONTAL ELLIPSIS}"
