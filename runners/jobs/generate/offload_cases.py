"""The child process of the offload benchmark: ``python -m runners.jobs.generate.offload_cases``.

It reports when the model is loaded, then answers the prompts once per input line.
"""

import hashlib
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict
from transformers import PreTrainedModel

from runners.jobs.generate.placement import mapped
from runners.jobs.generate.policy.zigzag import ZigZag
from runners.jobs.generate.static import Answer, Ids, Limits, run_batch
from runners.jobs.memory import PROC, status_bytes
from runners.jobs.runtime import prepare_process
from runners.jobs.skeleton import LayerwiseModel
from runners.jobspec.generate import PolicyOffload

CPU = torch.device("cpu")
DTYPE = torch.bfloat16
Answers = Callable[[Sequence[Ids]], list[Answer]]


class Order(BaseModel):
    """The case to run: an offload policy of ours, or memory and batch size for accelerate."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    folder: str
    scratch: str
    num_prompts: int
    input_tokens: int
    output_tokens: int
    vocab_size: int
    policy: PolicyOffload | None = None
    memory_bytes: int = 0
    batch_size: int = 0


def prompts_of(order: Order) -> list[list[int]]:
    """Return random prompts of one length, the same for every case."""
    generator = np.random.default_rng(11)
    size = (order.num_prompts, order.input_tokens)
    prompts: list[list[int]] = generator.integers(0, order.vocab_size, size).tolist()
    return prompts


def answers_of(order: Order) -> tuple[Answers, Callable[[], dict[str, float]]]:
    """Return a function that answers the prompts, and one that returns the policy's figures."""
    folder, scratch, limits = Path(order.folder), Path(order.scratch), Limits(order.output_tokens)
    if order.policy is not None:
        block = ZigZag(LayerwiseModel(folder, CPU, DTYPE), folder, order.policy, scratch)
        return (lambda prompts: block.run_batch(prompts, limits).answers), block.figures.measured
    model, _where = mapped(folder, DTYPE, order.memory_bytes, scratch)
    return (lambda prompts: _in_batches(model, prompts, order.batch_size, limits)), dict


def _in_batches(
    model: PreTrainedModel, prompts: Sequence[Ids], size: int, limits: Limits
) -> list[Answer]:
    batches = [prompts[at : at + size] for at in range(0, len(prompts), size)]
    return [answer for each in batches for answer in run_batch(model, each, limits).answers]


def main() -> None:
    """Load the ordered case, then answer the prompts for every further input line."""
    prepare_process()
    _print_json({"file_bytes": status_bytes("RssFile")})
    order = Order.model_validate_json(sys.stdin.readline())
    prompts = prompts_of(order)
    answers, figures = answers_of(order)
    _print_json({"stands": order.folder})
    for _line in sys.stdin:
        wall_start, cpu_start = time.perf_counter(), time.process_time()
        results = answers(prompts)
        seconds = time.perf_counter() - wall_start
        digests = [hashlib.sha256(bytes(str(each.ids), "ascii")).hexdigest() for each in results]
        _print_json(
            {
                "seconds": seconds,
                "processor_seconds": time.process_time() - cpu_start,
                "read_bytes": _read_bytes(),
                "answers": digests,
                "figures": figures(),
            }
        )


def _read_bytes() -> int:
    """Return the bytes that this process has read from disk so far."""
    for line in (PROC / "io").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "read_bytes":
            return int(value)
    return 0


def _print_json(document: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(document) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
