"""Published serving sweeps as input of the fit, and the times of their points with slopes."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace

import numpy as np

from planner.catalog.engines import arrival_priors
from planner.cost.column import single
from planner.cost.quantity import Ledger
from planner.cost.queueing import (
    ArrivalParameters,
    mean_token_gap,
    prompt_slot,
    prompts_waited_for,
    slot_wait,
    time_to_first_token,
)
from planner.fitting.evidence import Row, serving_request
from planner.fitting.step_fitting import Columns
from planner.specs.estimate import EstimateRequest
from planner.specs.workload import ServeWorkload
from planner.workload.generate import prefill_cost
from planner.workload.resolve import resolve
from planner.workload.serve import serve
from planner.workload.setting import Setting

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
NEUTRAL: dict[str, object] = {"serving_factors": {}, "arrival_factors": {}}
BEATING_SHARE = 0.2
Pair = tuple[str, str]


@dataclass(frozen=True, eq=False)
class ServingCase:
    """One measured point: the seconds of each part at factor 1, its load, and its times.

    ``prefill_s`` is the pass of one prompt alone, ``beside_s`` what the prompt adds to a pass that
    runs anyway. ``lanes`` is the number of prompts that stages and attention ranks process
    concurrently.
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
    decode_s: Columns
    prefill_s: Columns
    beside_s: Columns
    lanes: float
    prompts_per_pass: float
    offered: float
    running: float
    output_tokens: float
    intake_s: float
    tpot_s: float
    ttft_s: float

    @property
    def pair(self) -> Pair:
        """Return the (engine, group) whose arrival behaviour the point shows."""
        return self.engine, self.group

    def beats_the_peak(self) -> bool:
        """Return whether the measured token time is below its bound at peak rates.

        Such a point had something that its row does not state: a shared prefix, draft tokens, or a
        separate prefill.
        """
        floor = np.array([LEAST_AT_PEAK.get(part, 0.0) for part in PASS_PARTS])
        prompt = float(self.beside_s @ floor) / self.lanes
        least = float(self.decode_s @ floor) + (self.running - 1) / self.output_tokens * prompt
        return self.tpot_s < least


def parts_of(ledger: Ledger, group: str) -> Columns:
    """Return the seconds of a pass by part, in the order of ``PASS_PARTS``."""
    seconds = dict.fromkeys(PASS_PARTS, 0.0)
    for entry in ledger.entries:
        if entry.unit == "s" and entry.group == group and entry.name in PART_BY_NAME:
            seconds[PART_BY_NAME[entry.name]] += entry.value
    return np.array(list(seconds.values()))


def serving_case(row: Row) -> ServingCase:
    """Return a row as its parts, from the ledger of an uncalibrated estimate."""
    setting = resolve(EstimateRequest.model_validate(serving_request(row)))
    setting = replace(setting, engine=setting.engine.model_copy(update=NEUTRAL))
    workload, ledger = setting.workload, Ledger()
    if not isinstance(workload, ServeWorkload) or workload.concurrency is None:
        raise TypeError("only rows of a closed loop have callers")
    serve(setting, workload, ledger)
    inputs = {
        entry.key: {each.name: float(each.value) for each in entry.inputs()}
        for entry in ledger.entries
        if entry.key in {"tpot", "ttft", "slot"}
    }
    running = inputs["tpot"]["running"]
    lanes = min(running, single(setting.layout.attention_data))
    prefill = parts_of(ledger, "prefill")
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
        decode_s=parts_of(ledger, "decode"),
        prefill_s=prefill,
        beside_s=_doubled_pass(setting, workload, lanes) - prefill,
        lanes=lanes * setting.layout.pipeline,
        prompts_per_pass=inputs["slot"]["prompts per pass"],
        offered=max(1.0, workload.concurrency / setting.layout.data),
        running=running,
        output_tokens=float(workload.output_tokens),
        intake_s=inputs["ttft"]["intake s"],
        tpot_s=float(row["tpot_ms"]) / 1e3,
        ttft_s=float(row["ttft_ms"]) / 1e3,
    )


