"""What an engine itself counts for a model folder, beside the planner's count.

transformers builds the config on the meta device, in the job's environment; llama.cpp's
``llama-fit-params`` reads the GGUF file. vLLM 0.31 has no command that counts without a full start
(https://docs.vllm.ai/en/v0.31.0/cli/).
"""

import shutil
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

from runners.environment_messages import MAIN
from runners.environments.pins import PinsError
from runners.environments.store import Store
from runners.folder_queries import FolderQuery, run_query
from runners.stored_weights import GIB, differ
from runners.timing import scaled

SECONDS = scaled(20.0, least=4.0)
META_PACKAGES = ("torch", "transformers")
META_MODULE, FIT_MODULE = "runners.jobs.folder_parameters", "runners.jobs.folder_fit"
META_MEMORY_BYTES = 4 * 2**30  # DeepSeek-V3 takes 0.5 on torch for the CPU
FIT_MEMORY_BYTES = 8 * 2**30
FIT_TOOL = "llama-fit-params"


class EngineCount(NamedTuple):
    """An engine's count as a sentence, and the bytes of all weights, if it has them."""

    sentence: str
    weight_bytes: int | None = None


def interpreter(environment: str, store: Store) -> Path | None:
    """Return the interpreter of a job's environment if it has transformers and torch, or None."""
    if environment == MAIN:
        return Path(sys.executable) if all(map(_is_installed, META_PACKAGES)) else None
    try:
        pins = store.pins(environment)
    except PinsError:
        return None
    names = {each.partition("==")[0].lower() for each in pins.packages}
    return store.python(pins) if names.issuperset(META_PACKAGES) and store.is_ready(pins) else None


def _is_installed(name: str) -> bool:
    try:
        return bool(version(name))
    except PackageNotFoundError:
        return False


def transformers_count(query: FolderQuery, python: Path) -> EngineCount:
    """Return what transformers builds for a folder's config."""
    answer = run_query(
        query,
        [str(python), "-m", META_MODULE],
        seconds=SECONDS,
        memory_bytes=META_MEMORY_BYTES,
        env={"CUDA_VISIBLE_DEVICES": ""},
    )
    fields = answer.fields
    library = f"transformers {fields.get('version', '')}".strip()
    if "parameters" not in fields:
        problem = fields.get("problem") or answer.failure or "it printed nothing"
        return EngineCount(f"{library} does not build its config.json: {problem}.")
    parameters = f"{library} builds {fields['parameters']:,} parameters"
    if fields["is_quantised"]:
        return EngineCount(f"{parameters} for its config.json, before quantisation.")
    by_dtype = sorted(fields["bytes_by_dtype"].items(), key=lambda each: -each[1])
    sizes = " and ".join(f"{num_bytes / GIB:.2f} GiB in {name}" for name, num_bytes in by_dtype)
    total = sum(fields["bytes_by_dtype"].values())
    return EngineCount(f"{parameters} for its config.json, {sizes}.", total)


def compared(count: EngineCount, counted_bytes: int | None) -> str:
    """Return an engine's sentence, with a warning if it differs from the planner's count."""
    if count.weight_bytes is None or not counted_bytes:
        return count.sentence
    if not differ(counted_bytes, count.weight_bytes):
        return count.sentence
    return f"{count.sentence[:-1]}, unlike the planner: the plan's memory may be off."


def llama_is_there() -> bool:
    """Return whether this host has ``llama-fit-params`` on its PATH."""
    return shutil.which(FIT_TOOL) is not None


def llama_count(query: FolderQuery) -> EngineCount:
    """Return the arguments and the memory that llama.cpp chooses for a folder's GGUF file."""
    argv = [sys.executable, "-m", FIT_MODULE]
    answer = run_query(query, argv, seconds=SECONDS, memory_bytes=FIT_MEMORY_BYTES)
    fields = answer.fields
    if "arguments" not in fields:
        problem = fields.get("problem") or answer.failure or "it printed nothing"
        return EngineCount(f"{FIT_TOOL} counts nothing: {problem}.")
    chosen = f"{FIT_TOOL} chooses {_choice(fields['arguments'])}"
    if "devices" not in fields:
        return EngineCount(f"{chosen}; {fields.get('problem') or answer.failure}.")
    listed = "; ".join(
        f"{name} {model / GIB:.2f} + {context / GIB:.2f} + {compute / GIB:.2f}"
        for name, model, context, compute in fields["devices"]
    )
    total = sum(model for _, model, _, _ in fields["devices"])
    return EngineCount(f"{chosen}, with GiB of weights + context + buffers on {listed}.", total)


def _choice(arguments: list[str]) -> str:
    """Return the chosen context and layers on GPUs in words."""
    values = dict(zip(arguments[::2], arguments[1::2], strict=True))
    tokens = int(values["-c"])
    context = f"a context of {tokens:,} tokens" if tokens else "the model's own context"
    on_gpus = f"-ngl {values.get('-ngl', -1)}"
    moved = " and keeps some tensors in host memory" if "-ot" in values else ""
    return f"{context} and {on_gpus}{moved}"
