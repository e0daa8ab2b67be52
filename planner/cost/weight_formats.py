"""In which formats a checkpoint stores the parts of its layers: experts often narrower."""

from dataclasses import dataclass

from planner.cost.dtypes import weight_bytes_per_element
from planner.specs.base import Dtype
from planner.specs.model import WeightPart

WEIGHT_PARTS: tuple[WeightPart, ...] = ("attention", "feed_forward", "experts")


@dataclass(frozen=True)
class WeightFormat:
    """A format of stored weights, with the parts of the layers that have it."""

    dtype: Dtype
    element_bytes: float
    parts: tuple[WeightPart, ...]

    def share(self, part: WeightPart) -> int:
        """Return one for a part that has this format, else zero."""
        return int(part in self.parts)


def formats_of(
    dtype: Dtype, element_bytes: float, exceptions: dict[WeightPart, Dtype]
) -> tuple[WeightFormat, ...]:
    """Return the formats of all parts: the main one first, then those of the exceptions.

    >>> [f.parts for f in formats_of("fp8", 1.0, {"attention": "bf16"})]
    [('feed_forward', 'experts'), ('attention',)]
    """
    main = tuple(part for part in WEIGHT_PARTS if part not in exceptions)
    formats = [WeightFormat(dtype, element_bytes, main)]
    for other in sorted(set(exceptions.values())):
        parts = tuple(part for part in WEIGHT_PARTS if exceptions.get(part) == other)
        formats.append(WeightFormat(other, weight_bytes_per_element(other), parts))
    return tuple(formats)
