"""The report of a validation: figures beside predictions, as JSON and one HTML page."""

import contextlib
import hashlib
import hmac
import json
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from jinja2 import Environment, StrictUndefined, Template
from pydantic import Field, NonNegativeInt, TypeAdapter

from planner.api import estimate
from planner.calibration import calibrate_host, measurements_of
from planner.catalog.devices import DriverDevice, MeasuredRates, host_device
from planner.specs.base import PlannerError
from planner.specs.cluster import ClusterSpec, DeviceSpec
from planner.specs.estimate import (
    Estimate,
    EstimateRequest,
    HostCalibration,
    Measurement,
    Performance,
)
from runners.jobspec.base import Figure as Number
from runners.jobspec.base import Message, Name, Names, Rate, Seconds, Sentence, TimestampMs, key_id
from runners.jobspec.compress import StageName
from runners.shared.facts import DeviceMeasurement

# ---------------------------------------------------------------------------
# The report of a validation: stages, figures, checks, lessons, and its signature.
# ---------------------------------------------------------------------------


VERSION = 1
HARDWARE = "memory"  # the first figure of each stage: its how is the device's name
StageState = Literal["done", "cut", "failed", "not run"]
Verdict = Literal["proven", "failed", "incomplete"]
MAX_SAMPLES = 1000
MAX_RECORDS = 2000  # per stage


class Prediction(Message):
    """What the planner says about a figure, in the figure's unit.

    ``low`` and ``high`` bound its 80 % interval. ``calibrated`` is the prediction after the rates
    that this run measured have replaced the datasheet's. ``term`` names the operator class with
    the largest share of the predicted time.
    """

    value: Number
    low: Number | None = None
    high: Number | None = None
    calibrated: Number | None = None
    term: Name | None = None
    source: Sentence


class PlannerQuery(Message):
    """What to ask the planner for: a metric of one model, workload and strategy.

    ``engine`` is the planner's engine whose execution this is; None is Slipway's own runner.
    """

    model: dict[str, Any]  # a config.json
    workload: dict[str, Any]
    strategy: dict[str, Any]
    engine: Name | None = None
    metric: Name  # of the planner's performance or memory, such as "decode_tokens_per_second"


class CalibrationTime(Message):
    """A measured time that teaches the planner about its own runner on this host."""

    question: PlannerQuery
    metric: Literal["tpot_seconds", "ttft_seconds", "step_seconds"]
    seconds: Seconds


class ValidationRates(Message):
    """A device's rates as a validation measured them, and those of the folder where jobs write."""

    device: DeviceMeasurement
    disk_write_bytes_per_second: Rate | None = None


class Figure(Message):
    """One measured figure: the median of its raw samples."""

    record: Literal["figure"] = "figure"
    name: Name  # such as "decode/bf16/batch 1"
    unit: Name  # such as "tokens/s"
    value: Number
    samples: tuple[Number, ...] = Field(default=(), max_length=MAX_SAMPLES, fail_fast=True)
    device: Name  # "cpu", "cuda:0", ...
    how: Sentence = ""
    question: PlannerQuery | None = None
    prediction: Prediction | None = None


class Check(Message):
    """One property that holds or not; ``advice`` says what to do if it does not.

    A goal is one of Slipway itself: if it is not met, nothing is wrong with the host.
    """

    record: Literal["check"] = "check"
    name: Name
    is_met: bool
    is_goal: bool = False
    expected: Sentence
    found: Sentence
    advice: Sentence = ""


class Missing(Message):
    """Something that was not tested: for want of a device, of a library, or of time."""

    record: Literal["missing"] = "missing"
    name: Name
    cause: Literal["device", "library", "time"] = "device"
    why: Sentence
    advice: Sentence = ""


Record = Annotated[Figure | Check | Missing, Field(discriminator="record")]
RECORD: TypeAdapter[Figure | Check | Missing] = TypeAdapter(Record)


