"""The table of techniques, and a worked example of each."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from planner.catalog.reading import data_toml, nearest_names
from planner.cost.memory import CLASSES
from planner.specs.base import Dtype, JsonObject, Spec, UnknownTechniqueError
from planner.specs.cluster import ClusterSpec, DeviceSpec
from planner.specs.estimate import Estimate, EstimateRequest
from planner.specs.model import ModelSpec
from planner.specs.workload import ServeWorkload, Strategy, TrainWorkload, Workload
from planner.workload.costing import estimate_request

__all__ = ["Case", "Example", "Phase", "Technique"]


# ---------------------------------------------------------------------------
# The techniques: data entries with conditions for applicability and use, by key.
# ---------------------------------------------------------------------------


# The technique model: a data entry, and conditions for applicability and use.


# The case that a technique's conditions are checked against.


PHASES = {"train": "training", "compress": "compression"}


@dataclass(frozen=True)
class Case:
    """A model, a cluster and a workload with resolved names."""

    model: ModelSpec
    device: DeviceSpec
    cluster: ClusterSpec
    workload: Workload

    @property
    def phase(self) -> str:
        """Return the phase of the workload: inference, training or compression."""
        return PHASES.get(self.workload.kind, "inference")

    @property
    def method(self) -> str:
        """Return the method of training or compression; empty for inference."""
        return getattr(self.workload, "method", "")


# Conditions of techniques; a failed condition gives a reason with the case's numbers.
#
# The reason is an empty string if the condition holds.


ADAPTERS = frozenset({"lora", "qlora"})
LEAST_LAYERS = 2


@dataclass(frozen=True)
class Condition:
    """A condition in words, and the function that returns why a case fails it."""

    words: str
    reason_against: Callable[[Case], str]


def _condition(words: str, holds: Callable[[Case], object], reason: str) -> Condition:
    """Return a condition whose reason is a template of the case that fails it."""
    return Condition(words, lambda case: "" if holds(case) else reason.format(case=case))


def _peak(dtype: Dtype) -> Condition:
    def reason(case: Case) -> str:
        if dtype in case.device.peak_flops_per_second:
            return ""
        needs = f"needs {dtype} matrix units: {case.device.id} has none"
        if case.model.weight_dtype == dtype:
            return f"{needs}; an engine that takes this checkpoint multiplies it in 16 bits"
        return needs

    return Condition(f"the device multiplies matrices in {dtype}", reason)


CONDITIONS: dict[str, Condition] = {
    "several_devices": _condition(
        "the cluster has at least 2 devices",
        lambda case: case.cluster.num_devices > 1,
        "needs at least 2 devices: this cluster has 1",
    ),
    "several_nodes": _condition(
        "the cluster has at least 2 nodes",
        lambda case: case.cluster.num_nodes > 1,
        "needs at least 2 nodes: this cluster has 1",
    ),
    "unlike_nodes": _condition(
        "the cluster has nodes of several kinds",
        lambda case: case.cluster.other_nodes,
        "needs nodes of another kind: this cluster has {case.device.id} alone",
    ),
    "sparse_model": _condition(
        "the model is a sparse mixture of experts",
        lambda case: case.model.is_moe,
        "needs a sparse mixture-of-experts model: this one is dense",
    ),
    "plain_mlp": _condition(
        "the feed-forward blocks are plain, not gated",
        lambda case: not case.model.gated_mlp,
        "needs ReLU feed-forward blocks, whose zeros can be foreseen: this model's are gated",
    ),
    "divisible_heads": _condition(
        "a number of devices in one node or NVLink domain divides the attention heads",
        lambda case: any(
            case.model.num_attention_heads % size == 0
            for size in range(2, case.cluster.widest_domain + 1)
        ),
        "needs a divisor of the {case.model.num_attention_heads} attention heads between 2 and "
        "the {case.cluster.widest_domain} devices of a node or NVLink domain",
    ),
    "several_layers": _condition(
        "there is a layer for each stage",
        lambda case: case.model.num_hidden_layers >= LEAST_LAYERS,
        "needs a layer per stage: this model has {case.model.num_hidden_layers}",
    ),
    "several_sequences": _condition(
        "a step has at least 2 sequences",
        lambda case: (
            not isinstance(case.workload, TrainWorkload) or case.workload.global_batch_size != 1
        ),
        "needs at least 2 sequences per step, one per data-parallel rank: there is 1",
    ),
    "requests": _condition(
        "requests come and go",
        lambda case: isinstance(case.workload, ServeWorkload),
        "needs requests that come and go",
    ),
    "accelerator": _condition(
        "the device is not the host's own processor",
        lambda case: case.device.kind != "cpu",
        "needs a device beside the host's processor: this one is the host",
    ),
    "adapters": _condition(
        "adapters are trained over a frozen base",
        lambda case: case.method in ADAPTERS,
        "needs adapters over a frozen base: this is {case.method}",
    ),
    "all_weights": _condition(
        "all weights are trained",
        lambda case: case.method not in ADAPTERS,
        "needs all weights trained: {case.method} trains adapters over a frozen base",
    ),
    "pretraining": _condition(
        "the model is trained from scratch",
        lambda case: case.method == "pretrain",
        "needs training from scratch: this is {case.method}",
    ),
    "fpga": _condition(
        "the device is an FPGA appliance",
        lambda case: (
            case.device.kind == "accelerator"
            and "fpga" in f"{case.device.id} {case.device.name}".lower()
        ),
        "needs an FPGA appliance: {case.device.id} is a {case.device.kind}; give the appliance's "
        "own memory, bandwidth and peaks as the device, with FPGA in its id, to ask what it would "
        "do",
    ),
    "peak_fp8": _peak("fp8"),
    "peak_int8": _peak("int8"),
    "peak_nvfp4": _peak("nvfp4"),
    "price": _condition(
        "the device has an hourly price",
        lambda case: case.device.price_usd_per_hour is not None,
        "needs an hourly price: the catalog has none for {case.device.id}",
    ),
    "power": _condition(
        "the device has a power rating",
        lambda case: case.device.tdp_watts is not None,
        "needs a power rating: the catalog has none for {case.device.id}",
    ),
}

Phase = Literal["inference", "training", "compression"]
AcceptedValues = list[Any] | dict[Literal["min"], float]


class Example(Spec):
    """One request without and with a technique, and the expected changes of figures.

    ``request`` is common to both; ``off`` and ``on`` are merged over it. ``expect`` holds, per
    figure, the range of the ratio of with over without (1 = unchanged); ``values`` holds both
    values where a ratio is meaningless. Bytes of tensor classes that are neither in these nor in
    ``also`` must not change. ``published`` is the source of the ranges.
    """

    request: JsonObject
    off: JsonObject = {}
    on: JsonObject = {}
    expect: dict[str, tuple[float, float]] = {}
    values: dict[str, tuple[Any, Any]] = {}
    also: tuple[str, ...] = ()
    published: str


class Technique(Spec):
    """One technique of the registry.

    ``terms`` maps a figure of an estimate to the formula by which the technique changes it.
    ``needs`` names the conditions of applicability. ``used`` lists alternatives of field paths and
    accepted values by which a strategy uses the technique; ``settings`` are the strategy fields
    that enable it. ``headline`` is the claim of the project's reference papers, ``reviewed`` the
    place: the guide of Ersoy and Erşahin, the review of Rostam, Szénási and Kertész, Myneni's
    survey. ``only_named`` is the reason why no estimate shows its effect.
    """

    key: str
    title: str
    phases: frozenset[Phase]
    effect: str
    terms: dict[str, str] = {}
    source: str
    reviewed: str = ""
    headline: str = ""
    needs: tuple[str, ...] = ()
    used: tuple[dict[str, AcceptedValues], ...] = ()
    settings: JsonObject = {}
    example: Example | None = None
    only_named: str = ""

    @property
    def planned(self) -> Literal["costed", "applicability only"]:
        """Return whether estimates include the technique's effect, or only its applicability."""
        return "costed" if self.example else "applicability only"

    @property
    def applicability(self) -> tuple[str, ...]:
        """Return the requirements of the technique, as text."""
        phases = f"the work is {' or '.join(sorted(self.phases))}"
        return (phases, *(CONDITIONS[name].words for name in self.needs))

    def why_not(self, case: Case) -> str:
        """Return the first failed condition for a case of the right phase, or an empty string."""
        reasons = (CONDITIONS[name].reason_against(case) for name in self.needs)
        return next((reason for reason in reasons if reason), "")

    def reason_against(self, case: Case) -> str:
        """Return why the technique does not apply, or an empty string if it does."""
        if case.phase not in self.phases:
            return f"works on {' and '.join(sorted(self.phases))}: this is {case.phase}"
        return self.why_not(case)

    def is_used(self, strategy: Strategy, case: Case) -> bool:
        """Return whether a strategy uses the technique."""
        return any(
            all(_is_accepted(_value(path, strategy, case), ok) for path, ok in fields.items())
            for fields in self.used
        )


