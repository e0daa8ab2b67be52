"""The times of measured serving points under given factors and arrival parameters, with slopes.

A fitted row of values per point holds logarithms of factors and counts and log odds of shares, so
that every real value is valid and steps are symmetric.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace

import numpy as np

from planner.catalog.engines import arrival_priors
from planner.cost.queueing import (
    ArrivalHabits,
    mean_token_gap,
    prompt_slot,
    prompts_waited_for,
    slot_wait,
    time_to_first_token,
)
from planner.fitting.robust_fit import Columns
from planner.fitting.serving.cases import LEAST_AT_PEAK, PASS_PARTS, PASSES, ServingCase

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
ANEW = 3.0
CENTRES |= {"prefill_issue": ANEW, "prefill_further": ANEW}
LEAST_PART = 0.1  # lower bound of any other factor
FLOOR = np.log(
    [LEAST_AT_PEAK.get(name.partition("_")[2], LEAST_PART) for name in PARTS[:INTAKE]]
    + [LEAST_PART, 1.0, 1.0]  # low-bit kernels reach no larger share of their peak
)
STEP = 1e-5
LEAST_RISE = 1e-12  # seconds, for passes that take none


def packed(natural: Mapping[str, float]) -> Columns:
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


def habits_of(values: Columns) -> ArrivalHabits:
    """Return the arrival parameters of rows of values, as columns."""
    powers = np.exp(values[:, FREE])
    by_name = {
        name: powers[:, index] / (1 + powers[:, index]) if name in SHARES else powers[:, index]
        for index, name in enumerate(HABITS)
    }
    return ArrivalHabits(**by_name)


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

    def times(self, passes: Passes, habits: ArrivalHabits) -> tuple[Columns, Columns]:
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
        return self.times(self.passes(values), habits_of(values))

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
        base = np.array(self.times(passes, habits_of(values))).T
        for index in range(len(PARTS), len(NAMES)):
            moved = values.copy()
            moved[:, index] += STEP
            rise = np.array(self.times(passes, habits_of(moved))).T
            derivatives[:, :, index] = np.log(rise / base) / STEP
        return derivatives

    def rates(self, values: Columns) -> dict[str, Columns]:
        """Return the derivatives of the log times by the seconds of each pass."""
        passes, habits = self.passes(values), habits_of(values)
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
