"""What a host reads of a scheduler's job that somebody else started: see ``ObservedJobReport``."""

from typing import Annotated

from pydantic import BeforeValidator, Field, NonNegativeInt

from runners.jobspec.base import Figure, Message, Name, Sentence, TimestampMs, truncate
from runners.shared.facts import OtherJobFacts

MOST_OBSERVED = 50  # jobs of one host
MOST_LINES = 60  # of a log, its last ones
LINE_CHARACTERS = 500
MOST_ADDRESSES = 4
LogLine = Annotated[str, BeforeValidator(lambda text: truncate(text, LINE_CHARACTERS))]


class ObservedJobReport(Message):
    """One job of somebody else as its scheduler and its log tell of it; nothing of it is changed.

    ``figures`` are those of the log's last lines that say them, in the unit of the name's ending.
    """

    job_id: Name
    facts: OtherJobFacts | None = None  # None: the scheduler does not tell; ``problem`` says why
    problem: Sentence = ""
    has_ended: bool = False
    started_at_ms: TimestampMs | None = None
    ended_at_ms: TimestampMs | None = None
    exit_code: int | None = Field(default=None, ge=-(2**31), le=2**31)
    signal: NonNegativeInt | None = Field(default=None, le=255)  # that ended it; None: none
    log_path: Sentence = ""  # of its output, on the machines of the cluster
    log: tuple[LogLine, ...] = Field(default=(), max_length=MOST_LINES, fail_fast=True)
    log_problem: Sentence = ""  # why there are no lines
    figures: dict[Name, Figure] = Field(default_factory=dict, max_length=16)
    # At which its log says that it serves, with the name of its machine: http://n1:8000.
    addresses: tuple[Name, ...] = Field(default=(), max_length=MOST_ADDRESSES, fail_fast=True)
