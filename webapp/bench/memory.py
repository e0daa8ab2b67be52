"""Benchmark of memory on real ranks against the planner's prediction, term by term."""

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
from runners.host.bench import (
    CASES,
    CONFIG,
    LENGTH,
    ROWS,
    Case,
    RankMemory,
    Ratio,
    machine_class,
    versions,
)
from webapp.bench import site

RESULTS_PATH = Path(__file__).parent / "data" / "memory.jsonl"
DOCS = Path(__file__).parents[2] / "templates" / "docs" / "training-memory.md"
METHODS = {"compute": "lora", "nf4": "qlora"}
BY_OPTIMIZER = ("lomo", "adalomo")  # the planner has these as methods
# The rates do not affect memory.
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
    """One memory term of one case: predicted bytes and bytes of the fullest rank."""

    case: str
    term: str
    predicted_bytes: float
    measured_bytes: float

    @property
    def error(self) -> float:
        """Return the relative error of the prediction; positive if it is too high."""
        return (
            (self.predicted_bytes - self.measured_bytes) / self.measured_bytes
            if self.measured_bytes
            else float(self.predicted_bytes > 0)
        )


def measure_memory(*names: str) -> Iterator[RankMemory]:
    """Yield the measured memory of the fullest rank per named case; of all cases without names.

    It is counted in a process with torch.
    """
    command = [sys.executable, "-W", "ignore", "-m", "runners.jobs.bench.memory_bench", *names]
    ended = subprocess.run(
        command,
        cwd=site.ROOT,
        env=site.without_gpus(),
        stdout=subprocess.PIPE,
        text=True,
        errors="replace",
        check=True,
    )
    yield from map(RankMemory.model_validate_json, ended.stdout.splitlines())


def predicted_bytes(case: Case) -> dict[str, float]:
    """Return the predicted bytes of a case, in the measured terms."""
    request = EstimateRequest.model_validate(_request(case))
    breakdown = estimate(request).memory.breakdown_bytes
    working = breakdown.get("activations", 0) + breakdown.get("buffers", 0)
    terms = {name: float(breakdown.get(name, 0)) for name in RankMemory.TERMS}
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


def rows_of(found: RankMemory) -> list[Row]:
    """Return a case's terms that are predicted or measured as non-zero."""
    case = next(each for each in CASES if each.name == found.case)
    expected, real = predicted_bytes(case), found.model_dump()
    rows = [Row(case.name, term, expected[term], real[term]) for term in RankMemory.TERMS]
    return [each for each in rows if each.predicted_bytes or each.measured_bytes]


def sharding_ratios(found: Mapping[str, RankMemory]) -> Iterator[Ratio]:
    """Yield the ratio of DDP's to each ZeRO stage's bytes of the sharded term, on four ranks."""
    copies = found["DDP on 4 ranks"].model_dump()
    for name, term in SHARDED:
        own = found[f"{name} on 4 ranks"].model_dump()
        yield Ratio.exact(
            f"copies / {name} {_words(term)}, 4 ranks", copies[term], own[term], "bytes"
        )


def keep(found: Iterable[RankMemory], load: float) -> None:
    """Replace the stored rows and the docs page; ``load`` is the load average before the run."""
    with_what = ", ".join(f"{name} {version}" for name, version in versions().items())
    taken = f"{dt.datetime.now(dt.UTC).date()}, {machine_class(load)}; {with_what}"
    lines = [json.dumps({"taken": taken, **each.model_dump()}) for each in found]
    RESULTS_PATH.write_text("".join(f"{line}\n" for line in lines))
    DOCS.write_text(page())


def stored_memory() -> tuple[str, dict[str, RankMemory]]:
    """Return date, machine and versions of the stored rows, and the rows by case."""
    lines = [json.loads(line) for line in RESULTS_PATH.read_text().splitlines()]
    taken = {str(line.pop("taken")) for line in lines}
    return ", ".join(taken), {each.case: each for each in map(RankMemory.model_validate, lines)}


def page() -> str:
    """Return the docs page of the stored rows."""
    taken, measured = stored_memory()
    rows = [row for each in measured.values() for row in rows_of(each)]
    return PAGE.format(
        taken=taken,
        terms="\n".join(_training_line(each.case, rows_of(each)) for each in measured.values()),
        peaks="\n".join(map(_peak_line, measured.values())),
        titles=" | ".join(_words(term).capitalize() for term in RankMemory.TERMS),
        rules="---|" * (len(RankMemory.TERMS) + 1),
        within=sum(abs(row.error) <= WITHIN for row in rows),
        count=len(rows),
        length=LENGTH,
        rows=ROWS,
    )


