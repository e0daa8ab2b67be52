"""Read the layers of families with their own layer descriptions in configs."""

from collections import Counter
from typing import Any

from planner.catalog.hybrid_layers import kimi_delta, plamo2_mamba, read_towers, step3p5_experts
from planner.catalog.layer_groups import LARGEST, ConfigReader, Fields, dense_layers, latent_layers
from planner.specs.base import BadConfigError
from planner.specs.model import (
    AttentionLayers,
    CompressedLayers,
    IndexLayers,
    LatentLayers,
    LayerGroup,
    NoMixingLayers,
)

# Rounding step of a block's feed-forward width.
NAS_STEP = 256
MAMBA_EXPANSION = 2
LFM2_WIDTH = 12288
OPENELM_HEADS = ("num_query_heads", "num_kv_heads")
# Compression ratio of the entries that an index selects from.
INDEXED_RATIO = 4


def deepseek_v4(reader: ConfigReader) -> tuple[LayerGroup, ...]:
    """Return windowed layers, alone or with entries that compress 4 or 128 tokens each.

    Source: the family's implementation in transformers; only the entries of 4 are indexed.
    """
    ratios = _compression(reader)
    groups: list[LayerGroup] = []
    for ratio, count in ratios.items():
        groups.append(_compressed(reader, ratio, count))
        if ratio == INDEXED_RATIO:
            groups.append(_compressed_index(reader, ratio, count))
    return tuple(groups)


def _compression(reader: ConfigReader) -> Counter[int]:
    """Return the number of layers by compression ratio, from either config form."""
    layers, rates = reader.integer("num_hidden_layers"), reader.inside("compress_rates")
    listed = reader.listed("compress_ratios")
    counts = Counter(
        [_ratio(reader, ratio) for ratio in listed]
        or [rates.integer(str(kind), 0) for kind in reader.listed("layer_types")]
    )
    if sum(counts.values()) != layers:
        raise BadConfigError(
            f"compress_ratios has {sum(counts.values())} entries, but the model has {layers} "
            "layers: give one entry per layer",
            "model.compress_ratios",
        )
    return counts


def _ratio(reader: ConfigReader, ratio: object) -> int:
    if isinstance(ratio, bool) or not isinstance(ratio, int) or ratio < 0:
        raise reader.refusal("compress_ratios", ratio, "a list of whole numbers of at least 0")
    return ratio


def _compressed(reader: ConfigReader, ratio: int, count: int) -> CompressedLayers:
    hidden, dim = reader.integer("hidden_size"), reader.positive("head_dim")
    heads, rank = reader.integer("num_attention_heads"), reader.positive("q_lora_rank")
    output = reader.positive("o_lora_rank")
    indexed = ratio == INDEXED_RATIO
    streams = 0 if not ratio else 2 if indexed else 1
    split = rank * heads * dim + heads * dim * output
    return CompressedLayers(
        count=count,
        num_attention_heads=heads,
        head_dim=dim,
        window=reader.positive("sliding_window"),
        ratio=ratio or None,
        top_k=reader.positive("index_topk") if indexed else None,
        split_parameters=split + reader.integer("o_groups") * output * hidden,
        replicated_parameters=hidden * (rank + dim) + 2 * hidden * streams * dim,
        small_parameters=heads + rank + dim + (ratio * streams * dim + dim if ratio else 0),
    )


def _compressed_index(reader: ConfigReader, ratio: int, count: int) -> IndexLayers:
    hidden, dim = reader.integer("hidden_size"), reader.positive("index_head_dim")
    heads = reader.positive("index_n_heads")
    return IndexLayers(
        count=count,
        num_heads=heads,
        head_dim=dim,
        ratio=ratio,
        linear_parameters=reader.integer("q_lora_rank") * heads * dim + hidden * (4 * dim + heads),
        small_parameters=ratio * 2 * dim + dim,
    )