class Stage(Message):
    """One stage; ``problem`` is why it ended early or was not run."""

    name: StageName
    state: StageState = "not run"
    seconds: Seconds = 0.0
    records: tuple[Record, ...] = Field(default=(), max_length=MAX_RECORDS, fail_fast=True)
    problem: Sentence | None = None

    @property
    def figures(self) -> tuple[Figure, ...]:
        """Return the measured figures."""
        return tuple(each for each in self.records if isinstance(each, Figure))

    @property
    def checks(self) -> tuple[Check, ...]:
        """Return the checks, met or not."""
        return tuple(each for each in self.records if isinstance(each, Check))

    @property
    def failures(self) -> tuple[Check, ...]:
        """Return the checks of the host that are not met."""
        return tuple(each for each in self.checks if not each.is_met and not each.is_goal)

    @property
    def missing(self) -> tuple[Missing, ...]:
        """Return what could not be tested."""
        return tuple(each for each in self.records if isinstance(each, Missing))


class Report(Message):
    """A whole validation."""

    version: NonNegativeInt = VERSION
    began_at_ms: TimestampMs
    seconds: Seconds = 0.0
    hostname: Name
    host_id: Name | None = None  # None: the host is not enrolled
    versions: Names = Field(default_factory=dict)  # of Slipway, Python, torch, driver ...
    device: Name = "unknown"  # what the figures are of, as its driver names it
    stages: tuple[Stage, ...] = ()
    calibration: HostCalibration | None = None  # what the planner learns of this run
    key_id: Name | None = None
    signature: Name | None = None  # hexadecimal HMAC-SHA256; None: not enrolled

    @property
    def verdict(self) -> Verdict:
        """Return "failed" if a check is not met, "incomplete" for want of time or a library."""
        if any(stage.failures or stage.state == "failed" for stage in self.stages):
            return "failed"
        is_open = any(each.cause != "device" for stage in self.stages for each in stage.missing)
        if is_open or any(stage.state != "done" for stage in self.stages):
            return "incomplete"
        return "proven"

    def failures(self) -> Iterator[tuple[Stage, str]]:
        """Yield in words what failed, stage by stage, with what to do about it."""
        for stage in self.stages:
            if stage.state == "failed":
                yield stage, stage.problem or "the stage failed"
            for check in stage.failures:
                words = f"{check.name}: expected {check.expected}, found {check.found}"
                yield stage, f"{words}. {check.advice}" if check.advice else words

    def canonical(self) -> bytes:
        """Return the bytes that are signed: JSON with sorted keys, without the signature."""
        content = self.model_dump(mode="json", exclude={"key_id", "signature"})
        return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()

    def signed(self, key: str) -> "Report":
        """Return the report signed with a host's command key."""
        return self.model_copy(
            update={
                "key_id": key_id(key),
                "signature": _mac(key, self.canonical()),
            }
        )

    def is_signed_with(self, key: str) -> bool:
        """Return whether the signature is that of this content with this key."""
        return hmac.compare_digest(self.signature or "", _mac(key, self.canonical()))


def _mac(key: str, content: bytes) -> str:
    return hmac.new(key.encode(), content, hashlib.sha256).hexdigest()


# ---------------------------------------------------------------------------
# The report as one HTML file without further files, readable on a phone.
# ---------------------------------------------------------------------------


TITLES: dict[StageName, str] = {
    "identity": "Identity",
    "rates": "Bandwidth and arithmetic",
    "correctness": "Correctness",
    "speed": "Speed of an 8B-shaped model",
    "jobs": "Jobs as they are launched",
    "distributed": "Several devices",
}
VERDICTS: dict[Verdict, str] = {
    "proven": "Everything that was run is right",
    "failed": "Something is wrong",
    "incomplete": "Right as far as it ran, and not everything ran",
}
TONES: dict[Verdict, str] = {"proven": "good", "failed": "bad", "incomplete": "warn"}
PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
THOUSAND = 1000
PLAIN_UNITS = ("tokens/s", "s", "ratio", "J/token")


def render(report: Report) -> str:
    """Return the report as HTML."""
    return _template().render(
        report=report,
        began=datetime.fromtimestamp(report.began_at_ms / 1000, UTC).strftime(
            "%Y-%m-%d %H:%M UTC"
        ),
        failures=list(report.failures()),
        titles=TITLES,
        verdicts=VERDICTS,
        tones=TONES,
        number=number_text,
        number_range=number_range,
        spread=spread,
        inside=is_inside,
    )


def number_text(value: float, unit: str) -> str:
    """Return a value in its unit with three digits, such as "21.1 GB/s".

    >>> number(21_113_784_758.0, "bytes/s"), number(0.00451, "s"), number(1234.5, "tokens/s")
    ('21.1 GB/s', '4.51 ms', '1,234 tokens/s')
    """
    scale, short = _scale(value, unit)
    return f"{_digits(value / scale)} {short}"


