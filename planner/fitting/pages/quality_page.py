"""Write the quality page: the error of the predicted loss on sources outside the fit."""

from planner.catalog.quality import scheme_quality
from planner.fitting.quality_fit import held_out_quality

SHOWN = ("gguf:q8_0", "gguf:q4_k_m", "gguf:q2_k", "gptq-4g", "awq-4g", "nf4", "smoothquant")
MODELS = (("llama-2", 7.0), ("llama-2", 70.0), ("llama-3", 8.0), ("qwen", 7.0))
HEAD = """# Quality

What compression costs, from published tables: the perplexity of the compressed model over that of
the same source's uncompressed one. `planner/catalog/data/quality.csv` holds the rows and
`quality_sources.csv` where they are from. `python -m planner quality` writes this page, and a test
holds it to that. An interval holds four fifths of what sources that a fit did not see say; a
family without rows of a scheme borrows those of others, for a wider one; a scheme without rows is
unknown.
"""


def quality_page() -> str:
    """Return the quality page as Markdown, recomputed from the rows."""
    lines = [HEAD, "## Sources left out of the fit\n"]
    lines += ["| Source | Rows | Unknown pairs | Median error | Inside the interval |"]
    lines += ["|---|---|---|---|---|"]
    for entry in held_out_quality():
        error = "" if entry.median_error is None else f"{entry.median_error:.1%}"
        covered = "" if entry.covered is None else f"{entry.covered:.0%}"
        lines.append(f"| {entry.source} | {entry.rows} | {entry.unknown} | {error} | {covered} |")
    lines += ["\n## What to expect\n"]
    titles = " | ".join(f"{family} {billions:g}B" for family, billions in MODELS)
    lines += [f"| Scheme | {titles} |", "|---" * (len(MODELS) + 1) + "|"]
    lines += [f"| {scheme} | {_cells(scheme)} |" for scheme in SHOWN]
    return "\n".join(lines) + "\n"


def _cells(scheme: str) -> str:
    """Return the low, expected and high perplexity ratio of a scheme for each model."""
    cells = []
    for family, billions in MODELS:
        ratio = scheme_quality(scheme, family, billions).perplexity_ratio
        cells.append(" / ".join(f"{end:.3f}" for end in ratio) if ratio else "unknown")
    return " | ".join(cells)
