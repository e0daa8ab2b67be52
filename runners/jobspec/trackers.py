"""Experiment trackers, to which a training's metrics are written besides the site."""

import ipaddress
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, model_validator

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


_NO_NAME = re.compile(r"^\.|[/\\\x00-\x1f\x7f]")


def _check_name(name: str) -> str:
    if _NO_NAME.search(name):
        raise ValueError(
            f"{name[:80]!r} is no name of a project or run: a folder may be named after it, so it "
            "has no slash, backslash or control character, and does not begin with a full stop"
        )
    return name


PlainName = Annotated[str, AfterValidator(_check_name)]


class TrackerOptions(JobDocument):
    """A tracker, and the project, the run and the server to which it writes.

    ``run_name``: empty: the job's id. ``url``: of MLflow the tracking server, without one files of
    the job; of Weights & Biases another server than its own.
    """

    name: TrackerName
    project: PlainName = Field(default="slipway", min_length=1, max_length=120)
    run_name: PlainName = Field(default="", max_length=120)
    url: str = Field(default="", max_length=500, pattern=r"^(https?://\S+)?$")

    @model_validator(mode="after")
    def _has_a_server(self) -> Self:
        if self.url and not TRACKERS[self.name].has_server:
            raise ValueError(
                f"tracker {self.name} writes files of the job and no server; leave url out"
            )
        return self

    @model_validator(mode="after")
    def _has_an_address(self) -> Self:
        try:
            parts = urlsplit(self.url)
            _ = parts.port
        except ValueError as error:
            raise ValueError(f"url is no address: {error}") from None
        if self.url and not parts.hostname:
            raise ValueError(f"url is {self.url[:80]!r}, which names no host")
        if "@" in parts.netloc:
            raise ValueError(
                f"url has a user or a password, which every reader of the job would see; store "
                f"the key as the team's secret {TRACKERS[self.name].secret}, and leave it out here"
            )
        return self

    def secret_among(self, secrets: Collection[str]) -> str:
        """Return which of a job's secrets goes to the server at ``url``, "" if none does."""
        secret = TRACKERS[self.name].secret
        return secret if self.url and secret in secrets else ""

    def check_secrets(self, secrets: Collection[str]) -> None:
        """Check that no secret of a job travels readable.

        Raises:
            ValueError: one goes to another machine by http.
        """
        secret, parts = self.secret_among(secrets), urlsplit(self.url)
        if secret and parts.scheme != "https" and not _is_loopback(parts.hostname or ""):
            raise ValueError(
                f"url is {self.url[:80]!r}: the secret {secret} would travel unencrypted; "
                f"give an address with https, or launch the job without {secret}"
            )

    def is_at(self, addresses: Iterable[str]) -> bool:
        """Return whether ``url`` is one of some addresses; a slash at the end does not count."""
        return self.url.rstrip("/") in {each.rstrip("/") for each in addresses}


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
