"""Laws of size and hardware: counts, configs, lists of layers, links in bytes, dense peaks."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.catalog.devices import list_devices
from planner.catalog.models import get_model, list_models, model_from_config
from planner.cost.kv_cache import (
    cache_bytes,
    cached_tokens_by_layer_group,
    read_tokens_by_layer_group,
)
from planner.cost.parameters import count_parameters
from planner.cost.quantity import Ledger, Line
from planner.search.question import questions
from planner.search.serving_space import serving_blocks
from planner.specs.estimate import EstimateRequest, PlanRequest
from planner.specs.model import ModelSpec
from tests.planner.asking import LLAMA_70B, SERVE, TINY, TRAIN, ask, document, search
from tests.planner.invariants.drawing import configs, few, latent_models, sparse_configs
from tests.plugins.extent import sample

LAYER_BIASES = {"qwen2": ("q", "k", "v")}


def tensors(config):
    """Every tensor of a dense llama-like checkpoint, by name, written out shape by shape."""
    hidden, ffn, vocab = (
        config[name] for name in ("hidden_size", "intermediate_size", "vocab_size")
    )
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    width = hidden // heads
    out = {"q": heads * width, "k": kv_heads * width, "v": kv_heads * width}
    shapes = {"embed": (vocab, hidden), "norm": (hidden,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head"] = (vocab, hidden)
    for layer in range(config["num_hidden_layers"]):
        shapes |= {(layer, name): (size, hidden) for name, size in out.items()}
        shapes[layer, "o"] = (hidden, heads * width)
        shapes |= {(layer, name): (ffn, hidden) for name in ("gate", "up", "down")}
        shapes |= {(layer, name): (hidden,) for name in ("norm_1", "norm_2")}
        for name in LAYER_BIASES.get(config["model_type"], ()):
            shapes[layer, name, "bias"] = (out[name],)
        if config["model_type"] == "qwen3":
            shapes |= {(layer, name): (width,) for name in ("q_norm", "k_norm")}
    return shapes


def elements(shapes):
    return sum(shape[0] * (shape[1] if len(shape) > 1 else 1) for shape in shapes.values())


@few
@given(config=configs())
def test_the_count_is_the_sum_of_the_checkpoints_tensors(config):
    """llm-analysis always ties embeddings (69.50 B for 70.55 B); accelerate drops the head."""
    assert count_parameters(model_from_config(config)).total == elements(tensors(config))


@few
@given(config=configs())
def test_untying_the_embeddings_adds_exactly_one_head(config):
    """llm-analysis has no untied embeddings, accelerate's AutoModel no output head."""
    tied, untied = (
        count_parameters(model_from_config({**config, "tie_word_embeddings": is_tied})).total
        for is_tied in (True, False)
    )
    assert untied - tied == config["vocab_size"] * config["hidden_size"]


@few
@given(config=sparse_configs())
def test_a_token_visits_its_share_of_the_experts_and_all_of_the_rest(config):
    """llm-analysis leaves the experts per token out of a sparse model's work."""
    counts = count_parameters(model_from_config(config))
    share = config["num_experts_per_tok"] / config["num_experts"]
    assert counts.experts_active == pytest.approx(counts.experts * share)
    assert counts.active == counts.total - counts.experts + counts.experts_active


@few
@given(config=configs(), more=st.integers(1, 8))
def test_each_further_layer_adds_the_same(config, more):
    """EleutherAI's calculator takes 12 h^2 a layer, whatever the heads and the feed-forward."""
    sizes = [
        count_parameters(model_from_config({**config, "num_hidden_layers": layers})).total
        for layers in (1, 2, 2 + more)
    ]
    assert sizes[2] - sizes[1] == more * (sizes[1] - sizes[0])


@few
@given(config=configs())
def test_any_config_of_a_covered_family_can_be_estimated(config):
    """llm-analysis 0.2.2 cannot represent Llama-3 at all; HEAD fails when f/h is not 3.5."""
    found = ask(model=config, workload={**SERVE, "input_tokens": 64})
    assert found.performance.tpot_seconds > 0


@few
@given(config=sparse_configs())
def test_any_sparse_config_can_be_estimated(config):
    """Calculon and LLMCompass know neither grouped heads nor experts."""
    found = ask(model=config, workload={**SERVE, "input_tokens": 64})
    assert found.performance.ttft_seconds > 0


