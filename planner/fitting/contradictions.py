"""Contradictions among published peaks: pairs of rows that no formula can reproduce together.

With everything else equal, more tokens on a device never need less memory, and no device holds
more than its capacity. Rows that violate this remain in every fit and score; this module lists
them.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from planner.fitting.evidence import Row, cluster_of, number, table
from planner.fitting.inference_evidence import model_named
from planner.workload.resolve import resolve_device

# Columns for the work per device, and columns that do not describe the setting.
SIZES = ("micro_batch_size", "sequence_length", "batch_size", "input_tokens", "output_tokens")
REMARKS = (
    "row_id",
    "source_date",
    "source_url_or_repo_path",
    "global_batch_size",
    "peak_memory_bytes",
    "step_seconds",
    "notes",
)
MARGIN = 0.02  # published figures have two or three digits
GIGA = 1e9


@dataclass(frozen=True)
class Contradiction:
    """Two rows of one setting: the row with more work has the lower published peak."""

    source: str
    less: Row
    more: Row

    @property
    def gap(self) -> float:
        """Return the relative excess of the smaller run's published peak."""
        return number(self.less, "peak_memory_bytes") / number(self.more, "peak_memory_bytes") - 1


def settings(rows: Sequence[Row]) -> dict[tuple[str, ...], list[Row]]:
    """Return rows grouped by everything except the size of their work."""
    groups: dict[tuple[str, ...], list[Row]] = defaultdict(list)
    for row in rows:
        fixed = (value for name, value in row.items() if name not in {*SIZES, *REMARKS})
        groups[(*fixed, _setting_notes(row))].append(row)
    return groups


def _setting_notes(row: Row) -> str:
    """Return the parts of a row's notes that describe its setting: targets, kernels, optimiser."""
    remarks = row["notes"].split(";")
    return ";".join(word for word in remarks if "samples/s" not in word and "token" not in word)


def contradictions(rows: Sequence[Row]) -> Iterator[Contradiction]:
    """Yield the worst contradicting pair of each row with less work."""
    for alike in settings(rows).values():
        for less in alike:
            pairs = [
                Contradiction(less["source_id"], less, m) for m in alike if _works_more(m, less)
            ]
            worst = max(pairs, key=lambda pair: pair.gap, default=None)
            if worst is not None and worst.gap > MARGIN:
                yield worst


def _works_more(row: Row, other: Row) -> bool:
    """Return whether another row has at least as much work in every size."""
    sizes = [(number(row, name), number(other, name)) for name in SIZES]
    return row is not other and all(more >= less for more, less in sizes)


def rows_over_device_memory(rows: Sequence[Row]) -> Iterator[tuple[Row, float]]:
    """Yield rows with a published peak above the device memory, with that memory."""
    for row in rows:
        device = resolve_device(cluster_of(row)["device"])
        if number(row, "peak_memory_bytes") > device.memory_bytes:
            yield row, float(device.memory_bytes)


def section() -> str:
    """Return the accuracy page's section on contradictory peaks."""
    rows = table("memory")
    lines = [
        "## Peaks that contradict themselves\n",
        "Everything else alike, the run with more tokens was printed with less memory. Of such a",
        "pair one row must be missed by at least half the gap. They stay in every figure above.\n",
        "| Source | Model | Tokens | Printed | Tokens | Printed | Gap |",
        "|---|---|---|---|---|---|---|",
    ]
    for pair in sorted(contradictions(rows), key=lambda pair: -pair.gap):
        sides = " | ".join(
            f"{_work_text(row)} | {_peak_text(row)}" for row in (pair.less, pair.more)
        )
        model = model_named(pair.less["model"])
        lines.append(f"| {pair.source} | {model} | {sides} | {pair.gap:.0%} |")
    lines += [
        "",
        "Printed with more than the device has:\n",
        "| Source | Model | Printed | Device |",
    ]
    lines.append("|---|---|---|---|")
    for row, capacity in rows_over_device_memory(rows):
        model = model_named(row["model"])
        lines.append(
            f"| {row['source_id']} | {model} | {_peak_text(row)} | {capacity / GIGA:.1f} GB |"
        )
    return "\n".join(lines) + "\n"


def _work_text(row: Row) -> str:
    if row["sequence_length"]:
        return f"{int(number(row, 'micro_batch_size', 1))} x {row['sequence_length']}"
    tokens = int(number(row, "input_tokens")) + int(number(row, "output_tokens"))
    return f"{int(number(row, 'batch_size', 1))} x {tokens}"


def _peak_text(row: Row) -> str:
    return f"{number(row, 'peak_memory_bytes') / GIGA:.1f} GB"
