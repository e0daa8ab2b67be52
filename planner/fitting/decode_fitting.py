"""Fit single-stream speed to published speeds, per engine, with errors on left-out GPUs."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from planner.catalog.engines import COMMON_SERVING, Engine
from planner.cost.quantity import Ledger
from planner.fitting.evidence import (
    DECODE,
    PREFILL,
    TPOT,
    Row,
    inference_request,
    leave_one_group_out,
    number,
    round_factor,
    speed_rows,
)
from planner.fitting.serving_model import PART_BY_NAME
from planner.fitting.step_fitting import Columns, descend
from planner.specs.base import JsonObject, PlannerError
from planner.specs.estimate import EstimateRequest
from planner.specs.workload import GenerateWorkload
from planner.workload.generate import generate
from planner.workload.operators import FLOPS_PER_JOULE
from planner.workload.resolve import resolve
from planner.workload.setting import SHOWN_BY, Setting, width_of

NAMES = {**PART_BY_NAME, "Attention scores in memory": "scores"}
PRODUCTS = ("linear_flops", "expert_flops", "output_head_flops")
GROUPS = {DECODE: "decode", TPOT: "decode"}
PARTS = ("linear", "linear_8bit", "linear_4bit", "attention", "issue", "scores", "power")
LINEAR, ATTENTION, ISSUE, SCORES, POWER = (
    PARTS.index(part) for part in ("linear", "attention", "issue", "scores", "power")
)
WIDTHS = {"wide": 0, "8bit": PARTS.index("linear_8bit"), "4bit": PARTS.index("linear_4bit")}
# Reads are modelled at 71 % of the bandwidth: a factor below 0.72 would exceed it.
LOWER_BOUNDS = np.array([0.72, 0.8, 0.8, 0.55, 0.1, 0.5, 0.3])
UPPER_BOUNDS = np.array([6.0, 6.0, 6.0, 12.0, 10.0, 4.0, 4.0])
SCALE, RIDGE = 0.5, 0.35
# GPUs of a family differ among themselves: a family is held closer to its kind than an engine.
FAMILY_STIFFNESS = {"decode": 5.0, "prefill": 20.0}
WEIGHT = 10.0
LEAST_SECONDS = 1e-9
LONE = (1, 1)  # one source, one device
# Parts that grow with the context, and the share of a measured pass from which on their factor is
# fitted: below it in every row, it would follow what else those rows miss, and long contexts would
# be charged that many times over.
WITH_CONTEXT, LEAST_SHARE = (ATTENTION, SCORES), 0.05


@dataclass(frozen=True, eq=False)
class StreamCase:
    """One measured pass: the seconds of its parts at factor 1, and the measured seconds."""

    engine: str
    source: str
    device: str
    family: str
    kind: str
    group: str
    width: str
    linear_s: float
    attention_s: float
    issue_s: float
    scores_s: float
    power_s: float
    rest_s: float
    runs_ahead: bool
    measured_s: float

    @property
    def place(self) -> tuple[str, str, str]:
        """Return the key of a set of factors: engine, kind of pass and kind of device."""
        return self.engine, self.group, self.kind

    @property
    def sweep_key(self) -> str:
        """Return the key of a sweep, whose rows share weight."""
        return f"{self.source}/{self.engine}/{self.device}/{self.width}/{self.group}"

    def seconds(self, factors: Columns) -> float:
        """Return the predicted seconds of the pass."""
        return float(Sweep.of((self,)).seconds(factors)[0])

    def error(self, factors: Columns) -> float:
        """Return the relative error of the predicted speed."""
        return self.measured_s / self.seconds(factors) - 1


@dataclass(frozen=True, eq=False)
class Sweep:
    """Measured decode passes as arrays with one entry per pass; times in seconds.

    ``weights`` are smaller for passes of a sweep with many.
    """

    parts_s: Columns
    narrow: Columns
    rest_s: Columns
    runs_ahead: npt.NDArray[np.bool_]
    measured_s: Columns
    weights: Columns

    @classmethod
    def of(cls, cases: Sequence[StreamCase]) -> "Sweep":
        """Return cases as columns."""
        counts = Counter(case.sweep_key for case in cases)
        return cls(
            parts_s=np.array(
                [[c.linear_s, c.attention_s, c.issue_s, c.scores_s, c.power_s] for c in cases]
            ),
            narrow=np.array([WIDTHS[c.width] or -1 for c in cases]),
            rest_s=np.array([c.rest_s for c in cases]),
            runs_ahead=np.array([c.runs_ahead for c in cases]),
            measured_s=np.array([c.measured_s for c in cases]),
            weights=np.array([WEIGHT * counts[c.sweep_key] ** -0.5 for c in cases]),
        )

    def unseen_parts(self) -> list[int]:
        """Return the parts of the context on which every pass spends little of its time."""
        columns = {ATTENTION: 1, SCORES: 3}  # of ``parts_s``
        shares = self.parts_s / self.measured_s[:, None]
        return [part for part in WITH_CONTEXT if shares[:, columns[part]].max() < LEAST_SHARE]

    def seconds(self, factors: Columns) -> Columns:
        """Return the predicted seconds of every pass."""
        narrow = np.where(self.narrow < 0, 1.0, factors[self.narrow])
        linear, attention, issue, scores, power = self.parts_s.T
        products = np.maximum(linear * factors[LINEAR], power * factors[POWER]) * narrow
        read = attention * factors[ATTENTION] + scores * factors[SCORES]
        work = products + read + self.rest_s
        issue = issue * factors[ISSUE]
        total: Columns = np.where(self.runs_ahead, np.maximum(work, issue), work + issue)
        return total


def without_stream_factors(setting: Setting) -> Setting:
    """Return the setting without single-stream factors."""
    plain: Engine = setting.engine.model_copy(update={"stream_factors": {}})
    return replace(setting, engine=plain)


def stream_case(row: Row) -> StreamCase:
    """Return a row as its parts, from the ledger of an uncalibrated estimate."""
    setting = without_stream_factors(
        resolve(EstimateRequest.model_validate(inference_request(row)))
    )
    workload, ledger = setting.workload, Ledger()
    if not isinstance(workload, GenerateWorkload):
        raise TypeError("only generated batches have streams")
    generate(setting, workload, ledger)
    group = GROUPS.get(row["metric"], "prefill")
    parts = {"linear": 0.0, "attention": 0.0, "issue": 0.0, "scores": 0.0, "rest": 0.0}
    for entry in ledger.entries:
        if entry.unit == "s" and entry.group == group:
            part = NAMES.get(entry.name, "rest")
            part = SHOWN_BY.get(part, part)
            parts[part if part in parts else "rest"] += entry.value
    share = ledger.value_of("prefill", "pipeline_share") if group == "prefill" else 0.0
    share = share or 1.0
    return StreamCase(
        engine=setting.engine.key,
        source=row["source_id"],
        device=setting.device.id,
        family=setting.device.family,
        kind=setting.device.kind,
        group=group,
        width=width_of(setting),
        linear_s=parts["linear"] * share,
        attention_s=parts["attention"] * share,
        issue_s=parts["issue"] * share,
        scores_s=parts["scores"] * share,
        power_s=_power_seconds(setting, ledger, group) * share,
        rest_s=max(parts["rest"] * share, LEAST_SECONDS),
        runs_ahead=bool(setting.engine.ops_per_layer) and setting.device.kind != "cpu",
        measured_s=_measured_seconds(row, workload),
    )


def _power_seconds(setting: Setting, ledger: Ledger, group: str) -> float:
    """Return the seconds of a pass's products at the GPU's power limit, at factor 1."""
    watts = setting.device.tdp_watts
    if group != "prefill" or setting.device.kind != "gpu" or not watts:
        return 0.0
    flops = sum(ledger.value_of(group, key) for key in PRODUCTS)
    return flops / watts / FLOPS_PER_JOULE


def _measured_seconds(row: Row, workload: GenerateWorkload) -> float:
    """Return the seconds of the measured pass of the whole batch."""
    value = number(row, "value")
    if row["metric"] == DECODE:
        return workload.batch_size / value
    if row["metric"] == PREFILL:
        return workload.batch_size * workload.input_tokens / value
    return value


@cache
def stream_cases() -> tuple[StreamCase, ...]:
    """Return every usable row with a model and device of the catalog.

    Engines that whole serving sweeps were fitted to keep those factors.
    """
    cases = []
    for row in speed_rows():
        with suppress(PlannerError):
            case = stream_case(row)
            if not has_serving_factors(row):
                cases.append(case)
    return tuple(cases)


def has_serving_factors(row: Row) -> bool:
    """Return whether the row's engine has factors fitted to whole serving sweeps."""
    engine = resolve(EstimateRequest.model_validate(inference_request(row))).engine
    return bool(engine.tpot_spreads) and not engine.is_generic


