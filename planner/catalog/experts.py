"""Read from a config how the feed-forward blocks of a mixture of experts are made."""

from typing import Any

from planner.catalog.config_reader import ConfigReader
from planner.catalog.family import Family
from planner.catalog.layer_groups import layer_types

REQUIRED = ("num_experts", "num_experts_per_tok")
DENSE_TYPES = frozenset({"dense", "mlp"})


def read_experts(reader: ConfigReader, family: Family) -> dict[str, Any]:
    """Return the fields of a model's experts; nothing for a dense model."""
    if not family.sparse or (family.may_be_dense and not reader.has("num_experts")):
        return {}
    for name in REQUIRED:
        reader.integer(name)
    width = reader.integer("moe_intermediate_size", reader.get("intermediate_size"))
    shared = reader.integer("num_shared_experts", family.shared_experts)
    if reader.get("shared_expert_intermediate_size") == 0:
        shared = 0
    return {
        "num_experts": reader.integer("num_experts"),
        "num_experts_per_tok": reader.integer("num_experts_per_tok"),
        "moe_intermediate_size": width,
        "num_shared_experts": shared,
        "shared_expert_intermediate_size": _shared_width(reader, shared),
        "shared_expert_gate": family.shared_expert_gate and shared > 0,
        "expert_hidden_size": reader.integer("expert_hidden_size", 0),
        "router_bias": family.router_bias,
        "expert_bias": family.expert_bias,
        "num_dense_layers": dense_layers(reader),
    }


def _shared_width(reader: ConfigReader, shared: int) -> int:
    return int(reader.get("shared_expert_intermediate_size") or 0) if shared else 0


def dense_layers(reader: ConfigReader) -> int:
    """Return how many layers have one dense block instead of experts."""
    layers = reader.integer("num_hidden_layers")
    named = reader.listed("mlp_layer_types")
    if named:
        return sum(name in DENSE_TYPES for name in named)
    blocks = layer_types(reader)
    if "moe" in blocks:
        return blocks.count("mlp")
    flags = reader.listed("moe_layer_freq")
    if flags:
        return sum(not flag for flag in flags)
    return sum(not _is_sparse(reader, layer) for layer in range(layers))


def _ernie(reader: ConfigReader, layer: int) -> bool:
    """Return whether a layer has experts by a first, a last and an interval."""
    config = reader.config
    last = int(config.get("moe_layer_end_index") or -1)
    end = last if last >= 0 else reader.integer("num_hidden_layers") - 1
    inside = int(config["moe_layer_start_index"]) <= layer <= end
    return inside and (layer + 1) % int(config.get("moe_layer_interval") or 1) == 0


def _is_sparse(reader: ConfigReader, layer: int) -> bool:
    """Return whether a layer has experts by the rule that the config gives for all layers."""
    config = reader.config
    if config.get("moe_layer_start_index") is not None:
        return _ernie(reader, layer)
    if config.get("moe_layers"):
        return layer in config["moe_layers"]
    if config.get("interleave_moe_layer_step"):
        return bool((layer + 1) % int(config["interleave_moe_layer_step"]) == 0)
    if layer in (config.get("mlp_only_layers") or ()):
        return False
    first = int(config.get("first_k_dense_replace") or config.get("num_dense_layers") or 0)
    if layer < first or layer % int(config.get("moe_layer_freq") or 1):
        return False
    return bool((layer + 1) % int(config.get("decoder_sparse_step") or 1) == 0)
