"""Fit single-stream speed to published speeds, per engine, with errors on left-out GPUs."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
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
from planner.workload.setting import RELEASE, Setting, release_key, width_of

NAMES = {**PART_BY_NAME, "Attention scores in memory": "scores"}
PRODUCTS = ("linear_flops", "expert_flops", "output_head_flops")
GROUPS = {DECODE: "decode", TPOT: "decode"}
PARTS = (
    *("linear", "linear_8bit", "linear_4bit", "attention", "issue", "scores", "power"),
    "replay",  # the share of the launches that a replayed step has
    "experts",  # beside the factor of dense layers
)
LINEAR, ATTENTION, ISSUE, SCORES, POWER, REPLAY, EXPERTS = (
    PARTS.index(part)
    for part in ("linear", "attention", "issue", "scores", "power", "replay", "experts")
)
WIDTHS = {"wide": 0, "8bit": PARTS.index("linear_8bit"), "4bit": PARTS.index("linear_4bit")}
# Reads are modelled at 71 % of the bandwidth: a factor below 0.72 would exceed it.
LOWER_BOUNDS = np.array([0.72, 0.8, 0.8, 0.55, 0.1, 0.5, 0.3, 0.05, 0.7])
UPPER_BOUNDS = np.array([6.0, 6.0, 6.0, 12.0, 10.0, 4.0, 4.0, 1.0, 6.0])
SCALE, RIDGE = 0.5, 0.35
# GPUs of a family differ among themselves: a family is held closer to its kind than an engine.
FAMILY_STIFFNESS = {"decode": 5.0, "prefill": 20.0}
WEIGHT = 10.0
LEAST_SECONDS = 1e-9
FUSED_ATTENTION = "-fa 1"  # llama-bench's option for it
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
    kernels: str
    kind: str
    level: str
    group: str
    width: str
    linear_s: float
    experts_s: float
    attention_s: float
    issue_s: float
    scores_s: float
    power_s: float
    rest_s: float
    runs_ahead: bool
    is_replayed: bool
    measured_s: float

    @property
    def place(self) -> tuple[str, str, str]:
        """Return the key of a set of factors: engine, kind of pass and chips of like kernels."""
        return self.engine, self.group, self.kernels

    @property
    def pass_and_width(self) -> str:
        """Return the key of what was measured: a pass at a width of weights."""
        return f"{self.group}_{self.width}"

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
    is_replayed: npt.NDArray[np.bool_]
    measured_s: Columns
    weights: Columns

    @classmethod
    def of(cls, cases: Sequence[StreamCase]) -> "Sweep":
        """Return cases as columns."""
        counts = Counter(case.sweep_key for case in cases)
        return cls(
            parts_s=np.array(
                [
                    [c.linear_s, c.attention_s, c.issue_s, c.scores_s, c.power_s, c.experts_s]
                    for c in cases
                ]
            ),
            narrow=np.array([WIDTHS[c.width] or -1 for c in cases]),
            rest_s=np.array([c.rest_s for c in cases]),
            runs_ahead=np.array([c.runs_ahead for c in cases]),
            is_replayed=np.array([c.is_replayed for c in cases]),
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
        linear, attention, issue, scores, power, experts = self.parts_s.T
        products = (linear + experts * factors[EXPERTS]) * factors[LINEAR]
        products = np.maximum(products, power * factors[POWER]) * narrow
        read = attention * factors[ATTENTION] + scores * factors[SCORES]
        work = products + read + self.rest_s
        issue = issue * factors[ISSUE] * np.where(self.is_replayed, factors[REPLAY], 1.0)
        total: Columns = np.where(self.runs_ahead, np.maximum(work, issue), work + issue)
        return total


def without_stream_factors(setting: Setting, mode: str = "") -> Setting:
    """Return the setting without single-stream factors, with what a run was told.

    ``mode`` has the options of the run that differ from the release's defaults.
    """
    told = {"score_bytes": 0.0} if FUSED_ATTENTION in mode else {}
    plain: Engine = setting.engine.model_copy(update={"stream_factors": {}, **told})
    return replace(setting, engine=plain)


def stream_case(row: Row) -> StreamCase:
    """Return a row as its parts, from the ledger of an uncalibrated estimate."""
    setting = without_stream_factors(
        resolve(EstimateRequest.model_validate(inference_request(row))), row["mode"]
    )
    workload, ledger = setting.workload, Ledger()
    if not isinstance(workload, GenerateWorkload):
        raise TypeError("only generated batches have streams")
    generate(setting, workload, ledger)
    group = GROUPS.get(row["metric"], "prefill")
    parts = dict.fromkeys(("linear", "experts", "attention", "issue", "scores", "rest"), 0.0)
    for entry in ledger.entries:
        if entry.unit == "s" and entry.group == group:
            part = NAMES.get(entry.name, "rest")
            part = "issue" if part == "further" else part
            parts[part if part in parts else "rest"] += entry.value
    share = ledger.value_of("prefill", "pipeline_share") if group == "prefill" else 0.0
    share = share or 1.0
    return StreamCase(
        engine=setting.engine.key,
        source=row["source_id"],
        device=setting.device.id,
        family=setting.device.family,
        kernels=setting.device.kernels,
        kind=setting.device.kind,
        level=setting.stream_level,
        group=group,
        width=width_of(setting),
        linear_s=(parts["linear"] + (parts["experts"] if group == "decode" else 0.0)) * share,
        experts_s=parts["experts"] * share if group == "prefill" else 0.0,
        attention_s=parts["attention"] * share,
        issue_s=parts["issue"] * share,
        scores_s=parts["scores"] * share,
        power_s=_power_seconds(setting, ledger, group) * share,
        rest_s=max(parts["rest"] * share, LEAST_SECONDS),
        runs_ahead=bool(setting.engine.ops_per_layer) and setting.device.kind != "cpu",
        is_replayed=group == "decode"
        and workload.batch_size == 1
        and setting.replays_single_steps,
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
    cases: Iterable[StreamCase],
    prior: Columns | None = None,
    stiffness: float = 1.0,
    held: tuple[int, ...] = (),
) -> Columns:
    """Return the factors of one kind of pass, in the order of ``PARTS``, near the prior.

    Parts ``held``, and those that no pass shows, keep the prior's.

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
    for part in (*sweep.unseen_parts(), *held):
        lower[part] = upper[part] = start[part]
    return descend(regret, start, start * SCALE, lower, upper)


