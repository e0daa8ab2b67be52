"""Hybrid layers of state space and attention, and towers of vision and audio models."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal

from planner.catalog.layer_groups import (
    LARGEST,
    ConfigReader,
    Fields,
    dense_layers,
    latent_index,
    latent_layers,
)
from planner.specs.model import (
    AttentionLayers,
    LatentLayers,
    LayerGroup,
    OutputGate,
    RecurrentLayers,
)

# ---------------------------------------------------------------------------
# Count the vision and audio encoders that a composite checkpoint holds beside its decoder.
#
# Engines load them with the language model and in its plain dtype; the passes over images and
# sounds are not costed. ``tests/planner/test_parameters.py`` compares each kind with its own
# implementation.
# ---------------------------------------------------------------------------


# Objects of a config that describe an encoder, and those whose parts are never counted: speech
# output, query transformers, and encoders by the name of another checkpoint.
ENCODERS = ("vision_config", "audio_config", "visual", "vit_config", "speech_config")
OTHER_PARTS = (
    "talker_config",
    "code2wav_config",
    "qformer_config",
    "vq_config",
    "img_processor",
    "mm_vision_tower",
    "vision_tower_config",
)
NAMES = {
    "width": ("embed_dim", "d_model", "vt_hidden_size", "hidden_size", "width"),
    "layers": (
        "depth",
        "num_hidden_layers",
        "encoder_layers",
        "vt_num_hidden_layers",
        "num_layers",
        "layers",
    ),
    "feed_forward": ("intermediate_size", "encoder_ffn_dim", "vt_intermediate_size", "ffn_dim"),
    "merge": ("spatial_merge_size", "spatial_conv_size"),
}
CHANNELS = 3


@dataclass(frozen=True)
class Kind:
    """The structure of an encoder that its config does not state.

    ``projector`` is what maps its outputs to the language model: two matrices over merged patches
    ("merger"), two or one over single outputs ("mlp", "linear"), two over a width of its own
    ("wide"), or a family's own.
    """

    gated: bool = False
    learned_positions: bool = True
    projector: Literal[
        "merger", "mlp", "linear", "wide", "muse", "mistral3", "ernie", "glm4v", "llama4", "step3"
    ] = "mlp"
    defaults: dict[str, Any] = field(default_factory=dict)


MERGING = {"spatial_merge_size": 2, "temporal_patch_size": 2, "patch_size": 14}
QWEN2_5 = Kind(
    gated=True, learned_positions=False, projector="merger", defaults={"depth": 32, **MERGING}
)
QWEN3 = Kind(
    projector="merger",
    defaults={**MERGING, "patch_size": 16, "num_position_embeddings": 2304},
)
GLM4V = Kind(gated=True, projector="glm4v", defaults={**MERGING, "num_position_embeddings": 576})
ERNIE = Kind(learned_positions=False, projector="ernie", defaults={"mlp_ratio": 4, **MERGING})
# The table of positions has one part for rows and one for columns.
GEMMA4 = Kind(gated=True, projector="linear", defaults={"num_position_embeddings": 2 * 10240})
# Two feed-forward blocks of four widths each, relative keys and a gated convolution.
CONFORMER = Kind(projector="linear", defaults={"mlp_ratio": 10})
PIXTRAL = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24}
KINDS: dict[str, Kind] = {
    "clip_vision_model": Kind(),
    "siglip_vision_model": Kind(),
    "gemma3": Kind(projector="linear"),
    "gemma4": GEMMA4,
    "gemma4_audio": CONFORMER,
    "paligemma": Kind(projector="linear"),
    "idefics3": Kind(projector="linear"),
    "smolvlm": Kind(projector="linear"),
    "internvl_vision": Kind(defaults={"merge": 2}),
    "intern_vit_6b": Kind(defaults={"merge": 2}),
    "pixtral": Kind(gated=True, learned_positions=False, defaults={**PIXTRAL, "patch_size": 16}),
    "mistral3": Kind(gated=True, learned_positions=False, projector="mistral3", defaults=PIXTRAL),
    "qwen2_vl": Kind(
        learned_positions=False,
        projector="merger",
        defaults={"depth": 32, "embed_dim": 1280, "mlp_ratio": 4, **MERGING},
    ),
    "qwen2_5_omni": QWEN2_5,
    "qwen2_5_vl": QWEN2_5,
    "qwen3_vl": QWEN3,
    "qwen3_vl_moe": QWEN3,
    "qwen3_5": QWEN3,
    "qwen3_5_moe": QWEN3,
    "qwen3_omni_moe": QWEN3,
    "glm4v": GLM4V,
    "glm4v_moe": GLM4V,
    "ernie4_5_vl_moe": ERNIE,
    "ernie4_5_moe_vl": ERNIE,
    "llama4": Kind(projector="llama4"),
    "step3_vl": Kind(projector="step3"),
    "interns1": Kind(defaults={"merge": 2}),
    "lfm2_vl": Kind(
        projector="wide",
        defaults={"merge": 2, "num_position_embeddings": 256, "projector_input_dim": 2560},
    ),
    "mimo_v2": Kind(gated=True, learned_positions=False, projector="merger", defaults=MERGING),
    "muse_glimmer": Kind(
        projector="muse",
        defaults={
            "merge": 2,
            "temporal_patch_size": 2,
            "num_position_embeddings": 1024,
            "projector_input_dim": 4096,
        },
    ),
    "NemotronH_Nano_VL_V2": Kind(
        projector="wide", defaults={"merge": 2, "projector_input_dim": 20480}
    ),
    "dots3_note": Kind(gated=True, learned_positions=False, projector="merger"),
    "dots3_note_audio_encoder": Kind(gated=True, learned_positions=False),
}
# Kinds whose encoder's own model type is of another projector.
BY_WHOLE = ("step3_vl", "gemma3", "paligemma", "idefics3", "smolvlm", "mistral3", "lfm2_vl")
SUFFIXES = ("_vision_encoder", "_vision_model", "_vision")


def read_towers(reader: ConfigReader) -> dict[str, Any]:
    """Return the parameters of a composite config's encoders, and the parts without a count."""
    parameters, uncounted = 0, []
    for config in reader.composites:
        for name in ENCODERS:
            if config.get(name) is None:
                continue
            if not isinstance(config[name], dict):
                raise reader.refusal(name, config[name], "an object")
            counted = _count(Fields(config[name], path=f"model.{name}", title=name), reader)
            parameters += counted
            if not counted:
                uncounted.append(name)
        uncounted += [name for name in OTHER_PARTS if config.get(name)]
    if parameters > LARGEST**2:
        raise reader.refusal("vision_config", reader.get("vision_config"), "of a usual size")
    return {"tower_parameters": parameters, "uncounted": tuple(dict.fromkeys(uncounted))}


