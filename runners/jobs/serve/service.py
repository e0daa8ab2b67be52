"""What an endpoint is at this moment: loading, ready, draining or failed; and with which model."""

import time
from typing import Any, Literal

from runners.jobs.serve.contract import Ready, Relay
from runners.jobs.serve.figures import Figures
from runners.jobspec import ServeSpec

State = Literal["loading", "ready", "draining", "failed"]


class Service:
    """The endpoint as its door sees it."""

    def __init__(self, spec: ServeSpec) -> None:
        self.spec = spec
        self.figures = Figures()
        self.state: State = "loading"
        self.loaded: Ready | Relay | None = None
        self.asked_at = time.monotonic()
        self._created = int(time.time())

    @property
    def ready(self) -> Ready | Relay | None:
        """Return the model while requests are taken."""
        return self.loaded if self.state == "ready" else None

    @property
    def names(self) -> list[str]:
        """Return what clients may ask for: the model, then its adapters."""
        return [self.spec.served_name, *(each.name for each in self.spec.adapters)]

    def model_card(self, name: str) -> dict[str, Any]:
        """Return the served model, or one of its adapters, as ``/v1/models`` lists it."""
        card: dict[str, Any] = {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "slipway",
        }
        if name != self.spec.served_name:
            card["parent"] = self.spec.served_name
        if self.loaded is not None:
            card["max_model_len"] = self.loaded.engine.limits.max_length
        return card

    def open(self, loaded: Ready | Relay) -> None:
        """Take requests from now on, unless it was told to stop meanwhile."""
        self.loaded = loaded
        self.touch()
        if self.state == "loading":
            self.state = "ready"

    def lose(self) -> None:
        """Take no requests until another engine is there, unless it ends anyway."""
        self.loaded = None
        if self.state == "ready":
            self.state = "loading"

    def touch(self) -> None:
        """Note that somebody asks."""
        self.asked_at = time.monotonic()