def fit_family(cases: Iterable[StreamCase], group: str, prior: Columns) -> Columns:
    """Return the factors of one chip family, near those of its chips.

    What a replayed step saves is the engine's, and the same on all of them.
    """
    return fit_streams(cases, prior, FAMILY_STIFFNESS[group], held=(REPLAY,))


def fit_levels(cases: Sequence[StreamCase], group: str, family: str, level: str) -> Columns:
    """Return the factors of an engine's releases on a chip family, each level near the one above.

    The levels are all cases, those of the same releases, and those of the family among these.
    """
    factors = fit_streams(cases)
    if len({case.level for case in cases}) > 1:
        cases = [case for case in cases if case.level == level]
        factors = fit_family(cases, group, factors)
    of_family = [case for case in cases if case.family == family]
    return fit_family(of_family, group, factors) if of_family else factors


def fit_target_chip(cases: Sequence[StreamCase], target: StreamCase) -> Columns:
    """Return an engine's factors on a chip: fitted to chips of like kernels, then to its family.

    An engine without cases takes the factors common to all engines; chips without cases take the
    means of those of their kind.
    """
    group = [case for case in cases if case.group == target.group]
    own = [case for case in group if case.engine == target.engine]
    for candidates in (own, group):
        alike = [case for case in candidates if case.kernels == target.kernels]
        if alike:
            return fit_levels(alike, target.group, target.family, target.level)
    return dict(fitted_places(group, target.group, by_family=False)).get(
        target.kind, np.ones(len(PARTS))
    )


# Single-stream factors of each engine from published speeds, with errors on left-out GPUs.


COVERED = 0.8
LEAST_SHARE_STEP = 1e-9  # sums of shares are rounded
Z_80 = 1.2816
MIN_ROWS = 10
PASSES = ("decode", "prefill")
# GPUs left out as a whole, to represent unmeasured GPUs.
KEPT_APART = ("l40s", "rtx-6000-ada")


