"""Groups of like layers, read from the fields of a model's config."""

import math
from collections import ChainMap, Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from planner.specs.base import BadConfigError
from planner.specs.model import (
    AttentionLayers,
    IndexLayers,
    LatentLayers,
    LayerGroup,
    NoMixingLayers,
    OutputGate,
    RecurrentLayers,
)

# ---------------------------------------------------------------------------
# Access to a ``config.json`` by common field names, independent of its family's names.
# ---------------------------------------------------------------------------


# Alternative names of a field, in order of lookup.
SPELLINGS: dict[str, tuple[str, ...]] = {
    "num_experts": ("num_local_experts", "n_routed_experts", "moe_num_experts"),
    "num_experts_per_tok": (
        "num_experts_per_token",
        "experts_per_token",
        "moe_topk",
        "moe_k",
        "top_k_experts",
    ),
    "num_shared_experts": (
        "n_shared_experts",
        "num_shared_expert",
        "moe_num_shared_experts",
    ),
    "shared_expert_intermediate_size": (
        "shared_intermediate_size",
        "moe_shared_expert_intermediate_size",
        "share_expert_dim",
    ),
    "head_dim": ("attention_head_dim",),
    "torch_dtype": ("dtype",),
    "sliding_window": ("sliding_window_size", "swa_window"),
    "sliding_window_pattern": ("_sliding_window_pattern", "global_attn_every_n_layers"),
    "expert_hidden_size": ("moe_latent_size", "routed_expert_hidden_size"),
    "hidden_size": ("n_embed", "n_embd", "d_model"),
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("n_head", "n_heads"),
    "max_position_embeddings": ("seq_length", "n_positions", "max_sequence_length"),
    "index_head_dim": ("sparse_index_dim",),
    "index_n_heads": ("sparse_num_index_heads",),
    "index_topk_blocks": ("sparse_topk_blocks",),
    "index_block_size": ("sparse_block_size",),
    "attention_output_bias": ("attention_out_bias",),
}
# Model types of architectures whose configs state another family's; Grok 2 states "git".
MODEL_TYPES = {"Grok1ForCausalLM": "grok-1", "Grok1ModelForCausalLM": "grok-1"}
# Objects of a composite config that describe its language model.
TEXT_PARTS = ("text_config", "llm_config", "language_config")
# Larger numbers are treated as errors.
LARGEST = 10**9
LARGEST_OF = {"num_hidden_layers": 10_000, "num_experts": 1_000_000}


class Fields:
    """The fields of one object of a config; errors name the full path of a field."""

    def __init__(self, config: dict[str, Any], *, path: str = "model", title: str = "it") -> None:
        self.config = config
        self.path = path
        self.title = title
        self.names: dict[str, str] = {}

    def config_key(self, name: str) -> str:
        """Return the config's name of a field, or the family's name if it is absent."""
        of_family = self.names.get(name, name)
        spellings = (of_family, name, *SPELLINGS.get(name, ()))
        return next((key for key in spellings if key in self.config), of_family)

    def refusal(self, name: str, value: object, must: str) -> BadConfigError:
        """Return the error for a field with an invalid value."""
        own = self.config_key(name)
        return BadConfigError(f"{own} is {value!r}: it must be {must}", f"{self.path}.{own}")

    def get(self, name: str) -> Any:  # noqa: ANN401 - a JSON value may be of any type
        """Return a field by its common name, or None if it is absent."""
        return self.config.get(self.config_key(name))

    def has(self, name: str) -> bool:
        """Return whether a field has a value other than null, zero or empty."""
        return bool(self.get(name))

    def integer(self, name: str, default: int | None = None) -> int:
        """Return a whole number, also of a list that repeats it, or the default if it is absent.

        Raises:
            BadConfigError: the field is missing or out of range; the message uses the config's own
                name.
        """
        value = self.get(name)
        if isinstance(value, list) and value and all(entry == value[0] for entry in value):
            value = value[0]
        if value is None:
            value = default
        if value is None:
            own = self.config_key(name)
            raise BadConfigError(f"{self.title} lacks {own}", f"{self.path}.{own}")
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self.refusal(name, value, "a whole number of at least 0")
        largest = LARGEST_OF.get(name, LARGEST)
        if value > largest:
            raise self.refusal(name, value, f"at most {largest:,}")
        return value

    def positive(self, name: str, default: int | None = None) -> int:
        """Return a whole number of at least 1, or the default if it is absent.

        Raises:
            BadConfigError: the field is missing or out of range.
        """
        value = self.integer(name, default)
        if value == 0:
            raise self.refusal(name, value, "at least 1")
        return value

    def optional(self, name: str) -> int | None:
        """Return a whole number, or None if it is absent, 0 or false."""
        return None if self.get(name) is False else self.integer(name, 0) or None

    def number(self, name: str, default: float | None = None) -> float:
        """Return a number of at least 0, or the default if it is absent.

        Raises:
            BadConfigError: the field is missing or not such a number.
        """
        value = self.get(name)
        if isinstance(value, float) and math.isfinite(value) and 0 <= value <= LARGEST:
            return value
        whole_default = None if default is None else int(default)
        return (
            default if default is not None and value is None else self.integer(name, whole_default)
        )

    def flag(self, name: str, *, default: bool) -> bool:
        """Return a boolean, or the family's default if it is absent.

        Raises:
            BadConfigError: the field is not a boolean; any non-empty text would count as true.
        """
        value = self.get(name)
        if value is None:
            return default
        if value not in (True, False):
            raise self.refusal(name, value, "true or false")
        return bool(value)

    def inside(self, name: str) -> "Fields":
        """Return the fields of a nested object; empty if it is absent.

        Raises:
            BadConfigError: the field is not an object.
        """
        value = self.get(name)
        if value is not None and not isinstance(value, dict):
            raise self.refusal(name, value, "an object")
        own = f"{self.path}.{self.config_key(name)}"
        return Fields(value or {}, path=own, title=self.config_key(name))

    def each(self, name: str) -> tuple["Fields", ...]:
        """Return the fields of each object in a list.

        Raises:
            BadConfigError: the field is not a list of objects.
        """
        value, own = self.get(name), self.config_key(name)
        listed = [] if value is None else value
        if not isinstance(listed, list) or not all(isinstance(one, dict) for one in listed):
            raise self.refusal(name, value, "a list of objects")
        return tuple(
            Fields(one, path=f"{self.path}.{own}", title=f"{own}[{place}]")
            for place, one in enumerate(listed)
        )

    def items(self, name: str) -> list[Any]:
        """Return a list; empty if it is absent.

        Raises:
            BadConfigError: the field is not a list.
        """
        value = self.get(name)
        if value is None:
            return []
        if not isinstance(value, list | tuple):
            raise self.refusal(name, value, "a list")
        return list(value)


