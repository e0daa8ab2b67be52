"""Options that an engine's own validation ties together: the rows of ``option_pair``."""

import re
from collections.abc import Mapping
from functools import cache
from typing import Annotated, NamedTuple

from pydantic import BeforeValidator

from planner.catalog.engines import Engine, in_span
from planner.catalog.reading import data_toml
from planner.cost.quantity import Flag, Quantity, both, divides, either, negate
from planner.specs.base import Spec

COMPARISON = re.compile(r"(?P<left>.+?) (?P<how><=|>=|==|divides) (?P<right>.+)")


class Condition(NamedTuple):
    """A comparison of two products of numbers and named quantities."""

    left: tuple[str, ...]
    how: str
    right: tuple[str, ...]

    @classmethod
    def parse(cls, text: object) -> "Condition":
        """Return the condition that a text states.

        >>> Condition.parse("2 * context divides sequence_length").left
        ('2', 'context')
        """
        found = COMPARISON.fullmatch(text) if isinstance(text, str) else None
        if found is None:
            raise ValueError(f"{text!r} is no condition: left, <=, >=, == or divides, right")
        sides = (tuple(found[name].split(" * ")) for name in ("left", "right"))
        left, right = sides
        return cls(left, found["how"], right)

    @property
    def names(self) -> frozenset[str]:
        """Return the quantities that it compares."""
        return frozenset(word for word in (*self.left, *self.right) if not word[0].isdigit())

    def holds(self, quantities: Mapping[str, Quantity]) -> Flag:
        """Return whether, or in which rows of columns, the condition holds."""
        left, right = (_product(side, quantities) for side in (self.left, self.right))
        if self.how == "divides":
            return divides(left, right)
        if self.how == "==":
            return left == right
        return left <= right if self.how == "<=" else left >= right


def _product(words: tuple[str, ...], quantities: Mapping[str, Quantity]) -> Quantity:
    product: Quantity = 1.0
    for word in words:
        product = product * (float(word) if word[0].isdigit() else quantities[word])
    return product


NamedCondition = Annotated[Condition, BeforeValidator(Condition.parse)]


class OptionPair(Spec):
    """Where every condition of ``when`` holds, the engine refuses to run without ``needs``.

    ``field`` is the one of the strategy or the workload to change. ``says`` and ``instead`` are
    the reason and the way out; quantities in braces are filled in.
    """

    engines: frozenset[str]
    since: str = ""
    until: str = ""
    when: tuple[NamedCondition, ...] = ()
    needs: NamedCondition
    field: str
    says: str
    instead: str
    source: str

    @property
    def names(self) -> frozenset[str]:
        """Return the quantities that the row compares."""
        return frozenset(self.needs.names.union(*(one.names for one in self.when)))

    def holds(self, quantities: Mapping[str, Quantity]) -> Flag:
        """Return whether the engine takes the options, for one layout or columns of them."""
        concerned: Flag = True
        for condition in self.when:
            concerned = both(concerned, condition.holds(quantities))
        return either(negate(concerned), self.needs.holds(quantities))

    def message(self, engine: Engine, quantities: Mapping[str, Quantity]) -> str:
        """Return the refusal with the values of the options, and the way out."""
        shown = {name: f"{value:g}" for name, value in quantities.items()}
        shown |= {name: f"{value:.0f}" for name, value in quantities.items() if value >= 1}
        reason, instead = self.says.format_map(shown), self.instead.format_map(shown)
        title = f"{engine.title} {engine.release}".strip()
        return f"{reason}, which {title} refuses; {instead}"


@cache
def option_pairs() -> tuple[OptionPair, ...]:
    """Return the rows of all engines."""
    return tuple(map(OptionPair.model_validate, data_toml("engine_limits.toml")["option_pair"]))


@cache
def pairs_of(engine: str, release: str) -> tuple[OptionPair, ...]:
    """Return the rows about a release of an engine; without a number, those of any release."""
    return tuple(
        row
        for row in option_pairs()
        if engine in row.engines and in_span(release, row.since, row.until)
    )
