"""Evaluation options: windows of held-out text and tasks of lm-evaluation-harness."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, StringConstraints

MAX_WINDOW = 512  # tokens per window; shorter for a model with fewer positions
TASKS_ENVIRONMENT = "lm_eval"  # the named environment with the harness
TaskName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,99}$")]


def window_of(positions: int) -> tuple[int, int]:
    """Return a window's tokens and its scored tokens, which are its second half."""
    length = min(MAX_WINDOW, positions)
    return length, length // 2


class EvaluationTasks(BaseModel):
    """Tasks by name, from YAML files below ``folder`` or from the host's held-out text.

    Empty ``names`` selects all tasks. ``documents`` limits the documents per task.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    names: tuple[TaskName, ...] = Field(default=(), max_length=64)
    folder: Annotated[str, StringConstraints(min_length=1, max_length=1000)] | None = None
    documents: PositiveInt | None = Field(default=None, le=1_000_000)
