"""Storage formats of the parts of a checkpoint's layers, such as narrower experts."""

from dataclasses import dataclass

from planner.cost.columns import ceil
from planner.cost.dtypes import BITS_PER_BYTE, weight_bytes_per_element
from planner.cost.quantity import Quantity
from planner.specs.base import Dtype
from planner.specs.model import WeightPart

WEIGHT_PARTS: tuple[WeightPart, ...] = ("attention", "feed_forward", "experts")


@dataclass(frozen=True)
class WeightFormat:
    """A storage format and the parts of the layers stored in it."""

    dtype: Dtype
    element_bytes: float
    parts: tuple[WeightPart, ...]

    def share(self, part: WeightPart) -> int:
        """Return 1 for a part in this format, else 0."""
        return int(part in self.parts)


def formats_of(
    dtype: Dtype, element_bytes: float, exceptions: dict[WeightPart, Dtype]
) -> tuple[WeightFormat, ...]:
    """Return the formats of all parts, the main one first, then the exceptions.

    >>> [f.parts for f in formats_of("fp8", 1.0, {"attention": "bf16"})]
    [('feed_forward', 'experts'), ('attention',)]
    """
    main = tuple(part for part in WEIGHT_PARTS if part not in exceptions)
    formats = [WeightFormat(dtype, element_bytes, main)]
    for other in sorted(set(exceptions.values())):
        parts = tuple(part for part in WEIGHT_PARTS if exceptions.get(part) == other)
        formats.append(WeightFormat(other, weight_bytes_per_element(other), parts))
    return tuple(formats)


def packed_formats(
    dtype: Dtype, dense_bits: float, expert_bits: float
) -> tuple[WeightFormat, ...]:
    """Return the formats of a packed file, whose experts have a mean of their own.

    >>> [f.parts for f in packed_formats("int4", 4.8, 4.8)]
    [('attention', 'feed_forward', 'experts')]
    """
    dense = dense_bits / BITS_PER_BYTE
    if dense_bits == expert_bits:
        return (WeightFormat(dtype, dense, WEIGHT_PARTS),)
    return (
        WeightFormat(dtype, dense, ("attention", "feed_forward")),
        WeightFormat(dtype, expert_bits / BITS_PER_BYTE, ("experts",)),
    )


def padded_expert_ratio(
    hidden: int, intermediate: int, column_ranks: Quantity, multiples: tuple[int, int]
) -> Quantity:
    """Return loaded over published weights of experts whose widths a kernel rounds up.

    Each rank's share of the intermediate width and the hidden width become whole ``multiples``.

    >>> round(padded_expert_ratio(2880, 2880, 1, (128, 256)), 4)
    1.0904
    """
    inner, outer = multiples
    share = ceil(intermediate / column_ranks / inner) * inner * column_ranks
    return share / intermediate * (ceil(hidden / outer) * outer / hidden)