def _value(path: str, strategy: Strategy, case: Case) -> object:
    """Return the value of a dotted path such as ``strategy.zero_stage``, None if absent."""
    root, *names = path.split(".")
    value: object = strategy if root == "strategy" else getattr(case, root)
    for name in names:
        value = getattr(value, name, None)
    return value


def _is_accepted(value: Any, accepted: AcceptedValues) -> bool:  # noqa: ANN401 - any field's value
    if isinstance(accepted, Mapping):
        return (value or 0) >= accepted["min"]
    return value in accepted


FILES = ("compression", "training", "parallel", "serving", "hardware")


class Registry(Mapping[str, Technique]):
    """The techniques by key, read on first use."""

    @cached_property
    def entries(self) -> dict[str, Technique]:
        """Return every entry of the data files, in file order."""
        return {
            key: Technique.model_validate({"key": key, **entry})
            for name in FILES
            for key, entry in data_toml(f"techniques/{name}.toml").items()
        }

    def __getitem__(self, key: str) -> Technique:
        return self.entries[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)


TECHNIQUES: Mapping[str, Technique] = Registry()


def get(key: str) -> Technique:
    """Return the technique with a key.

    Raises:
        UnknownTechniqueError: no technique has this key; the message gives the nearest ones.
    """
    if key not in TECHNIQUES:
        nearest = nearest_names(key, TECHNIQUES)
        raise UnknownTechniqueError(
            f"no technique {key!r}; nearest: {', '.join(nearest) or 'none'}",
            "technique",
            nearest=nearest,
        )
    return TECHNIQUES[key]


