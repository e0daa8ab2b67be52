"""Families of 2026 that mix windowed, latent, linear and full attention."""

from dataclasses import replace

from planner.catalog.family import Family
from planner.catalog.hybrid_layers import (
    bailing_hybrid,
    dots3_note,
    dots3_note_extras,
    inkling,
    inkling_extras,
    inkling_widths,
    laguna,
    step3p5,
    step3p5_experts,
)
from planner.catalog.sparse_families import BAILING, LATENT, ROUTED, SPARSE

STEP = replace(
    ROUTED,
    shared_experts=1,
    derives=step3p5_experts,
    layers=step3p5,
    names={"num_key_value_heads": "num_attention_groups", "num_experts_per_tok": "moe_top_k"},
)
WINDOWED_LATENT = (
    "the cache of the layers that see a window is counted over the whole context, as an engine "
    "without a window of latent attention keeps it"
)
SHORT_CONVOLUTIONS = "the last inputs of its short convolutions are not counted"

HYBRID: dict[str, Family] = {
    "bailing_hybrid": replace(
        BAILING, router_bias=True, router_bias_switch=None, layers=bailing_hybrid
    ),
    "dots3_note_text": replace(
        LATENT,
        router_bias=True,
        layers=dots3_note,
        extras=dots3_note_extras,
        unconfirmed=("sliding_window", WINDOWED_LATENT),
    ),
    "hy_v3": replace(ROUTED, shared_experts=1),
    "inkling_text": replace(
        ROUTED,
        derives=inkling_widths,
        layers=inkling,
        extras=inkling_extras,
        unconfirmed=("d_rel", SHORT_CONVOLUTIONS),
    ),
    "laguna": replace(ROUTED, shared_experts=1, layers=laguna),
    "mellum": Family(qk_norm=True, sparse=True),
    "mimo_v2": SPARSE["mimo_v2_flash"],
    "muse_glimmer_text": Family(norms_per_layer=4, output_gate="element"),
    "step3p5": STEP,
    "step3p7": STEP,
}
