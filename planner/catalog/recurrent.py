"""Read layers with a state of constant size: linear attention and state-space models.

Each reader returns one layer's shape with exact parameter counts.
``tests/planner/test_parameters.py`` compares them with the families' own implementations.
"""

from planner.catalog.config_reader import ConfigReader
from planner.specs.layers import RecurrentLayers


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
    heads = own.optional("num_heads") or reader.positive("linear_num_heads")
    dim = own.optional("head_dim") or reader.positive("linear_head_dim")
    kernel = own.optional("short_conv_kernel_size") or reader.positive("linear_conv_kernel_dim")
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