def support_of(cases: Iterable[StreamCase]) -> tuple[int, int]:
    """Return the number of sources and of devices of cases."""
    own = tuple(cases)
    return len({case.source for case in own}), len({case.device for case in own})


def without_lone_widths(cases: Iterable[StreamCase]) -> tuple[StreamCase, ...]:
    """Return the cases without narrow widths of one source and device, if others have more."""
    all_cases = tuple(cases)
    if len({case.source for case in all_cases}) <= 1:
        return all_cases
    lone = {
        width
        for width, part in WIDTHS.items()
        if part and support_of(case for case in all_cases if case.width == width) == LONE
    }
    return tuple(case for case in all_cases if case.width not in lone)


def fit_streams(
    cases: Iterable[StreamCase], prior: Columns | None = None, stiffness: float = 1.0
) -> Columns:
    """Return the factors of one kind of pass, in the order of ``PARTS``, near the prior.

    A width of weights that one source measured on one device takes no part where the others have
    more sources, and keeps their factor: one table says more of itself than of a width.
    """
    fitted_cases = without_lone_widths(cases)
    start = np.ones(len(PARTS)) if prior is None else prior
    if not fitted_cases:
        return start
    sweep = Sweep.of(fitted_cases)

    def regret(factors: Columns) -> float:
        misfit = np.abs(np.log(sweep.seconds(factors) / sweep.measured_s)) @ sweep.weights
        distance = float(np.abs(np.log(factors / start)).sum()) / SCALE
        return float(misfit) + RIDGE * stiffness * distance

    lower, upper = LOWER_BOUNDS.copy(), UPPER_BOUNDS.copy()
    for part in sweep.unseen_parts():
        lower[part] = upper[part] = start[part]
    return descend(regret, start, start * SCALE, lower, upper)


