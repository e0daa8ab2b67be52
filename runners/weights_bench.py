"""Benchmarks compression: the demo model in fp32, and compressed by real jobs.

Bytes are exact. Perplexity ratios are paired over the same held-out windows: against the
original, or between two methods.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

from runners.compress_bench import EVALUATION_TOKENS, TRAINED, attempt_of, rows, run, spec_of
from runners.compress_options import WeightDtype
from runners.jobspec import ArtefactModel, DemoModel, EvaluateSpec, TrainSpec
from runners.ratios import Ratio

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
