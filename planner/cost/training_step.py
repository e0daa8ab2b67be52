"""The time of a training step: pipeline bubble and exposed communication."""

from planner.cost.columns import minimum
from planner.cost.equation import equation
from planner.cost.quantity import Quantity


@equation(
    "t_step = (m + (p - 1)/v) · t_micro + exposed + update",
    unit="s",
    symbols={
        "micro_batches": "m",
        "stages": "p",
        "chunks": "v",
        "micro_batch_s": "t_micro",
        "exposed_s": "exposed",
        "update_s": "update",
    },
    source="Narayanan et al. 2021, arXiv:2104.04473, section 2.2 (GPipe, 1F1B, interleaved); "
    "Qi et al. 2023, arXiv:2401.10241 (zero bubble, as chunks that divide the bubble)",
)
def step_seconds(
    *,
    micro_batches: Quantity,
    stages: Quantity,
    micro_batch_s: Quantity,
    exposed_s: Quantity,
    update_s: Quantity,
    chunks: Quantity = 1.0,
) -> Quantity:
    """Return the seconds of one step with a pipeline's fill and drain."""
    return (micro_batches + (stages - 1) / chunks) * micro_batch_s + exposed_s + update_s


@equation(
    "t_tax = kappa · min(t_links, t_window)",
    unit="s",
    symbols={"links_s": "t_links", "window_s": "t_window", "tax_ratio": "kappa"},
    source="Isaev et al. 2023 (Calculon): what overlaps still takes a part of the processors",
)
def tax_seconds(*, links_s: Quantity, window_s: Quantity, tax_ratio: Quantity) -> Quantity:
    """Return the slowdown in seconds of computation that overlaps communication."""
    return tax_ratio * minimum(links_s, window_s)


@equation(
    "t_exposed = max(0, t_links - t_window) + kappa · min(t_links, t_window)",
    unit="s",
    symbols={"links_s": "t_links", "window_s": "t_window", "tax_ratio": "kappa"},
    source="Isaev et al. 2023 (Calculon): what overlaps still takes a part of the processors",
)
def exposed_seconds(*, links_s: Quantity, window_s: Quantity, tax_ratio: Quantity) -> Quantity:
    """Return the exposed seconds of communication that overlaps ``window_s`` of computation."""
    hidden = minimum(links_s, window_s)
    return links_s - hidden + tax_ratio * hidden


@equation(
    "t = t_rounds",
    unit="s",
    symbols={"rounds_s": "t_rounds"},
    source="Thakur et al. 2005: a ring of n ranks passes a bucket on in 2(n-1) steps",
)
def rounds_seconds(*, rounds_s: Quantity) -> Quantity:
    """Return the latency seconds of the ring steps of all buckets."""
    return rounds_s


def zero_bubble_divisor(passes: float, weight_passes: float) -> float:
    """Return the divisor of the 1F1B bubble under ZB-H1, for passes of equal length.

    Weight gradients have no dependents and fill the bubble: it shrinks from ``passes`` to the
    forward and input-gradient passes less the ``weight_passes``.

    Source: Qi et al. 2023, arXiv:2401.10241, table 2: (p-1)(T_F + T_B - T_W).

    >>> zero_bubble_divisor(3, 1)
    3.0
    """
    return passes / (passes - 2 * weight_passes)
