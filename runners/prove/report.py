"""The report of a proof: stages, figures, checks, lessons, and its signature."""

import hashlib
import hmac
import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, NonNegativeInt, TypeAdapter

from planner.specs.estimate import HostCalibration
from runners.facts import DeviceMeasurement
from runners.wire import Figure as Number
from runners.wire import Message, Name, Names, Rate, Seconds, Sentence, TimestampMs, key_id

# The stages of a proof, in their order.


StageName = Literal["identity", "rates", "correctness", "speed", "jobs", "distributed"]
STAGES: tuple[StageName, ...] = get_args(StageName)


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


class Question(Message):
    """What to ask the planner for: a metric of one model, workload and strategy.

    ``engine`` is the planner's engine whose execution this is; None is Slipway's own runner.
    """

    model: dict[str, Any]  # a config.json
    workload: dict[str, Any]
    strategy: dict[str, Any]
    engine: Name | None = None
    metric: Name  # a field of the planner's performance, such as "decode_tokens_per_second"


class Lesson(Message):
    """A measured time that teaches the planner about its own runner on this host."""

    question: Question
    metric: Literal["tpot_seconds", "ttft_seconds", "step_seconds"]
    seconds: Seconds


class ProofRates(Message):
    """A device's rates as a proof measured them, and those of the folder where jobs write."""

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
    question: Question | None = None
    prediction: Prediction | None = None


class Check(Message):
    """One property that holds or not; ``advice`` says what to do if it does not."""

    record: Literal["check"] = "check"
    name: Name
    is_met: bool
    expected: Sentence
    found: Sentence
    advice: Sentence = ""


class Missing(Message):
    """Something that was not proven: for want of a device, of a library, or of time."""

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
        """Return the checks that are not met."""
        return tuple(each for each in self.checks if not each.is_met)

    @property
    def missing(self) -> tuple[Missing, ...]:
        """Return what could not be proven."""
        return tuple(each for each in self.records if isinstance(each, Missing))


class Report(Message):
    """A whole proof run."""

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
