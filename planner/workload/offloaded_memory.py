"""Host and disk memory of an inference strategy, and the buffers for streaming."""

from collections.abc import Callable, Sequence

from planner.cost.equation import Ledger
from planner.cost.offload import double_buffer_bytes
from planner.cost.stages import Share
from planner.workload.offloading import offloaded_weight_share
from planner.workload.setting import Setting

GROUP = "memory"
# The offload fields for weights, cache and activations of each tier.
HOST = ("weights_cpu", "kv_cpu", "activations_cpu")
DISK = ("weights_disk", "kv_disk", "")
Bytes = Callable[[Share], float]


def offloaded_bytes(
    setting: Setting,
    shares: tuple[str, ...],
    weights: Bytes,
    cache: Bytes,
    stages: Sequence[Share],
    tokens: float,
) -> float:
    """Return the bytes in one tier: weights once, caches and activations per replica.

    ``weights`` and ``cache`` return one device's bytes of a pipeline stage.
    """
    layout = setting.layout
    weight_share, cache_share, activation_share = (
        getattr(setting.offload, name, 0.0) for name in shares
    )
    if not weight_share and not cache_share and not activation_share:
        return 0.0
    copies = setting.engine.host_copy_ratio if shares == HOST else 1.0
    weight_bytes = copies * sum(weight_share * weights(stage) for stage in stages)
    cache_bytes = sum(cache_share * cache(stage) for stage in stages) * layout.data
    activation_bytes = activation_share * residual_bytes(setting, tokens) * layout.data
    return layout.tensor * (weight_bytes + cache_bytes) + activation_bytes


def residual_bytes(setting: Setting, tokens: float) -> float:
    """Return the bytes of the residual streams of tokens between two layers."""
    return tokens * setting.model.hidden_size * setting.activation_element_bytes


def waiting_bytes(setting: Setting, tokens: float) -> float:
    """Return the bytes of waiting micro-batches' residual streams on the device."""
    return residual_bytes(setting, tokens) * (1 - setting.offload.activations_cpu)


def double_buffer(setting: Setting, ledger: Ledger, weights: float, stage: Share) -> float:
    """Return the bytes of a double buffer: the current layer and the one being loaded."""
    offloaded = offloaded_weight_share(setting)
    if not offloaded or setting.engine.computes_on_host:
        return 0.0
    return ledger.term(
        double_buffer_bytes,
        setting.line(GROUP, "Two layers in transfer", key="buffers"),
        weight_bytes=weights,
        num_layers=stage.layers,
        away_share=offloaded,
    )
