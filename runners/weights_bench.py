"""What fewer bits bring and cost: the demo model in fp32, then made smaller by real jobs.

Bytes are exact. Perplexities are of the same held-out windows, pair by pair with the original.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

from runners.compress_bench import EVALUATION_TOKENS, TRAINED, Row, rows, run
from runners.jobspec import ArtefactModel, DemoModel, EvaluateSpec, TrainSpec
from runners.ratios import Ratio

NAMES = (
    "bf16", "int8", "nf4", "gptq 4 bit", "rtn 2 bit", "gptq 2 bit", "magnitude 50 %",
    "sparsegpt 50 %",
)  # fmt: skip
STORED = {"int8": "int8", "nf4": "nf4", "gptq 4 bit": "GPTQ 4-bit", "sparsegpt 50 %": "SparseGPT"}
BETTER = {  # the ratio -> which way should read worse, which better
    "round-to-nearest / GPTQ perplexity, 2 bit": ("rtn 2 bit", "gptq 2 bit"),
    "magnitude / SparseGPT perplexity, half of the weights": ("magnitude 50 %", "sparsegpt 50 %"),
}
PERPLEXITY = "perplexity"
WINDOWS = EVALUATION_TOKENS // (DemoModel().max_position_embeddings // 2)


def ratios(folder: Path, train_seconds: float) -> Iterator[Ratio]:
    """Train the demo model in fp32, make it smaller in each way, and yield the ratios."""
    run(folder, TRAINED, TrainSpec(time_budget_seconds=train_seconds, compute_dtype="fp32"))
    measured = {row.name: row.measured for row in rows(folder, train_seconds, NAMES)}
    own = ArtefactModel(attempt_id=TRAINED)
    asked = EvaluateSpec(
        model=own, original=own, weight_dtype="fp32", evaluation_tokens=EVALUATION_TOKENS
    )
    found = run(folder, "half", asked)
    yield of_perplexity("fp32 / bf16 perplexity", found)
    stored = sum(each.stat().st_size for each in trained_files(folder))
    yield Ratio.exact("fp32 / bf16 weights", stored, measured["bf16"]["disk_bytes"], "bytes")
    yield from of_rows(measured)


def trained_files(folder: Path) -> list[Path]:
    """Return the files with the weights of the model that was trained."""
    model = folder / "attempts" / TRAINED / "output" / "model"
    return sorted(model.glob("*.safetensors"))


def of_rows(measured: Mapping[str, Mapping[str, float]]) -> Iterator[Ratio]:
    """Yield what the rows of the ways show about bytes and about perplexity."""
    for name, title in STORED.items():
        row = measured[name]
        small = row.get("compressed_bytes", row["matrices_bytes"])
        yield Ratio.exact(
            f"bf16 / {title} matrices", row["original_matrices_bytes"], small, "bytes"
        )
    for title, (worse, better) in BETTER.items():
        yield between(
            title, Row(worse, dict(measured[worse])), Row(better, dict(measured[better]))
        )


def between(title: str, worse: Row, better: Row) -> Ratio:
    """Return the ratio of two perplexities, each known as an interval against one original.

    The bounds are those of the two intervals at their worst: wider than the pairs would allow.
    """
    above, below = worse.measured, better.measured
    return Ratio(
        title,
        above["perplexity_ratio"] / below["perplexity_ratio"],
        above["perplexity_ratio_low"] / below["perplexity_ratio_high"],
        above["perplexity_ratio_high"] / below["perplexity_ratio_low"],
        WINDOWS,
        PERPLEXITY,
    )


def of_perplexity(title: str, found: Mapping[str, float]) -> Ratio:
    """Return the ratio that an evaluation beside its original found."""
    value, low, high = (found[f"perplexity_ratio{end}"] for end in ("", "_low", "_high"))
    return Ratio(title, value, low, high, WINDOWS, PERPLEXITY)