def _doubled_pass(setting: Setting, workload: ServeWorkload, lanes: float) -> Columns:
    """Return the parts of a pass over twice as many prompts."""
    ledger = Ledger()
    prefill_cost(setting, ledger, 2 * lanes, workload.input_tokens)
    return parts_of(ledger, "prefill")


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
)
HABITS = ("burst_ratio", "prompts_ahead", "company_ratio", "steps_awaited")
NAMES = (*PARTS, *HABITS)
SHARES = frozenset({"burst_ratio", "company_ratio"})
DECODE = slice(0, len(PASS_PARTS))
PREFILL = slice(len(PASS_PARTS), 2 * len(PASS_PARTS))
INTAKE = PARTS.index("intake")
NARROW = tuple(PARTS.index(f"prefill_{width}") for width in WIDTHS)
PRODUCTS = tuple(PASS_PARTS.index(part) for part in ("linear", "experts"))
FREE = slice(len(PARTS), len(NAMES))
# Priors of the arrival parameters: those of the benchmarks that the catalog names, a fifth of the
# room in a pass used by other prompts, 1.5 steps until a request is admitted.
CENTRES = {**arrival_priors(), "company_ratio": 0.2, "steps_awaited": 1.5}
# Decode steps replay CUDA graphs; prefill passes launch each kernel.
LAUNCH_FACTOR_PRIOR = 3.0
CENTRES |= {"prefill_issue": LAUNCH_FACTOR_PRIOR, "prefill_further": LAUNCH_FACTOR_PRIOR}
LEAST_PART = 0.1  # lower bound of any other factor
FLOOR = np.log(
    [LEAST_AT_PEAK.get(name.partition("_")[2], LEAST_PART) for name in PARTS[:INTAKE]]
    + [LEAST_PART, 1.0, 1.0]  # low-bit kernels reach no larger share of their peak
)
STEP = 1e-5
LEAST_RISE = 1e-12  # seconds, for passes that take none


def pack_values(natural: Mapping[str, float]) -> Columns:
    """Return named factors and parameters as a row of values; absent ones take their prior."""
    by_name = {**dict.fromkeys(PARTS, 1.0), **CENTRES, **natural}
    return np.array(
        [
            np.log(by_name[name] / (1 - by_name[name]))
            if name in SHARES
            else np.log(by_name[name])
            for name in NAMES
        ]
    )


def natural(values: Columns) -> dict[str, float]:
    """Return a row of values as named factors and parameters."""
    bounded = values.copy()
    bounded[: len(PARTS)] = np.maximum(bounded[: len(PARTS)], FLOOR)
    with np.errstate(over="ignore"):
        powers = np.exp(bounded)
    by_name = {}
    for name, power in zip(NAMES, powers, strict=True):
        by_name[name] = float(power / (1 + power) if name in SHARES else power)
    return by_name


def arrival_parameters_of(values: Columns) -> ArrivalParameters:
    """Return the arrival parameters of rows of values, as columns."""
    powers = np.exp(values[:, FREE])
    by_name = {
        name: powers[:, index] / (1 + powers[:, index]) if name in SHARES else powers[:, index]
        for index, name in enumerate(HABITS)
    }
    return ArrivalParameters(**by_name)


@dataclass(frozen=True)
class Passes:
    """The seconds of each point's passes: a decode step, a prompt alone, an added prompt."""

    decode_s: Columns
    alone_s: Columns
    beside_s: Columns
    intake_s: Columns


