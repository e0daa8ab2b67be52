"""Text that a training's weights wrote on the way, as its page shows it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from webapp.jobs.models import Artefact, Job

NAME = "samples"
LONGEST = 2000  # characters of a text that are shown
MOST_ROWS = 60


@dataclass(frozen=True)
class SampleRow:
    """A prompt and its continuation by the weights of a step; ``is_final``: those that stay."""

    step: int
    prompt: str
    continuation: str
    is_final: bool


@dataclass(frozen=True)
class Samples:
    """The rows, newest step first, and how they were written."""

    rows: tuple[SampleRow, ...]
    how: str


def samples_of(job: Job) -> Samples | None:
    """Return what the job's current attempt wrote; None where it wrote nothing that is readable.

    What a host says is taken for text alone, whatever it holds.
    """
    found = Artefact.objects.filter(attempt=job.current_attempt, name=NAME, kind="report").first()
    facts = found.facts if found and isinstance(found.facts, dict) else {}
    rows = tuple(_rows(facts.get("samples")))[-MOST_ROWS:]
    how = facts.get("how")
    return Samples(rows[::-1], _text(how) if isinstance(how, str) else "") if rows else None


def _rows(samples: object) -> Iterator[SampleRow]:
    for each in samples if isinstance(samples, list) else ():
        if not isinstance(each, Mapping) or not _is_sample(each):
            continue
        texts = _text(each["prompt"]), _text(each["continuation"])
        yield SampleRow(each["step"], *texts, is_final=each.get("is_final") is True)


def _is_sample(each: Mapping[str, Any]) -> bool:
    is_step = isinstance(each.get("step"), int) and not isinstance(each["step"], bool)
    return is_step and all(isinstance(each.get(key), str) for key in ("prompt", "continuation"))


def _text(said: str) -> str:
    return said if len(said) <= LONGEST else f"{said[:LONGEST]}\N{HORIZONTAL ELLIPSIS}"
