"""Where published peaks contradict themselves: no formula can follow both rows of such a pair.

Everything else alike, more tokens on a device never need less memory, and no device holds more
than it has. Rows that break this stay in every fit and every score; here they are named.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from planner.evidence import Row, cluster_of, number, table
from planner.inference_evidence import model_named
from planner.workload.resolve import resolve_device

# What changes with the work of one device, and what is said about a row, not of its setting.
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
MARGIN = 0.02  # figures are printed with two or three digits
GIGA = 1e9


@dataclass(frozen=True)
class Contradiction:
    """Two rows of one setting: the one with more work was printed with less memory."""

    source: str
    less: Row
    more: Row

    @property
    def gap(self) -> float:
        """Return how much more the smaller run was printed with, as a share."""
        return number(self.less, "peak_memory_bytes") / number(self.more, "peak_memory_bytes") - 1


def settings(rows: Sequence[Row]) -> dict[tuple[str, ...], list[Row]]:
    """Return rows that differ in the size of their work alone, together."""
    found: dict[tuple[str, ...], list[Row]] = defaultdict(list)
    for row in rows:
        fixed = (value for name, value in row.items() if name not in {*SIZES, *REMARKS})
        found[(*fixed, _section(row))].append(row)
    return found


def _section(row: Row) -> str:
    """Return what a row's remarks say of its setting: targets, kernels, optimiser."""
    words = row["notes"].split(";")
    return ";".join(word for word in words if "samples/s" not in word and "token" not in word)


def contradictions(rows: Sequence[Row]) -> Iterator[Contradiction]:
    """Yield, for every row that does less than another of its setting, the worst such pair."""
    for alike in settings(rows).values():
        for less in alike:
            pairs = [
                Contradiction(less["source_id"], less, m) for m in alike if _works_more(m, less)
            ]
            worst = max(pairs, key=lambda pair: pair.gap, default=None)
            if worst is not None and worst.gap > MARGIN:
                yield worst


def _works_more(one: Row, other: Row) -> bool:
    """Return whether a run works on as much as another in every size, and is another row."""
    sizes = [(number(one, name), number(other, name)) for name in SIZES]
    return one is not other and all(more >= less for more, less in sizes)


def beyond_the_card(rows: Sequence[Row]) -> Iterator[tuple[Row, float]]:
    """Yield the rows that were printed with more than their device has, with what it has."""
    for row in rows:
        device = resolve_device(cluster_of(row)["device"])
        if number(row, "peak_memory_bytes") > device.memory_bytes:
            yield row, float(device.memory_bytes)


def section() -> str:
    """Return what published peaks say against themselves, as a part of the accuracy page."""
    rows = table("memory")
    lines = [
        "## Peaks that contradict themselves\n",
        "Everything else alike, the run with more tokens was printed with less memory. Of such a",
        "pair one row must be missed by at least half the gap. They stay in every figure above.\n",
        "| Source | Model | Tokens | Printed | Tokens | Printed | Gap |",
        "|---|---|---|---|---|---|---|",
    ]
    for pair in sorted(contradictions(rows), key=lambda pair: -pair.gap):
        sides = " | ".join(f"{_work(row)} | {_gigabytes(row)}" for row in (pair.less, pair.more))
        model = model_named(pair.less["model"])
        lines.append(f"| {pair.source} | {model} | {sides} | {pair.gap:.0%} |")
    lines += [
        "",
        "Printed with more than the device has:\n",
        "| Source | Model | Printed | Device |",
    ]
    lines.append("|---|---|---|---|")
    for row, has in beyond_the_card(rows):
        model = model_named(row["model"])
        lines.append(f"| {row['source_id']} | {model} | {_gigabytes(row)} | {has / GIGA:.1f} GB |")
    return "\n".join(lines) + "\n"


def _work(row: Row) -> str:
    if row["sequence_length"]:
        return f"{int(number(row, 'micro_batch_size', 1))} x {row['sequence_length']}"
    tokens = int(number(row, "input_tokens")) + int(number(row, "output_tokens"))
    return f"{int(number(row, 'batch_size', 1))} x {tokens}"


def _gigabytes(row: Row) -> str:
    return f"{number(row, 'peak_memory_bytes') / GIGA:.1f} GB"
