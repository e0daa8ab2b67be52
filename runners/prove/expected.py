"""What the planner and the datasheet say about a proof's figures, and what the planner learns.

A device of the catalog is asked twice: by its datasheet, then with the rates that this run
measured in place of the datasheet's. A device outside the catalog, such as a CPU, has no
datasheet: its measured rates are all that the planner has.
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal, NamedTuple

from planner.api import estimate
from planner.calibration import calibrate_host, measurements_of
from planner.catalog.devices import DriverDevice, MeasuredRates, host_device
from planner.errors import PlannerError
from planner.specs.cluster import ClusterSpec, DeviceSpec
from planner.specs.estimate import Estimate, EstimateRequest, HostCalibration, Measurement
from runners.facts import DeviceMeasurement
from runners.prove.report import (
    Check,
    Figure,
    Lesson,
    Missing,
    Prediction,
    ProofRates,
    Question,
    Record,
)

TRIAD = "memory triad"
PRODUCTS = "matmul "
TO_DEVICE, FROM_DEVICE = "copy host to device, pinned", "copy device to host, pinned"
OVERHEAD = "operator overhead"
DISK = "disk write"
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

    def _of_question(self, question: Question) -> Prediction | None:
        first = self.datasheet or self.measured
        if first is None:
            return None
        answer = self._estimated(question, first)
        if answer is None:
            return None
        value = getattr(answer.performance, question.metric)
        if value is None:
            return None
        low, high = answer.interval.get(question.metric, (None, None))
        after = None
        if self.datasheet is not None and self.measured is not None:
            again = self._estimated(question, self.measured)
            after = None if again is None else getattr(again.performance, question.metric)
        phase = answer.time_breakdown_seconds.get(PHASES.get(question.metric, ""), {})
        return Prediction(
            value=value,
            low=low,
            high=high,
            calibrated=after,
            term=max(phase, key=lambda name: phase[name]) if phase else None,
            source="datasheet" if self.datasheet is not None else "rates measured by this run",
        )

    def _estimated(self, question: Question, device: DeviceSpec) -> Estimate | None:
        try:
            return estimate(self._request(question, device))
        except PlannerError:
            return None

    def _request(self, question: Question, device: DeviceSpec) -> EstimateRequest:
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
        for number, lesson in enumerate(lessons(figures)):
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
        plain, model = _best(values, "decode bf16, batch 1"), values.get("model")
        if plain and model and bandwidth:
            share = plain * model.value / bandwidth
            yield _goal("decode in bf16: memory bandwidth", share, DECODE_GOAL, "of the triad")
        packed = _best(values, "decode int4, batch 1")
        if plain and packed:
            yield _goal("decode in int4", packed / plain, INT4_GOAL, "times bf16")


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


def proof_rates(figures: Iterable[Figure]) -> ProofRates | None:
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
    return ProofRates(device=device, disk_write_bytes_per_second=rates.get(DISK))


def _best(values: Mapping[str, Figure], name: str) -> float | None:
    return max((each.value for key, each in values.items() if key.startswith(name)), default=None)


def _goal(name: str, value: float, goal: float, unit: str) -> Check:
    return Check(
        name=f"goal: {name}",
        is_met=value >= goal,
        expected=f"at least {goal:.2f} {unit}",
        found=f"{value:.2f}",
        advice="Slipway's own engine is below its goal on this device; send us the report.",
    )


def lessons(figures: Iterable[Figure]) -> Iterator[Lesson]:
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
        yield Lesson(question=question, metric=CALIBRATED[question.metric], seconds=seconds)


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
