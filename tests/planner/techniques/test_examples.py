"""Every row of the technique list is in the registry, and its worked example comes out."""

import pytest

from planner.specs.estimate import EstimateRequest
from planner.techniques.examples import both_estimates, changes, figure, overlaid, technique_row
from planner.techniques.registry import (
    CONDITIONS,
    TECHNIQUES,
    Case,
    Example,
    Technique,
    get,
    used_by,
)
from planner.workload.resolve import resolve
from tests.planner.asking import ask

ROWS = [
    "fp16_bf16",
    "int8_weight_only",
    "int8_dynamic",
    "int4_weight_only",
    "quantization_aware_training",
    "gptq",
    "awq",
    "fptq_w4a8",
    "norm_tweaking",
    "finequant",
    "quantease",
    "fp8",
    "qmoe",
    "sparsegpt",
    "llm_pruner",
    "sheared_llama",
    "model_pruning",
    "lora",
    "qlora",
    "alphatuning",
    "qft",
    "lomo",
    "adalomo",
    "cramming",
    "growlength",
    "mixed_precision",
    "gradient_checkpointing",
    "data_parallel",
    "zero_1",
    "zero_2",
    "zero_3",
    "tensor_parallel",
    "sequence_parallel",
    "pipeline_gpipe",
    "pipeline_1f1b",
    "pipeline_interleaved",
    "pipeline_zero_bubble",
    "ptd_p",
    "expert_parallel",
    "pcc",
    "colossal_ai",
    "collie",
    "automatic_parallelism",
    "zero_offload",
    "zero_infinity",
    "swapadvisor",
    "swarm",
    "elastic_training",
    "gradient_compression",
    "decentralized_training",
    "overlap",
    "hierarchical_collectives",
    "topology_mapping",
    "lightseq2",
    "fused_kernels",
    "flash_attention",
    "bytetransformer",
    "padding_free",
    "kv_cache",
    "paged_attention",
    "continuous_batching",
    "dynamic_batching",
    "turbotransformers",
    "tensor_parallel_inference",
    "pipeline_parallel_inference",
    "expert_parallel_inference",
    "zero_inference",
    "accelerate_offload",
    "flexgen",
    "petals",
    "splitwise",
    "powerinfer",
    "moe_offload",
    "pets",
    "lightseq",
    "eet",
    "nlp_fast",
    "speculative_decoding",
    "quantized_kv_cache",
    "dfx",
    "llmcompass",
    "tier_local_machine",
    "tier_local_server",
    "tier_cloud",
    "tier_hpc",
    "instance_selection",
    "energy_cost",
    "distilbert_validation",
]
COSTED = [key for key, one in TECHNIQUES.items() if one.example]


def test_every_row_of_the_list_is_in_the_registry():
    for key in ROWS:
        technique = get(key)
        assert technique.applicability[0].startswith("the work is"), key
        assert technique.terms, key


def test_an_examples_figures_move_as_published_and_the_rest_stays():
    for key in COSTED:
        found = changes(get(key))
        assert [change.to_json() for change in found if not change.holds] == [], key
        assert any(change.expected != (1.0, 1.0) for change in found), key


def test_a_technique_applies_to_its_own_example_and_is_seen_in_use():
    for key in COSTED:
        technique = get(key)
        example = technique.example
        request = EstimateRequest.model_validate(overlaid(example.request, example.on))
        setting = resolve(request)
        case = Case(setting.model, setting.device, setting.cluster, setting.workload)
        assert technique.reason_against(case) == "", key
        is_seen = technique.used and "model" not in example.on
        assert not is_seen or key in used_by(setting.strategy, case), key


def test_at_most_a_few_techniques_are_only_named_and_each_says_why():
    named = [one for one in TECHNIQUES.values() if not one.example]
    assert all(one.only_named for one in named)
    assert all(one.planned == "applicability only" for one in named)
    assert not any(one.only_named for one in TECHNIQUES.values() if one.example)


def test_a_techniques_terms_are_figures_of_an_estimate():
    answer = ask()
    for key in sorted(TECHNIQUES):
        for name in TECHNIQUES[key].terms:
            figure(answer, name)


def test_every_condition_is_needed_by_a_technique():
    needed = {name for one in TECHNIQUES.values() for name in one.needs}
    assert needed == set(CONDITIONS)


def test_an_overlay_replaces_values_and_keeps_the_rest_of_an_object():
    base = {"strategy": {"zero_stage": 1, "micro_batch_size": 2}, "model": "a"}
    laid = overlaid(base, {"strategy": {"zero_stage": 3}, "model": {"b": 1}})
    assert laid == {"strategy": {"zero_stage": 3, "micro_batch_size": 2}, "model": {"b": 1}}
    assert base["strategy"]["zero_stage"] == 1


def test_a_figure_that_moves_against_its_range_is_told():
    example = get("zero_1").example.model_copy(update={"expect": {"optimizer_states": (2.0, 3.0)}})
    wrong = get("zero_1").model_copy(update={"example": example})
    (change, *_) = changes(wrong)
    assert not change.holds


def test_a_tensor_class_that_moves_unannounced_is_told():
    example = get("zero_3").example.model_copy(update={"also": ()})
    wrong = get("zero_3").model_copy(update={"example": example})
    assert [one.figure for one in changes(wrong) if not one.holds] == ["buffers"]


def test_an_unknown_figure_is_refused():
    with pytest.raises(KeyError, match="speed"):
        figure(ask(), "speed")


def test_a_term_of_the_record_is_a_figure():
    answer = ask()
    term = answer.terms[0]
    assert figure(answer, f"term_{term.key}") >= term.value


def test_a_row_shows_words_of_applicability_and_computed_figures():
    row = technique_row(get("zero_1"))
    assert row["planned"] == "costed"
    assert "the cluster has at least 2 devices" in row["applicability"]
    assert row["example"]["figures"][0]["ratio"] == pytest.approx(1 / 64)


def test_a_row_that_is_only_named_has_no_example():
    told = {"example": None, "only_named": "nobody measured it"}
    row = technique_row(get("dfx").model_copy(update=told))
    assert row["planned"] == "applicability only"
    assert "example" not in row
    assert row["only_named"]


def test_examples_without_and_with_differ_in_what_is_laid_over():
    example = Example(
        request={
            "model": "facebook/opt-125m",
            "cluster": {"device": "t4"},
            "workload": {
                "kind": "generate",
                "batch_size": 1,
                "input_tokens": 8,
                "output_tokens": 8,
            },
        },
        on={"workload": {"batch_size": 2}},
        published="definition",
    )

    without, with_ = both_estimates(example)

    assert figure(with_, "kv_cache") == 2 * figure(without, "kv_cache")


def test_a_technique_without_alternatives_is_never_seen_in_use():
    technique = Technique(
        key="a", title="A", phases=frozenset({"inference"}), effect="none", source="us"
    )
    assert not technique.is_used(ask().strategy, None)
