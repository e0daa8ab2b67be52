"""Two small training runs, and every parallel layout of the trainer on four ranks."""

from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

from planner.specs.cluster import ClusterSpec
from planner.specs.estimate import HostCalibration
from planner.specs.strategy import Strategy

RANKS = 4
ALONE, COPIES = "one process", "4 copies"
Sizes = dict[str, Any]
BATCH = 8  # sequences per step, each its own micro-batch
CHUNKS = 2  # virtual pipeline chunks per stage, for the interleaved schedule
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 1024,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}


class Case(NamedTuple):
    """One model and its sequence length."""

    name: str
    words: str
    config: dict[str, Any]
    sequence_length: int

    @property
    def training(self) -> dict[str, Any]:
        """Return the job spec fields that are equal for all layouts."""
        return {
            "sequence_length": self.sequence_length,
            "micro_batch_size": 1,
            "gradient_accumulation_steps": BATCH,
            "max_steps": 1000,
            "time_budget_seconds": None,
            "compute_dtype": "fp32",
        }

    def pinned(self, **sizes: object) -> Strategy:
        """Return a strategy with the fields that all layouts here share."""
        common = {
            "micro_batch_size": 1,
            "weight_dtype": "fp32",
            "compute_dtype": "fp32",
            "activation_recomputation": "none",
            "attention": "eager",
        }
        return Strategy.model_validate({**common, **sizes})

    def request(
        self, cluster: ClusterSpec, strategy: Strategy, calibration: HostCalibration | None = None
    ) -> dict[str, Any]:
        """Return the planner request for this training run."""
        return {
            "model": self.config,
            "cluster": cluster,
            "workload": {
                "kind": "train",
                "sequence_length": self.sequence_length,
                "global_batch_size": BATCH,
            },
            "engine": "torch",
            "strategy": strategy,
            "host_calibration": calibration,
        }


MODELS = (
    Case(
        "wide",
        "512 wide, 4 layers, sequences of 32 tokens: many weights for few tokens",
        {**LLAMA, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4,
         "num_attention_heads": 8, "num_key_value_heads": 8},
        32,
    ),
    Case(
        "deep",
        "192 wide, 8 layers, sequences of 128 tokens: few weights for many tokens",
        {**LLAMA, "hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 8,
         "num_attention_heads": 4, "num_key_value_heads": 4},
        128,
    ),
)  # fmt: skip


def cases(case: Case) -> dict[str, Strategy]:
    """Return every layout of four ranks that runs, by name: each dimension alone, and pairs."""
    layers = case.config["num_hidden_layers"]
    named = [*_copies(), *_tensor(), *_context(), *_pipelines(layers)]
    return {name: case.pinned(**sizes) for name, sizes in named}


def _zero(copies: int, stages: tuple[int, ...] = (0, 1, 2, 3)) -> Iterator[tuple[str, Sizes]]:
    for stage in stages:
        words = f", ZeRO-{stage}" if stage else ""
        yield f"{copies} copies{words}", {"data_parallel_size": copies, "zero_stage": stage}


def _copies() -> Iterator[tuple[str, Sizes]]:
    yield from _zero(RANKS)
    for name, sizes in _zero(RANKS, (1, 2, 3)):
        yield f"{name}, in pairs", {**sizes, "zero_shard_size": 2}


def _tensor() -> Iterator[tuple[str, Sizes]]:
    for words, sequence in (("", False), (" and sequence", True)):
        tensor = {"tensor_parallel_size": 2, "sequence_parallel": sequence}
        yield f"tensor{words} 4", {**tensor, "tensor_parallel_size": RANKS}
        for name, sizes in _zero(2):
            yield f"{name} x tensor{words} 2", {**sizes, **tensor}


def _context() -> Iterator[tuple[str, Sizes]]:
    context = {"context_parallel_size": 2}
    for method in ("gathered", "ring"):
        yield f"context 4, {method}", {"context_parallel_size": RANKS}
    for name, sizes in _zero(2):
        yield f"{name} x context 2", {**sizes, **context}
    yield "tensor 2 x context 2", {"tensor_parallel_size": 2, **context}


def _pipelines(layers: int) -> Iterator[tuple[str, Sizes]]:
    with_others = {
        **dict(_zero(2, (0, 1, 3))),
        "tensor 2": {"tensor_parallel_size": 2},
        "tensor and sequence 2": {"tensor_parallel_size": 2, "sequence_parallel": True},
        "context 2": {"context_parallel_size": 2},
    }
    for schedule, chunks in _schedules():
        own = {"pipeline_schedule": schedule, "virtual_pipeline_size": chunks}
        if layers >= RANKS * chunks:
            yield f"pipeline 4, {schedule}", {"pipeline_parallel_size": RANKS, **own}
        for name, sizes in with_others.items():
            whole = {**sizes, "pipeline_parallel_size": 2, **own}
            yield f"{name} x pipeline 2, {schedule}", whole


def _schedules() -> Iterator[tuple[str, int]]:
    yield from product(("gpipe", "1f1b", "zero_bubble"), (1,))
    yield "interleaved", CHUNKS
