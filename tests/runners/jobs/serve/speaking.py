"""What the arguments of every engine on GPUs are held to: a spec that says all that it can."""

import json
import tomllib
from pathlib import Path

from runners.jobs.serve.relayed.backend import ModelPaths
from runners.jobspec import FolderModel, ServeSpec
from runners.jobspec.serve import Draft, EngineOptions

STANDIN = Path(__file__).with_name("standin")  # in the place of engines that need a GPU
FOLDER = FolderModel(path="llama")
ALL = EngineOptions(
    tensor_parallel_size=2,
    pipeline_parallel_size=2,
    data_parallel_size=2,
    has_expert_parallel=True,
    memory_ratio=0.85,
    kv_cache_dtype="fp8",
    has_chunked_prefill=False,
    has_prefix_cache=True,
    draft=Draft(model=FOLDER, tokens=3),
)


def recorded_options(engine: str) -> frozenset[str]:
    """Return the options that an engine's own parser takes, as they were written down."""
    text = Path(__file__).with_name(f"{engine}_options.toml").read_text()
    return frozenset(tomllib.loads(text)["options"])


def spec_of(engine: str, **changes) -> ServeSpec:
    return ServeSpec(**{"model": FOLDER, "engine": engine, "served_name": "ours", **changes})


def place(folder: Path) -> ModelPaths:
    """Return a model folder without a template, two adapters, and a draft."""
    (folder / "tokenizer_config.json").write_text("{}")
    adapters = {}
    for name, rank in (("first", 4), ("second", 24)):
        (adapter := folder / name).mkdir()
        (adapter / "adapter_config.json").write_text(json.dumps({"r": rank}))
        adapters[name] = adapter
    return ModelPaths(folder, {}, adapters, folder / "draft")


def values(argv: list[str]) -> dict[str, str]:
    """Return what follows each option."""
    return {
        name: after for name, after in zip(argv, [*argv[1:], ""], strict=True) if name[:2] == "--"
    }


def unknown(argv: list[str], engine: str) -> list[str]:
    """Return the options that the engine's own parser has not."""
    options = recorded_options(engine)
    return [each for each in argv if each[:2] == "--" and each[2:] not in options]
