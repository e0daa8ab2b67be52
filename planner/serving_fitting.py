"""Fits the parts of prefill and decode to published serving sweeps, engine by engine."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from planner.cost.equation import Ledger
from planner.evidence import Row, serving_request
from planner.fitting import Columns, descend
from planner.specs.estimate import EstimateRequest
from planner.specs.workload import ServeWorkload
from planner.workload.resolve import resolve
from planner.workload.serve import serve

PART_BY_NAME = {
    "Linear layers": "linear",
    "Experts": "linear",
    "Output head": "linear",
    "Attention and KV-cache reads": "attention",
    "Norms, activations, residuals": "elementwise",
    "Tensor-parallel all-reduces": "tensor_parallel",
    "Expert exchange": "expert_exchange",
    "Issuing operators": "issue",
    "Scheduling the step": "scheduling",
}
# How far a factor may go: no read or product beats its peak, the priors being 53 to 71 % of it.
BOUNDS = {
    "linear": (0.7, 2.0),
    "attention": (0.53, 4.0),
    "elementwise": (0.25, 20.0),
    "tensor_parallel": (0.5, 4.0),
    "expert_exchange": (0.5, 4.0),
    "issue": (0.25, 4.0),
    "scheduling": (0.25, 20.0),
    "queue": (0.05, 4.0),
    "intake": (0.05, 40.0),
}
PASS_PARTS = tuple(dict.fromkeys(PART_BY_NAME.values()))
SWEEP = ("model", "gpu_slug", "engine", "weight_dtype", "tp", "input_len", "output_len")
PASSES = ("decode", "prefill")
PARTS = (*(f"{group}_{part}" for group in PASSES for part in PASS_PARTS), "queue", "intake")
DECODE = slice(0, len(PASS_PARTS))
PREFILL = slice(len(PASS_PARTS), 2 * len(PASS_PARTS))
BOUNDED = [BOUNDS[part.removeprefix("decode_").removeprefix("prefill_")] for part in PARTS]
LEAST, MOST = (np.array([bounds[end] for bounds in BOUNDED]) for end in (0, 1))
QUEUE, INTAKE = PARTS.index("queue"), PARTS.index("intake")
BEATING_SHARE = 0.2
SCALE = 0.5
RIDGE = 0.5
TPOT_WEIGHT, TTFT_WEIGHT = 10.0, 4.0


@dataclass(frozen=True, eq=False)
class ServingCase:
    """One measured point: the seconds of each part at factor 1, its load, and the truth."""

    engine: str
    architecture: str
    group: str
    sweep: str
    decode_s: Columns
    prefill_s: Columns
    running: float
    output_tokens: float
    intake_s: float
    wait_lives: float
    tpot_s: float
    ttft_s: float

    def beats_the_peak(self) -> bool:
        """Return whether the measured gap is shorter than products and reads at peak allow.

        Such a point was measured with something that its row does not say: a shared prefix,
        draft tokens, or prefill elsewhere.
        """
        floor = LEAST.copy()
        for index, part in enumerate(PARTS):
            if not part.endswith(("_linear", "_attention")):
                floor[index] = 0.0
        decode = float(self.decode_s @ floor[DECODE])
        prefill = float(self.prefill_s @ floor[PREFILL])
        return self.tpot_s < decode + (self.running - 1) / self.output_tokens * prefill


@dataclass(frozen=True)
class Sweep:
    """Many points as columns, so that one product predicts them all."""

    decode_s: Columns
    prefill_s: Columns
    running: Columns
    output_tokens: Columns
    intake_s: Columns
    wait_lives: Columns
    tpot_s: Columns
    ttft_s: Columns

    def predict(self, factors: Columns) -> tuple[Columns, Columns]:
        """Return the seconds per output token and to the first token of every point."""
        decode = self.decode_s @ factors[DECODE]
        prefill = self.prefill_s @ factors[PREFILL]
        tpot = decode + (self.running - 1) / self.output_tokens * prefill
        life = prefill + (self.output_tokens - 1) * tpot
        busy = np.minimum(1.0, self.running * prefill / life)
        queue = factors[QUEUE] * (self.running - 1) / 2 * prefill * busy
        half = np.where(self.running > 1, decode / 2, 0.0)
        intake = factors[INTAKE] * self.intake_s
        return tpot, prefill + half + queue + self.wait_lives * life + intake


def sweep_of(cases: Iterable[ServingCase]) -> Sweep:
    """Return cases as columns."""
    kept = tuple(cases)
    names = Sweep.__dataclass_fields__
    return Sweep(**{name: np.array([getattr(case, name) for case in kept]) for name in names})


def serving_case(row: Row) -> ServingCase:
    """Return a row as its parts: what an uncalibrated estimate writes into its ledger."""
    setting = resolve(EstimateRequest.model_validate(serving_request(row)))
    setting = replace(setting, engine=setting.engine.model_copy(update={"serving_factors": {}}))
    workload, ledger = setting.workload, Ledger()
    if not isinstance(workload, ServeWorkload):
        raise TypeError("only serving rows have passes")
    serve(setting, workload, ledger)
    seconds = dict.fromkeys(PARTS, 0.0)
    wanted = {}
    for entry in ledger.entries:
        if entry.unit == "s" and entry.group in PASSES and entry.name in PART_BY_NAME:
            seconds[f"{entry.group}_{PART_BY_NAME[entry.name]}"] += entry.value
        wanted[entry.key] = {one.name: float(one.value) for one in entry.inputs()}
    gap, first = wanted["tpot"], wanted["ttft"]
    life = gap["prefill s"] + (workload.output_tokens - 1) * ledger.value_of("serving", "tpot")
    return ServingCase(
        engine=row["engine"],
        architecture=setting.device.architecture,
        group=f"{setting.model.id}/{setting.device.architecture}",
        sweep="/".join(row[name] for name in SWEEP),
        decode_s=np.array([seconds[f"decode_{part}"] for part in PASS_PARTS]),
        prefill_s=np.array([seconds[f"prefill_{part}"] for part in PASS_PARTS]),
        running=gap["running"],
        output_tokens=float(workload.output_tokens),
        intake_s=first["intake s"],
        wait_lives=first["wait s"] / life,
        tpot_s=float(row["tpot_ms"]) / 1e3,
        ttft_s=float(row["ttft_ms"]) / 1e3,
    )


def told_apart(cases: Iterable[ServingCase]) -> tuple[ServingCase, ...]:
    """Return the cases whose groups were measured as their rows say, no point beating the peak.

    A group of which a fifth beats the peak was measured under other conditions as a whole.
    """
    kept = tuple(cases)
    beating: dict[tuple[str, str], list[bool]] = {}
    for case in kept:
        beating.setdefault((case.engine, case.group), []).append(case.beats_the_peak())
    return tuple(
        case
        for case in kept
        if not case.beats_the_peak()
        and float(np.mean(beating[case.engine, case.group])) < BEATING_SHARE
    )


def serving_errors(cases: Iterable[ServingCase], factors: Columns) -> tuple[Columns, Columns]:
    """Return the relative errors of the time per output token and to the first token."""
    sweep = sweep_of(cases)
    tpot, ttft = sweep.predict(factors)
    return tpot / sweep.tpot_s - 1, ttft / sweep.ttft_s - 1


def fit_serving(cases: Iterable[ServingCase], prior: Columns | None = None) -> Columns:
    """Return the factors of the parts, in the order of ``PARTS``, shrunk towards the prior."""
    kept = tuple(cases)
    start = np.ones(len(PARTS)) if prior is None else prior
    if not kept:
        return start
    sweep = sweep_of(kept)

    def regret(factors: Columns) -> float:
        tpot, ttft = sweep.predict(factors)
        wrong = TPOT_WEIGHT * float(np.abs(np.log(tpot / sweep.tpot_s)).sum())
        wrong += TTFT_WEIGHT * float(np.abs(np.log(ttft / sweep.ttft_s)).sum())
        return wrong + RIDGE * float(np.abs(factors - start).sum()) / SCALE

    return descend(regret, start, np.full(len(PARTS), SCALE), LEAST, MOST)
