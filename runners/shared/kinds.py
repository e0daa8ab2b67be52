"""Kinds of what hosts report: stages of environments, events and artefacts of attempts."""

from typing import Literal

EnvironmentStage = Literal["absent", "building", "ready", "failed", "outdated"]
EventKind = Literal[
    "started",  # StartedBody
    "phase",  # PhaseBody
    "progress",  # ProgressBody
    "metric",  # MetricPoint
    "log",  # LogBody
    "result",  # ResultBody
    "artefact",  # ArtefactBody
    "endpoint",  # EndpointBody
    "exited",  # ExitRecord
]
ArtefactKind = Literal["model", "adapter", "report"]
