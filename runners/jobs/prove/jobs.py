"""Stage of a validation: every kind of job, launched as an agent launches it, on a small model.

Each runs in its own process from a ``spec.json``, in a folder of its own, and must end with a
result. The model is trained first; the others use its artefact.
"""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runners.host.bench import BenchFailedError
from runners.host.bench import run as launch
from runners.jobs.prove.engines import llama_reads
from runners.jobs.prove.recorder import Recorder
from runners.jobspec import (
    ArtefactModel,
    BenchmarkSpec,
    CompressSpec,
    DemoModel,
    EvaluateSpec,
    GenerateSpec,
    JobSpec,
    TrainSpec,
)

TRAINED = "trained"
# How Python and transformers say that a library is absent.
ABSENT = re.compile(r"No module named '([\w-]+)|requires `([\w-]+)`")
SHAPE = DemoModel(
    hidden_size=128,
    intermediate_size=384,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=1024,
)
TOKENS: Mapping[str, Any] = {"calibration_tokens": 4096, "evaluation_tokens": 2048}
MODEL = ArtefactModel(attempt_id=TRAINED)


def specs() -> dict[str, JobSpec]:
    """Return the jobs that are launched, in order."""
    return {
        TRAINED: TrainSpec(
            model=SHAPE, max_steps=8, time_budget_seconds=None, sequence_length=128
        ),
        "benchmark": BenchmarkSpec(model=MODEL, repetitions=2, evaluation_tokens=2048),
        "generate": GenerateSpec.model_validate({"model": MODEL, "output_tokens": 16}),
        "evaluate": EvaluateSpec(model=MODEL, evaluation_tokens=2048),
        **{
            f"compress {method}": CompressSpec.model_validate(
                {"model": MODEL, "method": method, "group_size": 32, **TOKENS, **more}
            )
            for method, more in (
                ("gptq", {"bits": 4}),
                ("awq", {"bits": 4}),
                ("sparsegpt", {}),
                ("int8", {}),
                ("nf4", {}),
                ("gguf", {"gguf_type": "Q4_K_M"}),
            )
        },
    }


def run(recorder: Recorder, folder: Path) -> None:
    """Launch every kind of job and check that each ends with finite figures."""
    host_dir = folder / "host"
    host_dir.mkdir(exist_ok=True)
    for name, spec in specs().items():
        if not recorder.has_time(name, 15):
            continue
        is_trained = (host_dir / "attempts" / TRAINED / "output" / "model").is_dir()
        if name != TRAINED and not is_trained:
            recorder.missing(name, "it needs the trained model, and that job did not end well")
            continue
        with recorder.part(name):
            _launch(recorder, host_dir, name, spec)
    for file in sorted(host_dir.glob("attempts/compress-gguf/output/**/*.gguf"))[:1]:
        llama_reads(recorder, file)


def _launch(recorder: Recorder, host_dir: Path, name: str, spec: JobSpec) -> None:
    attempt = "".join(letter if letter.isalnum() else "-" for letter in name)
    expected = "to end with a result"
    try:
        measured = launch(host_dir, attempt, spec)
    except BenchFailedError as error:
        words = str(error)
        absent = ABSENT.search(words)
        if absent:
            package = absent[1] or absent[2]
            recorder.missing(name, words, f"pip install {package}", "library")
        else:
            recorder.check(name, is_met=False, expected=expected, found=words)
        return
    odd = sorted(key for key, value in measured.items() if not math.isfinite(value))
    recorder.check(
        name,
        is_met=bool(measured) and not odd,
        expected="finite figures in its result",
        found=f"{len(measured)} figures" + (f", not finite: {', '.join(odd)}" if odd else ""),
    )
