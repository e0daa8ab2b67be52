"""What an evaluation reads: windows of held-out text, and tasks of lm-evaluation-harness."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, StringConstraints

MAX_WINDOW = 512  # tokens of a window; a model of fewer positions has shorter ones
TASKS_ENVIRONMENT = "lm_eval"  # the named environment in which the harness is
TaskName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,99}$")]


def window_of(positions: int) -> tuple[int, int]:
    """Return the tokens of a window and those of them that are scored: its second half."""
    length = min(MAX_WINDOW, positions)
    return length, length // 2


class EvaluationTasks(BaseModel):
    """Tasks by ``names``, of YAML files below ``folder`` or of the host's own held-out text.

    No names stand for all that there are. ``documents`` is the most that are read of each.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    names: tuple[TaskName, ...] = Field(default=(), max_length=64)
    folder: Annotated[str, StringConstraints(min_length=1, max_length=1000)] | None = None
    documents: PositiveInt | None = Field(default=None, le=1_000_000)
