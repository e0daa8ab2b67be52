"""Fit single-stream speed to published decode and prefill speeds, per engine.

A pass consists of matrix products, attention, operator issue, and a rest with its uncalibrated
time. The share of peak that matrix products reach depends on the engine's kernels, the chip family
and the weight width, and may be limited by the GPU's power. Attention includes the scores that
unfused kernels write. Engines are shrunk towards the mean of all engines, families towards their
engine.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import numpy.typing as npt

from planner.catalog.engines import Engine
from planner.cost.quantity import Ledger
from planner.errors import PlannerError
from planner.fitting.evidence import Row, number
from planner.fitting.inference_evidence import DECODE, PREFILL, TPOT, inference_request, speed_rows
from planner.fitting.robust_fit import Columns, descend
from planner.fitting.serving.cases import PART_BY_NAME
from planner.specs.estimate import EstimateRequest
from planner.specs.workload import GenerateWorkload
from planner.workload.generate import generate
from planner.workload.operators import FLOPS_PER_JOULE
from planner.workload.rates import SHOWN_BY
from planner.workload.resolve import resolve
from planner.workload.setting import Setting, width_of

NAMES = {**PART_BY_NAME, "Attention scores in memory": "scores"}
PRODUCTS = ("linear_flops", "expert_flops", "output_head_flops")
GROUPS = {DECODE: "decode", TPOT: "decode"}
PARTS = ("linear", "linear_8bit", "linear_4bit", "attention", "issue", "scores", "power")
LINEAR, ATTENTION, ISSUE, SCORES, POWER = (
    PARTS.index(part) for part in ("linear", "attention", "issue", "scores", "power")
)
WIDTHS = {"wide": 0, "8bit": PARTS.index("linear_8bit"), "4bit": PARTS.index("linear_4bit")}
# Reads are modelled at 71 % of the bandwidth: a factor below 0.72 would exceed it.
LEAST = np.array([0.72, 0.8, 0.8, 0.55, 0.1, 0.5, 0.3])
MOST = np.array([6.0, 6.0, 6.0, 12.0, 10.0, 4.0, 4.0])
SCALE, RIDGE = 0.5, 0.35
# GPUs of a family differ among themselves: a family is held closer to its kind than an engine.
FAMILY_STIFFNESS = {"decode": 5.0, "prefill": 20.0}
WEIGHT = 10.0
LEAST_SECONDS = 1e-9


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
    def alike(self) -> str:
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
    """Many passes as columns, weighted per sweep."""

    parts_s: Columns
    narrow: Columns
    rest_s: Columns
    runs_ahead: npt.NDArray[np.bool_]
    measured_s: Columns
    weights: Columns

    @classmethod
    def of(cls, cases: Sequence[StreamCase]) -> "Sweep":
        """Return cases as columns."""
        counts = Counter(case.alike for case in cases)
        return cls(
            parts_s=np.array(
                [[c.linear_s, c.attention_s, c.issue_s, c.scores_s, c.power_s] for c in cases]
            ),
            narrow=np.array([WIDTHS[c.width] or -1 for c in cases]),
            rest_s=np.array([c.rest_s for c in cases]),
            runs_ahead=np.array([c.runs_ahead for c in cases]),
            measured_s=np.array([c.measured_s for c in cases]),
            weights=np.array([WEIGHT * counts[c.alike] ** -0.5 for c in cases]),
        )

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


def uncalibrated(setting: Setting) -> Setting:
    """Return the setting without single-stream factors."""
    plain: Engine = setting.engine.model_copy(update={"stream_factors": {}})
    return replace(setting, engine=plain)


def stream_case(row: Row) -> StreamCase:
    """Return a row as its parts, from the ledger of an uncalibrated estimate."""
    setting = uncalibrated(resolve(EstimateRequest.model_validate(inference_request(row))))
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
            if not served(row):
                cases.append(case)
    return tuple(cases)


def served(row: Row) -> bool:
    """Return whether the row's engine has factors fitted to whole serving sweeps."""
    engine = resolve(EstimateRequest.model_validate(inference_request(row))).engine
    return bool(engine.tpot_spreads) and not engine.is_generic


def fit_streams(
    cases: Iterable[StreamCase], prior: Columns | None = None, stiffness: float = 1.0
) -> Columns:
    """Return the factors of one kind of pass, in the order of ``PARTS``, near the prior."""
    fitted_cases = tuple(cases)
    start = np.ones(len(PARTS)) if prior is None else prior
    if not fitted_cases:
        return start
    sweep = Sweep.of(fitted_cases)

    def regret(factors: Columns) -> float:
        misfit = np.abs(np.log(sweep.seconds(factors) / sweep.measured_s)) @ sweep.weights
        distance = float(np.abs(np.log(factors / start)).sum()) / SCALE
        return float(misfit) + RIDGE * stiffness * distance

    return descend(regret, start, start * SCALE, LEAST, MOST)


def fit_family(cases: Iterable[StreamCase], group: str, prior: Columns) -> Columns:
    """Return the factors of one chip family, near those of its device kind."""
    return fit_streams(cases, prior, FAMILY_STIFFNESS[group])


def fitted(cases: Sequence[StreamCase], target: StreamCase) -> Columns:
    """Return an engine's factors on a chip: fitted to its device kind, then to its family.

    An engine without cases takes the factors common to all engines.
    """
    _, group, kind = target.place
    alike = [case for case in cases if (case.group, case.kind) == (group, kind)]
    own = [case for case in alike if case.engine == target.engine]
    family = (case for case in own if case.family == target.family)
    return fit_family(family, group, fit_streams(own or alike))