def factors_by_part(group: str, factors: Columns) -> dict[str, float]:
    """Return the factors that differ from 1, by the part that they multiply."""
    pairs = zip(PARTS, factors, strict=True)
    return {f"{group}_{part}": round_factor(float(value)) for part, value in pairs if value != 1.0}


def kinds_of_several_chips(cases: Sequence[StreamCase]) -> dict[str, list[str]]:
    """Return the measured chips of each kind of device that stands for chips nobody measured.

    A kind named as its chips is those chips; one chip alone says nothing of others.
    """
    pairs = {(case.kind, case.kernels) for case in cases}
    chips = {kernels for _, kernels in pairs}
    of_kind = {
        kind: sorted(kernels for own, kernels in pairs if own == kind)
        for kind in sorted({kind for kind, _ in pairs} - chips)
    }
    return {kind: own for kind, own in of_kind.items() if len(own) > 1}


def fitted_places(
    cases: Sequence[StreamCase], group: str, *, by_family: bool = True
) -> Iterator[tuple[str, Columns]]:
    """Yield the factors of an engine's passes by place: chips, older releases on them, families.

    Chips of a kind that nobody measured have the geometric means of the factors of those that
    were, which none of these takes.
    """
    chips = {
        kernels: [case for case in cases if case.kernels == kernels]
        for kernels in sorted({case.kernels for case in cases})
    }
    for kind, measured in kinds_of_several_chips(cases).items():
        logs = [np.log(fit_streams(chips[kernels])) for kernels in measured]
        yield kind, np.exp(np.mean(logs, axis=0))
    for kernels, own in chips.items():
        families = {case.family for case in own} - {kernels} if by_family else set()
        stated = {case.level for case in own}
        for level in sorted(stated | {""}) if len(stated) > 1 else ("",):
            for family in ("", *sorted(families)):
                place = family or kernels
                key = release_key(place, level) if level else place
                yield key, fit_levels(own, group, family, level)


def engine_factors(
    cases: Sequence[StreamCase],
    common: dict[str, dict[str, float]] | None = None,
    *,
    by_family: bool = True,
) -> dict[str, dict[str, float]]:
    """Return one engine's factors by kind of device, chips of like kernels and chip family.

    A pass that was not measured has the factors that engines have in ``common`` on the chips.
    """
    factors_by_place: dict[str, dict[str, float]] = {}
    for group in PASSES:
        same = [case for case in cases if case.group == group]
        for place, factors in fitted_places(same, group, by_family=by_family):
            own = factors_by_place.setdefault(place, {})
            own.update(factors_by_part(group, factors))
    chips_of = {case.family: case.kernels for case in cases}
    return {
        place: with_missing_passes(place, (factors_by_place, common or {}), chips_of)
        for place in factors_by_place
    }


def with_missing_passes(
    place: str, levels: Sequence[dict[str, dict[str, float]]], chips_of: dict[str, str]
) -> dict[str, float]:
    """Return a place's factors, with those of its chips for passes that were not measured there.

    ``levels`` are the factors by place of the engine, and then of all engines.
    """
    factors: dict[str, float] = {}
    family, _, level = place.partition(RELEASE)
    chips = chips_of.get(family, family)
    places = (place, release_key(chips, level), family, chips)
    for own in (factors_by_place.get(name, {}) for factors_by_place in levels for name in places):
        passes = {name.partition("_")[0] for name in factors}
        factors |= {n: value for n, value in own.items() if n.partition("_")[0] not in passes}
    return dict(sorted(factors.items()))


def engine_support(cases: Sequence[StreamCase]) -> dict[str, dict[str, tuple[int, int]]]:
    """Return one engine's numbers of sources and devices, by chips, pass and width."""
    kinds = kinds_of_several_chips(cases)
    support: dict[str, dict[str, tuple[int, int]]] = {}
    for place in sorted({case.kernels for case in cases} | set(kinds)):
        of_place = [case for case in cases if case.kernels in kinds.get(place, (place,))]
        for name in sorted({case.pass_and_width for case in of_place}):
            own = (case for case in of_place if case.pass_and_width == name)
            support.setdefault(place, {})[name] = support_of(own)
    return support