def _training_line(case: str, rows: list[Row]) -> str:
    """Return a case's table line: planned / held bytes per term, and the largest error."""
    by_term = {row.term: row for row in rows}
    cells = [
        f"{_megabytes(by_term[term].predicted_bytes)} / {_megabytes(by_term[term].measured_bytes)}"
        if term in by_term
        else ""
        for term in RankMemory.TERMS
    ]
    worst = max(rows, key=lambda row: abs(row.error))
    largest = f"{_words(worst.term)} {100 * worst.error:+.1f} %"
    cells.append(largest if abs(worst.error) <= WITHIN else f"**{largest}**")
    return f"| {case} | {' | '.join(cells)} |"


def _words(term: str) -> str:
    return term.replace("_", " ").replace("optimizer", "optimiser")


def _peak_line(measured: RankMemory) -> str:
    real = measured.model_dump()
    terms = sum(real[term] for term in RankMemory.TERMS)
    unaccounted = measured.process_peak - measured.process_start - terms
    cells = (terms, measured.process_start, measured.process_peak, unaccounted)
    return f"| {measured.case} | {' | '.join(map(_megabytes, cells))} |"


def _megabytes(size: float) -> str:
    return f"{size / 1e6:.1f}"


PAGE = """\
# Memory of a training, predicted and measured

This page compares the planner's memory terms with measurements. `manage.py bench memory` trains a
small Llama (256 wide, 8 layers, {rows} sequences of {length} tokens per rank) on real ranks and
counts the bytes of every live tensor in the third step, by the planner's terms. Full trainings are
in fp32, adapters are added to bf16 or 4-bit weights. The table shows the fullest rank, predicted /
measured in MB (10^6 bytes). {within} of {count} terms are within 10 %. Measured on {taken}.

| Training | {titles} | Largest error |
|---|{rules}
{terms}

For our own trainer, the planner counts saved tensors operator by operator; other engines have
separate formulas:

- **Data parallel copies (DDP)**: gradients are stored in the communication buckets. A step of
  several micro-batches per rank first accumulates them outside the buckets, until the bucket order
  is fixed (the third step); the planner counts that as buffers.
- **Selective recomputation**: our trainer keeps a layer's input and the outputs of its matrix
  products, and recomputes norms, gates and scores; Megatron keeps everything except the scores.
- **Chunked loss**: our trainer keeps the logits once and computes the loss of a part of them at a
  time. TRL from 1.7 to 1.14 (engine `trl`) never has more than the logits of 256 tokens, and since
  1.15 those of a tile of 4,096 tokens and 32,768 words, but for ORPO, which holds all.
- **Comparing answers** (DPO, KTO, ORPO, reward models): a pair has two sequences, and a reference
  model is one more copy of the weights where all are trained (see the planner's page).
- **Default dtypes**: where nothing is stated, TRL loads fp32 weights and multiplies in bf16,
  transformers since 5 fine-tunes in the checkpoint's dtype, and before that in fp32.
- **Adapters**: the adapter of each matrix keeps its own copy of that matrix's input, while
  the frozen matrix and the frozen norm keep none.
- **The active layer**: its recomputed tensors, and the gradients in its feed-forward block or, for
  long texts, in its scores.

## Process memory in addition to tensors

A process uses memory in addition to its tensors: the interpreter and libraries, which it had
before the model (shared by forks of one process), scratch memory of kernels, and memory that
malloc keeps. The terms do not all peak at the same moment, and ZeRO-1 and 2 copy gradients into
buckets after the activations are freed.

A plan counts this as its runtime term, which each host measures for itself. Two effects that made
it grow during training are prevented. A library that creates kernels per shape cached those of
every padded length, so batches have at most eight lengths. malloc kept the holes left by large
tensors, so large tensors are mapped individually. The demo model's training and the template's
classifier on two ranks now peak within 10 % of their plans, which a test checks.

| Training | Terms | Process before | Process at its peak | Peak minus both |
|---|---|---|---|---|
{peaks}
"""
