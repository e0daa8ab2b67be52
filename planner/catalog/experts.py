"""Read the expert configuration of a mixture-of-experts model from a config."""

from typing import Any

from planner.catalog.config_reader import ConfigReader
from planner.catalog.family import Family
from planner.catalog.layer_groups import layer_types

REQUIRED = ("num_experts", "num_experts_per_tok")
DENSE_TYPES = frozenset({"dense", "mlp"})


def read_experts(reader: ConfigReader, family: Family) -> dict[str, Any]:
    """Return the fields of a model's experts; empty for a dense model."""
    if not family.sparse or (family.may_be_dense and not reader.has("num_experts")):
        return {}
    for name in REQUIRED:
        reader.integer(name)
    width = reader.integer("moe_intermediate_size", reader.integer("intermediate_size", 0) or None)
    shared = reader.integer("num_shared_experts", family.shared_experts)
    if reader.integer("shared_expert_intermediate_size", width) == 0:
        shared = 0
    return {
        "num_experts": reader.integer("num_experts"),
        "num_experts_per_tok": reader.integer("num_experts_per_tok"),
        "moe_intermediate_size": width,
        "num_shared_experts": shared,
        "shared_expert_intermediate_size": _shared_width(reader, shared),
        "shared_expert_gate": family.shared_expert_gate and shared > 0,
        "expert_hidden_size": reader.integer("expert_hidden_size", 0),
        "router_bias": _router_bias(reader, family),
        "expert_bias": family.expert_bias,
        "num_dense_layers": dense_layers(reader),
    }


def _router_bias(reader: ConfigReader, family: Family) -> bool:
    switch = family.router_bias_switch
    return (
        family.router_bias if switch is None else reader.flag(switch, default=family.router_bias)
    )


def _shared_width(reader: ConfigReader, shared: int) -> int:
    return reader.integer("shared_expert_intermediate_size", 0) if shared else 0


def dense_layers(reader: ConfigReader) -> int:
    """Return the number of layers with one dense block instead of experts."""
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
    return sum(not sparse for sparse in _sparse_layers(reader, layers))


def _sparse_layers(reader: ConfigReader, layers: int) -> list[bool]:
    """Return for each layer whether it has experts, by the config's rule for all layers."""
    every = range(layers)
    if reader.get("moe_layer_start_index") is not None:
        return _sparse_in_interval(reader, layers)
    named = reader.items("moe_layers")
    if named:
        return [layer in named for layer in every]
    step = reader.optional("interleave_moe_layer_step")
    if step:
        return [(layer + 1) % step == 0 for layer in every]
    dense = reader.items("mlp_only_layers")
    first = reader.optional("first_k_dense_replace") or reader.integer("num_dense_layers", 0)
    freq, sparse = reader.optional("moe_layer_freq") or 1, reader.optional("decoder_sparse_step")
    return [
        layer not in dense
        and layer >= first
        and layer % freq == 0
        and (layer + 1) % (sparse or 1) == 0
        for layer in every
    ]


def _sparse_in_interval(reader: ConfigReader, layers: int) -> list[bool]:
    """Return for each layer whether it has experts, by first layer, last layer and interval."""
    start, step = reader.integer("moe_layer_start_index"), reader.optional("moe_layer_interval")
    last_layer = reader.get("moe_layer_end_index")
    end = layers - 1 if last_layer in (None, 0, -1) else reader.integer("moe_layer_end_index")
    return [start <= layer <= end and (layer + 1) % (step or 1) == 0 for layer in range(layers)]
