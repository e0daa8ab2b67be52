"""What engines do while they serve: cache, page, batch and fuse."""

from planner.specs.workload import ServeWorkload
from planner.techniques.technique import INFERENCE, TRAINING, Technique, always

KV_CACHE = Technique(
    key="kv_cache",
    title="KV cache",
    phases=INFERENCE,
    effect="each token is computed once; memory grows with every cached token",
    source="Pope et al. 2022, arXiv:2211.05102",
    settings={},
    why_not=always,
    is_used=lambda _strategy, case: case.is_inference,
)
PAGED_ATTENTION = Technique(
    key="paged_attention",
    title="Paged KV cache",
    phases=INFERENCE,
    effect="cache in blocks of 16 tokens: only the last block of a request is partly idle",
    headline="2-4x throughput",
    source="Kwon et al. 2023 (vLLM), arXiv:2309.06180",
    settings={},
    why_not=lambda case: (
        "" if isinstance(case.workload, ServeWorkload) else "needs requests that come and go"
    ),
    is_used=lambda _strategy, case: isinstance(case.workload, ServeWorkload),
)
CONTINUOUS_BATCHING = Technique(
    key="continuous_batching",
    title="Continuous batching",
    phases=INFERENCE,
    effect="requests join and leave the batch at every step; weights are read once for all",
    headline="near-linear with concurrency",
    source="Yu et al. 2022 (Orca), OSDI",
    settings={},
    why_not=lambda case: (
        "" if isinstance(case.workload, ServeWorkload) else "needs requests that come and go"
    ),
    is_used=lambda _strategy, case: isinstance(case.workload, ServeWorkload),
)
FLASH_ATTENTION = Technique(
    key="flash_attention",
    title="Fused attention",
    phases=INFERENCE | TRAINING,
    effect="no score matrix in memory: activations stop growing with the square of the sequence",
    headline="attention up to 2x and more",
    source="Dao et al. 2022, arXiv:2205.14135",
    settings={"attention": "flash"},
    why_not=always,
    is_used=lambda strategy, _case: strategy.attention == "flash",
)

TECHNIQUES = (KV_CACHE, PAGED_ATTENTION, CONTINUOUS_BATCHING, FLASH_ATTENTION)