def fit_family(cases: Iterable[StreamCase], group: str, prior: Columns) -> Columns:
    """Return the factors of one chip family, near those of its device kind."""
    return fit_streams(cases, prior, FAMILY_STIFFNESS[group])


def fit_target_chip(cases: Sequence[StreamCase], target: StreamCase) -> Columns:
    """Return an engine's factors on a chip: fitted to its device kind, then to its family.

    An engine without cases takes the factors common to all engines.
    """
    _, group, kind = target.place
    same_kind = [case for case in cases if (case.group, case.kind) == (group, kind)]
    own = [case for case in same_kind if case.engine == target.engine]
    family = (case for case in own if case.family == target.family)
    return fit_family(family, group, fit_streams(own or same_kind))


# Single-stream factors of each engine from published speeds, with errors on left-out GPUs.


COVERED = 0.8
Z_80 = 1.2816
MIN_ROWS = 10
PASSES = ("decode", "prefill")
# GPUs left out as a whole, to represent unmeasured GPUs.
KEPT_APART = ("l40s", "rtx-6000-ada")


def factors_by_part(group: str, factors: Columns) -> dict[str, float]:
    """Return the factors that differ from 1, by the part that they multiply."""
    pairs = zip(PARTS, factors, strict=True)
    return {f"{group}_{part}": round_factor(float(value)) for part, value in pairs if value != 1.0}


def engine_factors(cases: Sequence[StreamCase]) -> dict[str, dict[str, float]]:
    """Return one engine's factors by kind of device and by chip family."""
    factors_by_place: dict[str, dict[str, float]] = {}
    for group in PASSES:
        same = [case for case in cases if case.group == group]
        for kind in sorted({case.kind for case in same}):
            of_kind = [case for case in same if case.kind == kind]
            kind_factors = fit_streams(of_kind)
            factors_by_place.setdefault(kind, {}).update(factors_by_part(group, kind_factors))
            for family in sorted({case.family for case in of_kind} - {kind}):
                own = (case for case in of_kind if case.family == family)
                factors_by_place.setdefault(family, {}).update(
                    factors_by_part(group, fit_family(own, group, kind_factors))
                )
    return {
        place: with_kind_factors(factors, factors_by_place, cases, place)
        for place, factors in factors_by_place.items()
    }


def engine_support(cases: Sequence[StreamCase]) -> dict[str, dict[str, tuple[int, int]]]:
    """Return one engine's numbers of sources and devices, by kind of device, pass and width."""
    support: dict[str, dict[str, tuple[int, int]]] = {}
    for kind, group, width in sorted({(c.kind, c.group, c.width) for c in cases}):
        own = (c for c in cases if (c.kind, c.group, c.width) == (kind, group, width))
        support.setdefault(kind, {})[f"{group}_{width}"] = support_of(own)
    return support