def deepseek_v4_extras(reader: ConfigReader) -> dict[str, Any]:
    """Return the parameters of parallel residual streams, minus those of hash routers."""
    hidden, streams = reader.integer("hidden_size"), reader.integer("hc_mult")
    layers, experts = reader.integer("num_hidden_layers"), reader.integer("num_experts")
    mixes = streams * (streams + 2)
    each = mixes * streams * hidden + mixes + 3
    last = streams * streams * hidden + streams + 1
    tables = reader.listed("mlp_layer_types").count("hash_moe")
    without_correction = reader.integer("num_hash_layers", tables) * experts
    return {"extra_parameters": 2 * layers * each + last - without_correction}


def minimax_m3(reader: ConfigReader) -> tuple[LayerGroup, ...]:
    """Return full-attention layers, and layers that attend to blocks selected by an index."""
    layers = reader.integer("num_hidden_layers")
    nested = reader.inside("sparse_attention_config").config
    reader.config = {**nested, **reader.config}
    flags = reader.listed("sparse_attention_freq") or tuple(
        kind != "full_attention" for kind in reader.listed("layer_types")
    )
    indexed = sum(bool(flag) for flag in flags)
    if not indexed:
        return (AttentionLayers(count=layers),)
    dim, heads = reader.positive("index_head_dim"), reader.positive("index_n_heads")
    chosen = reader.positive("index_topk_blocks") * reader.positive("index_block_size")
    hidden = reader.integer("hidden_size")
    index = IndexLayers(
        count=indexed,
        num_heads=heads,
        head_dim=dim,
        linear_parameters=hidden * dim * (heads + 1),
        small_parameters=2 * dim,
    )
    groups = (AttentionLayers(count=indexed, top_k=chosen), index)
    full = layers - indexed
    return (AttentionLayers(count=full), *groups) if full else groups


def kimi_linear(reader: ConfigReader) -> tuple[LayerGroup, ...]:
    """Return delta-attention and latent-attention layers.

    Their number is that of ``linear_attn_config.kda_layers``, or of the "linear_attention" entries
    of ``layer_types`` if that list is empty or absent.

    Raises:
        BadConfigError: one of the lists does not fit the number of layers.
    """
    layers = reader.integer("num_hidden_layers")
    layer_types = reader.listed("layer_types")
    kda_layers = reader.inside("linear_attn_config").items("kda_layers")
    if len(kda_layers) > layers:
        raise BadConfigError(
            f"linear_attn_config.kda_layers has {len(kda_layers)} entries, but the model has "
            f"{layers} layers: list each delta-attention layer once",
            "model.linear_attn_config.kda_layers",
        )
    recurrent = len(kda_layers) or layer_types.count("linear_attention")
    if not recurrent or recurrent == layers:
        uniform = kimi_delta(reader, layers) if recurrent else _kimi_latent(reader, layers)
        return (uniform,)
    return (kimi_delta(reader, recurrent), _kimi_latent(reader, layers - recurrent))


def _kimi_latent(reader: ConfigReader, count: int) -> LatentLayers:
    gated = reader.flag("mla_use_output_gate", default=False)
    return latent_layers(reader, count, "element" if gated else "none")


def gemma4(reader: ConfigReader) -> tuple[LayerGroup, ...]:
    """Return sliding and full layers of different widths; the last may reuse earlier caches."""
    kinds = [str(kind) for kind in reader.listed("layer_types")]
    layers = reader.integer("num_hidden_layers")
    shared = reader.integer("num_kv_shared_layers", 0)
    groups: list[LayerGroup] = []
    for part, reuses in ((kinds[: layers - shared], False), (kinds[layers - shared :], True)):
        for kind, count in Counter(part).items():
            groups.append(_gemma4_group(reader, kind, count, reuses=reuses))
    return tuple(groups)


def _gemma4_group(reader: ConfigReader, kind: str, count: int, *, reuses: bool) -> AttentionLayers:
    if kind == "sliding_attention":
        window = reader.positive("sliding_window")
        return AttentionLayers(kind="sliding", count=count, window=window, reuses_cache=reuses)
    values_are_keys = reader.flag("attention_k_eq_v", default=False)
    per_layer = reader.inside("per_layer_config")
    layer_config = per_layer.inside(next(iter(per_layer.config), ""))
    own_head_dim = layer_config.optional("head_dim") or reader.optional("head_dim")
    dim = reader.optional("global_head_dim") or own_head_dim
    heads = reader.optional("num_global_key_value_heads") or layer_config.optional(
        "num_key_value_heads"
    )
    return AttentionLayers(
        count=count,
        head_dim=dim,
        num_key_value_heads=heads if values_are_keys else None,
        value_is_key=values_are_keys,
        reuses_cache=reuses,
    )


