"""Roofline model: the slower resource determines the time of an operator."""

from planner.cost.columns import maximum
from planner.cost.equation import equation
from planner.cost.quantity import Quantity

ROOFLINE = "Williams et al. 2009, Roofline, CACM 52(4)"


@equation(
    "t = max(F / (peak · e_c), Q / (bandwidth · e_m))",
    unit="s",
    symbols={
        "work_flops": "F",
        "peak_flops_per_s": "peak",
        "compute_efficiency": "e_c",
        "moved_bytes": "Q",
        "memory_bytes_per_s": "bandwidth",
        "memory_efficiency": "e_m",
    },
    source=ROOFLINE,
)
def roofline_seconds(
    *,
    work_flops: Quantity,
    peak_flops_per_s: Quantity,
    compute_efficiency: Quantity,
    moved_bytes: Quantity,
    memory_bytes_per_s: Quantity,
    memory_efficiency: Quantity,
) -> Quantity:
    """Return the seconds of an operator whose compute and memory traffic overlap."""
    return maximum(
        compute_seconds(
            work_flops=work_flops,
            peak_flops_per_s=peak_flops_per_s,
            compute_efficiency=compute_efficiency,
        ),
        memory_seconds(
            moved_bytes=moved_bytes,
            memory_bytes_per_s=memory_bytes_per_s,
            memory_efficiency=memory_efficiency,
        ),
    )


@equation(
    "t = F / (peak · e_c)",
    unit="s",
    symbols={"work_flops": "F", "peak_flops_per_s": "peak", "compute_efficiency": "e_c"},
    source=ROOFLINE,
)
def compute_seconds(
    *, work_flops: Quantity, peak_flops_per_s: Quantity, compute_efficiency: Quantity
) -> Quantity:
    """Return the seconds of arithmetic at a share of the peak rate."""
    return work_flops / (peak_flops_per_s * compute_efficiency)


@equation(
    "t = Q / (bandwidth · e_m)",
    unit="s",
    symbols={
        "moved_bytes": "Q",
        "memory_bytes_per_s": "bandwidth",
        "memory_efficiency": "e_m",
    },
    source=ROOFLINE,
)
def memory_seconds(
    *, moved_bytes: Quantity, memory_bytes_per_s: Quantity, memory_efficiency: Quantity
) -> Quantity:
    """Return the seconds of moving bytes at a share of the memory bandwidth."""
    return moved_bytes / (memory_bytes_per_s * memory_efficiency)


OVERHEAD = "inference-sim docs/guide/latency-models.md (form of the overhead terms)"


@equation(
    "t = L · (ops · c_op + c_layer) · passes",
    unit="s",
    symbols={
        "num_layers": "L",
        "ops_per_layer": "ops",
        "op_overhead_s": "c_op",
        "layer_overhead_s": "c_layer",
        "passes": "passes",
    },
    source=OVERHEAD,
)
def overhead_seconds(
    *,
    num_layers: Quantity,
    ops_per_layer: Quantity,
    op_overhead_s: Quantity,
    layer_overhead_s: Quantity,
    passes: Quantity = 1.0,
) -> Quantity:
    """Return the kernel launch seconds of all layers, without the kernels' own time."""
    return num_layers * (ops_per_layer * op_overhead_s + layer_overhead_s) * passes


@equation(
    "t = n · c_step",
    unit="s",
    symbols={"steps": "n", "step_overhead_s": "c_step"},
    source=OVERHEAD,
)
def scheduling_seconds(*, steps: Quantity, step_overhead_s: Quantity) -> Quantity:
    """Return the scheduling seconds of an engine's steps."""
    return steps * step_overhead_s


@equation(
    "t = b · c_request",
    unit="s",
    symbols={"requests": "b", "request_overhead_s": "c_request"},
    source=f"{OVERHEAD}; the host visits each request in turn: its blocks, its token, its stream",
)
def attending_seconds(*, requests: Quantity, request_overhead_s: Quantity) -> Quantity:
    """Return the host seconds per step for the requests in the batch."""
    return requests * request_overhead_s


@equation(
    "t = max(0, F / (W · g) - t_products)",
    unit="s",
    symbols={
        "work_flops": "F",
        "power_watts": "W",
        "flops_per_joule": "g",
        "products_s": "t_products",
    },
    source="published prompt speeds of 14 cards: in a chip family they go with the power limit",
)
def power_wait_seconds(
    *,
    work_flops: Quantity,
    power_watts: Quantity,
    flops_per_joule: Quantity,
    products_s: Quantity,
) -> Quantity:
    """Return the seconds by which a GPU's power limit slows its matrix products."""
    return maximum(0.0, work_flops / (power_watts * flops_per_joule) - products_s)
