"""What a technique is: an entry of data, and the tests of whether it applies and is in use."""

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
    """One request without and with a technique, and how far published figures should move.

    ``request`` is what both have in common; ``off`` and ``on`` are laid over it.
    ``expect`` holds, per figure, the range of its ratio with over without (1 = unchanged);
    ``values`` holds both values themselves where a ratio says nothing. Bytes of a tensor class
    that neither names, nor ``also`` lists, must stay. ``published`` is what the range is from.
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

    ``terms`` says, by figure of an estimate, with which formula it changes; ``needs`` names the
    conditions under which it applies; ``used`` lists alternatives of fields and accepted values
    by which a strategy is known to use it; ``settings`` are the strategy fields that turn it on.
    ``headline`` is what the papers that the project came from say of it, ``reviewed`` is where:
    the guide of Ersoy and Erşahin, the review of Rostam, Szénási and Kertész, Myneni's survey.
    ``only_named`` is the reason why no estimate shows its effect.
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
        """Return whether an estimate shows the technique's effect, or the planner names it."""
        return "costed" if self.example else "applicability only"

    @property
    def applicability(self) -> tuple[str, ...]:
        """Return in words what a request needs for the technique to apply."""
        phases = f"the work is {' or '.join(sorted(self.phases))}"
        return (phases, *(CONDITIONS[name].words for name in self.needs))

    def why_not(self, case: Case) -> str:
        """Return the first condition that a case of the right phase fails, or nothing."""
        reasons = (CONDITIONS[name].reason_against(case) for name in self.needs)
        return next((reason for reason in reasons if reason), "")

    def reason_against(self, case: Case) -> str:
        """Return why the technique does not apply, by name, or an empty string when it does."""
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
    """Return the value of a dotted path like ``strategy.zero_stage``; nothing when absent."""
    root, *names = path.split(".")
    found: object = strategy if root == "strategy" else getattr(case, root)
    for name in names:
        found = getattr(found, name, None)
    return found


def _is_accepted(value: Any, accepted: Accepted) -> bool:  # noqa: ANN401 - any field's value
    if isinstance(accepted, Mapping):
        return (value or 0) >= accepted["min"]
    return value in accepted
