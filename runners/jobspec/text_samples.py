"""Options of text samples that a training generates to show its progress."""

from typing import Annotated

from pydantic import Field, PositiveInt, StringConstraints

from runners.jobspec.base import JobDocument

MOST_PROMPTS = 3
LONGEST_PROMPT = 500  # characters
Prompt = Annotated[str, StringConstraints(min_length=1, max_length=LONGEST_PROMPT, pattern=r"\S")]


class TextSamples(JobDocument):
    """Prompts, interval and length of the samples; default prompt: the held-out text's beginning.

    ``temperature`` 0 is greedy; otherwise tokens are sampled with ``seed``.
    """

    every_steps: PositiveInt = 100
    prompts: tuple[Prompt, ...] = Field(default=(), max_length=MOST_PROMPTS)
    max_tokens: int = Field(default=48, ge=1, le=256)
    temperature: float = Field(default=0.0, ge=0.0, le=5.0)
    seed: int = Field(default=17, ge=0, lt=2**63)
