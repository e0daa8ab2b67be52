"""What an engine refuses on a device: formats of weights, activations and caches, by release."""

from functools import cache, lru_cache
from typing import Any, NamedTuple

from pydantic import Field

from planner.catalog.engines import Engine, release_number
from planner.catalog.reading import data_toml
from planner.cost.dtypes import WIDE
from planner.specs.base import Dtype, Spec
from planner.specs.cluster import DeviceSpec
from planner.specs.model import ModelSpec

MINOR = 2  # numbers of a release that spans are given in


class EngineLimit(Spec):
    """One row of ``engine_limits.toml``, as its head describes."""

    engines: frozenset[str]
    weights: frozenset[Dtype] = frozenset()
    activations: frozenset[Dtype] = frozenset()
    caches: frozenset[Dtype] = frozenset()
    model_types: frozenset[str] = frozenset()
    vendors: frozenset[str] = frozenset()
    not_vendors: frozenset[str] = frozenset()
    below: float | None = None
    at_least: float | None = Field(default=None, alias="from")
    without_peak: Dtype | None = None
    in_blocks: bool = False
    since: str = ""
    until: str = ""
    reason: str
    instead: str
    source: str

    def is_for(self, subject: "Subject") -> bool:
        """Return whether the row is about this engine's release, device and model."""
        vendor, capability = subject.vendor, subject.compute_capability
        return (
            subject.engine in self.engines
            and (not self.model_types or subject.model_type in self.model_types)
            and (not self.in_blocks or subject.in_blocks)
            and (not self.vendors or vendor in self.vendors)
            and (not self.not_vendors or (bool(vendor) and vendor not in self.not_vendors))
            and (not self.without_peak or self.without_peak not in subject.peaks)
            and (self.below is None or (capability is not None and capability < self.below))
            and (self.at_least is None or (capability is not None and capability >= self.at_least))
            and _in_span(subject.release, self.since, self.until)
        )

    def refuses(self, weight: Dtype, activation: Dtype, kv_cache: Dtype | None) -> str | None:
        """Return the strategy field that the row refuses, None if it allows the formats.

        A row that names no format refuses the engine as a whole.
        """
        if self.weights and weight not in self.weights:
            return None
        if self.activations and activation not in self.activations:
            return None
        if self.caches:
            return "strategy.kv_cache_dtype" if kv_cache in self.caches else None
        if self.activations:
            return "strategy.activation_dtype"
        return "strategy.weight_dtype" if self.weights else "engine"


class Subject(NamedTuple):
    """What decides which rows are about an engine on a device with a model."""

    engine: str
    release: str
    vendor: str
    compute_capability: float | None
    peaks: frozenset[Dtype]
    model_type: str
    in_blocks: bool


@cache
def _limits() -> tuple[EngineLimit, ...]:
    rows: list[dict[str, Any]] = data_toml("engine_limits.toml")["limit"]
    return tuple(EngineLimit.model_validate(row) for row in rows)


@lru_cache(maxsize=4096)
def _limits_of(subject: Subject) -> tuple[EngineLimit, ...]:
    """Return the rows about a subject; a search asks for the same ones many times."""
    return tuple(limit for limit in _limits() if limit.is_for(subject))


def _in_span(release: str, since: str, until: str) -> bool:
    """Return whether a release lies in a span; one without a number lies in every span.

    >>> _in_span("0.13.0", "", "0.13"), _in_span("0.14.1", "", "0.13"), _in_span("", "0.31", "")
    (True, False, True)
    """
    known = release_number(release)[:MINOR]
    if not known:
        return True
    after = not since or known >= release_number(since)
    return after and (not until or known <= release_number(until))


def refusal(
    engine: Engine,
    device: DeviceSpec,
    model: ModelSpec,
    formats: tuple[Dtype, Dtype, Dtype | None],
) -> tuple[str, str] | None:
    """Return the field and the reason if the engine refuses the formats on a device.

    ``formats`` are those of the weights, the activations and the KV cache, None if undecided.
    """
    subject = Subject(
        engine.key,
        engine.release,
        (device.vendor or "").lower(),
        device.compute_capability,
        frozenset(device.peak_flops_per_second),
        model.model_type,
        model.weight_block_size is not None,
    )
    for limit in _limits_of(subject):
        if field := limit.refuses(*formats):
            name = field.rpartition(".")[2]
            value = dict(
                zip(("weight_dtype", "activation_dtype", "kv_cache_dtype"), formats, strict=True)
            ).get(name, engine.key)
            title = engine.title if not engine.release else f"{engine.title} {engine.release}"
            return field, (
                f"{name} is {value}, which {title} refuses on {device.name or device.id}: "
                f"{limit.reason}; {limit.instead}"
            )
    return None


def sixteen_bit_dtype(device: DeviceSpec, published: Dtype | None = None) -> Dtype:
    """Return the 16-bit dtype that engines take on a device: fp16 below compute capability 8.0."""
    capability = device.compute_capability
    if capability is not None and capability < 8.0:  # noqa: PLR2004 - Ampere
        return "fp16"
    return published if published in WIDE and published is not None else "bf16"
