"""Failures of a long training: time between them, checkpoints, goodput and wall time."""

import numpy as np

from planner.cost.quantity import Quantity, equation, maximum, minimum

DALY = (
    "Daly 2006, Future Generation Computer Systems 22(3), doi:10.1016/j.future.2004.11.016: "
    "exponential times between failures, which may also interrupt a restart"
)


@equation(
    "M = M_device / n",
    unit="s",
    symbols={"device_mtbf_s": "M_device", "num_devices": "n"},
    source="failures of devices are independent, and each one stops a synchronous training",
)
def job_mtbf_seconds(*, device_mtbf_s: Quantity, num_devices: Quantity) -> Quantity:
    """Return the mean time between failures of a job on ``num_devices`` devices, in s."""
    return device_mtbf_s / num_devices


@equation(
    "w = C / (n · B)",
    unit="s",
    symbols={"checkpoint_bytes": "C", "writers": "n", "writer_bytes_per_s": "B"},
)
def checkpoint_write_seconds(
    *, checkpoint_bytes: Quantity, writers: Quantity, writer_bytes_per_s: Quantity
) -> Quantity:
    """Return the time in which ``writers`` nodes write a checkpoint to storage, in s."""
    return checkpoint_bytes / writers / writer_bytes_per_s


@equation(
    "δ = C / n / B",
    unit="s",
    symbols={"checkpoint_bytes": "C", "num_devices": "n", "link_bytes_per_s": "B"},
    source="Mohan et al. 2021 (CheckFreq), FAST, section 4: a snapshot in memory, then written",
)
def snapshot_seconds(
    *, checkpoint_bytes: Quantity, num_devices: Quantity, link_bytes_per_s: Quantity
) -> Quantity:
    """Return the time in which devices copy their parts to host memory, in s."""
    return checkpoint_bytes / num_devices / link_bytes_per_s


@equation(
    "τ = min(max(√(2 · δ · M), w), T_s)",
    unit="s",
    symbols={"checkpoint_s": "δ", "mtbf_s": "M", "write_s": "w", "solve_s": "T_s"},
    source="Young 1974, Communications of the ACM 17(9), first order",
)
def young_interval_seconds(
    *, checkpoint_s: Quantity, mtbf_s: Quantity, write_s: Quantity, solve_s: Quantity
) -> Quantity:
    """Return the training time between two checkpoints that loses least, in s.

    It is no shorter than a checkpoint takes to write, and no longer than the run.
    """
    return minimum(maximum(np.sqrt(2 * checkpoint_s * mtbf_s), write_s), solve_s)


@equation(
    "G = τ / (M · e^((R + w)/M) · (e^((τ + δ)/M) - 1))",
    unit="ratio",
    symbols={
        "interval_s": "τ",
        "checkpoint_s": "δ",
        "lag_s": "w",
        "restart_s": "R",
        "mtbf_s": "M",
    },
    source=DALY + "; w: a checkpoint that is still being written when a failure comes is lost",
)
def goodput_ratio(
    *,
    interval_s: Quantity,
    checkpoint_s: Quantity,
    lag_s: Quantity,
    restart_s: Quantity,
    mtbf_s: Quantity,
) -> Quantity:
    """Return the share of the wall time in which training moves on.

    A segment of ``interval_s`` of training and a checkpoint is repeated until it passes without a
    failure, and ``lag_s`` more, in which the checkpoint is written while training goes on; each
    failure costs a restart. The rest of the wall time goes to checkpoints, restarts and steps that
    are computed again. It is 0 where failures follow each other too fast for a float.
    """
    with np.errstate(over="ignore"):
        segment = np.expm1((interval_s + checkpoint_s) / mtbf_s)
        return interval_s / (mtbf_s * np.exp((restart_s + lag_s) / mtbf_s) * segment)


@equation("T = T_s / G", unit="s", symbols={"solve_s": "T_s", "goodput": "G"}, source=DALY)
def wall_seconds(*, solve_s: Quantity, goodput: Quantity) -> Quantity:
    """Return the wall time of a run that takes ``solve_s`` without failures, in s."""
    return solve_s / goodput
