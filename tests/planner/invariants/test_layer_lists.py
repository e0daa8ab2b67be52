"""Any list of layers, against going through it layer by layer and token by token."""

from hypothesis import given
from hypothesis import strategies as st

from planner.catalog.models import model_from_config
from planner.cost.kv_cache import cache_bytes, layer_tokens, read_tokens
from planner.cost.parameters import count_parameters
from planner.cost.quantity import Ledger, Line
from planner.specs.model import ModelSpec
from tests.planner.asking import TINY

KINDS = st.lists(st.sampled_from(["full_attention", "sliding_attention"]), min_size=1, max_size=40)
LENGTHS = st.integers(1, 5000)
WINDOWS = st.integers(1, 3000)
RECURRENT = {
    "model_type": "qwen3_5_text",
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
LATENT = {"kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}


def listed(kinds: list[str], window: int, **fields) -> ModelSpec:
    layers = {"num_hidden_layers": len(kinds), "layer_types": kinds}
    return model_from_config({**TINY, **layers, "sliding_window": window, **fields})


def kept_bytes(model: ModelSpec, tokens: int) -> float:
    kept = layer_tokens(model, float(tokens), paged=False)
    return cache_bytes(model, kept, 1, 2.0, (Ledger(), Line("memory", "cache")))


@given(kinds=KINDS, tokens=LENGTHS, window=WINDOWS)
def test_the_cache_is_the_sum_over_the_layers_as_they_are_listed(kinds, tokens, window):
    model = listed(kinds, window)
    found = kept_bytes(model, tokens)
    by_layer = [tokens if kind.startswith("full") else min(tokens, window) for kind in kinds]
    assert found == sum(by_layer) * 2 * 4 * 32 * 2


@given(kinds=KINDS, tokens=LENGTHS, window=WINDOWS)
def test_a_step_reads_of_windows_what_they_keep(kinds, tokens, window):
    model = listed(kinds, window)
    read, kept = read_tokens(model, float(tokens)), layer_tokens(model, float(tokens), paged=False)
    assert read.values == kept.values


@given(kinds=KINDS, window=WINDOWS, seed=st.randoms(use_true_random=False))
def test_the_order_of_the_layers_changes_neither_cache_nor_count(kinds, window, seed):
    shuffled = list(kinds)
    seed.shuffle(shuffled)
    first, second = listed(kinds, window), listed(shuffled, window)
    assert kept_bytes(first, 1000) == kept_bytes(second, 1000)
    assert count_parameters(first) == count_parameters(second)


@given(kinds=KINDS, more=st.integers(1, 5))
def test_entries_for_predictors_after_the_last_layer_change_nothing(kinds, more):
    config = {**TINY, "num_hidden_layers": len(kinds), "sliding_window": 64}
    plain = model_from_config({**config, "layer_types": kinds})
    longer = model_from_config({**config, "layer_types": kinds + ["full_attention"] * more})
    assert longer == plain


@given(states=st.integers(0, 12), full=st.integers(1, 12), tokens=LENGTHS)
def test_states_cost_the_same_at_any_length_and_keys_by_the_token(states, full, tokens):
    kinds = ["linear_attention"] * states + ["full_attention"] * full
    model = listed(kinds, 64, **RECURRENT)
    found = kept_bytes(model, tokens)
    # Four heads of 16 by 8 in 4 bytes; three inputs of 2 x 2 x 16 + 4 x 8 channels in 2 bytes.
    state = 4 * 16 * 8 * 4 + 3 * 96 * 2
    assert found == states * state + full * tokens * 2 * 4 * 32 * 2


@given(
    layers=st.integers(1, 40),
    step=st.integers(1, 5),
    dense=st.sets(st.integers(0, 45), max_size=8),
)
def test_a_layer_is_sparse_where_the_implementation_of_qwen_makes_it_so(layers, step, dense):
    """Qwen3MoeDecoderLayer of transformers decides layer by layer."""
    fields = {**EXPERTS, "decoder_sparse_step": step, "mlp_only_layers": sorted(dense)}

    model = model_from_config(
        {**TINY, **fields, "model_type": "qwen3_moe", "num_hidden_layers": layers}
    )

    sparse = [n for n in range(layers) if n not in dense and (n + 1) % step == 0]
    assert model.num_moe_layers == len(sparse)


@given(layers=st.integers(1, 40), first=st.integers(0, 45), step=st.integers(1, 4))
def test_a_layer_is_sparse_where_the_implementation_of_deepseek_makes_it_so(layers, first, step):
    """DeepseekV2DecoderLayer of transformers: from the first one on, every so many layers."""
    fields = {**EXPERTS, **LATENT, "first_k_dense_replace": first, "moe_layer_freq": step}

    model = model_from_config(
        {**TINY, **fields, "model_type": "deepseek_v2", "num_hidden_layers": layers}
    )

    sparse = [n for n in range(layers) if n >= first and n % step == 0]
    assert model.num_moe_layers == len(sparse)


@given(layers=st.integers(1, 60), every=st.integers(1, 12))
def test_a_layer_is_full_where_the_implementation_of_gemma_makes_it_so(layers, every):
    """Gemma3TextConfig of transformers: layer n slides unless n + 1 is a multiple."""
    config = {**TINY, "model_type": "gemma3_text", "num_hidden_layers": layers}
    model = model_from_config({**config, "sliding_window": 8, "sliding_window_pattern": every})
    sliding = sum(bool((n + 1) % every) for n in range(layers))
    found = sum(g.count for g in model.layers_by_attention if g.kind == "sliding")
    assert found == sliding


@given(kinds=KINDS, window=WINDOWS)
def test_a_model_of_any_list_comes_back_from_its_json(kinds, window):
    model = listed(kinds, window)
    assert ModelSpec.model_validate_json(model.model_dump_json()) == model


@given(letters=st.text("M*-", min_size=1, max_size=30))
def test_each_letter_of_a_pattern_is_one_layer_of_its_kind(letters):
    config = {
        **TINY,
        "model_type": "nemotron_h",
        "hybrid_override_pattern": letters,
        "num_hidden_layers": len(letters),
        "conv_kernel": 4,
        "mamba_num_heads": 8,
        "mamba_head_dim": 32,
        "ssm_state_size": 16,
        "n_groups": 2,
    }

    model = model_from_config(config)

    counts = {group.kind: group.count for group in model.layers_by_attention}
    assert counts.get("recurrent", 0) == letters.count("M")
    assert counts.get("full", 0) == letters.count("*")
    assert counts.get("none", 0) == letters.count("-")