def number_range(low: float, high: float, unit: str) -> str:
    """Return a range with its unit once.

    >>> number_range(1.9e9, 2.2e9, "bytes/s")
    '1.9 to 2.2 GB/s'
    """
    scale, short = _scale(high, unit)
    return f"{_digits(low / scale)} to {_digits(high / scale)} {short}"


def _scale(value: float, unit: str) -> tuple[float, str]:
    """Return by what a value of a unit is divided, and the unit that then stands after it."""
    if unit == "s" and value < 1:
        return 1e-3, "ms"
    if unit in PLAIN_UNITS:
        return 1.0, unit
    scale, prefix = next(
        ((scale, prefix) for scale, prefix in PREFIXES if abs(value) >= scale), (1.0, "")
    )
    return scale, f"{prefix}{unit.replace('bytes', 'B')}"


def _digits(value: float) -> str:
    if abs(value) >= THOUSAND:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def spread(figure: Figure) -> str:
    """Return the range of the samples and their number, or "" for a single one."""
    if len(figure.samples) <= 1:
        return ""
    range_ = number_range(min(figure.samples), max(figure.samples), figure.unit)
    return f"{range_} ({len(figure.samples)})"


def is_inside(figure: Figure) -> bool:
    """Return whether the value lies in the prediction's interval, or there is none."""
    predicted = figure.prediction
    if predicted is None or predicted.low is None or predicted.high is None:
        return True
    return predicted.low <= figure.value <= predicted.high


@cache
def _template() -> Template:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    source = Path(__file__).with_name("report.jinja").read_text(encoding="utf-8")
    return environment.from_string(source)


# ---------------------------------------------------------------------------
# What the planner and the datasheet say about a validation's figures, and what the planner learns.
#
# A device of the catalog is asked twice: by its datasheet, then with the rates that this run
# measured in place of the datasheet's. A device outside the catalog, such as a CPU, has no
# datasheet: its measured rates are all that the planner has.
# ---------------------------------------------------------------------------


TRIAD = "memory triad"
PRODUCTS = "matmul "
TO_DEVICE, FROM_DEVICE = "copy host to device, pinned", "copy device to host, pinned"
OVERHEAD = "operator overhead"
DISK = "disk write"
READ_WEIGHTS = "weights that a decode step reads"
# Achieved over datasheet: below it something is wrong, above it the device is another one.
BANDS: Mapping[str, tuple[float, float]] = {
    TRIAD: (0.6, 1.02),
    "memory copy": (0.6, 1.02),
    TO_DEVICE: (0.4, 1.1),
    FROM_DEVICE: (0.4, 1.1),
    "matmul fp32": (0.3, 1.05),
    "matmul tf32": (0.3, 1.05),
    "matmul bf16": (0.4, 1.05),
    "matmul fp16": (0.4, 1.05),
    "matmul fp8": (0.3, 1.05),
    "matmul int8": (0.2, 1.05),
}
SLOW = (
    "Look for another program on the device, a lowered power limit or clock, and a link with "
    "fewer lanes than its slot has (nvidia-smi -q)."
)
FAST = "The device is not the one that its name says, or its clock is wrong; check the identity."
# Goals of the product itself, on GPUs of the catalog.
DECODE_GOAL, INT4_GOAL, MFU_GOAL = 0.80, 2.2, 0.45
# Metric of a question -> the name under which the planner calibrates, in seconds.
CALIBRATED: Mapping[str, Literal["tpot_seconds", "ttft_seconds", "step_seconds"]] = {
    "decode_tokens_per_second": "tpot_seconds",
    "prefill_tokens_per_second": "ttft_seconds",
    "step_seconds": "step_seconds",
}
PHASES = {
    "decode_tokens_per_second": "decode",
    "prefill_tokens_per_second": "prefill",
    "step_seconds": "train_step",
}


class Hardware(NamedTuple):
    """The device of a run as the driver names it, with its memory and the host's."""

    name: str
    kind: str  # "gpu" or "cpu"
    memory_bytes: int
    host_memory_bytes: int


