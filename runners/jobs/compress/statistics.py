"""Calibration statistics of a linear layer's inputs: X^T X and the size of each channel."""

from dataclasses import dataclass, field

import torch


@dataclass
class InputStatistics:
    """Sums over the input tokens of one linear layer, in fp32."""

    num_inputs: int
    num_tokens: int = 0
    gram: torch.Tensor = field(init=False)
    absolute: torch.Tensor = field(init=False)
    largest: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        """Initialise the sums to zero."""
        self.gram = torch.zeros(self.num_inputs, self.num_inputs)
        self.absolute = torch.zeros(self.num_inputs)
        self.largest = torch.zeros(self.num_inputs)

    def add(self, inputs: torch.Tensor) -> None:
        """Add tokens [..., in]."""
        rows = inputs.detach().reshape(-1, self.num_inputs).float()
        self.gram = self.gram.to(rows.device).addmm_(rows.T, rows)
        self.absolute = self.absolute.to(rows.device) + rows.abs().sum(dim=0)
        self.largest = torch.maximum(self.largest.to(rows.device), rows.abs().amax(dim=0))
        self.num_tokens += len(rows)

    def divide(self, scales: torch.Tensor) -> None:
        """Rescale the statistics in place to those of the inputs divided by ``scales``."""
        self.gram = self.gram / (scales[:, None] * scales[None, :])
        self.absolute = self.absolute / scales
        self.largest = self.largest / scales

    @property
    def norms(self) -> torch.Tensor:
        """Return the L2 norm of each input channel over all tokens."""
        return self.gram.diagonal().clamp(min=0.0).sqrt()

    @property
    def mean_absolute(self) -> torch.Tensor:
        """Return the mean absolute value of each input channel."""
        return self.absolute / max(1, self.num_tokens)


def output_error(before: torch.Tensor, after: torch.Tensor, gram: torch.Tensor) -> float:
    """Return the squared error of a linear layer's outputs, summed over tokens and channels."""
    difference = (before.float() - after.float()).double()
    return float(((difference @ gram.double()) * difference).sum())