def used_by(strategy: Strategy, case: Case) -> tuple[str, ...]:
    """Return the keys of the techniques that a strategy uses."""
    return tuple(
        technique.key
        for technique in TECHNIQUES.values()
        if technique.used
        and technique.is_used(strategy, case)
        and not technique.reason_against(case)
    )


def inapplicable(case: Case) -> dict[str, str]:
    """Return the reasons against each inapplicable technique of the case's phase, by key."""
    return {
        technique.key: reason
        for technique in TECHNIQUES.values()
        if case.phase in technique.phases and (reason := technique.why_not(case))
    }


# ---------------------------------------------------------------------------
# Computed worked examples: each figure without and with a technique, and its published range.
# ---------------------------------------------------------------------------


TERM = "term_"
ROUNDING = 1e-6


@dataclass(frozen=True)
class Change:
    """One figure without and with a technique, and whether it changed as published."""

    figure: str
    without: Any
    with_: Any
    expected: tuple[Any, Any]
    holds: bool

    def to_json(self) -> JsonObject:
        """Return the change as the command line prints it."""
        ratio = _ratio(self.without, self.with_)
        finite = {} if ratio is None or ratio == float("inf") else {"ratio": ratio}
        return {
            "figure": self.figure,
            "without": self.without,
            "with": self.with_,
            **finite,
            "expected": [str(end) if end == float("inf") else end for end in self.expected],
            "holds": self.holds,
        }


