"""Weight formats that are named by how their file is packed: GGUF mixes, and any mean of bits.

``gguf:q4_k_m`` has its sizes in the catalog, ``gguf:3.9`` is a mix of so many bits; ``exl2:4.25``
(or any other method, a colon and a number) keeps that many bits per linear weight and 16 bits for
embedding and head.
"""

from dataclasses import dataclass
from functools import cache

from planner.catalog.nearest import nearest_names
from planner.catalog.reading import data_toml
from planner.cost.dtypes import BITS_PER_BYTE
from planner.errors import UnknownNameError
from planner.specs.base import Dtype

PLAIN_BITS = 16.0
MIXED_HEAD_BITS = 6.5625  # what GGUF mixes keep the output head in
FEWEST_BITS, MOST_BITS = 0.5, 32.0
# The dtype that stands for a packed format where only a dtype can be named.
NOMINAL: tuple[tuple[float, Dtype], ...] = ((2.0, "ternary"), (6.0, "int4"), (9.0, "int8"))


@dataclass(frozen=True)
class PackedFormat:
    """The mean bits of one weight, by where it lies."""

    linear_bits: float
    embedding_bits: float
    head_bits: float

    @property
    def linear_bytes_per_element(self) -> float:
        """Return the bytes of one linear weight of a layer, scales included."""
        return self.linear_bits / BITS_PER_BYTE

    @property
    def head_bytes_per_element(self) -> float:
        """Return the bytes of one weight of the output head, or of an embedding tied to it."""
        return self.head_bits / BITS_PER_BYTE

    @property
    def vocabulary_bytes_per_element(self) -> float:
        """Return the mean bytes of one weight of an embedding and an output head apart."""
        return (self.embedding_bits + self.head_bits) / 2 / BITS_PER_BYTE

    @property
    def nominal(self) -> Dtype:
        """Return the dtype nearest to the linear weights.

        >>> PackedFormat(4.8, 4.5, 6.5625).nominal
        'int4'
        """
        return next((dtype for most, dtype in NOMINAL if self.linear_bits < most), "fp16")


@cache
def packed_format(quantization: str | None) -> PackedFormat | None:
    """Return the sizes of a packed format, or nothing for names without a colon.

    Raises:
        UnknownNameError: the catalog has no such GGUF type, or the bits are no sensible number.
    """
    method, colon, kind = (quantization or "").lower().partition(":")
    if not colon:
        return None
    table: dict[str, list[float]] = data_toml("packed.toml").get(method, {})
    if kind in table:
        return PackedFormat(*table[kind])
    bits = _number(kind)
    if not method or not FEWEST_BITS <= bits <= MOST_BITS:
        nearest = nearest_names(kind, tuple(table))
        raise UnknownNameError(
            f"quantization is {quantization!r}: {method} has no such format; "
            + (f"nearest: {', '.join(nearest)}" if nearest else "give bits, as in exl2:4.25"),
            "strategy.quantization",
            nearest=nearest,
        )
    if table:  # a mix of the method's types, of so many bits: embedding and head as in its mixes
        return PackedFormat(bits, min(bits, PLAIN_BITS), max(bits, MIXED_HEAD_BITS))
    return PackedFormat(bits, PLAIN_BITS, PLAIN_BITS)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0
