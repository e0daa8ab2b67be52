"""Upper bound on the token rate: the peak arithmetic of all devices together.

A target above this bound needs no search. The bound is generous, so that it rejects only targets
that a full scoring would reject as well.
"""

import math
from collections.abc import Mapping

from planner.cost.equation import equation
from planner.cost.parameters import count_parameters
from planner.cost.quantity import Quantity
from planner.search.question import Question
from planner.specs.plan import Bound
from planner.specs.workload import CompressWorkload

# One multiply and one add per weight and token, for every strategy.
FLOPS_PER_WEIGHT = 2
# Measured rates exceed the datasheet by less than this, and so do kernels for half-sparse weights.
SLACK = 4.0


@equation(
    "r = k · n · π / (2 · P)",
    unit="tokens/s",
    symbols={
        "devices": "n",
        "peak_flops_per_s": "π",
        "weights_per_token": "P",
        "slack": "k",
    },
    source="Kaplan et al. 2020, arXiv:2001.08361, section 2.1: a multiply and an add per weight",
)
def most_tokens_per_second(
    *,
    devices: Quantity,
    peak_flops_per_s: Quantity,
    weights_per_token: Quantity,
    slack: Quantity = SLACK,
) -> Quantity:
    """Return an upper bound on the token rate of any strategy, training or serving."""
    return slack * devices * peak_flops_per_s / (FLOPS_PER_WEIGHT * weights_per_token)


def ceiling_of(question: Question) -> float:
    """Return the upper bound on a question's tokens per second, infinite if unknown.

    The bound does not apply to host calibrations and pruned weights: these may exceed a datasheet.
    """
    request, counts = question.request, count_parameters(question.model)
    visited = counts.layer_linear - counts.experts + counts.experts_active
    peak = max((device_peak(question, index) for index in range(len(question.devices))), default=0)
    unknown = request.host_calibration or request.pins.sparsity or not peak or not visited
    if unknown or isinstance(request.workload, CompressWorkload):
        return math.inf
    return float(
        most_tokens_per_second(
            devices=question.cluster.num_devices, peak_flops_per_s=peak, weights_per_token=visited
        )
    )


def device_peak(question: Question, index: int) -> float:
    """Return the highest dense peak of one device kind, in FLOP per second; 0 if unknown."""
    return max(question.devices[index].peak_flops_per_second.values(), default=0.0)


def exceeds_peak(question: Question, limits: Mapping[str, Bound]) -> bool:
    """Return whether a throughput target exceeds the peak arithmetic of the cluster."""
    target = limits.get("tokens_per_second", Bound()).min
    return target is not None and target > ceiling_of(question)
