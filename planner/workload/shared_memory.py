"""What our own runner's copies of a model exchange where they share one processor's cores.

An exchange through that processor's memory takes the cores that would work beside it, so nothing
of it is hidden, and each collective has to wait until every rank had its turn on a core.
"""

from planner.cost.columns import maximum, where
from planner.cost.communication import ring_seconds
from planner.cost.equation import Ledger, Line
from planner.workload.rates import Rates
from planner.workload.setting import Setting

SHARDED_GRADIENTS, FULL_SHARDING = 2, 3
# What goes round the ring in a step: sums twice, what is gathered once. The gloo backend sums
# whole gradients also where each rank keeps its shard alone.
# Source: torch 2.13, ProcessGroupGloo; runners/jobs/train/layouts/states.py for what is exchanged.
SUM_PASSES, GATHER_PASSES = 2, 1
BUCKET_BYTES = 32 * 2**20  # as our runner fills them; DistributedDataParallel's are of 25 MiB
GATHERS = 2  # of sharded weights: forward and backward


def copies_seconds(
    setting: Setting, rates: Rates, ledger: Ledger, line: Line, gradient_bytes: float
) -> float:
    """Return the seconds that copies of a model take to sum gradients and share weights.

    Assumes fp32 weights as wide as their gradients, and replicas of shards as one ring.
    """
    layout = setting.layout
    stage, micro_batches = layout.zero_stage, layout.micro_batches
    buckets = maximum(1.0, gradient_bytes / BUCKET_BYTES)
    layers = setting.model.num_hidden_layers / layout.pipeline + 1  # and what no layer has
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
