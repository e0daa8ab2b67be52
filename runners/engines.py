"""Which engine writes an endpoint's answers, and the environment and module that it runs in."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from runners.endpoint_spec import EngineName
from runners.environment_messages import MAIN


class Engine(NamedTuple):
    """How an endpoint's engine is started, and in which words a person chooses it."""

    environment: str
    module: str
    words: str


ENGINES: Mapping[EngineName, Engine] = {
    "slipway": Engine(MAIN, "runners.jobs.serve", "Slipway's own, on transformers"),
    "llamacpp": Engine("llamacpp", "runners.jobs.serve.llamacpp", "llama.cpp, for GGUF files"),
}


def engine_of(spec: Mapping[str, Any]) -> Engine | None:
    """Return the engine that a job's document names; None where its kind has none."""
    name = spec.get("engine", "slipway") if spec.get("kind") == "serve" else None
    return ENGINES.get(name) if name else None


def environment_of(spec: Mapping[str, Any]) -> str:
    """Return the environment that a job's document needs."""
    engine = engine_of(spec)
    return engine.environment if engine else MAIN
