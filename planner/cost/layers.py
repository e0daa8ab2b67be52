"""A quantity per group of layers, for models with different kinds of layer."""

from collections.abc import Callable
from dataclasses import dataclass

from planner.cost.quantity import Quantity
from planner.specs.layers import LayerGroup
from planner.specs.model import ModelSpec


@dataclass(frozen=True, eq=False)
class PerGroup:
    """One quantity for each group of ``model.layers_by_attention``, in their order.

    It supports scaling and addition like a number, for all groups at once.
    """

    values: tuple[Quantity, ...]

    # Let numpy columns on the left use __rmul__.
    __array_ufunc__ = None

    @classmethod
    def of(cls, model: ModelSpec, rule: Callable[[LayerGroup], Quantity]) -> "PerGroup":
        """Return the rule's value per layer, summed over the layers of each group."""
        return cls(tuple(group.count * rule(group) for group in model.layers_by_attention))

    def __mul__(self, factor: Quantity) -> "PerGroup":
        """Return every group's quantity times a factor."""
        return PerGroup(tuple(value * factor for value in self.values))

    __rmul__ = __mul__

    def __truediv__(self, divisor: Quantity) -> "PerGroup":
        """Return every group's quantity divided by a divisor."""
        return PerGroup(tuple(value / divisor for value in self.values))

    def __add__(self, other: "PerGroup") -> "PerGroup":
        """Return the sums group by group."""
        return PerGroup(tuple(a + b for a, b in zip(self.values, other.values, strict=True)))

    @property
    def total(self) -> Quantity:
        """Return the sum over all groups."""
        return sum(self.values[1:], start=self.values[0])
