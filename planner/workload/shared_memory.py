"""Communication of the runner's data-parallel copies that share one processor's cores.

Collectives through shared memory use the cores of the computation, so they do not overlap with
it, and each collective waits until every rank has run on a core.
"""

from planner.cost.columns import maximum, where
from planner.cost.communication import ring_seconds
from planner.cost.equation import Ledger, Line
from planner.workload.rates import Rates
from planner.workload.setting import Setting

SHARDED_GRADIENTS, FULL_SHARDING = 2, 3
# Passes around the ring per step: 2 for all-reduce, 1 for all-gather. The gloo backend reduces
# whole gradients even if each rank keeps only its shard.
# Source: torch 2.13, ProcessGroupGloo; runners/jobs/train/layouts/states.py.
SUM_PASSES, GATHER_PASSES = 2, 1
BUCKET_BYTES = 32 * 2**20  # of Slipway's runner; DistributedDataParallel's default is 25 MiB
GATHERS = 2  # of sharded weights: forward and backward


def copies_seconds(
    setting: Setting, rates: Rates, ledger: Ledger, line: Line, gradient_bytes: float
) -> float:
    """Return the seconds to reduce gradients and gather weights between copies of a model.

    Assumes fp32 weights as wide as their gradients, and replicas of shards as one ring.
    """
    layout = setting.layout
    stage, micro_batches = layout.zero_stage, layout.micro_batches
    buckets = maximum(1.0, gradient_bytes / BUCKET_BYTES)
    layers = (
        setting.model.num_hidden_layers / layout.pipeline + 1
    )  # plus weights outside the layers
    once = where(stage >= SHARDED_GRADIENTS, micro_batches, 1.0)
    gathered = where(stage >= FULL_SHARDING, GATHERS * micro_batches, where(stage > 0, 1.0, 0.0))
    groups = where(stage >= FULL_SHARDING, layers, buckets)
    return ledger.term(
        ring_seconds,
        line,
        payload_bytes=gradient_bytes,
        ranks=layout.state_ranks,
        link_bytes_per_s=rates.link_bytes_per_s,
        latency_s=rates.latency_s,
        ring_passes=SUM_PASSES * once + GATHER_PASSES * gathered,
        starts=groups * (once + gathered),
    )