@dataclass(frozen=True)
class Sweep:
    """Many points as columns."""

    decode_s: Columns
    prefill_s: Columns
    beside_s: Columns
    lanes: Columns
    prompts_per_pass: Columns
    offered: Columns
    running: Columns
    output_tokens: Columns
    intake_s: Columns
    tpot_s: Columns
    ttft_s: Columns
    narrow: Columns

    def products(self, values: Columns) -> tuple[Columns, Columns, Columns]:
        """Return the seconds of every part: decode, prompt alone, added prompt."""
        factors = np.exp(values[:, : len(PARTS)])
        prefill = factors[:, PREFILL].copy()
        width_factor = np.exp((values[:, NARROW] * self.narrow).sum(axis=1))
        prefill[:, PRODUCTS] *= width_factor[:, None]
        share = prefill / self.lanes[:, None]
        return self.decode_s * factors[:, DECODE], self.prefill_s * prefill, self.beside_s * share

    def passes(self, values: Columns) -> Passes:
        """Return the seconds of every point's passes."""
        decode, alone, added = (part.sum(axis=1) for part in self.products(values))
        intake = np.exp(values[:, INTAKE]) * self.intake_s
        return Passes(decode, alone, np.maximum(0.0, added), intake)

    def times(self, passes: Passes, habits: ArrivalParameters) -> tuple[Columns, Columns]:
        """Return the seconds per output token and to the first token of every point."""
        slot = prompt_slot(
            beside_s=passes.beside_s,
            alone_s=passes.alone_s / self.lanes,
            company_ratio=habits.company_ratio,
            prompts_per_pass=self.prompts_per_pass,
        )
        tpot = mean_token_gap(
            decode_s=passes.decode_s,
            running=self.running,
            output_tokens=self.output_tokens,
            slot_s=slot,
            burst_ratio=habits.burst_ratio,
        )
        wait = slot_wait(
            offered=np.maximum(self.offered, self.running),
            running=self.running,
            withheld_slots=habits.withheld_slots,
            life_s=passes.alone_s + (self.output_tokens - 1) * tpot,
        )
        ttft = time_to_first_token(
            prefill_s=passes.alone_s,
            prompts_before=prompts_waited_for(
                running=self.running,
                burst_ratio=habits.burst_ratio,
                prompts_ahead=habits.prompts_ahead,
            ),
            slot_s=slot,
            decode_s=passes.decode_s,
            decoding_ratio=np.where(self.running > 1, 1.0, 0.0),
            wait_s=wait,
            intake_s=passes.intake_s,
            steps_awaited=habits.steps_awaited,
        )
        return np.asarray(tpot), np.asarray(ttft)

    def predict(self, values: Columns) -> tuple[Columns, Columns]:
        """Return both times of every point, one row of values each."""
        return self.times(self.passes(values), arrival_parameters_of(values))

    def wrong(self, values: Columns) -> Columns:
        """Return the log ratios of predicted and measured times, two columns."""
        tpot, ttft = self.predict(values)
        log_ratios: Columns = np.log(np.array([tpot / self.tpot_s, ttft / self.ttft_s]).T)
        return log_ratios

    def slopes(self, values: Columns) -> Columns:
        """Return the derivatives of the log ratios: point by time by value."""
        derivatives = np.zeros((len(values), 2, len(NAMES)))
        decode, alone, beside = self.products(values)
        rates = self.rates(values)
        derivatives[:, :, DECODE] = rates["decode_s"][:, :, None] * decode[:, None, :]
        derivatives[:, :, INTAKE] = rates["intake_s"] * self.passes(values).intake_s[:, None]
        joined = beside.sum(axis=1) > 0  # an added prompt never shortens a pass
        for name, parts in (("alone_s", alone), ("beside_s", beside * joined[:, None])):
            products = parts[:, PRODUCTS].sum(axis=1)[:, None] * self.narrow
            derivatives[:, :, PREFILL] += rates[name][:, :, None] * parts[:, None, :]
            derivatives[:, :, NARROW] += rates[name][:, :, None] * products[:, None, :]
        passes = self.passes(values)
        base = np.array(self.times(passes, arrival_parameters_of(values))).T
        for index in range(len(PARTS), len(NAMES)):
            moved = values.copy()
            moved[:, index] += STEP
            rise = np.array(self.times(passes, arrival_parameters_of(moved))).T
            derivatives[:, :, index] = np.log(rise / base) / STEP
        return derivatives

    def rates(self, values: Columns) -> dict[str, Columns]:
        """Return the derivatives of the log times by the seconds of each pass."""
        passes, habits = self.passes(values), arrival_parameters_of(values)
        base = np.array(self.times(passes, habits)).T
        rates_by_pass = {}
        for field in fields(Passes):
            seconds = getattr(passes, field.name)
            more = replace(passes, **{field.name: seconds * (1 + STEP) + LEAST_RISE})
            rise = np.log(np.array(self.times(more, habits)).T / base)
            rates_by_pass[field.name] = rise / (getattr(more, field.name) - seconds)[:, None]
        return rates_by_pass


def sweep_of(cases: Iterable[ServingCase]) -> Sweep:
    """Return cases as columns."""
    all_cases = tuple(cases)
    names = [field.name for field in fields(Sweep) if field.name != "narrow"]
    columns = {name: np.array([getattr(case, name) for case in all_cases]) for name in names}
    narrow = np.array([[float(case.width == width) for width in WIDTHS] for case in all_cases])
    return Sweep(**columns, narrow=narrow.reshape(len(all_cases), len(WIDTHS)))
