"""Packed weight formats: GGUF mixes, and formats given by their mean bits.

``gguf:q4_k_m`` has its usual sizes in the catalog and those of a model from its row widths
(planner/catalog/gguf.py), ``gguf:3.9`` is a mix of 3.9 bits on average.
``exl2:4.25`` (or any other method with a number) stores 4.25 bits per linear weight, and 16 bits
per weight of embedding and head.
"""

from dataclasses import dataclass
from functools import cache, lru_cache

from planner.catalog.gguf import file_sizes, supports
from planner.catalog.reading import data_toml, nearest_names
from planner.cost.weights import BITS_PER_BYTE
from planner.errors import UnknownNameError
from planner.specs.base import Dtype
from planner.specs.model import ModelSpec

PLAIN_BITS = 16.0
MIXED_HEAD_BITS = 6.5625  # bits of the output head in GGUF mixes
FEWEST_BITS, MOST_BITS = 0.5, 32.0
# The nearest dtype of a packed format, where only a dtype is possible: (bits below, dtype).
NOMINAL: tuple[tuple[float, Dtype], ...] = ((2.0, "ternary"), (6.0, "int4"), (9.0, "int8"))


@dataclass(frozen=True)
class PackedFormat:
    """The mean bits per weight, by part of the model.

    ``dense_bits`` and ``expert_bits`` divide the linear weights where a file's sizes are known;
    ``small_bits`` are those of norms, biases and routers.
    """

    linear_bits: float
    embedding_bits: float
    head_bits: float
    small_bits: float = PLAIN_BITS
    dense_bits: float | None = None
    expert_bits: float | None = None

    @property
    def linear_bytes_per_element(self) -> float:
        """Return the bytes per linear weight of a layer, including scales."""
        return self.linear_bits / BITS_PER_BYTE

    @property
    def head_bytes_per_element(self) -> float:
        """Return the bytes per weight of the output head or of a tied embedding."""
        return self.head_bits / BITS_PER_BYTE

    @property
    def vocabulary_bytes_per_element(self) -> float:
        """Return the mean bytes per weight of an untied embedding and output head."""
        return (self.embedding_bits + self.head_bits) / 2 / BITS_PER_BYTE

    @property
    def nominal(self) -> Dtype:
        """Return the dtype nearest to the linear weights.

        >>> PackedFormat(4.8, 4.5, 6.5625).nominal
        'int4'
        """
        return next((dtype for most, dtype in NOMINAL if self.linear_bits < most), "fp16")


def packed_format(quantization: str | None, model: ModelSpec | None = None) -> PackedFormat | None:
    """Return the sizes of a packed format, or None for names without a colon.

    With a model, GGUF sizes are those of its own file: types depend on the width of its rows.

    Raises:
        UnknownNameError: the catalog has no such GGUF type, or the bits are out of range.
    """
    usual = _usual_format(quantization)
    method, _, kind = (quantization or "").lower().partition(":")
    if usual is None or model is None or method != "gguf" or not supports(kind):
        return usual
    return _format_of_file(kind, model.model_copy(update={"part_dtypes": ()}))


@lru_cache(maxsize=1024)
def _format_of_file(kind: str, model: ModelSpec) -> PackedFormat:
    """Return the sizes of a model's GGUF file; a dict in the model could not be hashed."""
    sizes = file_sizes(kind, model)
    return PackedFormat(
        sizes.linear_bits,
        sizes.embedding_bits,
        sizes.head_bits,
        sizes.small_bits,
        sizes.dense_bits,
        sizes.expert_bits,
    )


@cache
def _usual_format(quantization: str | None) -> PackedFormat | None:
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
    if table:  # a mix with these mean bits: embedding and head as in the method's mixes
        return PackedFormat(bits, min(bits, PLAIN_BITS), max(bits, MIXED_HEAD_BITS))
    return PackedFormat(bits, PLAIN_BITS, PLAIN_BITS)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0
