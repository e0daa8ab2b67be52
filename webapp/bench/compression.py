"""Benchmark of compression methods on the demo model: stored rows, table and docs page."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from textwrap import fill
from typing import NamedTuple

from runners.host.bench import CALIBRATION_TOKENS, EVALUATION_TOKENS, GROUP_SIZE, Row, rows
from runners.jobspec import TrainSpec

RESULTS_PATH = Path(__file__).parent / "data" / "compression.jsonl"
DOCS = Path(__file__).parents[2] / "templates" / "docs" / "compression.md"
TRAIN_SECONDS = 300.0
METRICS = (  # metrics of a row, with their units
    ("compressed_bytes", "bytes"),
    ("disk_bytes", "bytes"),
    ("compress_peak_memory_bytes", "bytes"),
    ("compress_seconds", "s"),
    ("perplexity", ""),
    ("perplexity_ratio", "ratio"),
    ("decode_tokens_per_second", "1/s"),
)


class Claim(NamedTuple):
    """A ranking from the literature: the first method has a lower perplexity than the second."""

    better: str
    worse: str
    source: str
    why_not: str = ""  # measured explanation if the ranking does not hold here


UNMEASURED = "not measured yet"
CONTRADICTED = "does not hold"
LINE = 99  # characters per line of the page
WANDA_WHY = (
    "Wanda meets its own objective: over 32,768 tokens the output error of its down projections "
    "is 0.08 to 0.37 of magnitude pruning's, and most other layers have a smaller error too. "
    "Perplexity does not follow in a model trained so briefly. In another model, after 500 "
    "steps and on 8,192 tokens, perplexity is 275.51 unpruned. With half of the down "
    "projections' weights removed it is 275.94 against magnitude's 275.50; with two of four "
    "removed, 276.33 against 277.61; with all layers pruned, 279.39 against 278.85 and 284.70 "
    "against 284.42. Our interpretation: most small weights are still noise of the "
    "initialisation, and the input outliers that Wanda relies on appear in models of billions "
    "of parameters (arXiv:2208.07339). A larger trained model would settle it; none fits this "
    "benchmark."
)
CLAIMS = (
    *(
        Claim(f"{method} {bits} bit", f"rtn {bits} bit", source)
        for method, source in (("gptq", "arXiv:2210.17323"), ("quantease", "arXiv:2309.01885"))
        for bits in (4, 3)
    ),
    *(Claim(f"quantease {bits} bit", f"gptq {bits} bit", "arXiv:2309.01885") for bits in (4, 3)),
    Claim("sparsegpt 50 %", "magnitude 50 %", "arXiv:2301.00774"),
    Claim("gptq 2 bit", "rtn 2 bit", "arXiv:2210.17323"),
    *(
        Claim(f"norm_tweaking {bits} bit", f"gptq {bits} bit", "arXiv:2309.02784")
        for bits in (3, 2)
    ),
    *(Claim(f"awq {bits} bit", f"rtn {bits} bit", "arXiv:2306.00978") for bits in (4, 3)),
    Claim("quantease 3 bit, 1 % outliers", "quantease 3 bit", "arXiv:2309.01885"),
    Claim("wanda 50 %", "magnitude 50 %", "arXiv:2306.11695", WANDA_WHY),
    Claim("sparsegpt 2:4", "magnitude 2:4", "arXiv:2301.00774"),
    Claim("wanda 2:4", "magnitude 2:4", "arXiv:2306.11695", WANDA_WHY),
)


def compression_metrics(
    folder: Path, *, is_kept: bool = False
) -> Iterator[tuple[str, float, str]]:
    """Measure every row and yield its figures with their units.

    With ``is_kept``, the stored rows and the docs page are replaced after the last row.
    """
    measured_rows: list[Row] = []
    for row in rows(folder, TrainSpec(time_budget_seconds=TRAIN_SECONDS)):
        measured_rows.append(row)
        for metric, unit in METRICS:
            if metric in row.measured:
                yield f"{row.name}: {metric}", row.measured[metric], unit

    if is_kept:
        RESULTS_PATH.write_text("".join(f"{json.dumps(row)}\n" for row in measured_rows))
        DOCS.write_text(page(stored()))


def stored() -> dict[str, Mapping[str, float]]:
    """Return the stored rows by name."""
    lines = [json.loads(line) for line in RESULTS_PATH.read_text().splitlines()]
    return {Row(*line).name: Row(*line).measured for line in lines}


def verdict(claim: Claim, measured: Mapping[str, Mapping[str, float]]) -> str:
    """Return whether a claim holds in the rows, according to their confidence intervals."""
    if claim.better not in measured or claim.worse not in measured:
        return UNMEASURED
    own, other = measured[claim.better], measured[claim.worse]
    if own["perplexity_ratio_high"] < other["perplexity_ratio_low"]:
        return "holds beyond both intervals"
    if own["perplexity"] < other["perplexity"]:
        return "holds, within the intervals"
    if own["perplexity_ratio_low"] <= other["perplexity_ratio_high"]:
        return "not seen: too close for this text"
    return CONTRADICTED


def page(measured: Mapping[str, Mapping[str, float]]) -> str:
    """Return the docs page with the rows."""
    table = "\n".join(_line(name, row) for name, row in measured.items())
    claims = "\n".join(
        f"| {claim.better} | {claim.worse} | {verdict(claim, measured)} | {claim.source} |"
        for claim in CLAIMS
    )
    return PAGE.format(
        table=table,
        claims=claims,
        reasons=_reasons(measured),
        original=_size(measured["bf16"]["original_matrices_bytes"]),
        perplexity=measured["bf16"]["original_perplexity"],
        seconds=TRAIN_SECONDS,
        group_size=GROUP_SIZE,
        calibration=CALIBRATION_TOKENS,
        evaluation=EVALUATION_TOKENS,
    )


def _reasons(measured: Mapping[str, Mapping[str, float]]) -> str:
    explained: dict[str, list[str]] = {}
    for claim in CLAIMS:
        if verdict(claim, measured) == CONTRADICTED:
            explained.setdefault(claim.why_not, []).append(claim.better)
    return "".join(
        "\n" + fill(f"**Why not: {' and '.join(names)}.** {why}", LINE) + "\n"
        for why, names in explained.items()
    )


def _line(name: str, row: Mapping[str, float]) -> str:
    compressed = row.get("compressed_bytes", row.get("gguf_bytes", row["matrices_bytes"]))
    peak = row.get("compress_peak_memory_bytes")
    seconds = row.get("compress_seconds")
    low, high = row["perplexity_ratio_low"], row["perplexity_ratio_high"]
    cells = (
        name,
        _size(compressed),
        _size(row["disk_bytes"]),
        _size(peak) if peak else "",
        f"{seconds:.1f}" if seconds else "",
        f"{row['perplexity']:.2f}",
        f"{row['perplexity_ratio']:.4f} ({low:.4f} to {high:.4f})",
        f"{row['decode_tokens_per_second']:.0f}",
    )
    return "| " + " | ".join(cells) + " |"


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:.2f} MB"


PAGE = """\
# Compressing the demo model

