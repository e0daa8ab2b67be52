"""The stages of a proof, in their order."""

from typing import Literal, get_args

StageName = Literal["identity", "rates", "correctness", "speed", "jobs", "distributed"]
STAGES: tuple[StageName, ...] = get_args(StageName)
