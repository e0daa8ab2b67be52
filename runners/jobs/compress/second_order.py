"""Upper Cholesky factor of the damped inverse Hessian, shared by GPTQ and SparseGPT."""

import torch

DAMPING = 0.01  # share of the mean diagonal, as in both papers
MAX_DAMPING = 1.0
BLOCK_COLUMNS = 128


class IllConditionedError(Exception):
    """X^T X of a matrix's inputs is numerically singular."""


def inverse_factor(gram: torch.Tensor, damping: float = DAMPING) -> torch.Tensor:
    """Return U with U^T U = (X^T X + damping)^-1, upper triangular, in fp32.

    Inputs that are always zero get a diagonal of one. Damping grows until the factor exists.

    Raises:
        IllConditionedError: the factor does not exist even at ``MAX_DAMPING``.
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
