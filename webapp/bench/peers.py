"""Comparison of our planner with others: one question, one process each, answers and speed.

No other planner is a dependency: each is installed into its own environment on request.
"""

import csv
import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from statistics import fmean, median
from types import MappingProxyType
from typing import Any, NamedTuple

from planner.catalog.devices import get_device
from planner.catalog.models import get_model
from runners.shared.log_text import last_line

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).with_name("peer_answer.py")
INSTALL_LIMIT_S, ANSWER_LIMIT_S = 1200.0, 300.0
# The question: a batch of Llama 3.1 70B on eight H100 with tensor parallelism; ``shape`` and
# ``system`` are for planners that know neither the model nor the GPU.
QUESTION: dict[str, Any] = {
    "model": "meta-llama/Llama-3.1-70B",
    "device": "h100-sxm-80gb",
    "devices": 8,
    "engine": "vllm",
    "dtype": "bf16",
    "batch_size": 32,
    "input_tokens": 2048,
    "output_tokens": 256,
    "shape": {
        "layers": 80,
        "hidden": 8192,
        "heads": 64,
        "key_value_heads": 8,
        "feed_forward": 28672,
        "vocabulary": 128256,
    },
    "system": {
        "peak_flops_per_s": 989e12,
        "memory_bytes": 80 * 2**30,
        "memory_bytes_per_s": 3.35e12,
        "link_bytes_per_s": 450e9,
    },
}
# Planner -> its name in the package index.
OTHERS = {
    "llm-analysis": "llm-analysis",
    "aiconfigurator": "aiconfigurator",
    "GenZ": "genz-llm",
}
UNITS = {
    "cold_s": ("first answer, loading included", "s"),
    "warm_s": ("the same answer again", "s"),
    "strategies_per_s": ("strategies answered one by one", "1/s"),
    "prefill_s": ("prefill of the batch", "s"),
    "decode_s": ("decode step", "s"),
    "device_bytes": ("held by a device", "B"),
}
# Sweeps in no fit of ours from which a cohort is drawn: by a rule that sees no prediction.
COHORT_TABLE = ROOT / "planner" / "validation" / "unfitted_serving.csv"
COHORT_SEED, COHORT_SIZE = 54, 24
COHORT_LIMIT_S = 1200.0
BenchRow = tuple[str, float, str]  # name, value, unit
Run = Callable[..., subprocess.CompletedProcess[str]]


class Answer(NamedTuple):
    """The answer of one planner, or the reason for none."""

    name: str
    version: str = ""
    figures: Mapping[str, float] = MappingProxyType({})
    reason: str = ""


@cache
def cohort() -> tuple[dict[str, str], ...]:
    """Return the measured rows that every planner is asked, drawn by a seed."""
    lines = COHORT_TABLE.read_text(encoding="utf-8").splitlines()
    rows = sorted(csv.DictReader(lines), key=lambda row: row["row_id"])
    return tuple(random.Random(COHORT_SEED).sample(rows, COHORT_SIZE))  # noqa: S311 - no secret


def cohort_question(row: Mapping[str, str]) -> dict[str, Any]:
    """Return a row as a question; ``shape`` and ``system`` are for planners that know neither."""
    model, device = get_model(row["model"]), get_device(row["gpu_slug"])
    shape = {
        "layers": model.num_hidden_layers,
        "hidden": model.hidden_size,
        "heads": model.num_attention_heads,
        "key_value_heads": model.num_key_value_heads,
        "feed_forward": model.intermediate_size,
        "vocabulary": model.vocab_size,
    }
    rates = {str(name): rate for name, rate in device.peak_flops_per_second.items()}
    request = {
        "model": row["model"],
        "cluster": {"device": row["gpu_slug"], "devices_per_node": int(row["num_gpus"])},
        "workload": {
            "kind": "serve",
            "input_tokens": int(row["input_len"]),
            "output_tokens": int(row["output_len"]),
            "concurrency": int(row["concurrency"]),
        },
        "strategy": {
            "weight_dtype": row["weight_dtype"],
            "activation_dtype": row["activation_dtype"],
            "tensor_parallel_size": int(row["tp"]),
            "expert_parallel_size": int(row["moe_ep"]),
        },
        "engine": row["engine"],
    }
    return {
        "request": request,
        "model": row["model"],
        "device": row["gpu_slug"],
        "tensor_parallel": int(row["tp"]),
        "expert_parallel": int(row["moe_ep"]),
        "engine": row["engine"],
        "dtype": row["weight_dtype"],
        "batch_size": int(row["concurrency"]),
        "input_tokens": int(row["input_len"]),
        "output_tokens": int(row["output_len"]),
        "shape": None if model.is_moe else shape,
        "system": {
            "peak_flops_per_s": rates[row["activation_dtype"]],
            "memory_bytes": device.memory_bytes,
            "memory_bytes_per_s": device.memory_bandwidth_bytes_per_second,
            "link_bytes_per_s": device.intra_node_bandwidth_bytes_per_second,
        },
    }


