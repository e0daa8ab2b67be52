"""Published serving sweeps as input of the fit, and the times of their points with slopes."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace

import numpy as np

from planner.cost.quantity import Ledger
from planner.fitting.evidence import Row, serving_request, states_client
from planner.fitting.step_fitting import Columns
from planner.specs.estimate import EstimateRequest
from planner.specs.workload import ServeWorkload
from planner.workload.resolve import resolve
from planner.workload.serve import USUAL_STEPS_AWAITED, serve
from planner.workload.setting import (
    BETWEEN_TOKENS,
    BURST_STEP,
    DECODING,
    UNTIL_FIRST_TOKEN,
)

# Published serving sweeps as input of the fit: the parts of each point's passes, and times.


PART_BY_NAME = {
    "Linear layers": "linear",
    "Experts": "experts",
    "Output head": "linear",
    "Attention and KV-cache reads": "attention",
    "Norms, activations, residuals": "elementwise",
    "Tensor-parallel all-reduces": "tensor_parallel",
    "Expert all-to-all": "expert_exchange",
    "Kernel launches": "issue",
    "Further kernel launches": "further",
    "Scheduling the step": "scheduling",
    "Per-request overhead": "requests",
}
PASS_PARTS = tuple(dict.fromkeys(PART_BY_NAME.values()))
# Lower bounds of factors: no part exceeds its peak, and priors are 53 to 71 % of it.
LEAST_AT_PEAK = {"linear": 0.7, "experts": 0.7, "attention": 0.53}
SWEEP = (
    *("model", "gpu_slug", "engine", "weight_dtype", "tp", "moe_ep", "attention_dp"),
    *("input_len", "output_len"),
)
PASSES = ("decode", "prefill")
NEUTRAL: dict[str, object] = {"serving_factors": {}}
BEATING_SHARE = 0.2
Pair = tuple[str, str]


@dataclass(frozen=True, eq=False)
class ServingCase:
    """One measured point: the seconds of each part of its two times at factor 1, and the times.

    ``gap_s`` are the parts of the time per output token, ``first_s`` those of the time to the
    first token and ``step_s`` those of a decode step, all over the parts of decode and then of
    prefill. To the time to the first token come ``awaited_steps`` decode steps, ``launch_steps``
    by the row's launch script, ``queued_tokens`` times the time per output token, and
    ``intake_s``. It weighs ``counts_ttft``: 0 where nobody says how the clients sent requests.
    """

    row_id: str
    engine: str
    device: str
    group: str
    layout: str
    release: str
    sweep: str
    is_sparse: bool
    width: str
    gap_s: Columns
    first_s: Columns
    step_s: Columns
    awaited_steps: float
    launch_steps: float
    queued_tokens: float
    intake_s: float
    tpot_s: float
    ttft_s: float
    counts_ttft: float

    @property
    def pair(self) -> Pair:
        """Return the (engine, group) whose waits the point shows."""
        return self.engine, self.group

    def beats_the_peak(self) -> bool:
        """Return whether the measured token time is below its bound at peak rates.

        Such a point had something that its row does not state: a shared prefix, draft tokens, or a
        separate prefill.
        """
        floor = np.array([LEAST_AT_PEAK.get(part, 0.0) for part in PASS_PARTS] * len(PASSES))
        return self.tpot_s < float(self.gap_s @ floor)


def parts_of(ledger: Ledger, group: str) -> Columns:
    """Return the seconds of a pass by part, in the order of ``PASS_PARTS``."""
    seconds = dict.fromkeys(PASS_PARTS, 0.0)
    for entry in ledger.entries:
        if entry.unit == "s" and entry.group == group and entry.name in PART_BY_NAME:
            seconds[PART_BY_NAME[entry.name]] += entry.value
    return np.array(list(seconds.values()))


def mixed_parts_of(ledger: Ledger, group: str) -> Columns:
    """Return the seconds of a mixed step by part of decode and of prefill."""
    decoding = parts_of(ledger, f"{group}{DECODING}")
    return np.concatenate([decoding, parts_of(ledger, group)])


def serving_case(row: Row) -> ServingCase:
    """Return a row as its parts, from the ledger of an uncalibrated estimate."""
    setting = resolve(EstimateRequest.model_validate(serving_request(row)))
    setting = replace(setting, engine=setting.engine.model_copy(update=NEUTRAL))
    workload, ledger = setting.workload, Ledger()
    if not isinstance(workload, ServeWorkload) or workload.concurrency is None:
        raise TypeError("only rows of a closed loop have callers")
    serve(setting, workload, ledger)
    terms = {entry.key: entry for entry in ledger.entries}
    tpot, usual, ttft = (
        {each.name: float(each.value) for each in terms[key].inputs()}
        for key in ("tpot", "usual_ttft", "ttft")
    )
    queued_ratio = 0.0
    if "slot_wait" in terms:
        waits = {each.name: float(each.value) for each in terms["slot_wait"].inputs()}
        queued_ratio = waits["offered"] / waits["running"] - 1
    nothing = np.zeros(len(PASS_PARTS))
    decode = np.concatenate([parts_of(ledger, "decode"), nothing])
    prompt = np.concatenate([nothing, parts_of(ledger, "prefill")])
    mixed, burst = tpot["mixed ratio"], ttft["burst ratio"]
    overlap = (1 - burst) * usual["decoding ratio"]
    first = (1 - burst) * usual["steps"] * mixed_parts_of(ledger, UNTIL_FIRST_TOKEN)
    first = first + burst * ttft["burst steps"] * mixed_parts_of(ledger, BURST_STEP)
    return ServingCase(
        row_id=row["row_id"],
        engine=row["engine"],
        device=row["gpu_slug"],
        group=setting.pair,
        layout=setting.sweep_factors.layout_name,
        release=setting.engine.release,
        sweep="/".join(row.get(name) or "1" for name in SWEEP),
        is_sparse=setting.model.is_moe,
        width=setting.unit_width,
        gap_s=(1 - mixed) * decode + mixed * mixed_parts_of(ledger, BETWEEN_TOKENS),
        first_s=first + queued_ratio * prompt,
        step_s=decode,
        awaited_steps=overlap * USUAL_STEPS_AWAITED,
        launch_steps=overlap * (usual["steps awaited"] - USUAL_STEPS_AWAITED),
        queued_tokens=queued_ratio * (workload.output_tokens - 1),
        intake_s=ttft["intake s"],
        tpot_s=float(row["tpot_ms"]) / 1e3,
        ttft_s=float(row["ttft_ms"]) / 1e3,
        counts_ttft=float(states_client(row)),
    )


def consistent_groups(cases: Iterable[ServingCase]) -> tuple[ServingCase, ...]:
    """Return the cases of groups with consistent rows, without points that beat the peak.

    A group in which a fifth of the points beats the peak is excluded: it was measured under other
    conditions.
    """
    all_cases = tuple(cases)
    beating: dict[Pair, list[bool]] = {}
    for case in all_cases:
        beating.setdefault(case.pair, []).append(case.beats_the_peak())
    return tuple(
        case
        for case in all_cases
        if not case.beats_the_peak() and float(np.mean(beating[case.pair])) < BEATING_SHARE
    )


WIDTHS = ("8bit", "4bit")
PARTS = (
    *(f"{phase}_{part}" for phase in PASSES for part in PASS_PARTS),
    "intake",
    *(f"prefill_{width}" for width in WIDTHS),
    "steps_awaited",
)
NUM_PARTS = len(PASSES) * len(PASS_PARTS)
DECODE = slice(0, len(PASS_PARTS))
PREFILL = slice(len(PASS_PARTS), NUM_PARTS)
OF_PASSES = slice(0, NUM_PARTS)
INTAKE, AWAITED = PARTS.index("intake"), PARTS.index("steps_awaited")
NARROW = tuple(PARTS.index(f"prefill_{width}") for width in WIDTHS)
PRODUCTS = tuple(PARTS.index(f"prefill_{part}") for part in ("linear", "experts"))
# Decode steps replay CUDA graphs; prefill passes launch each kernel.
LAUNCH_FACTOR_PRIOR = 3.0
CENTRES = {"prefill_issue": LAUNCH_FACTOR_PRIOR, "prefill_further": LAUNCH_FACTOR_PRIOR}
MOST_STEPS_AWAITED = 60.0
LEAST_PART = 0.1  # lower bound of any other factor
FLOOR = np.log(
    [LEAST_AT_PEAK.get(name.partition("_")[2], LEAST_PART) for name in PARTS[OF_PASSES]]
    + [LEAST_PART, 1.0, 1.0, LEAST_PART]  # low-bit kernels reach no larger share of their peak
)


CEILING = np.full(len(PARTS), np.inf)
CEILING[AWAITED] = np.log(MOST_STEPS_AWAITED / USUAL_STEPS_AWAITED)


def pack_values(natural: Mapping[str, float]) -> Columns:
    """Return named factors as a row of values, their logarithms; absent ones take their prior."""
    by_name = {**dict.fromkeys(PARTS, 1.0), **CENTRES, **natural}
    return np.log([by_name[name] for name in PARTS])


def natural(values: Columns) -> dict[str, float]:
    """Return a row of values as named factors."""
    factors = np.exp(np.clip(values, FLOOR, CEILING))
    return {name: float(factor) for name, factor in zip(PARTS, factors, strict=True)}


@dataclass(frozen=True)
class Sweep:
    """Many points as columns."""

    gap_s: Columns
    first_s: Columns
    step_s: Columns
    awaited_steps: Columns
    launch_steps: Columns
    queued_tokens: Columns
    intake_s: Columns
    tpot_s: Columns
    ttft_s: Columns
    counts_ttft: Columns
    narrow: Columns

    def products(self, values: Columns) -> tuple[Columns, Columns, Columns]:
        """Return the seconds of every part of both times, and of a decode step."""
        factors = np.exp(values[:, OF_PASSES])
        factors[:, PRODUCTS] *= np.exp((values[:, NARROW] * self.narrow).sum(axis=1))[:, None]
        return self.gap_s * factors, self.first_s * factors, self.step_s * factors

    def waits(self, values: Columns) -> tuple[Columns, Columns]:
        """Return the fitted part of the steps that a first token awaits, and the intake in s."""
        awaited = np.exp(values[:, AWAITED]) * self.awaited_steps
        return awaited, np.exp(values[:, INTAKE]) * self.intake_s

    def predict(self, values: Columns) -> tuple[Columns, Columns]:
        """Return the seconds per output token and to the first token, one row of values each."""
        gap, first, step = (parts.sum(axis=1) for parts in self.products(values))
        awaited, intake = self.waits(values)
        steps = awaited + self.launch_steps
        return gap, first + steps * step + self.queued_tokens * gap + intake

    def wrong(self, values: Columns) -> Columns:
        """Return the log ratios of predicted and measured times, two columns."""
        tpot, ttft = self.predict(values)
        log_ratios: Columns = np.log(np.array([tpot / self.tpot_s, ttft / self.ttft_s]).T)
        return log_ratios

    def slopes(self, values: Columns) -> Columns:
        """Return the derivatives of the log ratios: point by time by value."""
        gap, first, step = self.products(values)
        awaited, intake = self.waits(values)
        times = np.array(self.predict(values)).T
        seconds = np.zeros((len(values), 2, len(PARTS)))
        seconds[:, 0, OF_PASSES] = gap
        queued = self.queued_tokens[:, None] * gap
        steps = (awaited + self.launch_steps)[:, None]
        seconds[:, 1, OF_PASSES] = first + steps * step + queued
        seconds[:, :, NARROW] = (
            seconds[:, :, PRODUCTS].sum(axis=2)[:, :, None] * self.narrow[:, None, :]
        )
        seconds[:, 1, INTAKE] = intake
        seconds[:, 1, AWAITED] = awaited * step.sum(axis=1)
        slopes: Columns = seconds / times[:, :, None]
        return slopes


def sweep_of(cases: Iterable[ServingCase]) -> Sweep:
    """Return cases as columns."""
    all_cases = tuple(cases)
    names = [field.name for field in fields(Sweep) if field.name != "narrow"]
    columns = {name: np.array([getattr(case, name) for case in all_cases]) for name in names}
    narrow = np.array([[float(case.width == width) for width in WIDTHS] for case in all_cases])
    return Sweep(**columns, narrow=narrow.reshape(len(all_cases), len(WIDTHS)))
