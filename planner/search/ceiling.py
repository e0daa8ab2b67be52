"""What no strategy can reach: a rate beyond the peak arithmetic of all devices together.

A target above it needs no search. The ceiling is far above what anything reaches, so that it
only ever refuses what scoring every strategy would refuse.
"""

import math
from collections.abc import Mapping

from planner.cost.equation import equation
from planner.cost.parameters import count_parameters
from planner.cost.quantity import Quantity
from planner.search.question import Question
from planner.specs.plan import Bound
from planner.specs.workload import CompressWorkload

# Every token passes each weight that it visits once, whatever else a strategy does.
FLOPS_PER_WEIGHT = 2
# Measured rates exceed a datasheet's by less, and so do kernels that skip half of the weights.
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
    """Return a rate that no strategy exceeds, training or serving."""
    return slack * devices * peak_flops_per_s / (FLOPS_PER_WEIGHT * weights_per_token)


def ceiling_of(question: Question) -> float:
    """Return the tokens per second that no strategy of a question exceeds; infinite if unknown.

    A host's own measurements and pruned weights are not held against a datasheet.
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
    """Return the highest dense peak of one kind of device, in FLOP per second; 0 if unknown."""
    return max(question.devices[index].peak_flops_per_second.values(), default=0.0)


def out_of_reach(question: Question, limits: Mapping[str, Bound]) -> bool:
    """Return whether a target asks for more tokens per second than there is arithmetic for."""
    asked = limits.get("tokens_per_second", Bound()).min
    return asked is not None and asked > ceiling_of(question)
