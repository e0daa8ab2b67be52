"""Experiment trackers, to which a training's metrics are written besides the site."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, Self

from pydantic import Field, model_validator

from runners.jobspec.base import JobDocument

TrackerName = Literal["tensorboard", "mlflow", "wandb", "trackio"]


@dataclass(frozen=True)
class Tracker:
    """A tracker, whose library is alone in the named environment of its name.

    ``secret``: the team's secret that its server asks for, by its library's own name.
    ``has_server``: it writes to an address; all write files of the job without one.
    ``needs_secret``: without the secret it writes files, whatever the address.
    """

    name: TrackerName
    title: str
    secret: str = ""
    has_server: bool = False
    needs_secret: bool = False


TRACKERS: Mapping[TrackerName, Tracker] = MappingProxyType(
    {
        each.name: each
        for each in (
            Tracker("tensorboard", "TensorBoard"),
            Tracker("mlflow", "MLflow", "MLFLOW_TRACKING_TOKEN", has_server=True),
            Tracker(
                "wandb", "Weights & Biases", "WANDB_API_KEY", has_server=True, needs_secret=True
            ),
            Tracker("trackio", "Trackio"),
        )
    }
)


class TrackerOptions(JobDocument):
    """A tracker, and the project, the run and the server to which it writes.

    ``run_name``: empty: the job's id. ``url``: of MLflow the tracking server, without one files of
    the job; of Weights & Biases another server than its own.
    """

    name: TrackerName
    project: str = Field(default="slipway", min_length=1, max_length=120)
    run_name: str = Field(default="", max_length=120)
    url: str = Field(default="", max_length=500, pattern=r"^(https?://\S+)?$")

    @model_validator(mode="after")
    def _has_a_server(self) -> Self:
        if self.url and not TRACKERS[self.name].has_server:
            raise ValueError(
                f"tracker {self.name} writes files of the job and no server; leave url out"
            )
        return self
