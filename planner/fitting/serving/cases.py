"""Published serving sweeps as input of the fit: the parts of each point's passes, and times."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from planner.cost.quantity import Ledger, minimum
from planner.fitting.evidence import Row, serving_request
from planner.fitting.robust_fit import Columns
from planner.specs.estimate import EstimateRequest
from planner.specs.workload import ServeWorkload
from planner.workload.generate import prefilling
from planner.workload.resolve import resolve
from planner.workload.serve import serve
from planner.workload.setting import Setting

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
    inputs = {e.key: {item.name: float(item.value) for item in e.inputs()} for e in ledger.entries}
    running = inputs["tpot"]["running"]
    lanes = float(minimum(running, setting.layout.attention_data))
    prefill = parts_of(ledger, "prefill")
    return ServingCase(
        row_id=row["row_id"],
        engine=row["engine"],
        device=row["gpu_slug"],
        group=setting.pair,
        layout=setting.swept.layout_name,
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
    prefilling(setting, ledger, 2 * lanes, workload.input_tokens)
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
