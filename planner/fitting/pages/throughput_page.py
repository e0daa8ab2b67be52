"""The accuracy page's section on published throughput tables."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from functools import cache

from planner.errors import PlannerError
from planner.fitting.evidence import Row
from planner.fitting.held_out import summary
from planner.fitting.serving.throughput_fitting import left_out_parts
from planner.fitting.serving.throughput_rows import (
    kind_of,
    layouts_of,
    measured_of,
    throughput_rows,
)
from planner.specs.estimate import EstimateRequest
from planner.workload.estimator import estimate_request

GAP = "open loop"
WORDS = """Output tokens per second of whole tables, each row asked as it was measured. Open
loops are compared by the gap between tokens, as their throughput is what was sent.
"""
ASSUMED = """What the tables do not say is assumed. TensorRT-LLM's runs sent 30,000 requests of
128 + 128 tokens and 1,000 to 3,000 longer ones; where its notes say attention data parallelism,
attention is whole on every rank and experts are spread over them. MLPerf's logs name neither
layout nor format: 8-bit weights and activations (4-bit on B200), 8-bit cache, and the fastest of
the tensor-parallel layouts. OpenVINO's prompts have 256 tokens, its answers what the lowest rate
implies. Left out are GPT-J and Mixtral in MLPerf (no lengths, four beams), rates at the edge of
an objective, and shared prefixes. Full batches and bursts took part in the fit; MLPerf, batches
sent at once to TensorRT-LLM, closed and open loops did not.
"""


def predicted(row: Row) -> float | None:
    """Return the predicted rate of a row, None if there is no estimate."""
    rates = []
    for request in layouts_of(row):
        with suppress(PlannerError):
            answer = estimate_request(EstimateRequest.model_validate(request), explain=False)
            speed = answer.performance
            if kind_of(row).startswith(GAP):
                rates.append(1 / speed.tpot_seconds if speed.tpot_seconds else None)
            else:
                rates.append(speed.output_tokens_per_second)
    return max((rate for rate in rates if rate), default=None)


@cache
def table_errors() -> dict[tuple[str, str], list[float]]:
    """Return the relative errors of every usable row, by source and kind."""
    errors_by_kind: dict[tuple[str, str], list[float]] = defaultdict(list)
    for row in throughput_rows():
        rate = predicted(row)
        if rate:
            errors_by_kind[row["source_id"], kind_of(row)].append(rate / measured_of(row) - 1)
    return dict(sorted(errors_by_kind.items()))


def throughput_section() -> str:
    """Return the errors by source and kind, fitted and left out, as tables."""
    lines = [
        "## Throughput tables\n",
        WORDS,
        "| Rows of | Kind | n | Mean | Median | 90th percentile |",
        "|---|---|---|---|---|---|",
        *_rows(table_errors()),
        "",
        "| Left out of the fit | Rows of | n | Mean | Median | 90th percentile |",
        "|---|---|---|---|---|---|",
        *_rows(_left_out()),
        "",
        ASSUMED,
    ]
    return "\n".join(lines)


def _left_out() -> dict[tuple[str, str], list[float]]:
    errors_by_part: dict[tuple[str, str], list[float]] = defaultdict(list)
    for part, errors in left_out_parts().items():
        for case, error in errors:
            errors_by_part[part, f"{case.source}, {case.engine}"].append(error)
    return dict(sorted(errors_by_part.items()))


def _rows(errors_by_key: dict[tuple[str, str], list[float]]) -> Iterator[str]:
    all_errors = [error for errors in errors_by_key.values() for error in errors]
    for (first, second), errors in [*errors_by_key.items(), (("all", ""), all_errors)]:
        s = summary(errors)
        shares = " | ".join(f"{s[key]:.1%}" for key in ("mean", "median", "p90"))
        yield f"| {first} | {second} | {s['n']} | {shares} |"
