"""Evaluate the planner's first choice of layout on published sweeps.

A sweep is one source's runs of one model, batch and number of devices. Predictions are made with
the sweep's model left out of the fit.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from planner.fitting.evidence import Row, table
from planner.fitting.left_out import STEP, LeftOut
from planner.fitting.serving.factors import SEEN, UNSEEN

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
    """The predicted best layout of a sweep, compared with the fastest measured one."""

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
    """Return a row's layout as text.

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

    For an engine with only one model, the source is left out instead of the model.
    """
    steps = [row for row in predictions if row.figure == STEP]
    predictions_by_row: dict[str, LeftOut] = {}
    for error_class in (UNSEEN, SEEN):
        predictions_by_row |= {row.row_id: row for row in steps if row.error_class == error_class}
    sweeps: dict[tuple[str, ...], list[Row]] = defaultdict(list)
    for row in table("training"):
        if row["row_id"] in predictions_by_row:
            sweeps[tuple(row[name] for name in SAME)].append(row)
    valid_sweeps = (rows for _, rows in sorted(sweeps.items()) if _is_sweep(rows))
    return [_choice(rows, predictions_by_row) for rows in valid_sweeps]


def _is_sweep(rows: list[Row]) -> bool:
    layouts = {tuple(row[name] for name in LAYOUT) for row in rows}
    return len(rows) >= MIN_LAYOUTS and len(layouts) > 1


def _choice(rows: list[Row], predictions_by_row: dict[str, LeftOut]) -> Choice:
    first = min(rows, key=lambda row: predictions_by_row[row["row_id"]].predicted)
    best = min(rows, key=lambda row: predictions_by_row[row["row_id"]].measured)
    chosen_seconds, fastest = (predictions_by_row[row["row_id"]].measured for row in (first, best))
    return Choice(
        source=first["source_id"],
        model=first["model"],
        devices=int(first["num_gpus"]),
        runs=len(rows),
        chosen=layout_of(first),
        best=layout_of(best),
        lost=chosen_seconds / fastest - 1,
    )
