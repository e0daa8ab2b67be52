"""Benchmarks compression: every method on the demo model, with real jobs in one host folder."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from runners.bench_cases import Ratio
from runners.jobspec import (
    ArtefactModel,
    CompressSpec,
    DemoModel,
    EvaluateSpec,
    JobSpec,
    TrainSpec,
)
from runners.jobspec.compress import WeightDtype
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


# Benchmarks compression: the demo model in fp32, and compressed by real jobs.
#
# Bytes are exact. Perplexity ratios are paired over the same held-out windows: against the
# original, or between two methods.


NAMES = (
    "bf16", "int8", "int8 dynamic", "nf4", "gptq 4 bit", "rtn 2 bit", "gptq 2 bit",
    "magnitude 50 %", "sparsegpt 50 %",
)  # fmt: skip
STORED = {
    "int8": "int8",
    "int8 dynamic": "int8 dynamic",
    "nf4": "nf4",
    "gptq 4 bit": "GPTQ 4-bit",
    "sparsegpt 50 %": "SparseGPT",
}
BETTER = {  # ratio -> the methods expected to be worse and better
    "round-to-nearest / GPTQ perplexity, 2 bit": ("rtn 2 bit", "gptq 2 bit"),
    "magnitude / SparseGPT perplexity, half of the weights": ("magnitude 50 %", "sparsegpt 50 %"),
    "bf16 / int8 dynamic perplexity": ("bf16", "int8 dynamic"),
}
PERPLEXITY = "perplexity"
WINDOWS = EVALUATION_TOKENS // (DemoModel().max_position_embeddings // 2)


TRAINING = TrainSpec(max_steps=2700, time_budget_seconds=None, compute_dtype="fp32")


def ratios(folder: Path, training: TrainSpec = TRAINING) -> Iterator[Ratio]:
    """Train the demo model, compress it with each method, and yield the ratios.

    Training is limited by steps, not seconds, so that a busy machine yields the same model.
    """
    measured = {row.name: row.measured for row in rows(folder, training, NAMES)}
    yield of_perplexity(
        "fp32 / bf16 perplexity", _paired_evaluation(folder, TRAINED, TRAINED, "fp32")
    )
    stored = sum(each.stat().st_size for each in trained_files(folder))
    yield Ratio.exact("fp32 / bf16 weights", stored, measured["bf16"]["disk_bytes"], "bytes")
    yield from of_rows(measured)
    yield from compared(folder)


def compared(folder: Path) -> Iterator[Ratio]:
    """Yield the perplexity ratios between two methods, from jobs that evaluate both.

    Paired per window: two separate intervals against the original would hide the difference.
    """
    for title, (worse, better) in BETTER.items():
        dtype = spec_of(worse).weight_dtype
        measured = _paired_evaluation(folder, attempt_of(worse), attempt_of(better), dtype)
        yield of_perplexity(title, measured)


def _paired_evaluation(
    folder: Path, attempt_id: str, other_id: str, weight_dtype: WeightDtype
) -> dict[str, float]:
    """Return the paired evaluation of one attempt's model against another's."""
    spec = EvaluateSpec(
        model=ArtefactModel(attempt_id=attempt_id),
        original=ArtefactModel(attempt_id=other_id),
        weight_dtype=weight_dtype,
        evaluation_tokens=EVALUATION_TOKENS,
    )
    return run(folder, f"{attempt_id}-against-{other_id}", spec)


def trained_files(folder: Path) -> list[Path]:
    """Return the weight files of the trained model."""
    model = folder / "attempts" / TRAINED / "output" / "model"
    return sorted(model.glob("*.safetensors"))


def of_rows(measured: Mapping[str, Mapping[str, float]]) -> Iterator[Ratio]:
    """Yield the size ratios of the methods' rows."""
    for name, title in STORED.items():
        row = measured[name]
        small = row.get("compressed_bytes", row["matrices_bytes"])
        yield Ratio.exact(
            f"bf16 / {title} matrices", row["original_matrices_bytes"], small, "bytes"
        )


def of_perplexity(title: str, found: Mapping[str, float]) -> Ratio:
    """Return the perplexity ratio of a paired evaluation."""
    value, low, high = (found[f"perplexity_ratio{end}"] for end in ("", "_low", "_high"))
    return Ratio(title, value, low, high, WINDOWS, PERPLEXITY)
