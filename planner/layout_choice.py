"""Would our first choice have been the best layout? Published sweeps, ranked by prediction.

A sweep is what one source measured for one model, batch and number of devices. The predictions
are those without the sweep's model, so that no choice was seen before.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from planner.evidence import Row, table
from planner.left_out import STEP, LeftOut
from planner.serving_factors import SEEN, UNSEEN

SAME = (
    "source_id",
    "engine",
    "model",
    "num_attention_heads",
    "gpu",
    "num_gpus",
    "global_batch_size",
    "sequence_length",
    "precision",
    "method",
)
LAYOUT = ("tp", "pp", "micro_batch_size", "recompute", "zero_stage")
MIN_LAYOUTS = 4
WITHIN = 0.03


@dataclass(frozen=True)
class Choice:
    """The layout that predictions put first in a sweep, against the fastest one measured."""

    source: str
    model: str
    devices: int
    runs: int
    chosen: str
    best: str
    lost: float

    @property
    def is_close(self) -> bool:
        """Return whether the choice is within 3 % of the fastest."""
        return self.lost <= WITHIN


def layout_of(row: Row) -> str:
    """Return a row's layout in a few words.

    >>> layout_of({"tp": "2", "pp": "4", "micro_batch_size": "1", "recompute": "none",
    ...            "zero_stage": "1"})
    'tensor 2, pipeline 4, micro-batch 1, none recomputed'
    """
    return (
        f"tensor {row['tp'] or 1}, pipeline {row['pp'] or 1}, "
        f"micro-batch {row['micro_batch_size'] or '?'}, {row['recompute'] or '?'} recomputed"
    )


def choices(predictions: Iterable[LeftOut]) -> list[Choice]:
    """Return the choice in every sweep of at least four runs over at least two layouts.

    An engine's only model has no prediction without it: there the source is what was left out.
    """
    steps = [row for row in predictions if row.figure == STEP]
    known: dict[str, LeftOut] = {}
    for error_class in (UNSEEN, SEEN):
        known |= {row.row_id: row for row in steps if row.error_class == error_class}
    sweeps: dict[tuple[str, ...], list[Row]] = defaultdict(list)
    for row in table("training"):
        if row["row_id"] in known:
            sweeps[tuple(row[name] for name in SAME)].append(row)
    kept = (rows for _, rows in sorted(sweeps.items()) if _is_sweep(rows))
    return [_choice(rows, known) for rows in kept]


def _is_sweep(rows: list[Row]) -> bool:
    layouts = {tuple(row[name] for name in LAYOUT) for row in rows}
    return len(rows) >= MIN_LAYOUTS and len(layouts) > 1


def _choice(rows: list[Row], known: dict[str, LeftOut]) -> Choice:
    first = min(rows, key=lambda row: known[row["row_id"]].predicted)
    best = min(rows, key=lambda row: known[row["row_id"]].measured)
    taken, fastest = (known[row["row_id"]].measured for row in (first, best))
    return Choice(
        source=first["source_id"],
        model=first["model"],
        devices=int(first["num_gpus"]),
        runs=len(rows),
        chosen=layout_of(first),
        best=layout_of(best),
        lost=taken / fastest - 1,
    )