@few
@given(fields=latent_models())
def test_any_model_with_latents_can_be_estimated(fields):
    """fm-training-estimator counts multi-head attention alone."""
    found = ask(model=fields, devices=8, strategy={"tensor_parallel_size": 8}, engine="sglang")
    assert found.performance.tpot_seconds > 0


def family_of(model_id):
    return get_model(model_id).model_type


def test_every_model_of_the_catalog_loads_offline_and_can_be_costed():
    """hf-mem and accelerate ask a hub first; llm-analysis maps an unread config to a wrong one."""
    wrong = []
    for model_id in sample([entry.id for entry in list_models()], kind=family_of):
        stages = min(8, get_model(model_id).num_hidden_layers)
        answer = ask(
            model=model_id,
            device="b300-sxm",
            devices=8,
            strategy={"pipeline_parallel_size": stages},
        )
        if not answer.memory.per_device_peak_bytes > 0:
            wrong.append(model_id)
    assert not wrong, wrong


@few
@given(config=configs())
def test_every_answer_survives_json(config):
    """aiconfigurator and llm-analysis answer with objects whose figures JSON cannot hold."""
    found = ask(model=config, workload={**SERVE, "input_tokens": 64})
    assert type(found).model_validate_json(found.model_dump_json()) == found


@few
@given(fields=latent_models(), as_json=st.booleans())
def test_explicit_fields_are_taken_as_they_are_given(fields, as_json):
    """A config reader that guesses by family drops the fields that it does not know."""
    request = document(model=fields)
    if as_json:
        parsed = EstimateRequest.model_validate_json(json.dumps(request))
    else:
        parsed = EstimateRequest.model_validate(request)
    assert parsed.model == ModelSpec.model_validate(fields)


# Ports of 1.6 Tbit/s per device exist; a figure beyond 400 GB/s would be bits taken for bytes.
FASTEST_PORT_BYTES_PER_S = 4e11
LINKED = [one for one in list_devices() if one.intra_node_bandwidth_bytes_per_second]


def test_eight_devices_can_be_used_as_eight():
    """GenZ's search stops at TP x PP < devices and never offers an 8-GPU plan."""
    answer = search(model=LLAMA_70B, devices=8, objective="latency", top=100)
    sizes = {plan.strategy.tensor_parallel_size for plan in answer.plans}
    assert 8 in sizes


@few
@given(devices=st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16]))
def test_some_layout_uses_every_device(devices):
    """GenZ leaves at least one device idle for every number of them."""
    request = PlanRequest.model_validate(document(model=LLAMA_70B, devices=devices))
    (question,) = questions(request)
    blocks = serving_blocks(question, request.workload)
    sizes = {size for block in blocks for size in block.column(block.setting.layout.devices)}
    assert sizes == {devices}


def test_links_are_in_bytes_and_peaks_dense():
    # llm-analysis has 400 Gbit/s of an H100's port as 400 GB/s: eight times too much.
    for device in LINKED:
        link, memory = (
            device.intra_node_bandwidth_bytes_per_second,
            device.memory_bandwidth_bytes_per_second,
        )
        assert 1e9 <= link <= 2e12, device
        assert link < memory or device.kind == "cpu" or "PCIe" in (device.link or ""), device

    # Public tables list GH200 with 1,979 and B100 with 3,500: peaks of sparse matrices.
    for device in list_devices():
        peaks = device.peak_flops_per_second
        assert peaks.get("bf16", 0) < 2.6e15, device
        for narrow, wide in (("fp8", "bf16"), ("int8", "bf16")):
            if narrow in peaks and wide in peaks and device.kind == "gpu":
                assert peaks[narrow] <= 4.1 * peaks[wide], device


def test_the_network_between_nodes_is_in_bytes():
    """The same eightfold mistake between nodes would make data parallelism look free."""
    cluster = {"device": "h100-sxm5-80gb", "devices_per_node": 8, "nodes": 2}
    found = ask(cluster=cluster, workload=TRAIN, engine="megatron")
    used = [
        one.value
        for term in found.terms
        for one in term.inputs
        if one.name.startswith("link bytes")
    ]

    assert used
    assert max(used) <= 9e11
    assert min(used) <= FASTEST_PORT_BYTES_PER_S


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
    kept = cached_tokens_by_layer_group(model, float(tokens), paged=False)
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
    read, kept = (
        read_tokens_by_layer_group(model, float(tokens)),
        cached_tokens_by_layer_group(model, float(tokens), paged=False),
    )
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
