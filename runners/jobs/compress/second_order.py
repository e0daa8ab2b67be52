"""What GPTQ and SparseGPT share: the damped Hessian's inverse as an upper Cholesky factor."""

import torch

DAMPING = 0.01  # of the mean diagonal, as both papers have it
MAX_DAMPING = 1.0
BLOCK_COLUMNS = 128


class IllConditionedError(Exception):
    """The inputs of a matrix are so alike that their X^T X has no inverse."""


def inverse_factor(gram: torch.Tensor, damping: float = DAMPING) -> torch.Tensor:
    """Return U with U^T U = (X^T X + damping)^-1, upper triangular, in fp32.

    Inputs that never occur get a diagonal of one. Damping grows until the factor exists.

    Raises:
        IllConditionedError: it does not exist even with damping as large as the diagonal.
    """
    hessian = gram.float().clone()
    diagonal = hessian.diagonal()
    diagonal[diagonal == 0] = 1.0
    mean = float(diagonal.mean())
    while damping <= MAX_DAMPING:
        damped = hessian + damping * mean * torch.eye(len(hessian), device=hessian.device)
        upper = _factor_of_inverse(damped)
        if upper is not None:
            return upper
        damping *= 10
    msg = "X^T X of the calibration text has no inverse; take more calibration tokens"
    raise IllConditionedError(msg)


def _factor_of_inverse(damped: torch.Tensor) -> torch.Tensor | None:
    lower, failed = torch.linalg.cholesky_ex(damped)
    if failed.item():
        return None
    upper: torch.Tensor
    upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
    return None if failed.item() or not bool(upper.isfinite().all()) else upper
