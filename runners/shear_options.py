"""To which shape Sheared LLaMA prunes a model, and how long it learns what goes."""

from typing import Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, PositiveInt

Dimension = Literal["layers", "hidden", "heads", "channels"]
HIDDEN_MULTIPLE, CHANNEL_MULTIPLE = 16, 32  # kernels and groups of weights want even widths


class Shape(NamedTuple):
    """How many of each kind a dense model has; ``key_value_heads`` with their queries."""

    layers: int
    hidden_size: int
    key_value_heads: int
    intermediate_size: int

    def size(self, dimension: str) -> int:
        """Return the size of a dimension of the masks."""
        return self[("layers", "hidden", "heads", "channels").index(dimension)]

    def without(self, share: float) -> "Shape":
        """Return the shape that loses about ``share`` of its matrices, evenly by dimension.

        Depth, hidden size and inner widths each keep the third root of what stays.
        """
        kept = (1.0 - share) ** (1 / 3)
        return Shape(
            max(1, round(self.layers * kept)),
            _rounded(self.hidden_size, kept, HIDDEN_MULTIPLE),
            max(1, round(self.key_value_heads * kept)),
            _rounded(self.intermediate_size, kept, CHANNEL_MULTIPLE),
        )


class Shear(BaseModel):
    """The target by dimension, where it is not as even as ``sparsity`` makes it, and the steps.

    Masks and weights learn together first; the smaller model then learns on, with text drawn
    from each domain by how far its loss is above the original's.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    layers: PositiveInt | None = None
    hidden_size: PositiveInt | None = None
    key_value_heads: PositiveInt | None = None
    intermediate_size: PositiveInt | None = None
    mask_steps: PositiveInt = Field(default=80, le=1_000_000)
    recovery_steps: PositiveInt = Field(default=160, le=1_000_000)
    learning_rate: float = Field(default=5e-4, gt=0.0, le=0.1)

    def target(self, full: Shape, share: float) -> Shape:
        """Return the shape to prune to."""
        even = full.without(share)
        return Shape(
            self.layers or even.layers,
            self.hidden_size or even.hidden_size,
            self.key_value_heads or even.key_value_heads,
            self.intermediate_size or even.intermediate_size,
        )


def _rounded(size: int, kept: float, multiple: int) -> int:
    multiple = min(multiple, size)
    return max(multiple, round(size * kept / multiple) * multiple)