def unknown_encoders(reader: ConfigReader) -> tuple[str, ...]:
    """Return the encoders of unknown structure, which are counted as vision transformers."""
    return tuple(
        name
        for config in reader.composites
        for name in ENCODERS
        if isinstance(config.get(name), dict)
        and _kind_name(Fields(config[name]), reader) not in KINDS
    )


def _kind_name(encoder: Fields, reader: ConfigReader) -> str:
    """Return an encoder's own model type without its suffix, or that of the whole model."""
    whole = str(reader.outer.get("model_type")).removesuffix("_text")
    own = str(encoder.get("model_type") or whole)
    if whole in BY_WHOLE:
        return whole
    shorter = [own.removesuffix(suffix) for suffix in SUFFIXES]
    return next((name for name in (own, *shorter) if name in KINDS), own)


def _value(encoder: Fields, kind: Kind, name: str, default: int | None = None) -> int | None:
    """Return a size by its common name or one of its names; the first of a list of sizes."""
    for own in NAMES.get(name, (name,)):
        value = encoder.config.get(own, kind.defaults.get(own))
        if isinstance(value, list) and value and type(value[0]) is int:
            value = value[0]
        if value is not None:
            return Fields({own: value}, path=encoder.path, title=encoder.title).integer(own)
    return kind.defaults.get(name, default)


