"""Fits the parts of prefill and decode to published serving sweeps, engine by engine.

Beside the parts of a pass, which belong to an engine, each sweep's pair of model and chip has its
habits: how the callers of that benchmark fell together. Both are fitted in turns.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

import numpy as np

from planner.catalog.engines import arrival_priors
from planner.cost.equation import Ledger
from planner.cost.queueing import (
    ArrivalHabits,
    mean_token_gap,
    prompts_waited_for,
    slot_wait,
    time_to_first_token,
)
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
    "Issuing further operators": "issue",
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
    "intake": (0.05, 40.0),
}
PASS_PARTS = tuple(dict.fromkeys(PART_BY_NAME.values()))
SWEEP = ("model", "gpu_slug", "engine", "weight_dtype", "tp", "input_len", "output_len")
PASSES = ("decode", "prefill")
PARTS = (*(f"{group}_{part}" for group in PASSES for part in PASS_PARTS), "intake")
DECODE = slice(0, len(PASS_PARTS))
PREFILL = slice(len(PASS_PARTS), 2 * len(PASS_PARTS))
BOUNDED = [BOUNDS[part.removeprefix("decode_").removeprefix("prefill_")] for part in PARTS]
LEAST, MOST = (np.array([bounds[end] for bounds in BOUNDED]) for end in (0, 1))
INTAKE = PARTS.index("intake")
NEUTRAL: dict[str, object] = {"serving_factors": {}, "arrival_factors": {}}
BEATING_SHARE = 0.2
SCALE = 0.5
RIDGE = 1.0
TPOT_WEIGHT, TTFT_WEIGHT = 10.0, 4.0
TURNS = 3
Pair = tuple[str, str]
BURST_RATIOS = (0.02, 0.05, 0.08, 0.1, 0.13, 0.16, 0.2, 0.25, 0.3, 0.4, 0.5, 0.7, 0.85, 1.0)
PROMPTS_AHEAD = (0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0)
WITHHELD_SLOTS = (0.0, 0.5, 1.0)
HABIT_RIDGE, WITHHELD_RIDGE = 10.0, 10.0


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

    @property
    def pair(self) -> Pair:
        """Return whose habits the point shows."""
        return self.engine, self.group

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

    def predict(self, factors: Columns, habits: ArrivalHabits) -> tuple[Columns, Columns]:
        """Return the seconds per output token and to the first token of every point."""
        decode = self.decode_s @ factors[DECODE]
        prefill = self.prefill_s @ factors[PREFILL]
        tpot = mean_token_gap(
            decode_s=decode,
            running=self.running,
            output_tokens=self.output_tokens,
            slot_s=prefill,
            burst_ratio=habits.burst_ratio,
        )
        wait = slot_wait(
            offered=(1 + self.wait_lives) * self.running,
            running=self.running,
            withheld_slots=habits.withheld_slots,
            life_s=prefill + (self.output_tokens - 1) * tpot,
        )
        before = prompts_waited_for(
            running=self.running,
            burst_ratio=habits.burst_ratio,
            prompts_ahead=habits.prompts_ahead,
        )
        ttft = time_to_first_token(
            prefill_s=prefill,
            prompts_before=before,
            slot_s=prefill,
            decode_s=decode,
            decoding_ratio=np.where(self.running > 1, 1.0, 0.0),
            wait_s=wait,
            intake_s=factors[INTAKE] * self.intake_s,
        )
        return np.asarray(tpot), np.asarray(ttft)

    def regrets(self, factors: Columns, habits: ArrivalHabits) -> Columns:
        """Return how wrong both times of every point are, in weighted log ratios."""
        tpot, ttft = self.predict(factors, habits)
        wrong = TPOT_WEIGHT * np.abs(np.log(tpot / self.tpot_s))
        return np.asarray(wrong + TTFT_WEIGHT * np.abs(np.log(ttft / self.ttft_s)))


@dataclass(frozen=True, eq=False)
class ServingFit:
    """The factors of the parts, in the order of ``PARTS``, and the habits of each known pair."""

    factors: Columns
    habits: Mapping[Pair, ArrivalHabits] = field(default_factory=dict)

    def habits_of(self, cases: Sequence["ServingCase"]) -> ArrivalHabits:
        """Return the habits of each case as columns, the prior where its pair is not known."""
        prior = ArrivalHabits(**arrival_priors())
        rows = [self.habits.get(case.pair, prior) for case in cases]
        return ArrivalHabits(*(np.array(column) for column in zip(*rows, strict=True)))


def sweep_of(cases: Iterable[ServingCase]) -> Sweep:
    """Return cases as columns."""
    kept = tuple(cases)
    names = Sweep.__dataclass_fields__
    return Sweep(**{name: np.array([getattr(case, name) for case in kept]) for name in names})


def serving_case(row: Row) -> ServingCase:
    """Return a row as its parts: what an uncalibrated estimate writes into its ledger."""
    setting = resolve(EstimateRequest.model_validate(serving_request(row)))
    setting = replace(setting, engine=setting.engine.model_copy(update=NEUTRAL))
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
    life = first["prefill s"] + (workload.output_tokens - 1) * ledger.value_of("serving", "tpot")
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


def serving_errors(cases: Sequence[ServingCase], fit: ServingFit) -> tuple[Columns, Columns]:
    """Return the relative errors of the time per output token and to the first token."""
    sweep = sweep_of(cases)
    tpot, ttft = sweep.predict(fit.factors, fit.habits_of(cases))
    return tpot / sweep.tpot_s - 1, ttft / sweep.ttft_s - 1


def fit_serving(cases: Iterable[ServingCase], prior: ServingFit | None = None) -> ServingFit:
    """Return factors shrunk towards the prior, and the habits of every pair among the cases."""
    kept = tuple(cases)
    start = ServingFit(np.ones(len(PARTS))) if prior is None else prior
    fit = start
    for _ in range(TURNS if kept else 0):
        fit = ServingFit(fit.factors, fit_habits(kept, fit.factors))
        fit = ServingFit(fit_factors(kept, fit, start.factors), fit.habits)
    return fit


def fit_factors(cases: Sequence[ServingCase], fit: ServingFit, prior: Columns) -> Columns:
    """Return the factors of least regret under known habits; every pair weighs the same."""
    sweep, habits = sweep_of(cases), fit.habits_of(cases)
    points = Counter(case.pair for case in cases)
    weights = np.array([len(cases) / len(points) / points[case.pair] for case in cases])

    def regret(factors: Columns) -> float:
        distance = float(np.abs(factors - prior).sum()) / SCALE
        return float(weights @ sweep.regrets(factors, habits)) + RIDGE * distance

    return descend(regret, fit.factors, np.full(len(PARTS), SCALE), LEAST, MOST)


def fit_habits(cases: Sequence[ServingCase], factors: Columns) -> dict[Pair, ArrivalHabits]:
    """Return the habits of each pair: the best of a grid, near the prior where little is known."""
    prior = ArrivalHabits(**arrival_priors())
    found = {}
    for pair in sorted({case.pair for case in cases}):
        sweep = sweep_of(case for case in cases if case.pair == pair)

        def regret(tried: ArrivalHabits, sweep: Sweep = sweep) -> float:
            far = abs(float(np.log(tried.burst_ratio / prior.burst_ratio)))
            far += abs(float(tried.prompts_ahead - prior.prompts_ahead))
            bound = HABIT_RIDGE * far + WITHHELD_RIDGE * float(tried.withheld_slots)
            return float(sweep.regrets(factors, tried).sum()) + bound

        grid = product(BURST_RATIOS, PROMPTS_AHEAD, WITHHELD_SLOTS)
        found[pair] = min((ArrivalHabits(*one) for one in grid), key=regret)
    return found
