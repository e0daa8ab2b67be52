"""Cases of the benchmark of offloaded generation, and the process of one."""

import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TypedDict

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict
from transformers import PreTrainedModel

from runners.jobs.generate.placement import load_with_device_map
from runners.jobs.generate.static import Answer, AnswerLimits, Ids, run_batch
from runners.jobs.generate.zigzag import ZigZag
from runners.jobs.loading import LayerwiseModel
from runners.jobs.memory import PROC, proc_self_status_bytes
from runners.jobs.runtime import prepare_process
from runners.jobspec.generate import PolicyOffload
from runners.supervision.procfs import memory_cap

# ---------------------------------------------------------------------------
# The child process of the offload benchmark: ``python -m runners.jobs.generate.offload_cases``.
#
# It reports when the model is loaded, then answers the prompts once per input line.
# ---------------------------------------------------------------------------


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
    folder, scratch, limits = (
        Path(order.folder),
        Path(order.scratch),
        AnswerLimits(order.output_tokens),
    )
    if order.policy is not None:
        block = ZigZag(LayerwiseModel(folder, CPU, DTYPE), folder, order.policy, scratch)
        return (
            lambda prompts: block.run_batch(prompts, limits).answers
        ), block.figures.result_metrics
    model, _where = load_with_device_map(folder, DTYPE, order.memory_bytes, scratch)
    return (lambda prompts: _in_batches(model, prompts, order.batch_size, limits)), dict


def _in_batches(
    model: PreTrainedModel, prompts: Sequence[Ids], size: int, limits: AnswerLimits
) -> list[Answer]:
    batches = [prompts[at : at + size] for at in range(0, len(prompts), size)]
    return [answer for each in batches for answer in run_batch(model, each, limits).answers]


def main() -> None:
    """Load the ordered case, then answer the prompts for every further input line."""
    prepare_process()
    _print_json({"file_bytes": proc_self_status_bytes("RssFile")})
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


# ---------------------------------------------------------------------------
# A case of the offload benchmark in a child process with a memory limit.
# ---------------------------------------------------------------------------


class RunMeasurements(TypedDict):
    """The measurements of one run over the prompts; ``read_bytes`` since the process began."""

    seconds: float
    processor_seconds: float
    read_bytes: int
    answers: list[str]  # digests, by prompt
    figures: dict[str, float]


class BenchProcessError(RuntimeError):
    """The benchmark process died."""

    def __init__(self, returncode: int) -> None:
        reason = "-9: the cap is too small, or it took too long"
        super().__init__(f"a benchmark case ended with {returncode} ({reason})")


class BenchProcess:
    """A child process that answers the prompts on request."""

    def __init__(self, process: "subprocess.Popen[str]", out: IO[str], answers: IO[str]) -> None:
        self._process, self._out, self._answers = process, out, answers

    def run(self, timeout_seconds: float = threading.TIMEOUT_MAX) -> RunMeasurements:
        """Answer the prompts once, and return the measurements.

        Raises:
            BenchProcessError: the process died, or was killed after ``timeout_seconds``.
        """
        guard = threading.Timer(timeout_seconds, self._process.kill)
        guard.daemon = True
        guard.start()
        try:
            self.send("again")
            measurements: RunMeasurements = json.loads(self.receive())
        finally:
            guard.cancel()
        return measurements

    def send(self, line: str) -> None:
        """Send a line.

        Raises:
            BenchProcessError: the process has died.
        """
        try:
            self._out.write(f"{line}\n")
            self._out.flush()
        except BrokenPipeError:
            raise BenchProcessError(self._process.wait()) from None

    def receive(self) -> str:
        """Return the process's next output line.

        Raises:
            BenchProcessError: the process has died.
        """
        line = self._answers.readline()
        if not line:
            raise BenchProcessError(self._process.wait())
        return line

    def end(self) -> None:
        """Kill the process and close its pipes."""
        self._process.kill()
        self._process.communicate()


def forget(folder: Path) -> None:
    """Drop a folder's files from the page cache."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@contextmanager
def start_capped_case(order: Order, cap_bytes: int) -> Iterator[BenchProcess]:
    """Start a case under a memory limit; yield it when its model is loaded.

    Raises:
        NoMemoryCapError: this host cannot enforce the limit.
        BenchProcessError: the process died.
    """
    forget(Path(order.folder))  # pages cached by others would not count towards the limit
    name = "policy" if order.policy else "map"
    module = [sys.executable, "-m", "runners.jobs.generate.offload_cases"]
    with memory_cap(f"slipway-bench-{os.getpid()}-{name}", cap_bytes) as cap:
        process = subprocess.Popen(
            module, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, errors="replace"
        )
        if process.stdin is None or process.stdout is None:
            raise RuntimeError("the pipes of a benchmark case were not opened")
        bench_process = BenchProcess(process, process.stdin, process.stdout)
        try:
            libraries = json.loads(bench_process.receive())["file_bytes"]
            cap.limit(cap_bytes - libraries)  # shared pages are charged to their first reader
            cap.take_in(process.pid)  # the process waits for its order and has loaded nothing
            bench_process.send(order.model_dump_json())
            bench_process.receive()
            yield bench_process
        finally:
            bench_process.end()


if __name__ == "__main__":
    main()
