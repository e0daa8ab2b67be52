"""The type of the context that torch passes to an autograd function."""

from typing import Any, Protocol

import torch


class Context(Protocol):
    """The context of an autograd function's forward and backward; torch exports no class.

    Tensors go through ``save_for_backward``, so that torch detects in-place changes; everything
    else is set as an attribute of any name.
    """

    saved_tensors: tuple[torch.Tensor, ...]

    def save_for_backward(self, *tensors: torch.Tensor) -> None:
        """Save tensors; the backward pass reads them from ``saved_tensors``."""

    def __setattr__(self, name: str, value: object) -> None: ...

    def __getattr__(self, name: str) -> Any: ...  # noqa: ANN401 - any attribute