class Expectations:
    """The planner's view of one device, before and after this run's rates."""

    def __init__(self, hardware: Hardware, rates: Iterable[Figure]) -> None:
        self._hardware = hardware
        self._rates = {each.name: each.value for each in rates}
        device = DriverDevice(hardware.name, hardware.kind, hardware.memory_bytes)
        self.datasheet, self.measured = host_device(device, measured_rates(self._rates))

    def complete(self, records: Iterable[Record]) -> Iterator[Record]:
        """Yield the records with predictions, and checks of rates against the datasheet."""
        for record in records:
            if not isinstance(record, Figure):
                yield record
                continue
            prediction = self._prediction(record)
            yield record.model_copy(update={"prediction": prediction})
            if record.name == TRIAD and self.datasheet is None:
                yield self._without_datasheet()
            if prediction is not None and record.name in BANDS and self.datasheet is not None:
                yield _against_datasheet(record, prediction.value)

    def _without_datasheet(self) -> Missing:
        """Return why no rate is compared with a datasheet."""
        name = self._hardware.name
        why = f"no datasheet of {name} is known, so its rates are not compared with one"
        if self._hardware.kind == "cpu":
            why = f"the catalog has no datasheets of CPUs such as {name}"
        return Missing(name="datasheet", why=f"{why}; predictions use the rates measured here")

    def _prediction(self, figure: Figure) -> Prediction | None:
        if figure.question is not None:
            return self._of_question(figure.question)
        published = None if self.datasheet is None else _published(self.datasheet, figure.name)
        if published is None or self.datasheet is None:
            return None
        return Prediction(value=published, source=self.datasheet.source or "datasheet")

    def _of_question(self, question: PlannerQuery) -> Prediction | None:
        first = self.datasheet or self.measured
        if first is None:
            return None
        answer = self._estimated(question, first)
        if answer is None:
            return None
        value = _metric_of(answer, question.metric)
        if value is None:
            return None
        low, high = answer.interval.get(question.metric, (None, None))
        after = None
        if self.datasheet is not None and self.measured is not None:
            again = self._estimated(question, self.measured)
            after = None if again is None else _metric_of(again, question.metric)
        phase = answer.time_breakdown_seconds.get(PHASES.get(question.metric, ""), {})
        return Prediction(
            value=value,
            low=low,
            high=high,
            calibrated=after,
            term=max(phase, key=lambda name: phase[name]) if phase else None,
            source="datasheet" if self.datasheet is not None else "rates measured by this run",
        )

    def _estimated(self, question: PlannerQuery, device: DeviceSpec) -> Estimate | None:
        try:
            return estimate(self._request(question, device))
        except PlannerError:
            return None

    def _request(self, question: PlannerQuery, device: DeviceSpec) -> EstimateRequest:
        return EstimateRequest.model_validate(
            {
                **question.model_dump(exclude={"metric"}),
                "cluster": ClusterSpec(
                    device=device,
                    devices_per_node=1,
                    host_memory_bytes=self._hardware.host_memory_bytes,
                ),
            }
        )

    def calibration(self, figures: Iterable[Figure], host: str) -> HostCalibration | None:
        """Return what the planner learns about its own runner from the figures."""
        device = self.datasheet or self.measured
        if device is None:
            return None
        found: list[Measurement] = []
        for number, lesson in enumerate(calibration_times(figures)):
            request = self._request(lesson.question, device)
            with contextlib.suppress(PlannerError):
                found += measurements_of(
                    request, {lesson.metric: lesson.seconds}, host=host, job=str(number)
                )
        return calibrate_host(found) if found else None

    def goals(self, figures: Iterable[Figure]) -> Iterator[Check]:
        """Yield the product's own goals of speed, on a GPU of the catalog."""
        if self.datasheet is None:
            return
        values = {each.name: each for each in figures}
        yield from self._decode_goals(values)
        training, peak = values.get("training, model FLOP/s"), self._rates.get("matmul bf16")
        published = self.datasheet.peak_flops_per_second.get("bf16", peak)
        if training is not None and published:
            share = training.value / published
            yield _goal("training: model FLOPs utilisation", share, MFU_GOAL, "of the peak")

    def _decode_goals(self, values: Mapping[str, Figure]) -> Iterator[Check]:
        bandwidth = self._rates.get(TRIAD)
        plain, weights = _best(values, "decode bf16, batch 1"), values.get(READ_WEIGHTS)
        if plain and weights and bandwidth:
            share = plain * weights.value / bandwidth
            yield _goal("decode in bf16: memory bandwidth", share, DECODE_GOAL, "of the triad")
        packed = _best(values, "decode int4, batch 1")
        if plain and packed:
            yield _goal("decode in int4", packed / plain, INT4_GOAL, "times bf16")


