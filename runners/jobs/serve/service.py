"""What an endpoint is at this moment: loading, ready, draining or failed; and with which model."""

import asyncio
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from runners.jobs.serve.engine import Engine
from runners.jobs.serve.figures import Figures
from runners.jobs.serve.protocol import AskedError
from runners.jobs.serve.text import Reader
from runners.jobspec import ServeSpec

State = Literal["loading", "ready", "draining", "failed"]


@dataclass(frozen=True)
class Ready:
    """A loaded model: its engine, and its tokenizer, which one thread uses at a time."""

    engine: Engine
    reader: Reader
    vocabulary: int
    _lock: threading.Lock = field(default_factory=threading.Lock)

    async def prompt_ids(self, prompt: str | Sequence[int]) -> list[int]:
        """Return a prompt's tokens, checked where the client sent tokens.

        Raises:
            AskedError: the model has no such token.
        """
        if isinstance(prompt, str):
            return await asyncio.to_thread(self._prompt_ids, prompt)
        if max(prompt, default=0) >= self.vocabulary:
            message = f"prompt holds token {max(prompt)}; the model has {self.vocabulary}"
            raise AskedError(400, message, param="prompt")
        return list(prompt)

    async def chat_ids(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Return a conversation's tokens.

        Raises:
            TemplateRefusedError: the template takes no such messages.
        """
        return await asyncio.to_thread(self._chat_ids, messages)

    def _prompt_ids(self, text: str) -> list[int]:
        with self._lock:
            return self.reader.prompt_ids(text)

    def _chat_ids(self, messages: Sequence[dict[str, str]]) -> list[int]:
        with self._lock:
            return self.reader.chat_ids(messages)


class Service:
    """The endpoint as its door sees it."""

    def __init__(self, spec: ServeSpec) -> None:
        self.spec = spec
        self.figures = Figures()
        self.state: State = "loading"
        self.loaded: Ready | None = None
        self.asked_at = time.monotonic()
        self._created = int(time.time())

    @property
    def ready(self) -> Ready | None:
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

    def open(self, loaded: Ready) -> None:
        """Take requests from now on, unless it was told to stop meanwhile."""
        self.loaded = loaded
        self.touch()
        if self.state == "loading":
            self.state = "ready"

    def touch(self) -> None:
        """Note that somebody asks."""
        self.asked_at = time.monotonic()
