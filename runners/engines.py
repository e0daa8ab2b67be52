"""Maps a job to its environment: that of its serving engine or evaluation harness."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from runners.jobspec.benchmark import TASKS_ENVIRONMENT
from runners.jobspec.serve import EngineName
from runners.messages import MAIN


class Engine(NamedTuple):
    """A serving engine: its environment, module and display name."""

    environment: str
    module: str
    words: str


ENGINES: Mapping[EngineName, Engine] = {
    "slipway": Engine(MAIN, "runners.jobs.serve", "Slipway's own, on transformers"),
    "llamacpp": Engine("llamacpp", "runners.jobs.serve.llamacpp", "llama.cpp, for GGUF files"),
    "vllm": Engine("vllm", "runners.jobs.serve.vllm", "vLLM, on NVIDIA GPUs"),
    "sglang": Engine("sglang", "runners.jobs.serve.sglang", "SGLang, on NVIDIA GPUs"),
}


def engine_of(spec: Mapping[str, Any]) -> Engine | None:
    """Return the engine of a job's document, or None if its kind has none."""
    name = spec.get("engine", "slipway") if spec.get("kind") == "serve" else None
    return ENGINES.get(name) if name else None


def environment_of(spec: Mapping[str, Any]) -> str:
    """Return the environment of a job's document."""
    if spec.get("kind") == "evaluate" and spec.get("tasks"):
        return TASKS_ENVIRONMENT
    engine = engine_of(spec)
    return engine.environment if engine else MAIN
