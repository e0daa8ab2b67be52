"""What fewer bits bring and cost: the demo model in fp32, then made smaller by real jobs.

Bytes are exact. Perplexities are of the same held-out windows, pair by pair: with the original, or
of two ways with each other.
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
BETTER = {  # the ratio -> which way should read worse, which better
    "round-to-nearest / GPTQ perplexity, 2 bit": ("rtn 2 bit", "gptq 2 bit"),
    "magnitude / SparseGPT perplexity, half of the weights": ("magnitude 50 %", "sparsegpt 50 %"),
    "bf16 / int8 dynamic perplexity": ("bf16", "int8 dynamic"),
}
PERPLEXITY = "perplexity"
WINDOWS = EVALUATION_TOKENS // (DemoModel().max_position_embeddings // 2)


TRAINING = TrainSpec(max_steps=2700, time_budget_seconds=None, compute_dtype="fp32")


def ratios(folder: Path, training: TrainSpec = TRAINING) -> Iterator[Ratio]:
    """Train the demo model, make it smaller in each way, and yield the ratios.

    So many steps, not seconds: on a busy machine it is the same model, only later.
    """
    measured = {row.name: row.measured for row in rows(folder, training, NAMES)}
    yield of_perplexity("fp32 / bf16 perplexity", _against(folder, TRAINED, TRAINED, "fp32"))
    stored = sum(each.stat().st_size for each in trained_files(folder))
    yield Ratio.exact("fp32 / bf16 weights", stored, measured["bf16"]["disk_bytes"], "bytes")
    yield from of_rows(measured)
    yield from compared(folder)


def compared(folder: Path) -> Iterator[Ratio]:
    """Yield how much better one way reads than another, by a job that reads both side by side.

    Window by window: two intervals against the original, each at its worst, would hide it.
    """
    for title, (worse, better) in BETTER.items():
        dtype = spec_of(worse).weight_dtype
        found = _against(folder, attempt_of(worse), attempt_of(better), dtype)
        yield of_perplexity(title, found)


def _against(
    folder: Path, attempt_id: str, other_id: str, weight_dtype: WeightDtype
) -> dict[str, float]:
    """Return what one attempt's model reads beside another's, window by window."""
    asked = EvaluateSpec(
        model=ArtefactModel(attempt_id=attempt_id),
        original=ArtefactModel(attempt_id=other_id),
        weight_dtype=weight_dtype,
        evaluation_tokens=EVALUATION_TOKENS,
    )
    return run(folder, f"{attempt_id}-against-{other_id}", asked)


def trained_files(folder: Path) -> list[Path]:
    """Return the files with the weights of the model that was trained."""
    model = folder / "attempts" / TRAINED / "output" / "model"
    return sorted(model.glob("*.safetensors"))


def of_rows(measured: Mapping[str, Mapping[str, float]]) -> Iterator[Ratio]:
    """Yield what the rows of the ways show about bytes."""
    for name, title in STORED.items():
        row = measured[name]
        small = row.get("compressed_bytes", row["matrices_bytes"])
        yield Ratio.exact(
            f"bf16 / {title} matrices", row["original_matrices_bytes"], small, "bytes"
        )


def of_perplexity(title: str, found: Mapping[str, float]) -> Ratio:
    """Return the ratio that an evaluation beside its original found."""
    value, low, high = (found[f"perplexity_ratio{end}"] for end in ("", "_low", "_high"))
    return Ratio(title, value, low, high, WINDOWS, PERPLEXITY)
