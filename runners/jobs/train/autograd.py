"""The type of what torch hands to both halves of an autograd function."""

from typing import Any, Protocol

import torch


class Context(Protocol):
    """What a function's forward half leaves for its backward half; torch has no class of it.

    Tensors go through ``save_for_backward``, so that torch sees whether they were changed in
    between; everything else is set as an attribute of any name.
    """

    saved_tensors: tuple[torch.Tensor, ...]

    def save_for_backward(self, *tensors: torch.Tensor) -> None:
        """Keep tensors until the backward half asks ``saved_tensors`` for them."""

    def __setattr__(self, name: str, value: object) -> None: ...

    def __getattr__(self, name: str) -> Any: ...  # noqa: ANN401 - whatever was set
