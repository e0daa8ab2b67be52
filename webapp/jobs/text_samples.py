"""Text that a training's weights wrote on the way, as its page shows it."""

import re
from collections.abc import Mapping
from itertools import groupby
from typing import Any, NamedTuple

from webapp.jobs.models import Artefact, Job

NAME = "samples"
LONGEST = 2000  # characters of a text that are shown
MOST_ROWS = 60
BLANK_LINES = re.compile(r"\n{4,}")  # what an untaught model may write and nothing else


class Sample(NamedTuple):
    """A prompt, and how the weights continued it."""

    prompt: str
    continuation: str


class SampledStep(NamedTuple):
    """What the weights of a step wrote; ``is_final``: those that stay."""

    step: int
    is_final: bool
    samples: tuple[Sample, ...]


class Samples(NamedTuple):
    """The steps, newest first, and how their texts were written."""

    steps: tuple[SampledStep, ...]
    how: str


def samples_of(job: Job) -> Samples | None:
    """Return what the job's current attempt wrote; None where it wrote nothing that is readable.

    What a host says is taken for text alone, whatever it holds.
    """
    found = Artefact.objects.filter(attempt=job.current_attempt, name=NAME, kind="report").first()
    facts = found.facts if found and isinstance(found.facts, dict) else {}
    said = facts.get("samples")
    rows = [each for each in said if _is_sample(each)] if isinstance(said, list) else []
    steps = [
        SampledStep(step, is_final, tuple(map(_sample, own)))
        for (step, is_final), own in groupby(rows[-MOST_ROWS:], _written_by)
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


def _text(said: str) -> str:
    said = BLANK_LINES.sub(lambda run: f"\n↵ \N{MULTIPLICATION SIGN} {len(run[0])}\n", said)
    return said if len(said) <= LONGEST else f"{said[:LONGEST]}\N{HORIZONTAL ELLIPSIS}"
