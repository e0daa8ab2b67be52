"""Benchmarks every compression method on the demo model with real jobs in one host folder.

One training, then one compression per row, each in its own process as on any host.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from runners.jobspec import ArtefactModel, CompressSpec, JobSpec, TrainSpec
from runners.messages import RunRequest

TRAINED = "trained"
GROUP_SIZE = 32
CALIBRATION_TOKENS = 32_768
EVALUATION_TOKENS = 32_768
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "bf16": {"method": "bf16"},
    "int8": {"method": "int8"},
    "int8 dynamic": {"method": "int8_dynamic"},
    "nf4": {"method": "nf4"},
    **{
        f"{method} {bits} bit": {"method": method, "bits": bits}
        for bits in (4, 3)
        for method in ("rtn", "gptq", "quantease")
    },
    **{f"{method} 50 %": {"method": method} for method in ("magnitude", "sparsegpt")},
    **{
        f"{method} 2 bit": {"method": method, "bits": 2}
        for method in ("rtn", "gptq", "norm_tweaking", "quantease")
    },
    **{f"awq {bits} bit": {"method": "awq", "bits": bits} for bits in (4, 3)},
    "norm_tweaking 3 bit": {"method": "norm_tweaking", "bits": 3},
    "quantease 3 bit, 1 % outliers": {"method": "quantease", "bits": 3, "outlier_share": 0.01},
    "finequant 3 bit": {"method": "finequant", "bits": 3},
    "fptq 4 bit, 8 bit activations": {"method": "fptq", "bits": 4},
    "smoothquant 8 bit, 8 bit activations": {"method": "smoothquant"},
    "fp8": {"method": "fp8"},
    "wanda 50 %": {"method": "wanda"},
    **{
        f"{method} 2:4": {"method": method, "pattern": "2:4"}
        for method in ("magnitude", "wanda", "sparsegpt")
    },
    "llm_pruner 20 %": {"method": "llm_pruner", "sparsity": 0.2},
    "sheared_llama 20 %": {"method": "sheared_llama", "sparsity": 0.2},
    **{
        f"gguf {kind}": {"method": "gguf", "gguf_type": kind}
        for kind in ("Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M", "Q4_0")
    },
}


class BenchFailedError(Exception):
    """A job of the benchmark failed; the message has its last line."""


class Row(NamedTuple):
    """One compression method and its job's measurements."""

    name: str
    measured: dict[str, float]


def rows(folder: Path, training: TrainSpec, names: tuple[str, ...] = ()) -> Iterator[Row]:
    """Train the demo model in ``folder`` and yield one row per setting."""
    if not (folder / "attempts" / TRAINED / "output" / "model").is_dir():
        run(folder, TRAINED, training)
    for name in names or SETTINGS:
        yield Row(name, run(folder, attempt_of(name), spec_of(name)))


def spec_of(name: str) -> CompressSpec:
    """Return the job spec of a row."""
    fields: dict[str, Any] = {
        "group_size": GROUP_SIZE,
        "calibration_tokens": CALIBRATION_TOKENS,
        "evaluation_tokens": EVALUATION_TOKENS,
        **SETTINGS[name],
    }
    return CompressSpec(model=ArtefactModel(attempt_id=TRAINED), **fields)


def attempt_of(name: str) -> str:
    """Return the attempt id of a row."""
    return "".join(letter if letter.isalnum() else "-" for letter in name)


def run(folder: Path, attempt_id: str, spec: JobSpec) -> dict[str, float]:
    """Run one job to its end and return its measurements.

    Raises:
        BenchFailedError: the job failed.
    """
    attempt = folder / "attempts" / attempt_id
    attempt.mkdir(parents=True, exist_ok=True)
    request = RunRequest(attempt_id=attempt_id, job_id="bench", number=1, fence="f", spec=spec)
    (attempt / "spec.json").write_text(request.model_dump_json())
    events = attempt / "events.jsonl"
    with events.open("wb") as sink:
        ended = subprocess.run(
            [sys.executable, "-m", f"runners.jobs.{spec.kind}", str(attempt)],
            env=os.environ
            | {"SLIPWAY_HOST_DIR": str(folder), "SLIPWAY_EVENT_FD": str(sink.fileno())},
            pass_fds=[sink.fileno()],
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    if ended.returncode:
        last = ended.stderr.strip().rpartition("\n")[2] or f"exit code {ended.returncode}"
        raise BenchFailedError(f"{attempt_id}: {last}")
    results = [json.loads(line) for line in events.read_text().splitlines()]
    measured: dict[str, float] = [
        each["body"]["measured"] for each in results if each["kind"] == "result"
    ][-1]
    return measured