def gemma4_extras(reader: ConfigReader) -> dict[str, Any]:
    """Return the dense block in addition to experts, and the per-layer embeddings."""
    hidden, layers = reader.integer("hidden_size"), reader.integer("num_hidden_layers")
    narrow = reader.integer("hidden_size_per_layer_input", 0)
    width, extra = reader.integer("intermediate_size"), 0
    fields: dict[str, Any] = {}
    if narrow:
        table = reader.integer("vocab_size_per_layer_input") * layers * narrow
        each = 2 * hidden * narrow + hidden
        extra += table + layers * each + hidden * layers * narrow + narrow
    if reader.flag("use_double_wide_mlp", default=False):
        columns = width * (layers + reader.integer("num_kv_shared_layers", 0))
        fields["intermediate_size"] = columns // layers
        extra += 3 * hidden * (columns % layers)
    if reader.has("num_experts"):
        extra += layers * (4 * hidden + reader.integer("num_experts"))
        fields |= {"num_shared_experts": 1, "shared_expert_intermediate_size": width}
        fields |= {"num_dense_layers": 0}
    return {**fields, "extra_parameters": extra}


def diffusion_gemma_extras(reader: ConfigReader) -> dict[str, Any]:
    """Return what Gemma 4 has, and the block that reads the last guess at the tokens."""
    hidden, fields = reader.integer("hidden_size"), gemma4_extras(reader)
    guess = 3 * hidden * reader.integer("intermediate_size") + hidden
    return {**fields, "extra_parameters": fields["extra_parameters"] + guess}