class ConfigReader(Fields):
    """A config with its family's names of the common fields."""

    def __init__(self, config: dict[str, Any]) -> None:
        if not isinstance(config, dict):
            raise BadConfigError(
                f"config.json is {type(config).__name__} {config!r:.60}: it must be an object, as "
                "Hugging Face writes it",
                "model",
            )
        thinker = config.get("thinker_config")
        # The objects that may describe encoders beside the language model.
        self.composites = tuple(part for part in (config, thinker) if isinstance(part, dict))
        nested = [part.get(name) for part in self.composites for name in TEXT_PARTS]
        texts = [text for text in nested if isinstance(text, dict)]
        super().__init__(dict(ChainMap(*texts[-1:], *reversed(self.composites))))
        self.is_nested = bool(texts)
        self.outer = config
        self.model_type = self._model_type()
        self.title = f"config.json of model_type {self.model_type}"

    def _model_type(self) -> str:
        architectures = self.config.get("architectures")
        first = architectures[0] if isinstance(architectures, list) and architectures else None
        model_type = MODEL_TYPES.get(str(first)) or self.config.get("model_type")
        if not isinstance(model_type, str):
            raise BadConfigError(
                "config.json has no model_type: give the file as Hugging Face writes it, "
                "or the explicit fields of a ModelSpec",
                "model.model_type",
            )
        return model_type

    def listed(self, name: str) -> tuple[Any, ...]:
        """Return a list with one entry per layer, cut to the model's layers; empty if absent.

        Entries beyond the last layer describe layers for multi-token prediction.

        Raises:
            BadConfigError: the list has fewer entries than the model has layers.
        """
        value = self.get(name)
        if not isinstance(value, list | tuple) or not value:
            return ()
        layers = self.integer("num_hidden_layers")
        if len(value) < layers:
            raise BadConfigError(
                f"{self.config_key(name)} has {len(value)} entries, but the model has {layers} "
                "layers: give one entry per layer",
                f"model.{self.config_key(name)}",
            )
        return tuple(value[:layers])


# ---------------------------------------------------------------------------
# Reads the groups of layers from a config: attention span, cache, latents and experts.
# ---------------------------------------------------------------------------


# Properties common to the models of one family that their configs do not state.


