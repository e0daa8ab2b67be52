"""Read the groups of layers from a config: their attention span and cache.

The config's statements about layers take precedence; the family fills in what is absent.
"""

from collections import Counter
from typing import Any

from planner.catalog.config_reader import ConfigReader
from planner.catalog.family import Family
from planner.catalog.latent_layers import latent_index, latent_layers
from planner.errors import BadConfigError
from planner.specs.layers import AttentionLayers, LayerGroup, NoMixingLayers

# Configs' names of layer kinds.
KINDS = {
    "full": "full",
    "full_attention": "full",
    "attention": "full",
    "indexed_attention": "full",
    "deepseek_sparse_attention": "full",
    "nope": "full",
    "global": "full",
    "sliding": "sliding",
    "sliding_attention": "sliding",
    "local": "sliding",
    "chunked_attention": "chunked",
    "linear_attention": "recurrent",
    "mamba": "recurrent",
    "mamba2": "recurrent",
    "recurrent": "recurrent",
    "conv": "recurrent",
    "mlp": "none",
    "moe": "none",
}
# Fields with the indices of the attention layers, and the kind of the other layers.
ATTENTION_INDICES = {"full_attn_idxs": "conv", "attn_layer_indices": "mamba"}
WINDOW_FIELD = {"sliding": "sliding_window", "chunked": "attention_chunk_size"}
# Letters of a repeating pattern of local and global layers.
WINDOW_LETTERS = frozenset("lgsf")
# Letters of a pattern with one letter per layer.
PATTERN_LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}


def layer_types(reader: ConfigReader) -> tuple[str, ...]:
    """Return the config's name of each layer's kind; empty if it has none."""
    pattern = reader.get("hybrid_override_pattern")
    if isinstance(pattern, str):
        return _kinds_from_pattern(reader, pattern)
    blocks = reader.items("layers_block_type")
    if blocks:
        return tuple(str(name) for name in blocks)
    named = reader.listed("layer_types")
    if named:
        return tuple(str(name) for name in named)
    for field, other in ATTENTION_INDICES.items():
        indices = reader.items(field)
        if indices:
            layers = range(reader.integer("num_hidden_layers"))
            return tuple("attention" if layer in indices else other for layer in layers)
    windows = reader.listed("hybrid_layer_pattern")
    return tuple("sliding" if slides else "full" for slides in windows)


def _kinds_from_pattern(reader: ConfigReader, pattern: str) -> tuple[str, ...]:
    """Return the kinds of layers of a letter pattern.

    Raises:
        BadConfigError: a letter is unknown, or the pattern has another number of layers.
    """
    unknown = sorted(set(pattern) - set(PATTERN_LETTERS))
    if unknown:
        letters = ", ".join(f"{letter} {kind}" for letter, kind in PATTERN_LETTERS.items())
        raise reader.refusal(
            "hybrid_override_pattern", pattern, f"spelt with the letters {letters}"
        )
    return tuple(PATTERN_LETTERS[letter] for letter in pattern)


def read_layer_groups(reader: ConfigReader, family: Family) -> tuple[LayerGroup, ...]:
    """Return the layer groups of a model; empty if all have plain full attention."""
    if family.layers is not None:
        return family.layers(reader)
    counts = _counts_by_kind(reader, family)
    groups: list[LayerGroup] = []
    for kind, count in counts.items():
        if kind == "recurrent":
            if family.recurrent is None:
                raise BadConfigError(
                    f"layer_types of model_type {reader.model_type} name recurrent layers, which "
                    "this family is not known to have",
                    "model.layer_types",
                )
            groups.append(family.recurrent(reader, count))
        elif kind == "none":
            groups.append(NoMixingLayers(count=count))
        elif reader.has("kv_lora_rank"):
            groups.extend(_latent(reader, family, count))
        else:
            groups.append(_attention(reader, family, kind, count))
    plain = AttentionLayers(count=reader.integer("num_hidden_layers"))
    return () if groups == [plain] else tuple(groups)