def nemotron_nas(reader: ConfigReader) -> tuple[LayerGroup, ...]:
    """Return the layers of a searched architecture, some without attention."""
    heads = reader.integer("num_attention_heads")
    groups: Counter[int] = Counter()
    for block in reader.each("block_configs"):
        attention = block.inside("attention")
        groups[0 if _is_empty(attention) else heads // attention.positive("n_heads_in_group")] += 1
    return tuple(
        AttentionLayers(count=count, num_key_value_heads=kv_heads)
        if kv_heads
        else NoMixingLayers(count=count)
        for kv_heads, count in groups.items()
    )


def nemotron_nas_extras(reader: ConfigReader) -> dict[str, Any]:
    """Return the mean width of the blocks, and the parameters lost to its rounding."""
    hidden, layers = reader.integer("hidden_size"), reader.integer("num_hidden_layers")
    blocks = reader.each("block_configs")
    columns = sum(_nas_width(hidden, block.inside("ffn")) for block in blocks)
    attending = [mixer for b in blocks if not _is_empty(mixer := b.inside("attention"))]
    norms = len(attending) + sum(not _is_empty(block.inside("ffn")) for block in blocks)
    if not attending:
        raise BadConfigError(
            "block_configs describes no layer with attention: give one entry per layer",
            "model.block_configs",
        )
    heads = reader.integer("num_attention_heads")
    return {
        "intermediate_size": columns // layers,
        "extra_parameters": 3 * hidden * (columns % layers) + (norms - layers) * hidden,
        "num_key_value_heads": heads // attending[0].positive("n_heads_in_group"),
        "norms_per_layer": 1,
    }


def _is_empty(block: Fields) -> bool:
    return block.flag("no_op", default=False)


def _nas_width(hidden: int, block: Fields) -> int:
    if _is_empty(block):
        return 0
    width = int(2 * block.number("ffn_mult") * hidden / 3)
    return _rounded_up(width, NAS_STEP)


def lfm2_width(reader: ConfigReader) -> dict[str, Any]:
    """Return the feed-forward width, which the config states before its adjustment."""
    width = reader.optional("block_ff_dim") or reader.positive("intermediate_size", LFM2_WIDTH)
    if not reader.flag("block_auto_adjust_ff_dim", default=True):
        return {"intermediate_size": width}
    width = 2 * width // 3
    if reader.config.get("block_ffn_dim_multiplier", 1.0) is not None:
        width = int(reader.number("block_ffn_dim_multiplier", 1.0) * width)
        width = _rounded_up(width, reader.positive("block_multiple_of", NAS_STEP))
    return {"intermediate_size": width}


def _rounded_up(width: int, step: int) -> int:
    return -(-width // step) * step


def mamba_heads(reader: ConfigReader) -> dict[str, Any]:
    """Return the width of a state-space head, which may be stated as automatic."""
    if reader.get("mamba_d_head") != "auto":
        return {}
    inner = reader.positive("mamba_expand", MAMBA_EXPANSION) * reader.positive("hidden_size")
    return {"mamba_d_head": inner // reader.positive("mamba_n_heads")}


def granite_hybrid(reader: ConfigReader) -> dict[str, Any]:
    """Return the width of state-space heads, and of the dense block of models without experts."""
    if reader.has("num_experts"):
        return mamba_heads(reader)
    return {
        **mamba_heads(reader),
        "intermediate_size": reader.positive("shared_expert_intermediate_size"),
    }


def longcat_sublayers(reader: ConfigReader) -> dict[str, Any]:
    """Return two layers per layer of the config: each has two attentions and two dense blocks."""
    return {"num_hidden_layers": 2 * reader.positive("num_layers")}


def longcat_experts(reader: ConfigReader) -> dict[str, Any]:
    """Return the experts of every second layer, beside that layer's dense block.

    Zero-computation experts have no weights but outputs of the router, and take their share of the
    routed tokens: 12 of 768 experts are 8 of the 512 with weights, as the router is trained to.

    Source: LongCat-Flash, arXiv:2509.01322, sections 2.1 and 2.2.
    """
    experts, zero = reader.positive("num_experts"), reader.integer("zero_expert_num", 0)
    sparse = reader.integer("num_hidden_layers") // 2
    routed = reader.integer("num_experts_per_tok") * experts / (experts + zero)
    return {
        "num_dense_layers": sparse,
        "num_shared_experts": 1,
        "shared_expert_intermediate_size": reader.integer("intermediate_size"),
        "num_experts_per_tok": min(experts, max(1, round(routed))),
        "extra_parameters": sparse * zero * (reader.integer("hidden_size") + 1),
    }


def arctic_residual(reader: ConfigReader) -> dict[str, Any]:
    """Return the dense block of the hidden width, with a norm, beside each layer's experts.

    Source: the family's implementation in vLLM, ``ArcticDecoderLayer``.
    """
    if not reader.flag("parallel_attn_mlp_res", default=False):
        return {}
    hidden, layers = reader.integer("hidden_size"), reader.integer("num_hidden_layers")
    return {
        "num_shared_experts": 1,
        "shared_expert_intermediate_size": hidden,
        "extra_parameters": layers // reader.positive("decoder_sparse_step", 1) * hidden,
    }


def grok_experts(reader: ConfigReader) -> dict[str, Any]:
    """Return the dense block that Grok 2 has beside its experts."""
    if not reader.flag("residual_moe", default=False):
        return {"num_shared_experts": 0}
    width = reader.positive("intermediate_size")
    return {"num_shared_experts": 1, "shared_expert_intermediate_size": width}


def step3_experts(reader: ConfigReader) -> dict[str, Any]:
    """Return the indices of the layers with experts: as listed, or all but the first."""
    listed = step3p5_experts(reader)
    return listed or {"moe_layers": list(range(1, reader.positive("num_hidden_layers")))}


def step3_layers(reader: ConfigReader) -> tuple[LayerGroup, ...]:
    """Return layers whose queries share a low-rank projection (multi-matrix factorisation).

    Source: Step-3, arXiv:2507.19427, section 3.
    """
    return (
        AttentionLayers(
            count=reader.integer("num_hidden_layers"), q_lora_rank=reader.positive("share_q_dim")
        ),
    )


def plamo2_layers(reader: ConfigReader) -> tuple[LayerGroup, ...]:
    """Return state-space layers with one attention layer in every ``mamba_step``."""
    layers, step = reader.integer("num_hidden_layers"), reader.positive("mamba_step", 2)
    attention = sum(layer % step == step // 2 for layer in range(layers))
    if layers <= step // 2:
        attention = 1
    groups: list[LayerGroup] = [AttentionLayers(count=attention)] if attention else []
    if layers > attention:
        groups.append(plamo2_mamba(reader, layers - attention))
    return tuple(groups)


def openelm_shape(reader: ConfigReader) -> dict[str, Any]:
    """Return the first layer's heads, and the mean width of the feed-forward blocks."""
    heads, kv_heads = (_of_each_layer(reader, name) for name in OPENELM_HEADS)
    widths = _openelm_widths(reader)
    return {
        "num_attention_heads": heads[0],
        "num_key_value_heads": kv_heads[0],
        "intermediate_size": sum(widths) // len(widths),
    }


def _of_each_layer(reader: ConfigReader, name: str) -> tuple[int, ...]:
    """Return one whole number per layer."""
    listed = reader.listed(name)
    if not listed or not all(type(each) is int and 0 < each <= LARGEST for each in listed):
        raise reader.refusal(
            name, reader.get(name), f"a list with one whole number from 1 to {LARGEST:,} per layer"
        )
    return listed


def _openelm_widths(reader: ConfigReader) -> list[int]:
    """Return each layer's feed-forward width: a multiple of the divisor near its multiplier."""
    hidden, step = reader.positive("hidden_size"), reader.positive("ffn_dim_divisor", NAS_STEP)
    multipliers = reader.listed("ffn_multipliers")
    if not multipliers or not all(
        isinstance(each, int | float) and 0 < each < LARGEST for each in multipliers
    ):
        raise reader.refusal(
            "ffn_multipliers", list(multipliers), "a list with one positive number per layer"
        )
    wanted = [each * hidden for each in multipliers]
    nearest = [max(step, int(width + step / 2) // step * step) for width in wanted]
    return [
        width + step * (width < 0.9 * exact) for width, exact in zip(nearest, wanted, strict=True)
    ]


def openelm_layers(reader: ConfigReader) -> tuple[LayerGroup, ...]:
    """Return the layers by their numbers of heads."""
    pairs = zip(*(_of_each_layer(reader, name) for name in OPENELM_HEADS), strict=True)
    return tuple(
        AttentionLayers(count=count, num_attention_heads=heads, num_key_value_heads=kv_heads)
        for (heads, kv_heads), count in Counter(pairs).items()
    )


def openelm_extras(reader: ConfigReader) -> dict[str, Any]:
    """Return the parameters lost to the rounding of the mean feed-forward width."""
    widths = _openelm_widths(reader)
    return {"extra_parameters": 3 * reader.integer("hidden_size") * (sum(widths) % len(widths))}


def ernie_text_experts(reader: ConfigReader) -> dict[str, Any]:
    """Return the sizes of the experts of text, which the config lists before those of images."""
    names = ("moe_intermediate_size", "moe_layer_start_index", "moe_layer_end_index")
    listed = {name: reader.get(name) for name in names if isinstance(reader.get(name), list)}
    derived = {name: value[0] for name, value in listed.items() if value}
    widths = listed.get("moe_intermediate_size", [])
    return {**derived, "vision_expert_width": widths[-1] if widths else 0}


def ernie_vision_experts(reader: ConfigReader) -> dict[str, Any]:
    """Return the encoders, and the experts and routers that only tokens of images visit.

    Source: the family's implementation in transformers, ``Ernie4_5_VLMoeMoeBlock``.
    """
    towers, width = read_towers(reader), reader.integer("vision_expert_width")
    hidden, experts = reader.integer("hidden_size"), reader.integer("num_experts")
    sparse = reader.integer("num_hidden_layers") - dense_layers(reader)
    if width:
        towers["tower_parameters"] += sparse * experts * (hidden + 1)
        towers["image_expert_parameters"] = 3 * sparse * experts * hidden * width
    return towers
