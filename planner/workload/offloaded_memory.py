"""What host memory and disk hold of an inference strategy, and what streaming takes."""

from collections.abc import Callable, Sequence

from planner.cost.equation import Ledger
from planner.cost.offload import double_buffer_bytes
from planner.cost.stages import Share
from planner.workload.offloading import weights_away
from planner.workload.setting import Setting

GROUP = "memory"
# The shares of weights, cache and activations that each tier off the device holds.
HOST = ("weights_cpu", "kv_cpu", "activations_cpu")
DISK = ("weights_disk", "kv_disk", "")
Bytes = Callable[[Share], float]


def away_bytes(
    setting: Setting,
    shares: tuple[str, ...],
    weights: Bytes,
    cache: Bytes,
    stages: Sequence[Share],
    tokens: float,
) -> float:
    """Return what one tier holds: weights once, caches and waiting tokens for every replica.

    ``weights`` and ``cache`` give one device's bytes of a pipeline stage.
    """
    layout = setting.layout
    of_weights, of_cache, of_tokens = (getattr(setting.offload, name, 0.0) for name in shares)
    if not of_weights and not of_cache and not of_tokens:
        return 0.0
    held = sum(of_weights * weights(stage) for stage in stages)
    kept = sum(of_cache * cache(stage) for stage in stages) * layout.data
    waiting = of_tokens * residual_bytes(setting, tokens) * layout.data
    return layout.tensor * (held + kept) + waiting


def residual_bytes(setting: Setting, tokens: float) -> float:
    """Return the bytes of the residual streams of tokens that wait between two layers."""
    return tokens * setting.model.hidden_size * setting.activation_element_bytes


def waiting_bytes(setting: Setting, tokens: float) -> float:
    """Return the bytes of waiting residual streams that stay on the device."""
    return residual_bytes(setting, tokens) * (1 - setting.offload.activations_cpu)


def double_buffer(setting: Setting, ledger: Ledger, weights: float, stage: Share) -> float:
    """Return the room for the layer that works and the one that is loaded meanwhile."""
    away = weights_away(setting)
    if not away or setting.engine.computes_on_host:
        return 0.0
    return ledger.term(
        double_buffer_bytes,
        setting.line(GROUP, "Two layers on their way", key="buffers"),
        weight_bytes=weights,
        num_layers=stage.layers,
        away_share=away,
    )
