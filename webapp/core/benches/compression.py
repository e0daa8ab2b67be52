"""What compressing the demo model gave on this machine, as rows, a table and a docs page."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from textwrap import fill
from typing import NamedTuple

from runners.compress_bench import (
    CALIBRATION_TOKENS,
    EVALUATION_TOKENS,
    GROUP_SIZE,
    Row,
    rows,
)
from runners.jobspec import TrainSpec

RAW = Path(__file__).parent / "data" / "compression.jsonl"
DOCS = Path(__file__).parents[3] / "templates" / "docs" / "compression.md"
TRAIN_SECONDS = 300.0
METRICS = (  # of a row, with their unit
    ("compressed_bytes", "bytes"),
    ("disk_bytes", "bytes"),
    ("compress_peak_memory_bytes", "bytes"),
    ("compress_seconds", "s"),
    ("perplexity", ""),
    ("perplexity_ratio", "ratio"),
    ("decode_tokens_per_second", "1/s"),
)


class Claim(NamedTuple):
    """An order that the literature has: the first should read text better than the second."""

    better: str
    worse: str
    source: str
    why_not: str = ""  # what was measured of the cause, where the order is not seen here


UNMEASURED = "not measured yet"
CONTRADICTED = "does not hold"
LINE = 99  # letters of the page's own lines
WANDA_WHY = (
    "Wanda reaches its own aim: over 32,768 tokens its down projections err by 0.08 to 0.37 "
    "of what magnitude's do, and most other layers by less than magnitude's too. Perplexity "
    "does not follow in so young a model. Looked at in another one, after 500 steps and on "
    "8,192 tokens, where it reads 275.51 unpruned: half of the down projections' weights "
    "gone, 275.94 against magnitude's 275.50; two of four gone, 276.33 against 277.61; "
    "everywhere, 279.39 against 278.85 and 284.70 against 284.42. Our reading: most small "
    "weights are still noise of the initialisation, and the outlying inputs on which Wanda "
    "builds appear in models of billions of parameters (arXiv:2208.07339). A larger trained "
    "model would settle it; none fits this bench."
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


def figures(folder: Path, *, is_kept: bool = False) -> Iterator[tuple[str, float, str]]:
    """Measure every row anew and yield its figures with their units.

    With ``is_kept`` the rows and their page take the place of the kept ones, once all are there.
    """
    found: list[Row] = []
    for row in rows(folder, TrainSpec(time_budget_seconds=TRAIN_SECONDS)):
        found.append(row)
        for metric, unit in METRICS:
            if metric in row.measured:
                yield f"{row.name}: {metric}", row.measured[metric], unit

    if is_kept:
        RAW.write_text("".join(f"{json.dumps(row)}\n" for row in found))
        DOCS.write_text(page(stored()))


def stored() -> dict[str, Mapping[str, float]]:
    """Return the rows that were kept of a run, by name."""
    lines = [json.loads(line) for line in RAW.read_text().splitlines()]
    return {Row(*line).name: Row(*line).measured for line in lines}


def verdict(claim: Claim, measured: Mapping[str, Mapping[str, float]]) -> str:
    """Return whether a claim's order holds in the rows, judged by their intervals."""
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
    """Return the docs page of the rows."""
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
    """Return a paragraph for each cause of an order that does not hold, with what it explains."""
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

Each row is a job that really ran: `manage.py bench compress` trains the demo model for
{seconds:.0f} seconds and compresses it in each of these ways, {group_size} weights a
scale, {calibration} calibration tokens. Every model was saved, loaded again by plain
`from_pretrained`, and judged on the same {evaluation} held-out tokens; its original has a
perplexity of {perplexity:.2f} and matrices of {original}. Bytes are exact; seconds and tokens
per second are of a machine with two cores on which other work ran: they moved fivefold
between rows that compute the same, so no method is faster than another by this table.

| Method | Matrices | On disk | Peak memory | Seconds | Perplexity | Times original | Tokens/s |
|---|---|---|---|---|---|---|---|
{table}

*Matrices* counts what the compressed linear layers take: codes and scales; for pruned ones a
bitmask and the values that stay; beside codes each outlier with its place. *On disk* is the
folder's safetensors with embedding and output layer, which stay in 16 bit. Packed codes are
unpacked when a CPU uses them, so tokens per second are those of 16-bit weights; int8 and nf4
stay small in memory. Pruned weights and outliers are written as plain 16-bit tensors, because no
loader reads a sparse store: their saving on disk is still to come.

## What each way does, and its limits

- Round-to-nearest, GPTQ, QuantEase: whole numbers of 2, 3, 4 or 8 bits in groups that share a
  scale, as compressed-tensors `pack-quantized`. QuantEase may keep outliers in 16 bit.
- Norm tweaking: GPTQ, then a few passes of Adam over the calibration text bring each layer's
  output channels back to the mean and variance that they had; only norms move.
- AWQ, SmoothQuant, FPTQ: scales move from a layer's inputs into its norms before rounding. They
  know the layers of Llama, Mistral, Qwen 2 and Qwen 3. SmoothQuant (8-bit weights) and FPTQ
  (4-bit weights) round each token's activations to 8 bits too; a CPU emulates that, slower.
- FineQuant: each matrix has groups as coarse as serve it. An engine that fuses queries, keys and
  values may want one size for the three.
- int8 dynamic: 8-bit weights, and each token's activations to 8 bits as they come (torchao).
- fp8: one scale a row of e4m3 floats (torchao); products are in 16 bit on a CPU.
- Magnitude, Wanda, SparseGPT: single weights to zero, a share of them or two of each four.
- LLM-Pruner: whole heads with the keys they share and whole channels go, as many in each layer.
  *Recovery steps* train a LoRA on the calibration text after the cut and merge it; without them
  the model is not tuned afterwards.
- Sheared LLaMA, at small scale: layers, heads, hidden units and channels by learnt masks, down to
  one shape; then 160 steps of training with code and prose drawn by how far each is behind. It
  keeps a checkpoint: after a kill it makes the steps that an unbroken run would have made.
- QMoE: the experts of a sparse model as three values a row in an entropy code, everything else in
  16 bit. The job says how many bits a weight takes and the least that its entropy allows; experts
  are decoded when the model is loaded, so memory is that of 16 bit. The demo has no experts, hence
  no row.
- GGUF: F16, Q8_0, Q6_K, Q5_K_M, Q4_K_M or Q4_0 for llama.cpp, of Llama and Mistral models with
  byte-level BPE, read back and compared tensor by tensor. K-quants have blocks of 256 weights: in
  a model whose rows are no multiple of that, as the demo's, they give way to wider types of blocks
  of 32, as in llama.cpp. Later jobs take the original, not the GGUF file.

## Does the literature's order hold?

The interval of each ratio is 95 % over windows, pair by pair with the original.

| Should read better | than | Here | Source |
|---|---|---|---|
{claims}
{reasons}"""
