"""Read multi-head latent attention (MLA) and its indexers, by the names that all families use.

Sources: DeepSeek-V2, arXiv:2405.04434, section 2.1; DeepSeek-V3.2, arXiv:2512.02556, section 2.1.
"""

from planner.catalog.config_reader import Fields
from planner.specs.layers import IndexLayers, LatentLayers, OutputGate


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