def overlaid(base: Mapping[str, Any], over: Mapping[str, Any]) -> JsonObject:
    """Return a document deep-merged with another one."""
    merged = dict(base)
    for key, value in over.items():
        current = merged.get(key)
        if isinstance(current, Mapping) and isinstance(value, Mapping):
            merged[key] = overlaid(current, value)
        else:
            merged[key] = value
    return merged


def both_estimates(example: Example) -> tuple[Estimate, Estimate]:
    """Return the example's estimates without and with the technique."""
    without, with_ = (
        estimate_request(EstimateRequest.model_validate(overlaid(example.request, over)))
        for over in (example.off, example.on)
    )
    return without, with_


def figure(estimate: Estimate, name: str) -> Any:  # noqa: ANN401 - a number or a verdict
    """Return a figure by name: a tensor class, a field of the estimate, or a term.

    Raises:
        KeyError: the estimate has no figure of that name.
    """
    if name in CLASSES:
        return float(estimate.memory.breakdown_bytes.get(name, 0))
    if name == "perplexity":
        return estimate.quality and (estimate.quality.perplexity_ratio or (0, None, 0))[1]
    if name.startswith(TERM):
        key = name.removeprefix(TERM)
        return sum(term.value for term in estimate.terms if term.key == key)
    for section in (estimate, estimate.memory, estimate.performance):
        if name in type(section).model_fields:
            return getattr(section, name)
    raise KeyError(name)


def _ratio(without: Any, with_: Any) -> float | None:  # noqa: ANN401 - figures of any kind
    if isinstance(without, bool) or isinstance(with_, bool) or with_ is None:
        return None
    if not without:
        return float("inf") if with_ else 1.0
    return float(with_) / float(without)


def changes(technique: Technique) -> tuple[Change, ...]:
    """Return the change of every figure of a technique's example, and of unlisted classes."""
    example = technique.example
    if example is None:
        return ()
    without, with_ = both_estimates(example)
    checked = []
    for name, (low, high) in example.expect.items():
        pair = figure(without, name), figure(with_, name)
        ratio = _ratio(*pair)
        holds = ratio is not None and low * (1 - ROUNDING) <= ratio <= high * (1 + ROUNDING)
        checked.append(Change(name, *pair, (low, high), holds))
    for name, expected in example.values.items():
        pair = figure(without, name), figure(with_, name)
        checked.append(Change(name, *pair, expected, pair == expected))
    listed = {*example.expect, *example.also}
    for name in CLASSES:
        pair = figure(without, name), figure(with_, name)
        if name not in listed and any(pair):
            is_unchanged = abs(pair[1] - pair[0]) <= 1 + ROUNDING * pair[0]
            checked.append(Change(name, *pair, (1.0, 1.0), is_unchanged))
    return tuple(checked)


def technique_row(technique: Technique) -> JsonObject:
    """Return a registry entry as the command line prints it, with its computed example."""
    row: JsonObject = technique.model_dump(mode="json", exclude={"used", "example", "needs"})
    row = {name: value for name, value in row.items() if value not in ("", {}, [], None)}
    row["phases"] = sorted(technique.phases)
    row["planned"] = technique.planned
    row["applicability"] = list(technique.applicability)
    example = technique.example
    if example is not None:
        row["example"] = {
            "without": overlaid(example.request, example.off),
            "with": overlaid(example.request, example.on),
            "published": example.published,
            "figures": [change.to_json() for change in changes(technique)],
        }
    return row