def _counts_by_kind(reader: ConfigReader, family: Family) -> dict[str, int]:
    """Return the number of layers of each kind, in order of first occurrence."""
    layers = reader.integer("num_hidden_layers")
    named = layer_types(reader)
    if named:
        unknown = sorted(set(named) - set(KINDS))
        if unknown:
            field = "layers_block_type" if reader.has("layers_block_type") else "layer_types"
            raise BadConfigError(
                f"{field} names {', '.join(unknown)}: known are {', '.join(sorted(KINDS))}",
                f"model.{field}",
            )
        counts = Counter(KINDS[name] for name in named)
        if not _window(reader):
            counts = Counter({"full" if k == "sliding" else k: n for k, n in counts.items()})
        return dict(counts)
    step = _full_attention_interval(reader, family)
    rest = family.rest_kind
    if rest == "sliding" and not _window(reader):
        return {"full": layers}
    if rest == "chunked" and not reader.has("attention_chunk_size"):
        return {"full": layers}
    full = layers // step if step else 0
    return {kind: count for kind, count in ((rest, layers - full), ("full", full)) if count}


def _full_attention_interval(reader: ConfigReader, family: Family) -> int:
    """Return the interval of full-attention layers; zero if there are none."""
    pattern = reader.get("sliding_window_pattern")
    if isinstance(pattern, str) and set(pattern.lower()) <= WINDOW_LETTERS:
        return len(pattern)
    step = reader.optional("sliding_window_pattern") or reader.optional("full_attention_interval")
    return step or family.full_every


def _window(reader: ConfigReader) -> int | None:
    on = reader.flag("use_sliding_window", default=True)
    return reader.optional("sliding_window") if on else None


def _attention(reader: ConfigReader, family: Family, kind: str, count: int) -> AttentionLayers:
    windows = {"sliding": _window(reader), "chunked": reader.optional("attention_chunk_size")}
    if kind != "full" and windows[kind] is None:
        raise reader.refusal(WINDOW_FIELD[kind], None, f"how many tokens {kind} layers see")
    return AttentionLayers.model_validate(
        {
            "kind": kind,
            "count": count,
            "window": windows.get(kind),
            "output_gate": family.output_gate,
            "sinks": family.sinks or (family.sliding_sinks and kind == "sliding"),
            **_kind_shape(reader, kind),
        }
    )


def _kind_shape(reader: ConfigReader, kind: str) -> dict[str, Any]:
    """Return the head counts and widths specific to a kind of layer."""
    own: dict[str, Any] = {}
    value_dim = reader.optional("v_head_dim")
    if value_dim:
        own["v_head_dim"] = value_dim
    if kind == "sliding" and reader.has("swa_head_dim"):
        own |= {
            "num_attention_heads": reader.optional("swa_num_attention_heads"),
            "num_key_value_heads": reader.optional("swa_num_key_value_heads"),
            "head_dim": reader.optional("swa_head_dim"),
            "v_head_dim": reader.optional("swa_v_head_dim"),
        }
    if kind == "full" and reader.has("global_head_dim"):
        own["head_dim"] = own["v_head_dim"] = reader.optional("global_head_dim")
        if reader.flag("attention_k_eq_v", default=False):
            own["num_key_value_heads"] = reader.optional("num_global_key_value_heads")
            own["value_is_key"] = True
    return own


def _latent(reader: ConfigReader, family: Family, count: int) -> list[LayerGroup]:
    """Return latent-attention layers, with their indexers if the config has any."""
    top_k = reader.optional("index_topk") if family.indexed else None
    latent = latent_layers(reader, count, family.output_gate, top_k=top_k)
    if not top_k:
        return [latent]
    types = reader.listed("indexer_types")
    indexed_layers = sum(name != "shared" for name in types) if types else count
    return [latent, latent_index(reader, indexed_layers)] if indexed_layers else [latent]
