"""The workspace of SGLang's attention kernels on AMD, sized by the cache that it serves.

Source: sgl-project/sglang, python/sglang/srt/layers/attention/aiter_backend.py (AITER, the default
on CDNA 3 and 4) and model_executor/model_runner.py: requests are 512 times the contexts that the
cache holds, 2,048 to 4,096 of them. Latents and sliding windows take other kernels. Pull request
18263 of sglang measured 51.75 GiB.
"""

from planner.cost.activations import split_workspace_bytes
from planner.cost.columns import maximum, minimum
from planner.cost.equation import Ledger
from planner.cost.quantity import Quantity
from planner.specs.layers import AttentionLayers
from planner.specs.model import ModelSpec
from planner.specs.workload import ServeWorkload
from planner.workload.setting import Setting

LONGER = 4  # default longest request, as a multiple of the typical one
REQUESTS_PER_CONTEXT, FEWEST, MOST = 512, 2048.0, 4096.0
AITER_CHIPS = "mi3"  # CDNA 3 and 4


def longest_request(model: ModelSpec, workload: ServeWorkload) -> int:
    """Return the context that the engine is started with: the stated one, or a multiple."""
    typical = workload.input_tokens + workload.output_tokens
    return workload.max_request_tokens or min(LONGER * typical, model.max_position_embeddings)


def attention_workspace(
    setting: Setting, ledger: Ledger, free_bytes: Quantity, bytes_per_token: Quantity
) -> float:
    """Return the bytes of the split workspace, which shares ``free_bytes`` with the cache."""
    size, workload, model = setting.engine.attention_partition, setting.workload, setting.model
    if not size or not isinstance(workload, ServeWorkload):
        return 0.0
    if not setting.device.id.startswith(AITER_CHIPS) or not _is_split(model):
        return 0.0
    context = longest_request(model, workload)
    requests_per_token = REQUESTS_PER_CONTEXT / context
    heads = model.num_attention_heads / setting.layout.tensor
    partitions = float(-(-context // size))
    each = split_workspace_bytes(
        num_requests=1.0, num_heads=heads, num_partitions=partitions, head_dim=model.head_dim
    )
    tokens = maximum(0.0, free_bytes) / (bytes_per_token + requests_per_token * each)
    requests = minimum(MOST, maximum(FEWEST, requests_per_token * tokens))
    if workload.concurrency is not None:
        ranks = setting.layout.data * setting.layout.attention_data
        requests = minimum(requests, maximum(1.0, workload.concurrency / ranks))
    return ledger.term(
        split_workspace_bytes,
        setting.line("memory", "Attention workspace", key="buffers"),
        num_requests=requests,
        num_heads=heads,
        num_partitions=partitions,
        head_dim=model.head_dim,
    )


def _is_split(model: ModelSpec) -> bool:
    """Return whether decode attention is split over partitions of the context."""
    groups = [g for g in model.layers_by_attention if isinstance(g, AttentionLayers)]
    return bool(groups) and not any(group.window for group in groups)
