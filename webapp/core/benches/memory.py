"""What real ranks hold of each of the planner's terms, beside what it counts."""

import datetime as dt
import json
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from planner.api import estimate
from planner.specs.cluster import ClusterSpec, DeviceSpec
from planner.specs.estimate import EstimateRequest
from runners.memory_cases import CASES, CONFIG, LENGTH, ROWS, Case, Held
from runners.ratios import Ratio, machine_class, versions
from webapp.core.benches import site

RAW = Path(__file__).parent / "data" / "memory.jsonl"
DOCS = Path(__file__).parents[3] / "templates" / "docs" / "training-memory.md"
METHODS = {"compute": "lora", "nf4": "qlora"}
BY_OPTIMIZER = ("lomo", "adalomo")  # the planner has these as methods
# The rates decide no byte.
DEVICE = DeviceSpec(
    id="any-processor",
    kind="cpu",
    memory_bytes=2**34,
    memory_bandwidth_bytes_per_second=1e10,
    peak_flops_per_second={"fp32": 1e11, "bf16": 1e11},
)
WITHIN = 0.1
SHARDED = (("ZeRO-1", "optimizer_states"), ("ZeRO-2", "gradients"), ("ZeRO-3", "weights"))


class Row(NamedTuple):
    """One term of one case: the planner's bytes and those of the fullest rank."""

    case: str
    term: str
    planned: float
    held: float

    @property
    def error(self) -> float:
        """Return by how much of what was held the planner errs; too much is positive."""
        return (self.planned - self.held) / self.held if self.held else float(self.planned > 0)


def held() -> Iterator[Held]:
    """Yield what the fullest rank of each case holds, from a process with torch."""
    command = [sys.executable, "-W", "ignore", "-m", "runners.jobs.memory_bench"]
    ended = subprocess.run(command, cwd=site.ROOT, stdout=subprocess.PIPE, text=True, check=True)
    yield from map(Held.model_validate_json, ended.stdout.splitlines())


def planned(case: Case) -> dict[str, float]:
    """Return the planner's bytes of a case, in the terms that are measured."""
    asked = EstimateRequest.model_validate(_request(case))
    found = estimate(asked).memory.breakdown_bytes
    working = found.get("activations", 0) + found.get("buffers", 0)
    terms = {name: float(found.get(name, 0)) for name in Held.TERMS}
    return {**terms, "activations": float(working)}


def _request(case: Case) -> dict[str, Any]:
    method = METHODS.get(case.adapter or "", "full")
    if case.optimizer in BY_OPTIMIZER:
        method = case.optimizer
    optimizer = {} if case.optimizer in BY_OPTIMIZER else {"optimizer": case.optimizer}
    rank = {"lora_rank": case.rank} if case.adapter else {}
    width = {"nf4": "nf4", "compute": "bf16"}.get(case.adapter or "", "fp32")
    return {
        "model": CONFIG,
        "cluster": ClusterSpec(device=DEVICE, devices_per_node=case.ranks),
        "workload": {
            "kind": "train",
            "sequence_length": LENGTH,
            "global_batch_size": ROWS * case.ranks,
            "method": method,
            **optimizer,
            **rank,
        },
        "engine": "torch",
        "strategy": {
            "data_parallel_size": case.ranks,
            "zero_stage": case.zero_stage,
            "micro_batch_size": ROWS,
            "activation_recomputation": case.recomputation,
            "weight_dtype": width,
            "compute_dtype": case.compute_dtype,
            "attention": "eager",
        },
    }


def rows_of(found: Held) -> list[Row]:
    """Return a case's terms, those alone that somebody counts."""
    case = next(each for each in CASES if each.name == found.case)
    expected, real = planned(case), found.model_dump()
    rows = [Row(case.name, term, expected[term], real[term]) for term in Held.TERMS]
    return [each for each in rows if each.planned or each.held]


def sharding_ratios(found: Mapping[str, Held]) -> Iterator[Ratio]:
    """Yield how much less of what it shards each stage of ZeRO holds on four ranks."""
    copies = found["DDP on 4 ranks"].model_dump()
    for name, term in SHARDED:
        own = found[f"{name} on 4 ranks"].model_dump()
        yield Ratio.exact(
            f"copies / {name} {_words(term)}, 4 ranks", copies[term], own[term], "bytes"
        )


