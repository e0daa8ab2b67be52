"""Comparison of our planner with others: one question, one process each, answers and speed.

No other planner is a dependency: each is installed into its own environment on request.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

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
Run = Callable[..., subprocess.CompletedProcess[str]]


class Answer(NamedTuple):
    """The answer of one planner, or the reason for none."""

    name: str
    version: str = ""
    figures: Mapping[str, float] = MappingProxyType({})
    reason: str = ""


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
    command = [str(python), str(SCRIPT), name]
    if name == "slipway":
        command = [str(python), "-m", "webapp.bench.peer_answer", name]
    output, failure = _run_process(command, run, ANSWER_LIMIT_S, json.dumps(QUESTION))
    if failure:
        return Answer(name, reason=f"does not answer: {failure}")
    answer = json.loads(output.splitlines()[-1])
    return Answer(name, str(answer["version"]), {key: float(answer[key]) for key in UNITS})


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
