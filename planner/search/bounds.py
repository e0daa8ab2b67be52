"""Bounds on what any strategy of a request reaches, by the peak arithmetic of its devices.

A target beyond a bound needs no search. The bounds are generous: they reject only targets that a
full scoring would reject as well.
"""

import math
from collections.abc import Mapping

from planner.cost.parameters import count_parameters
from planner.cost.quantity import Quantity, equation
from planner.search.question import Question, mean_bound
from planner.search.select import ROUNDING
from planner.search.serving_space import computes_on_host
from planner.search.space import candidate_formats
from planner.specs.estimate import Bound
from planner.specs.workload import CompressWorkload, ServeWorkload
from planner.workload.setting import peak_of

# One multiply and one add per weight and token, for every strategy.
FLOPS_PER_WEIGHT = 2
# Measured rates exceed the datasheet by less than this, and so do kernels for half-sparse weights.
SLACK = 4.0
# Fields of a strategy that choose the formats of its products.
COMPUTED_IN = frozenset({"weight_dtype", "activation_dtype", "compute_dtype", "quantization"})


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


def throughput_bound(question: Question) -> float:
    """Return the upper bound on a question's tokens per second, infinite if unknown.

    The bound does not apply to host calibrations and pruned weights: these may exceed a datasheet.
    """
    request, counts = question.request, count_parameters(question.model)
    visited = counts.layer_linear - counts.experts + counts.experts_active
    peaks = (max(each.peak_flops_per_second.values(), default=0) for each in question.devices)
    peak = max(peaks, default=0)
    unknown = request.host_calibration or request.pins.sparsity or not peak or not visited
    if unknown or isinstance(request.workload, CompressWorkload):
        return math.inf
    return float(
        most_tokens_per_second(
            devices=question.cluster.num_devices, peak_flops_per_s=peak, weights_per_token=visited
        )
    )


def exceeds_peak(question: Question, limits: Mapping[str, Bound]) -> bool:
    """Return whether a target is beyond what the peak arithmetic of the cluster allows."""
    target = limits.get("tokens_per_second", Bound()).min
    if target is not None and target > throughput_bound(question):
        return True
    least = least_latency_seconds(question)
    return any(
        least > most * (1 + ROUNDING)
        for name, bound in limits.items()
        for figure, most in [mean_bound(name, bound) or (name, bound.max)]
        if figure == "latency_seconds" and most is not None
    )


@equation(
    "T = c · 2 · P · s / (n · π)",
    unit="s",
    symbols={
        "callers": "c",
        "weights_per_token": "P",
        "tokens": "s",
        "devices": "n",
        "peak_flops_per_s": "π",
    },
    source="Little 1961: each of c callers gets one answer while the devices compute c of them",
)
def least_seconds_of_callers(
    *,
    callers: Quantity,
    weights_per_token: Quantity,
    tokens: Quantity,
    devices: Quantity,
    peak_flops_per_s: Quantity,
) -> Quantity:
    """Return a lower bound on the mean latency of callers who keep the devices busy."""
    work = FLOPS_PER_WEIGHT * weights_per_token * tokens
    return callers * work / (devices * peak_flops_per_s)


def least_latency_seconds(question: Question) -> float:
    """Return a lower bound on the mean latency of any strategy, 0 if unknown.

    It is known for callers of like devices that work at most at their published peaks, without
    help of a draft model, of the host's cores or of pruned weights.
    """
    request, workload, device = question.request, question.request.workload, question.device
    pins, counts = request.pins, count_parameters(question.model)
    unlike = question.cluster.other_nodes or pins.disaggregated or device.provenance == "measured"
    helped = pins.speculative or pins.sparsity or computes_on_host(question)
    if unlike or helped or request.host_calibration or not isinstance(workload, ServeWorkload):
        return 0.0
    if workload.concurrency is None or not device.peak_flops_per_second:
        return 0.0
    peak = max(device.peak_flops_per_second.values())
    if not COMPUTED_IN & question.pinned.keys():
        peak = max(
            peak_of(device, computed, ggml_kernels=True)[0]
            for _, computed in candidate_formats(question)
        )
    prompt = workload.input_tokens * (1 - workload.prefix_share_ratio)
    return float(
        least_seconds_of_callers(
            callers=workload.concurrency,
            weights_per_token=counts.layer_linear - counts.experts + counts.experts_active,
            tokens=prompt + workload.output_tokens - 1,
            devices=question.cluster.num_devices,
            # Kernels that sum up in 16 bits reach twice the published rate of some cards.
            peak_flops_per_s=peak * (1 + device.halves_wide_sums),
        )
    )