def _count(encoder: Fields, reader: ConfigReader) -> int:
    """Return the parameters of an encoder with its projector; 0 if a size is missing."""
    kind = KINDS.get(_kind_name(encoder, reader), Kind())
    width, layers = _value(encoder, kind, "width"), _value(encoder, kind, "layers")
    inner = _value(encoder, kind, "feed_forward")
    ratio = encoder.number("mlp_ratio", kind.defaults.get("mlp_ratio", 0.0))
    if not inner and width:
        inner = int(width * ratio)
    if not width or not layers or not inner:
        return 0
    text = reader.integer("hidden_size")
    out = _value(encoder, kind, "out_hidden_size") or text
    block = out if kind.projector == "glm4v" else inner
    matrices = 4 * width * width + (3 if kind.gated else 2) * width * block
    body = layers * (matrices + 9 * width + block) + _inputs(encoder, kind, width)
    return body + _projector(encoder, kind, (width, inner, out, text))


def _inputs(encoder: Fields, kind: Kind, width: int) -> int:
    """Return the patch or sound convolutions and the position embeddings."""
    bands = _value(encoder, kind, "num_mel_bins")
    if bands:
        return CHANNELS * width * (bands + width)
    patch = _value(encoder, kind, "patch_size")
    if not patch:
        return 0
    frames = _value(encoder, kind, "temporal_patch_size", 1) or 1
    side = (_value(encoder, kind, "image_size") or 0) // patch
    positions = _value(encoder, kind, "num_position_embeddings") or side * side
    if not kind.learned_positions:
        positions = 0
    return (CHANNELS * frames * patch * patch + positions) * width


def _projector(encoder: Fields, kind: Kind, sizes: tuple[int, int, int, int]) -> int:
    """Return the parameters between an encoder and the language model."""
    width, inner, out, text = sizes
    merge = _value(encoder, kind, "merge", 1) or 1
    merged = merge * merge * width
    # Qwen2-VL states the width of the encoder's outputs as its hidden size.
    to_text = text if "embed_dim" in kind.defaults else out
    levels = 1 + len(encoder.items("deepstack_visual_indexes"))
    middle = _value(encoder, kind, "projector_input_dim") or inner
    outputs = _value(encoder, kind, "output_hidden_size") or text
    joined = _value(encoder, kind, "vision_output_dim") or middle
    return {
        "merger": levels * merged * (merged + to_text),
        "ernie": merged * (5 * merged + text),
        "glm4v": out * (out + 3 * inner + merged),
        "llama4": middle * (inner + middle) + joined * text,
        "linear": width * text,
        "wide": 2 * merged + middle * (merged + text),
        "muse": middle * (merged + middle + text),
        # Two convolutions, of 2 by 2 and 3 by 3, before the projection.
        "step3": outputs * (4 * width + 18 * outputs + 2 * text),
        "mistral3": 4 * width * width + text * (width + text),
        "mlp": text * (merged + text),
    }[kind.projector]


# ---------------------------------------------------------------------------
# Reads layers with a constant state, and the layers of families that mix kinds of layers.
# ---------------------------------------------------------------------------


# Read layers with a state of constant size: linear attention and state-space models.
#
# Each reader returns one layer's shape with exact parameter counts.
# ``tests/planner/test_parameters.py`` compares them with the families' own implementations.


def _delta_layers(
    reader: ConfigReader,
    count: int,
    heads: tuple[int, int],
    dims: tuple[int, int],
    kernel: int,
    *,
    decay_and_gate: int,
    decay_biases: int,
) -> RecurrentLayers:
    """Return layers of the gated delta rule: one key-by-value state matrix per value head.

    ``heads`` and ``dims`` are those of keys and values. Queries, keys and values pass a short
    convolution; every value head has an update rate and a decay, every layer one output norm.
    Sources: Yang et al. 2024 (Gated Delta Networks), arXiv:2412.06464; Kimi Linear,
    arXiv:2510.26692, which decays each channel of its own.
    """
    hidden = reader.integer("hidden_size")
    keys, values = heads[0] * dims[0], heads[1] * dims[1]
    channels = 2 * keys + values
    return RecurrentLayers(
        count=count,
        num_heads=heads[1],
        key_dim=dims[0],
        value_dim=dims[1],
        conv_channels=channels,
        conv_kernel=kernel,
        linear_parameters=hidden * (channels + heads[1] + values) + decay_and_gate,
        small_parameters=channels * kernel + heads[1] + decay_biases + dims[1],
    )


