"""The registry as a table in the documentation: definition and measurement of each figure."""

from webapp.figures.registry import REGISTRY, FigureDefinition

BETTER = {"higher": "more is better", "lower": "less is better", "": ""}
UNITS = {
    "bytes": "bytes",
    "seconds": "s",
    "elapsed_seconds": "s",
    "tokens_per_second": "tokens/s",
    "share": "share, shown in %",
    "count": "count",
    "usd": "US dollars",
    "joules": "J",
    "joules_per_token": "J/token",
    "": "number",
}


def figure_table() -> str:
    """Return one Markdown row per registered figure: name, unit, meaning, window."""
    head = "| Figure | Unit | What it is | Taken over |\n|---|---|---|---|\n"
    return head + "\n".join(_row(each) for each in REGISTRY.values())


def _row(figure: FigureDefinition) -> str:
    unit = UNITS.get(figure.unit, figure.unit)
    better = BETTER[figure.better]
    meaning = f"{figure.definition} *{better}*" if better else figure.definition
    named = f"{figure.label}<br>`{figure.name}`"
    return f"| {named} | {unit} | {meaning} | {_windows(figure)} |"


def _windows(figure: FigureDefinition) -> str:
    """Return how each kind of job measures the figure; equal ones are grouped."""
    kinds: dict[str, list[str]] = {}
    for kind, taking in figure.takings.items():
        kinds.setdefault(taking.words, []).append(kind)
    groups = [f"**{', '.join(names)}**: {words}" for words, names in kinds.items()]
    return "; ".join(groups) or figure.default.words
