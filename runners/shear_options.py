"""Options of Sheared LLaMA pruning: target shape and training steps."""

from typing import Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, PositiveInt

Dimension = Literal["layers", "hidden", "heads", "channels"]
HIDDEN_MULTIPLE, CHANNEL_MULTIPLE = 16, 32  # widths that suit kernels and quantisation groups


class Shape(NamedTuple):
    """The shape of a dense model; ``key_value_heads`` includes their query heads."""

    layers: int
    hidden_size: int
    key_value_heads: int
    intermediate_size: int

    def size(self, dimension: str) -> int:
        """Return the size of a mask dimension."""
        return self[("layers", "hidden", "heads", "channels").index(dimension)]

    def without(self, share: float) -> "Shape":
        """Return the shape with about ``share`` of the weights removed, evenly by dimension.

        Depth, hidden size and inner widths are each scaled by ``(1 - share) ** (1/3)``.
        """
        ratio = (1.0 - share) ** (1 / 3)
        return Shape(
            max(1, round(self.layers * ratio)),
            _rounded(self.hidden_size, ratio, HIDDEN_MULTIPLE),
            max(1, round(self.key_value_heads * ratio)),
            _rounded(self.intermediate_size, ratio, CHANNEL_MULTIPLE),
        )


class Shear(BaseModel):
    """Target sizes, which override the even shape of ``sparsity``, and training steps.

    Masks and weights are trained together first; then the pruned model is trained further, with
    domains sampled by how far their loss is above the original's.
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


def _rounded(size: int, ratio: float, multiple: int) -> int:
    multiple = min(multiple, size)
    return max(multiple, round(size * ratio / multiple) * multiple)