def common_factors(cases: Sequence[StreamCase]) -> dict[str, dict[str, float]]:
    """Return the factors common to all engines on each kind of device."""
    factors_by_kind: dict[str, dict[str, float]] = {}
    for kind in sorted({case.kind for case in cases}):
        for group in PASSES:
            same = [case for case in cases if (case.kind, case.group) == (kind, group)]
            if same:
                factors_by_kind.setdefault(kind, {}).update(
                    factors_by_part(group, fit_streams(same))
                )
    return factors_by_kind


def with_kind_factors(
    factors: dict[str, float],
    factors_by_kind: dict[str, dict[str, float]],
    cases: Sequence[StreamCase],
    place: str,
) -> dict[str, float]:
    """Return a family's factors, with its device kind's for passes that were not measured."""
    kind = next((case.kind for case in cases if case.family == place), place)
    passes = {name.partition("_")[0] for name in factors}
    missing = {
        name: value
        for name, value in factors_by_kind.get(kind, {}).items()
        if name.partition("_")[0] not in passes
    }
    return dict(sorted({**missing, **factors}.items()))


def left_out(
    cases: Sequence[StreamCase], part_of: Callable[[StreamCase], str]
) -> list[tuple[StreamCase, float]]:
    """Return the error of each case, fitted without its part."""
    errors = []
    for _, own, rest in leave_one_group_out(cases, part_of):
        fitted_by_key: dict[tuple[tuple[str, str, str], str], Columns] = {}
        for case in own:
            key = (case.place, case.family)
            if key not in fitted_by_key:
                fitted_by_key[key] = fit_target_chip(rest, case)
            errors.append((case, case.error(fitted_by_key[key])))
    return errors


def cards_of(cases: Sequence[StreamCase], place: tuple[str, str, str]) -> set[str]:
    """Return the GPUs on which an engine's kind of pass was measured."""
    return {case.device for case in cases if case.place == place}


@cache
def _fitted_at(place: tuple[str, str, str], family: str) -> Columns:
    cases = stream_cases()
    target = next(c for c in cases if c.place == place and c.family == family)
    return fit_target_chip(cases, target)


def fitted_here(case: StreamCase) -> Columns:
    """Return the factors of a case's engine on its chip, fitted to all rows."""
    return _fitted_at(case.place, case.family)


def device_of(case: StreamCase) -> str:
    """Return the GPU that a row was measured on."""
    return case.device


def source_of(case: StreamCase) -> str:
    """Return the source of a row."""
    return case.source


def spread_of(errors: Sequence[float]) -> float:
    """Return the log spread whose 80 % interval covers four fifths of these errors."""
    log_error = float(np.quantile(np.abs(np.log1p(errors)), COVERED))
    return round_factor(log_error / Z_80)


def fit_single_stream_decode_factors() -> dict[str, dict[str, Any]]:
    """Return the fields of every engine that describe its single streams."""
    cases = stream_cases()
    fields_by_engine: dict[str, dict[str, Any]] = {
        COMMON_SERVING: {"stream_factors": common_factors(cases)}
    }
    unseen = left_out(cases, device_of)
    elsewhere = spread_of([error for _, error in left_out(cases, source_of)])
    for engine in sorted({case.engine for case in cases}):
        own = [case for case in cases if case.engine == engine]
        fields_by_engine[engine] = {
            "stream_factors": engine_factors(own),
            "stream_support": engine_support(own),
            "lone_stream_spread": elsewhere,
        }
        compared_places = {
            place for place in {c.place for c in own} if len(cards_of(own, place)) > 1
        }
        errors = [error for case, error in unseen if case.place in compared_places]
        if len(errors) >= MIN_ROWS:
            fields_by_engine[engine]["stream_spread"] = spread_of(errors)
    return fields_by_engine


def stream_report(summary: Callable[[list[float]], JsonObject]) -> JsonObject:
    """Return the held-out errors of single streams, by what was left out."""
    cases = stream_cases()
    cards, sources = left_out(cases, device_of), left_out(cases, source_of)
    errors_by_title: JsonObject = {}
    for group in PASSES:
        errors = [error for case, error in cards if case.group == group]
        kept_apart = [e for c, e in cards if c.group == group and c.device in KEPT_APART]
        source_errors = [error for case, error in sources if case.group == group]
        errors_by_title[f"{group} of one stream, unseen card"] = summary(errors)
        errors_by_title[f"{group} of one stream, L40S and RTX 6000 Ada"] = summary(kept_apart)
        errors_by_title[f"{group} of one stream, unseen source"] = summary(source_errors)
    return errors_by_title