This page compares the compression methods on the demo model. Each row is a real job:
`manage.py bench compress` trains the demo model for {seconds:.0f} seconds and compresses it with
each method, with {group_size} weights per scale and {calibration} calibration tokens. Every model
was saved, loaded again by plain `from_pretrained`, and evaluated on the same {evaluation} held-out
tokens; the original has a perplexity of {perplexity:.2f} and matrices of {original}. Bytes are
exact. Seconds and tokens per second come from a machine with two cores and other load: they varied
fivefold between rows that compute the same, so do not rank methods by speed from this table.

| Method | Matrices | On disk | Peak memory | Seconds | Perplexity | Perplexity ratio | Tokens/s |
|---|---|---|---|---|---|---|---|
{table}

*Matrices* is the size of the compressed linear layers: codes and scales, for pruned layers a
bitmask and the remaining values, plus each outlier with its position. *On disk* is the size of the
folder's safetensors including embedding and output layer, which stay in 16 bit. A CPU unpacks
packed codes when it uses them, so tokens per second are those of 16-bit weights; int8 and nf4
stay small in memory. Pruned weights and outliers are written as plain 16-bit tensors, because no
loader reads a sparse format: they save no disk space yet.

## Methods and their limits

- Round-to-nearest, GPTQ, QuantEase: integers of 2, 3, 4 or 8 bits in groups that share a
  scale, as compressed-tensors `pack-quantized`. QuantEase can keep outliers in 16 bit.
- Norm tweaking: GPTQ, then a few passes of Adam over the calibration text restore the mean and
  variance of each layer's output channels; only norms are trained.
- AutoRound: 200 steps along the sign of the gradient learn, in each layer, where every weight
  rounds to and how far each group's scale shrinks, so that the layer's outputs on the calibration
  text change least. It takes backward passes: more time and memory than GPTQ.
- AWQ, SmoothQuant, FPTQ: scales move from a layer's inputs into the preceding norms before
  rounding. They support the layers of Llama, Mistral, Qwen 2 and Qwen 3. SmoothQuant (8-bit
  weights) and FPTQ (4-bit weights) also round each token's activations to 8 bits, which a CPU
  emulates more slowly.
- FineQuant: each matrix gets the coarsest groups that preserve its accuracy. An engine that fuses
  queries, keys and values may need one size for the three.
- int8 dynamic: 8-bit weights, and each token's activations rounded to 8 bits at run
  time (torchao).
- fp8: e4m3 floats with one scale per row (torchao); products are in 16 bit on a CPU.
- Magnitude, Wanda, SparseGPT: set single weights to zero: a fraction of them (the sparsity
  ratio), or two of each four (2:4).
- LLM-Pruner: removes whole heads with the keys they share and whole channels, the same number in
  each layer. *Recovery steps* train a LoRA on the calibration text after pruning and merge it;
  without them the model is not tuned afterwards.
- Sheared LLaMA, at small scale: learnt masks reduce layers, heads, hidden units and channels to
  one target shape; then 160 training steps follow, with code and prose sampled by how far each is
  behind. It writes checkpoints: after a kill it repeats the steps of an uninterrupted run.
- QMoE: stores the experts of a sparse model as three values per row in an entropy code, everything
  else in 16 bit. The job reports the bits per weight and the entropy bound. Experts are decoded
  when the model is loaded, so memory is that of 16 bit. The demo has no experts and therefore no
  row.
- GGUF: F16, Q8_0, Q6_K, Q5_K_M, Q4_K_M or Q4_0 for llama.cpp, for Llama and Mistral models with
  byte-level BPE, read back and compared tensor by tensor. K-quants have blocks of 256 weights. If
  a model's rows are not a multiple of that, as in the demo, wider types with blocks of 32 are used
  instead, as in llama.cpp. Later jobs use the original, not the GGUF file.

## Comparison with the literature

The interval of each ratio is 95 % over windows, paired with the original.

| Should have lower perplexity | than | Result here | Source |
|---|---|---|---|
{claims}
{reasons}"""