@dataclass(frozen=True)
class Family:
    """The structure common to all models of one ``model_type``."""

    gated_mlp: bool = True
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    norm_bias: bool = False
    norms_per_layer: int = 2
    qk_norm: bool = False
    qk_norm_width: Literal["head", "full"] = "head"
    attention_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    lm_head_bias: bool = False
    tied_by_default: bool = False
    # Whether configs state the length after the scaling of rotary positions.
    states_extended_length: bool = False
    learned_positions_offset: int | None = None
    default_ffn_multiple: int | None = None
    sparse: bool = False
    may_be_dense: bool = False
    shared_experts: int = 0
    shared_expert_gate: bool = False
    router_bias: bool = False
    # The config's flag for biases of the router, if it has one.
    router_bias_switch: str | None = None
    expert_bias: bool = False
    output_bias_follows: bool = False
    # The config's flag for norms of queries and keys, if only some models have them.
    qk_norm_switch: str | None = None
    # Small parameters per layer, and vectors of the hidden size outside the layers.
    extra_per_layer: int = 0
    extra_hidden_vectors: int = 0
    output_gate: OutputGate = "none"
    sinks: bool = False
    sliding_sinks: bool = False
    indexed: bool = False
    # Every ``full_every``-th layer has full attention, the others are of ``rest_kind``.
    full_every: int = 0
    rest_kind: Literal["sliding", "chunked", "recurrent"] = "sliding"
    recurrent: Callable[[ConfigReader, int], RecurrentLayers] | None = None
    fused_gate_width: bool = False
    # Reader of fields that the family's configs state in another form, by common name.
    derives: Callable[[ConfigReader], dict[str, Any]] | None = None
    # Readers for families with their own description of layers or fields.
    layers: Callable[[ConfigReader], tuple[LayerGroup, ...]] | None = None
    extras: Callable[[ConfigReader], dict[str, Any]] | None = None
    # A field that marks a feature without a confirmed implementation, and its description.
    unconfirmed: tuple[str, str] = ("", "")
    # Nested objects whose fields count as the model's own.
    nested: tuple[str, ...] = ()
    # Fields to ignore.
    ignores: tuple[str, ...] = ()
    names: dict[str, str] = field(default_factory=dict)
    # Defaults of the family's own implementation.
    defaults: dict[str, Any] = field(default_factory=dict)


# Read multi-head latent attention (MLA) and its indexers, by the names that all families use.
#
# Sources: DeepSeek-V2, arXiv:2405.04434, section 2.1; DeepSeek-V3.2, arXiv:2512.02556, section
# 2.1.


def latent_layers(
    fields: Fields,
    count: int,
    gate: OutputGate = "none",
    *,
    heads: int | None = None,
    top_k: int | None = None,
) -> LatentLayers:
    """Return latent-attention layers; ``heads`` are None if they have as many as the model.

    Raises:
        BadConfigError: a width is missing or out of range.
    """
    return LatentLayers(
        count=count,
        num_attention_heads=heads,
        q_lora_rank=fields.optional("q_lora_rank"),
        kv_lora_rank=fields.positive("kv_lora_rank"),
        qk_nope_head_dim=fields.positive("qk_nope_head_dim"),
        qk_rope_head_dim=fields.integer("qk_rope_head_dim"),
        v_head_dim=fields.positive("v_head_dim"),
        top_k=top_k,
        output_gate=gate,
    )


def latent_index(fields: Fields, count: int) -> IndexLayers:
    """Return the indexers that select the tokens of latent-attention layers.

    Their queries come from the compressed queries, their one key per token from the hidden state.

    Raises:
        BadConfigError: a width is missing or out of range.
    """
    dim, heads = fields.positive("index_head_dim"), fields.positive("index_n_heads")
    hidden, rank = fields.integer("hidden_size"), fields.positive("q_lora_rank")
    return IndexLayers(
        count=count,
        num_heads=heads,
        head_dim=dim,
        linear_parameters=rank * heads * dim + hidden * (dim + heads),
        small_parameters=2 * dim,
    )


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
    for indices_field, other in ATTENTION_INDICES.items():
        indices = reader.items(indices_field)
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
            "hybrid_override_pattern", pattern, f"a string of the letters {letters}"
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
        raise reader.refusal(
            WINDOW_FIELD[kind], None, f"the number of tokens that {kind} layers attend to"
        )
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


# Read the expert configuration of a mixture-of-experts model from a config.


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
    width_of_shared = reader.integer("shared_expert_intermediate_size", 0) if shared else 0
    router_bias, switch = family.router_bias, family.router_bias_switch
    if switch is not None:
        router_bias = reader.flag(switch, default=router_bias)
    return {
        "num_experts": reader.integer("num_experts"),
        "num_experts_per_tok": reader.integer("num_experts_per_tok"),
        "moe_intermediate_size": width,
        "num_shared_experts": shared,
        "shared_expert_intermediate_size": width_of_shared,
        "shared_expert_gate": family.shared_expert_gate and shared > 0,
        "expert_hidden_size": reader.integer("expert_hidden_size", 0),
        "router_bias": router_bias,
        "expert_bias": family.expert_bias,
        "num_dense_layers": dense_layers(reader),
    }


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
