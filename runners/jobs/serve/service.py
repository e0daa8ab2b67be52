"""The state of an endpoint: loading, ready, draining or failed; and the model it serves."""

import time
from typing import Any, Literal

from runners.jobs.serve.contract import Ready, Relay
from runners.jobs.serve.figures import Figures
from runners.jobspec import ServeSpec

State = Literal["loading", "ready", "draining", "failed"]


class Service:
    """The endpoint's state as the HTTP server sees it."""

    def __init__(self, spec: ServeSpec) -> None:
        self.spec = spec
        self.figures = Figures()
        self.state: State = "loading"
        self.loaded: Ready | Relay | None = None
        self.asked_at = time.monotonic()
        self._created = int(time.time())

    @property
    def ready(self) -> Ready | Relay | None:
        """Return the model if requests are accepted."""
        return self.loaded if self.state == "ready" else None

    @property
    def names(self) -> list[str]:
        """Return the names that clients may request: the model, then its adapters."""
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
        """Accept requests from now on, unless the endpoint was stopped meanwhile."""
        self.loaded = loaded
        self.touch()
        if self.state == "loading":
            self.state = "ready"

    def lose(self) -> None:
        """Refuse requests until another engine is loaded, unless the endpoint is ending."""
        self.loaded = None
        if self.state == "ready":
            self.state = "loading"

    def touch(self) -> None:
        """Record that a request arrived."""
        self.asked_at = time.monotonic()