def _metric_of(answer: Estimate, metric: str) -> float | None:
    """Return a figure of an estimate's performance or memory by its name."""
    group = answer.performance if metric in Performance.model_fields else answer.memory
    value: float | None = getattr(group, metric)
    return value


def products(rates: Mapping[str, float]) -> dict[str, float]:
    """Return the operations per second of matrix products by dtype."""
    return {
        name.removeprefix(PRODUCTS): value
        for name, value in rates.items()
        if name.startswith(PRODUCTS)
    }


def measured_rates(rates: Mapping[str, float]) -> MeasuredRates | None:
    """Return what a run measured for the planner, by figure; None without a bandwidth."""
    if TRIAD not in rates:
        return None
    return MeasuredRates(
        memory_bandwidth_bytes_per_second=rates[TRIAD],
        flops_per_second=products(rates),
        source="measured by this run",
        host_to_device_bytes_per_second=rates.get(TO_DEVICE),
        op_overhead_seconds=rates.get(OVERHEAD),
    )


def validation_rates(figures: Iterable[Figure]) -> ValidationRates | None:
    """Return the rates that replace a micro-benchmark's, or None if one of them is missing."""
    known = {each.name: each for each in figures}
    rates = {name: each.value for name, each in known.items()}
    if TRIAD not in rates or OVERHEAD not in rates or not products(rates):
        return None
    device = DeviceMeasurement(
        device=known[TRIAD].device,
        memory_bandwidth_bytes_per_second=rates[TRIAD],
        flops_per_second=products(rates),
        op_overhead_seconds=rates[OVERHEAD],
        host_to_device_bytes_per_second=rates.get(TO_DEVICE),
        device_to_host_bytes_per_second=rates.get(FROM_DEVICE),
    )
    return ValidationRates(device=device, disk_write_bytes_per_second=rates.get(DISK))


def _best(values: Mapping[str, Figure], name: str) -> float | None:
    """Return the highest speed among the ways to run, such as "decode bf16, batch 1, compiled"."""
    speeds = [
        each.value
        for key, each in values.items()
        if each.unit == "tokens/s" and key.startswith(f"{name}, ")
    ]
    return max(speeds, default=None)


def _goal(name: str, value: float, goal: float, unit: str) -> Check:
    return Check(
        name=f"goal: {name}",
        is_met=value >= goal,
        is_goal=True,
        expected=f"at least {goal:.2f} {unit}",
        found=f"{value:.2f}",
        advice="Slipway's own engine is below its goal on this device; the host is not at fault.",
    )


def calibration_times(figures: Iterable[Figure]) -> Iterator[CalibrationTime]:
    """Yield the times that calibrate: of Slipway's own runner as it works by default."""
    for figure in figures:
        question = figure.question
        if question is None or question.engine or question.metric not in CALIBRATED:
            continue
        seconds = figure.value
        if question.metric != "step_seconds":  # a rate of the whole batch
            tokens = question.workload["batch_size"]
            if question.metric == "prefill_tokens_per_second":
                tokens *= question.workload["input_tokens"]
            seconds = tokens / figure.value
        yield CalibrationTime(
            question=question, metric=CALIBRATED[question.metric], seconds=seconds
        )


def _published(device: DeviceSpec, name: str) -> float | None:
    if name.startswith("memory "):
        return device.memory_bandwidth_bytes_per_second
    if name.startswith("copy ") and name.endswith("pinned"):
        return device.host_to_device_bandwidth_bytes_per_second
    if not name.startswith(PRODUCTS):
        return None
    dtype = name.removeprefix(PRODUCTS)
    return next(
        (peak for known, peak in device.peak_flops_per_second.items() if known == dtype), None
    )


def _against_datasheet(figure: Figure, published: float) -> Check:
    least, most = BANDS[figure.name]
    share = figure.value / published
    return Check(
        name=f"{figure.name} against the datasheet",
        is_met=least <= share <= most,
        expected=f"{least:.0%} to {most:.0%} of {published:.3g} {figure.unit}",
        found=f"{share:.0%}",
        advice=SLOW if share < least else FAST,
    )