def keep(found: Iterable[Held], load: float) -> None:
    """Put rows and page in the place of the kept ones; ``load`` was there before."""
    with_what = ", ".join(f"{name} {version}" for name, version in versions().items())
    taken = f"{dt.datetime.now(dt.UTC).date()}, {machine_class(load)}; {with_what}"
    lines = [json.dumps({"taken": taken, **each.model_dump()}) for each in found]
    RAW.write_text("".join(f"{line}\n" for line in lines))
    DOCS.write_text(page())


def stored() -> tuple[str, dict[str, Held]]:
    """Return when, where and with what rows were kept, and they by case."""
    lines = [json.loads(line) for line in RAW.read_text().splitlines()]
    taken = {str(line.pop("taken")) for line in lines}
    return ", ".join(taken), {each.case: each for each in map(Held.model_validate, lines)}


def page() -> str:
    """Return the docs page of the kept rows."""
    taken, found = stored()
    rows = [row for each in found.values() for row in rows_of(each)]
    return PAGE.format(
        taken=taken,
        terms="\n".join(_training_line(each.case, rows_of(each)) for each in found.values()),
        peaks="\n".join(map(_peak_line, found.values())),
        titles=" | ".join(_words(term).capitalize() for term in Held.TERMS),
        rules="---|" * (len(Held.TERMS) + 1),
        within=sum(abs(row.error) <= WITHIN for row in rows),
        count=len(rows),
        length=LENGTH,
        rows=ROWS,
    )


def _training_line(case: str, rows: list[Row]) -> str:
    """Return a training's line: planned and held bytes of each term, and the largest error."""
    by_term = {row.term: row for row in rows}
    cells = [
        f"{_megabytes(by_term[term].planned)} / {_megabytes(by_term[term].held)}"
        if term in by_term
        else ""
        for term in Held.TERMS
    ]
    worst = max(rows, key=lambda row: abs(row.error))
    said = f"{_words(worst.term)} {100 * worst.error:+.1f} %"
    cells.append(said if abs(worst.error) <= WITHIN else f"**{said}**")
    return f"| {case} | {' | '.join(cells)} |"


def _words(term: str) -> str:
    return term.replace("_", " ").replace("optimizer", "optimiser")


def _peak_line(found: Held) -> str:
    real = found.model_dump()
    terms = sum(real[term] for term in Held.TERMS)
    beside = found.process_peak - found.process_start - terms
    cells = (terms, found.process_start, found.process_peak, beside)
    return f"| {found.case} | {' | '.join(map(_megabytes, cells))} |"


def _megabytes(size: float) -> str:
    return f"{size / 1e6:.1f}"


PAGE = """\
# Memory of a training, planned and held

`manage.py bench memory` trains a small Llama (256 wide, 8 layers, {rows} sequences of {length}
tokens a rank) on real ranks and counts in the third step the bytes of every tensor that is alive,
by the planner's terms. Full trainings are in fp32, adapters stand beside bf16 or 4-bit weights.
The fullest rank is shown, planned / held in MB (10^6 bytes). {within} of {count} terms are within
10 %. Counted on {taken}.

| Training | {titles} | Largest error |
|---|{rules}
{terms}

The planner counts what our own trainer keeps, operator by operator, where other engines have
formulas of their own:

- **Copies (DDP)**: gradients lie in the buckets in which they are exchanged. A step of several
  micro-batches a rank adds them up beside the buckets first, until these have their order (the
  third step); the planner counts that as buffers.
- **Selective recomputation**: ours keeps a layer's input and what its matrix products gave, and
  computes norms, gates and scores again; Megatron's keeps everything but the scores.
- **Adapters**: an adapter beside each matrix keeps a copy of that matrix's input of its own, while
  the frozen matrix and the frozen norm keep none.
- **A layer at work**: what is rebuilt of it, and the gradients on their way through its
  feed-forward block or, in long texts, through its scores.

## The process beside its tensors

What a process takes beyond its tensors was there before it had a model (interpreter and libraries,
shared by forks of one process), or is scratch of the kernels and what malloc keeps: the peak of
all terms is not at one moment, and ZeRO-1 and 2 copy gradients into buckets when activations are
gone.

A plan has this as its runtime term, of which each host measures its own. Two things made it grow
while a job trained, and are kept from it. A library that makes kernels for each shape kept those
of every length that padded batches came in, so that they come in eight lengths at most. And malloc
kept the holes that large tensors left, so that these are mapped one by one. The demo model's
training and the template's classifier on two ranks then peak within 10 % of their plans, which a
test holds.

| Training | Terms | Process before | Process at its peak | Peak less both |
|---|---|---|---|---|
{peaks}
"""