def gated_delta_net(reader: ConfigReader, count: int) -> RecurrentLayers:
    """Return gated delta-net layers, with a decay per head: Qwen3-Next and later."""
    hidden, kernel = reader.integer("hidden_size"), reader.positive("linear_conv_kernel_dim")
    heads = reader.positive("linear_num_key_heads"), reader.positive("linear_num_value_heads")
    dims = reader.positive("linear_key_head_dim"), reader.positive("linear_value_head_dim")
    return _delta_layers(
        reader,
        count,
        heads,
        dims,
        kernel,
        decay_and_gate=hidden * (heads[1] + heads[1] * dims[1]),
        decay_biases=heads[1],
    )


def mamba2(reader: ConfigReader, count: int) -> RecurrentLayers:
    """Return Mamba-2 layers: one state-by-channel matrix per head.

    Source: Dao and Gu 2024, arXiv:2405.21060.
    """
    hidden, kernel = reader.integer("hidden_size"), reader.positive("conv_kernel")
    heads, head_dim = reader.positive("mamba_num_heads"), reader.positive("mamba_head_dim")
    state, groups = reader.positive("ssm_state_size"), reader.positive("n_groups")
    inner = heads * head_dim
    channels = inner + 2 * groups * state
    has_bias = reader.flag("use_conv_bias", default=True)
    projections = hidden * (inner + channels + heads) + inner * hidden
    bias = inner + channels + heads + hidden if reader.flag("use_bias", default=False) else 0
    return RecurrentLayers(
        count=count,
        num_heads=heads,
        key_dim=state,
        value_dim=head_dim,
        conv_channels=channels,
        conv_kernel=kernel,
        linear_parameters=projections,
        small_parameters=channels * (kernel + has_bias) + 3 * heads + inner + bias,
    )