def common_factors(cases: Sequence[StreamCase]) -> dict[str, dict[str, float]]:
    """Return the factors common to all engines, by kind of device and chips of like kernels."""
    return engine_factors(cases, by_family=False)


def left_out(
    cases: Sequence[StreamCase], part_of: Callable[[StreamCase], str]
) -> list[tuple[StreamCase, float]]:
    """Return the error of each case, fitted without its part."""
    errors = []
    for _, own, rest in leave_one_group_out(cases, part_of):
        fitted_by_key: dict[tuple[tuple[str, str, str], str, str], Columns] = {}
        for case in own:
            key = (case.place, case.family, case.level)
            if key not in fitted_by_key:
                fitted_by_key[key] = fit_target_chip(rest, case)
            errors.append((case, case.error(fitted_by_key[key])))
    return errors


@cache
def _fitted_at(place: tuple[str, str, str], family: str, level: str) -> Columns:
    cases, key = stream_cases(), (place, family, level)
    target = next(c for c in cases if (c.place, c.family, c.level) == key)
    return fit_target_chip(cases, target)


def fitted_here(case: StreamCase) -> Columns:
    """Return the factors of a case's engine on its chip, fitted to all rows."""
    return _fitted_at(case.place, case.family, case.level)


def device_of(case: StreamCase) -> str:
    """Return the GPU that a row was measured on."""
    return case.device


def source_of(case: StreamCase) -> str:
    """Return the source of a row."""
    return case.source


def spread_of(errors: Sequence[tuple[StreamCase, float]]) -> float:
    """Return the log spread whose 80 % interval covers four fifths of these errors.

    Rows of a source share weight, as those of a sweep do in the fit.
    """
    distances = np.abs(np.log1p([error for _, error in errors]))
    counts = Counter(case.source for case, _ in errors)
    order = np.argsort(distances)
    shares = np.array([counts[case.source] ** -0.5 for case, _ in errors])[order].cumsum()
    enough = COVERED * shares[-1] * (1 - LEAST_SHARE_STEP)
    reached = min(int(np.searchsorted(shares, enough)), len(errors) - 1)
    return round_factor(float(distances[order][reached]) / Z_80)


def chip_spreads(
    cards: Sequence[tuple[StreamCase, float]], sources: Sequence[tuple[StreamCase, float]]
) -> dict[str, dict[str, float]]:
    """Return one engine's log spreads by chips and pass, from cards left out.

    Where one card alone was measured, they are those of sources left out.
    """
    spreads: dict[str, dict[str, float]] = {}
    places = sorted({(case.kernels, case.group) for case, _ in cards})
    for kernels, group in places:
        own, elsewhere = (
            [(case, error) for case, error in errors if (case.kernels, case.group) == place]
            for errors in (cards, sources)
            for place in ((kernels, group),)
        )
        num_sources, num_cards = support_of(case for case, _ in own)
        errors = own if num_cards > 1 else elsewhere
        if len(errors) >= MIN_ROWS and num_cards + num_sources > sum(LONE):
            spreads.setdefault(kernels, {})[group] = spread_of(errors)
    return spreads


def fit_single_stream_decode_factors() -> dict[str, dict[str, Any]]:
    """Return the fields of every engine that describe its single streams."""
    cases = stream_cases()
    common = common_factors(cases)
    fields_by_engine: dict[str, dict[str, Any]] = {COMMON_SERVING: {"stream_factors": common}}
    cards, sources = left_out(cases, device_of), left_out(cases, source_of)
    lone = spread_of(sources)
    for engine in sorted({case.engine for case in cases}):
        own = [case for case in cases if case.engine == engine]
        spreads = chip_spreads(
            *([(c, e) for c, e in errors if c.engine == engine] for errors in (cards, sources))
        )
        fields_by_engine[engine] = {
            "stream_factors": engine_factors(own, common),
            "stream_support": engine_support(own),
            "lone_stream_spread": lone,
            **({"stream_spreads": spreads} if spreads else {}),
        }
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
