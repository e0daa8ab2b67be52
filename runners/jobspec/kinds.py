"""The kinds of jobs: one row says how a kind is called, what starts it and what it needs."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from runners.jobspec.engines import ENGINES, OWN

KindName = Literal[
    "train", "compress", "evaluate", "benchmark", "generate", "serve", "drill", "prove", "publish"
]


@dataclass(frozen=True)
class Kind:
    """A kind of job.

    ``title`` is its name for people; ``module`` is run by ``python -m`` with the attempt's
    folder; ``packages`` are distributions that it needs besides those of every kind.
    """

    name: KindName
    title: str
    module: str
    packages: tuple[str, ...] = ()
    is_resumable: bool = False  # leaves a checkpoint, answers or layers to go on from
    has_ranks: bool = False  # runs as one rank per device


ROWS = (
    Kind("train", "Train", "runners.jobs.train", is_resumable=True, has_ranks=True),
    Kind(
        "compress",
        "Compress",
        "runners.jobs.compress",
        packages=("accelerate", "compressed-tensors", "gguf"),
        is_resumable=True,
    ),
    Kind("evaluate", "Evaluate", "runners.jobs.evaluate"),
    Kind("benchmark", "Benchmark", "runners.jobs.load.benchmark"),
    Kind("generate", "Generate", "runners.jobs.generate", is_resumable=True, has_ranks=True),
    Kind(
        "serve",
        "Serve",
        ENGINES[OWN].module,  # another engine's row names its own
        packages=("starlette", "uvicorn", "Jinja2"),
    ),
    Kind("drill", "Drill", "runners.jobs.drill"),
    Kind("prove", "Validation", "runners.jobs.prove"),
    Kind("publish", "Publish", "runners.jobs.publish", packages=("huggingface-hub",)),
)
KINDS: Mapping[str, Kind] = MappingProxyType({each.name: each for each in ROWS})