def lightning_attention(reader: ConfigReader, count: int) -> RecurrentLayers:
    """Return linear-attention layers with a fixed decay per head.

    Source: Qin et al. 2024 (Lightning Attention), arXiv:2401.04658.
    """
    hidden, heads = reader.integer("hidden_size"), reader.integer("num_attention_heads")
    dim = reader.integer("head_dim", hidden // heads)
    return RecurrentLayers(
        count=count,
        num_heads=heads,
        key_dim=dim,
        value_dim=dim,
        linear_parameters=5 * hidden * heads * dim,
        small_parameters=heads * dim,
    )


def kimi_delta(reader: ConfigReader, count: int) -> RecurrentLayers:
    """Return Kimi delta-attention layers: a delta net with a decay per channel."""
    own = reader.inside("linear_attn_config")
    heads = _kimi_delta_size(reader, own, "num_heads", "linear_num_heads")
    dim = _kimi_delta_size(reader, own, "head_dim", "linear_head_dim")
    kernel = _kimi_delta_size(reader, own, "short_conv_kernel_size", "linear_conv_kernel_dim")
    hidden, width = reader.integer("hidden_size"), heads * dim
    low_rank = hidden * dim + dim * width
    gate = hidden * width if own.flag("use_full_rank_gate", default=False) else low_rank
    return _delta_layers(
        reader,
        count,
        (heads, heads),
        (dim, dim),
        kernel,
        decay_and_gate=low_rank + gate,
        decay_biases=width,
    )


def _kimi_delta_size(reader: ConfigReader, own: Fields, name: str, flat_name: str) -> int:
    """Return a size of delta-attention layers, from ``linear_attn_config`` or the flat fields.

    Raises:
        BadConfigError: the size is missing or 0; the message names the field of the object that
            the config has.
    """
    if size := own.optional(name):
        return size
    if own.config and not reader.has(flat_name):
        return own.positive(name)
    return reader.positive(flat_name)


def short_convolution(reader: ConfigReader, count: int) -> RecurrentLayers:
    """Return gated short convolutions, which only keep their last inputs.

    Source: LFM2, arXiv:2511.23404, section 2.
    """
    hidden, kernel = reader.integer("hidden_size"), reader.positive("conv_L_cache", 3)
    has_bias = reader.flag("conv_bias", default=False)
    return RecurrentLayers(
        count=count,
        num_heads=1,
        key_dim=0,
        value_dim=0,
        conv_channels=hidden,
        conv_kernel=kernel,
        linear_parameters=4 * hidden * hidden,
        small_parameters=hidden * (kernel + 5 * has_bias),
    )


def plamo2_mamba(reader: ConfigReader, count: int) -> RecurrentLayers:
    """Return Mamba-2 layers that compute steps and states from their convolved inputs.

    Source: the family's implementation in vLLM, ``Plamo2MambaMixer``.
    """
    hidden, kernel = reader.integer("hidden_size"), reader.positive("mamba_d_conv")
    heads, head_dim = reader.positive("mamba_num_heads"), reader.positive("hidden_size_per_head")
    state, inner = reader.positive("mamba_d_state"), heads * head_dim
    rank = max(64, hidden // 16)
    return RecurrentLayers(
        count=count,
        num_heads=heads,
        key_dim=state,
        value_dim=head_dim,
        conv_channels=inner,
        conv_kernel=kernel,
        linear_parameters=3 * hidden * inner + inner * (rank + 2 * state) + rank * heads,
        small_parameters=inner * kernel + 3 * heads + rank + 2 * state,
    )


def bailing_delta(reader: ConfigReader, count: int) -> RecurrentLayers:
    """Return delta-attention layers whose decays and gates have matrices of full rank.

    Source: the family's implementation in transformers, ``BailingHybridDeltaAttention``.
    """
    hidden, heads = reader.integer("hidden_size"), reader.integer("num_attention_heads")
    dim = reader.optional("linear_head_dim") or reader.positive("head_dim")
    width, kernel = heads * dim, reader.positive("short_conv_kernel_size", 4)
    return _delta_layers(
        reader,
        count,
        (heads, heads),
        (dim, dim),
        kernel,
        decay_and_gate=2 * hidden * width,
        decay_biases=width,
    )


def bailing_lightning(reader: ConfigReader, count: int) -> RecurrentLayers:
    """Return linear-attention layers with a fixed decay per head and norms of queries and keys.

    Source: Ring-V2.5, ``BailingMoeV2_5LinearAttention``.
    """
    layers = lightning_attention(reader, count)
    norms = 2 * layers.key_dim if reader.flag("use_qk_norm", default=True) else 0
    return layers.model_copy(update={"small_parameters": layers.small_parameters + norms})


# Fields of Ling 3.0 that no config of Ling 2.5 and 2.6 has.
DELTA_FIELDS = ("short_conv_kernel_size", "no_kda_lora", "kda_safe_gate")
PER_HEAD = (True, "per-head", "per_head")
# Widths of the windowed layers of Dots 3 where its config leaves them out.
DOTS3_WINDOWED = {
    "num_attention_heads": 64,
    "q_lora_rank": 1024,
    "kv_lora_rank": 1024,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
# Every sixth layer of Inkling has full attention.
INKLING_STEP = 6


def _grouped(
    reader: ConfigReader, kinds: tuple[str, ...], heads: tuple[Any, ...], gate: OutputGate
) -> tuple[LayerGroup, ...]:
    """Return attention layers grouped by their kind and number of query heads."""
    groups = Counter(zip(kinds, heads, strict=True))
    return tuple(
        AttentionLayers.model_validate(
            {
                "kind": kind,
                "count": count,
                "window": reader.positive("sliding_window") if kind == "sliding" else None,
                "num_attention_heads": query_heads,
                "output_gate": gate,
            }
        )
        for (kind, query_heads), count in groups.items()
    )


def _kinds(reader: ConfigReader) -> tuple[str, ...]:
    """Return whether each layer slides; all are full if the config does not say."""
    named = reader.listed("layer_types")
    if not named:
        return ("full",) * reader.integer("num_hidden_layers")
    return tuple("sliding" if "sliding" in str(name) else "full" for name in named)


def laguna(reader: ConfigReader) -> tuple[LayerGroup, ...]:
    """Return layers with their own number of query heads, gated by head or by element.

    Source: the family's implementation in transformers, ``LagunaAttention``.
    """
    kinds, own = _kinds(reader), reader.listed("num_attention_heads_per_layer")
    gate: OutputGate = "head" if reader.config.get("gating", True) in PER_HEAD else "element"
    return _grouped(
        reader, kinds, own or (reader.integer("num_attention_heads"),) * len(kinds), gate
    )


def step3p5(reader: ConfigReader) -> tuple[LayerGroup, ...]:
    """Return full and sliding layers, of which the latter may have more query heads.

    Source: the family's implementation in transformers, ``Step3p7TextConfig``.
    """
    heads = reader.integer("num_attention_heads")
    sliding = reader.inside("attention_other_setting").integer("num_attention_heads", heads)
    sliding = reader.integer("num_sliding_attention_heads", sliding)
    kinds = _kinds(reader)
    own = tuple(sliding if kind == "sliding" else heads for kind in kinds)
    return _grouped(reader, kinds, own, "head")


def step3p5_experts(reader: ConfigReader) -> dict[str, Any]:
    """Return the indices of the layers with experts, which the config lists as text."""
    listed = reader.get("moe_layers_enum")
    if listed is None:
        return {}
    numbers = str(listed).split(",")
    if not all(number.strip().isdigit() for number in numbers):
        raise reader.refusal("moe_layers_enum", listed, "layer numbers separated by commas")
    return {"moe_layers": [int(number) for number in numbers]}


def bailing_hybrid(reader: ConfigReader) -> tuple[LayerGroup, ...]:
    """Return linear attention with a latent layer in every group: Ling 2.5, 2.6 and 3.0.

    Layers after the last whole group are latent too. Sources: Ring-V2.5,
    ``BailingMoeV2_5DecoderLayer``; transformers, ``BailingHybridDecoderLayer``.
    """
    layers = reader.integer("num_hidden_layers")
    named, step = reader.listed("layer_types"), reader.positive("layer_group_size", 1)
    latent = (
        sum(name != "linear_attention" for name in named)
        if named
        else layers // step + layers % step
    )
    delta = any(reader.has(name) for name in DELTA_FIELDS)
    groups: list[LayerGroup] = []
    if latent < layers:
        count = layers - latent
        groups.append(bailing_delta(reader, count) if delta else bailing_lightning(reader, count))
    if latent:
        groups.append(latent_layers(reader, latent, "head" if delta else "none"))
    return tuple(groups)


def dots3_note(reader: ConfigReader) -> tuple[LayerGroup, ...]:
    """Return latent layers that see a window, and others that see what an index selects.

    Source: the family's implementation in transformers, ``Dots3NoteTextAttention``.
    """
    kinds = Counter(_kinds(reader))
    groups: list[LayerGroup] = []
    if kinds["sliding"]:
        window, own = reader.positive("sliding_window"), _dots3_windowed(reader)
        heads = own.positive("num_attention_heads")
        groups.append(latent_layers(own, kinds["sliding"], "head", heads=heads, top_k=window))
    if kinds["full"]:
        top_k = reader.positive("index_topk")
        groups.append(latent_layers(reader, kinds["full"], "head", top_k=top_k))
        groups.append(latent_index(reader, kinds["full"]))
    return tuple(groups)


def _dots3_windowed(reader: ConfigReader) -> Fields:
    """Return the widths of the windowed layers, from either config form."""
    each = reader.inside("per_layer_config")
    first = each.inside(next(iter(each.config), "")).config
    stated = {name: reader.config.get(f"swa_{name}", first.get(name)) for name in DOTS3_WINDOWED}
    given = {name: value for name, value in stated.items() if value is not None}
    return Fields({**DOTS3_WINDOWED, **given}, path=reader.path, title=reader.title)


def dots3_note_extras(reader: ConfigReader) -> dict[str, Any]:
    """Return the norms of the rotary keys, and the experts of the encoder of images."""
    fields = read_towers(reader)
    for part in reader.composites:
        vision = part.get("vision_config")
        if isinstance(vision, dict):
            encoder = Fields(vision, path="model.vision_config")
            fields["tower_parameters"] += _vision_experts(encoder)
    latents = [group for group in dots3_note(reader) if isinstance(group, LatentLayers)]
    norms = sum(group.count * group.qk_rope_head_dim for group in latents)
    return {**fields, "extra_parameters": norms}


def _vision_experts(vision: Fields) -> int:
    """Return what the experts of an encoder add to its dense blocks."""
    routed = vision.items("pyramid_num_routed")
    if not all(type(count) is int for count in routed):
        raise vision.refusal("pyramid_num_routed", routed, "a list of whole numbers")
    each, usual = vision.inside("per_layer_config"), vision.integer("num_local_experts", 0)
    for layer, kind in enumerate([] if routed else vision.items("mlp_layer_types")):
        own_count = each.inside(str(layer)).integer("num_local_experts", usual)
        routed.append(own_count if kind == "sparse" else 0)
    experts = [count for count in routed if count > 0]
    width, dense = vision.positive("hidden_size"), vision.positive("intermediate_size")
    own = vision.positive("moe_intermediate_size", dense)
    return sum(width * (count * (3 * own + 1) - 3 * dense) for count in experts)


def inkling_widths(reader: ConfigReader) -> dict[str, Any]:
    """Return the widths of experts and dense blocks as transformers names them."""
    derived: dict[str, Any] = {}
    dense = reader.config.get("dense_intermediate_size")
    if dense is not None:
        derived = {
            "moe_intermediate_size": reader.config.get("intermediate_size"),
            "intermediate_size": dense,
        }
    first = reader.config.get("dense_mlp_idx")
    return derived if first is None else {**derived, "first_k_dense_replace": first}


def inkling(reader: ConfigReader) -> tuple[LayerGroup, ...]:
    """Return full layers, and sliding layers with heads of their own.

    Source: the family's implementation in transformers, ``InklingAttention``.
    """
    kinds = Counter(_inkling_kinds(reader))
    groups: list[LayerGroup] = []
    if kinds["sliding"]:
        heads = reader.integer("num_attention_heads")
        groups.append(
            AttentionLayers(
                kind="sliding",
                count=kinds["sliding"],
                window=reader.positive("sliding_window"),
                num_attention_heads=reader.positive("swa_num_attention_heads", heads),
                num_key_value_heads=reader.positive(
                    "swa_num_key_value_heads", reader.positive("num_key_value_heads", heads)
                ),
                head_dim=reader.positive("swa_head_dim", reader.positive("head_dim")),
            )
        )
    if kinds["full"]:
        groups.append(AttentionLayers(count=kinds["full"]))
    return tuple(groups)


def _inkling_kinds(reader: ConfigReader) -> tuple[str, ...]:
    if reader.listed("layer_types"):
        return _kinds(reader)
    layers, local = reader.integer("num_hidden_layers"), reader.items("local_layer_ids")
    slides = local or [layer for layer in range(layers) if (layer + 1) % INKLING_STEP]
    return tuple("sliding" if layer in slides else "full" for layer in range(layers))


def inkling_extras(reader: ConfigReader) -> dict[str, Any]:
    """Return the relative positions, short convolutions, scales and routes to shared experts."""
    hidden, kernel = reader.integer("hidden_size"), reader.positive("conv_kernel_size", 4)
    rank, total = reader.positive("d_rel"), 0
    for group in inkling(reader):
        if not isinstance(group, AttentionLayers):
            continue
        heads = group.num_attention_heads or reader.integer("num_attention_heads")
        keys = group.num_key_value_heads or reader.positive("num_key_value_heads", heads)
        channels = 2 * keys * (group.head_dim or reader.positive("head_dim")) + 2 * hidden
        extent = group.window or reader.positive("rel_extent")
        total += group.count * (hidden * heads * rank + rank * extent + kernel * channels)
    layers = reader.integer("num_hidden_layers")
    sparse = layers - dense_layers(reader)
    total += layers + sparse * hidden * reader.integer("num_shared_experts") + hidden
    return {"extra_parameters": total}
