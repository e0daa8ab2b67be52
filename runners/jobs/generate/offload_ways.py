"""One way of the bench, told in one line: ``python -m runners.jobs.generate.offload_ways``.

It says when the model stands, then answers the pile each time it is asked to.
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

from runners.generate_options import PolicyOffload
from runners.jobs.generate.placement import mapped
from runners.jobs.generate.policy.zigzag import ZigZag
from runners.jobs.generate.static import Answer, Ids, Limits, run_batch
from runners.jobs.layers import LayerwiseModel
from runners.jobs.memory import PROC, status_bytes
from runners.jobs.runtime import prepare_process

CPU = torch.device("cpu")
DTYPE = torch.bfloat16
Answers = Callable[[Sequence[Ids]], list[Answer]]


class Order(BaseModel):
    """What a way is to do; a policy for ours, bytes of weights and a batch for accelerate's."""

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
    """Return random prompts of one length, the same for every way."""
    generator = np.random.default_rng(11)
    size = (order.num_prompts, order.input_tokens)
    found: list[list[int]] = generator.integers(0, order.vocab_size, size).tolist()
    return found


def answers_of(order: Order) -> tuple[Answers, Callable[[], dict[str, float]]]:
    """Return how the pile is answered, and the figures of what lay where."""
    folder, scratch, limits = Path(order.folder), Path(order.scratch), Limits(order.output_tokens)
    if order.policy is not None:
        block = ZigZag(LayerwiseModel(folder, CPU, DTYPE), folder, order.policy, scratch)
        return (lambda pile: block.run_batch(pile, limits).answers), block.figures.measured
    model, _where = mapped(folder, DTYPE, order.memory_bytes, scratch)
    return (lambda pile: _in_batches(model, pile, order.batch_size, limits)), dict


def _in_batches(
    model: PreTrainedModel, pile: Sequence[Ids], size: int, limits: Limits
) -> list[Answer]:
    batches = [pile[at : at + size] for at in range(0, len(pile), size)]
    return [answer for each in batches for answer in run_batch(model, each, limits).answers]


def main() -> None:
    """Load as ordered, then answer the pile for every further line of the input."""
    prepare_process()
    _say({"file_bytes": status_bytes("RssFile")})
    order = Order.model_validate_json(sys.stdin.readline())
    pile = prompts_of(order)
    answers, figures = answers_of(order)
    _say({"stands": order.folder})
    for _line in sys.stdin:
        began, used = time.perf_counter(), time.process_time()
        found = answers(pile)
        seconds = time.perf_counter() - began
        digests = [hashlib.sha256(bytes(str(each.ids), "ascii")).hexdigest() for each in found]
        _say(
            {
                "seconds": seconds,
                "processor_seconds": time.process_time() - used,
                "read_bytes": _read_bytes(),
                "answers": digests,
                "figures": figures(),
            }
        )


def _read_bytes() -> int:
    """Return the bytes that this process had the disk read so far."""
    for line in (PROC / "io").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "read_bytes":
            return int(value)
    return 0


def _say(document: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(document) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