def cohort_rows(name: str, python: Path, run: Run = subprocess.run) -> list[BenchRow]:
    """Return how many rows of the cohort a planner answers, and how far it is off on them."""
    questions = json.dumps({"cohort": [cohort_question(row) for row in cohort()]})
    output, failure = _run_process(_command(name, python), run, COHORT_LIMIT_S, questions)
    if failure:
        return [(f"{name}: cohort not answered ({failure})", 0.0, "rows")]
    found = json.loads(output.splitlines()[-1])
    errors = [
        abs(1e3 * said / float(row["tpot_ms"]) - 1)
        for row, said in zip(cohort(), found["tpot_s"], strict=True)
        if said is not None
    ]
    title = f"{name} {found['version']}: of {len(cohort())} measured sweeps"
    figures = [(f"{title}, answered", float(len(errors)), "rows")]
    if errors:
        figures += [
            (f"{title}, time per token off, mean", fmean(errors), "ratio"),
            (f"{title}, time per token off, median", median(errors), "ratio"),
        ]
    return [*figures, (f"{title}, time of a question", found["seconds"] / len(cohort()), "s")]


def cohort_figures(
    folder: Path, found: Iterable[Answer], run: Run = subprocess.run
) -> Iterator[BenchRow]:
    """Yield the figures of every planner that answered the question, on the cohort."""
    for answer in found:
        if not answer.reason:
            package = OTHERS.get(answer.name)
            python = folder / package / "bin" / "python" if package else Path(sys.executable)
            yield from cohort_rows(answer.name, python, run)


def answers(folder: Path, run: Run = subprocess.run) -> Iterator[Answer]:
    """Yield our planner's answer, then the others', from environments below ``folder``."""
    yield answer_of("slipway", Path(sys.executable), run)
    for name, package in OTHERS.items():
        python = folder / package / "bin" / "python"
        reason = install(package, python, run)
        yield Answer(name, reason=reason) if reason else answer_of(name, python, run)


def install(package: str, python: Path, run: Run = subprocess.run) -> str:
    """Install a planner if it is missing; return the error, or ""."""
    home = python.parent.parent
    installed = home / "installed"
    if installed.exists():
        return ""
    make = [sys.executable, "-m", "venv", str(home)]
    fetch = [str(python), "-m", "pip", "install", "--quiet", package]
    for command in (make, fetch):
        failure = _run_process(command, run, INSTALL_LIMIT_S)[1]
        if failure:
            return f"{package} does not install: {failure}"
    installed.touch()
    return ""


def answer_of(name: str, python: Path, run: Run = subprocess.run) -> Answer:
    """Return a planner's answer to the question, from a process of its own Python."""
    command = _command(name, python)
    output, failure = _run_process(command, run, ANSWER_LIMIT_S, json.dumps(QUESTION))
    if failure:
        return Answer(name, reason=f"does not answer: {failure}")
    answer = json.loads(output.splitlines()[-1])
    return Answer(name, str(answer["version"]), {key: float(answer[key]) for key in UNITS})


def _command(name: str, python: Path) -> list[str]:
    """Return the command that answers for a planner in an environment."""
    if name == "slipway":
        return [str(python), "-m", "webapp.bench.peer_answer", name]
    return [str(python), str(SCRIPT), name]


def _run_process(command: list[str], run: Run, limit_s: float, stdin: str = "") -> tuple[str, str]:
    """Run a process; return its output and its error, or ""."""
    try:
        done = run(
            command,
            input=stdin,
            cwd=ROOT,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=limit_s,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", last_line(f"{error}")
    if done.returncode == 0:
        return done.stdout, ""
    return "", last_line(done.stderr, f"exit status {done.returncode}")


def rows(found: Answer) -> Iterator[tuple[str, float, str]]:
    """Yield one planner's figures as rows of the benchmark: name, value, unit."""
    for key, value in found.figures.items():
        title, unit = UNITS[key]
        yield f"{found.name} {found.version}: {title}", value, unit
