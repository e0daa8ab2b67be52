"""The technique model: a data entry, and tests for applicability and use."""

from collections.abc import Mapping
from typing import Any, Literal

from planner.specs.base import JsonObject, Spec
from planner.specs.strategy import Strategy
from planner.techniques.case import Case
from planner.techniques.conditions import CONDITIONS

__all__ = ["Case", "Example", "Phase", "Technique"]

Phase = Literal["inference", "training", "compression"]
Accepted = list[Any] | dict[Literal["min"], float]


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
    used: tuple[dict[str, Accepted], ...] = ()
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


def _is_accepted(value: Any, accepted: Accepted) -> bool:  # noqa: ANN401 - any field's value
    if isinstance(accepted, Mapping):
        return (value or 0) >= accepted["min"]
    return value in accepted
