"""Options that an engine's own validation ties together: refused, not planned, not exported."""

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from planner.catalog.engines import list_engines
from planner.catalog.option_pairs import option_pairs
from planner.exports.registry import export, export_case
from planner.specs.base import NotPossibleError, PlannerError
from planner.specs.estimate import PlannedStrategy, PlanRequest
from tests.planner.asking import LLAMA_8B, MIXTRAL, SERVE, TRAIN, ask, document, search
from tests.planner.exports.parsers import commands, refusals

LONG = {**SERVE, "max_request_tokens": 16_384}
MANY = {**SERVE, "concurrency": 3000}
PROMPT = {**SERVE, "input_tokens": 12_000}
DRAFT = {"draft_model": "meta-llama/Llama-3.2-1B", "tokens": 4}
TWO_STAGES = {"pipeline_parallel_size": 2, "tensor_parallel_size": 1}
PRETRAIN = {**TRAIN, "method": "pretrain", "sequence_length": 4096, "global_batch_size": 64}
AWAY = {"offload": {"activations_cpu": 1.0}}
EIGHT = {"devices": 8, "workload": PRETRAIN}


def told(engine, field, way_out, strategy, **fields):
    """Return a refused request: engine, field, the way out as other fields, and the rest."""
    return engine, field, way_out, {"strategy": strategy, **fields}


# Each row of the table, refused by name; the way out that the refusal names is taken and answered.
REFUSED = [
    told("vllm", "max_batch_tokens", {"max_batch_tokens": 16_384},
         {"chunked_prefill": False, "max_batch_tokens": 8192}, workload=LONG),
    told("vllm", "max_batch_tokens", {"chunked_prefill": True},
         {"chunked_prefill": False}, workload=LONG),
    told("vllm", "max_batch_tokens", {"max_batch_tokens": 3000},
         {"max_batch_tokens": 2048}, workload=MANY),
    told("vllm", "pipeline_parallel_size", {"pipeline_parallel_size": 1},
         {"speculative": DRAFT, **TWO_STAGES}, devices=2),
    told("sglang", "speculative", {"pipeline_parallel_size": 1},
         {"speculative": DRAFT, **TWO_STAGES}, devices=2),
    told("tensorrt_llm", "max_batch_tokens", {"chunked_prefill": True},
         {"chunked_prefill": False, "max_batch_tokens": 8192}, workload=PROMPT),
    told("tensorrt_llm", "max_batch_tokens", {"max_batch_tokens": 12_000},
         {"chunked_prefill": False, "max_batch_tokens": 8192}, workload=PROMPT),
    told("tensorrt_llm", "max_batch_tokens", {"max_batch_tokens": 3000},
         {"max_batch_tokens": 2048}, workload=MANY),
    told("llama_cpp", "attention", {"attention": "flash"},
         {"attention": "eager", "kv_cache_dtype": "int8"}),
    told("llama_cpp", "attention", {"kv_cache_dtype": "fp16"},
         {"attention": "eager", "kv_cache_dtype": "int8"}),
    told("llama_cpp", "attention", {"attention": "flash"},
         {"attention": "eager", "tensor_parallel_size": 2}, devices=2),
    told("megatron", "sequence_parallel", {"sequence_parallel": True},
         {"sequence_parallel": False, "tensor_parallel_size": 2}, model=MIXTRAL, **EIGHT),
    told("megatron", "context_parallel_size", {"context_parallel_size": 1},
         {"context_parallel_size": 8}, devices=8, workload={**PRETRAIN, "sequence_length": 1000}),
    told("megatron", "virtual_pipeline_size", {"pipeline_parallel_size": 2},
         {"virtual_pipeline_size": 2, "pipeline_schedule": "interleaved"}, **EIGHT),
    told("megatron", "expert_parallel_size", {"expert_parallel_size": 2},
         {"expert_parallel_size": 4, "data_parallel_size": 6}, model=MIXTRAL, devices=6,
         workload={**PRETRAIN, "global_batch_size": 72}),
    told("megatron", "offload.activations_cpu", {"pipeline_parallel_size": 1},
         {**AWAY, "pipeline_parallel_size": 2}, **EIGHT),
    told("megatron", "offload.activations_cpu", {"activation_recomputation": "none"},
         {**AWAY, "activation_recomputation": "full"}, **EIGHT),
    told("deepspeed", "zero_stage", {"zero_stage": 1},
         {"zero_stage": 2, "pipeline_parallel_size": 2}, **EIGHT),
    told("deepspeed", "zero_stage", {"pipeline_parallel_size": 1},
         {"zero_stage": 3, "pipeline_parallel_size": 2}, **EIGHT),
    told("torchtitan", "context_parallel_size", {"context_parallel_size": 1},
         {"context_parallel_size": 8}, devices=8, workload={**PRETRAIN, "sequence_length": 1000}),
    told("torchtitan", "tensor_parallel_size", {"tensor_parallel_size": 1},
         {"tensor_parallel_size": 8}, devices=8, workload={**PRETRAIN, "sequence_length": 1001}),
]  # fmt: skip


def test_a_pair_that_an_engine_refuses_is_refused_by_name_and_its_way_out_is_open():
    for engine, field, way_out, fields in REFUSED:
        with pytest.raises(NotPossibleError) as refused:
            ask(engine=engine, **fields)
        words = refused.value.message
        assert refused.value.field == f"strategy.{field}", words
        assert all(name in words for name in way_out), words
        budget = way_out.get("max_batch_tokens")
        assert budget is None or f"max_batch_tokens to {budget} or more" in words

        assert ask(engine=engine, **{**fields, "strategy": {**fields["strategy"], **way_out}})


def test_a_search_with_a_pinned_pair_refuses_it_or_keeps_clear_of_it():
    refusals_met = 0
    for engine, field, _, fields in REFUSED:
        rest = {name: value for name, value in fields.items() if name != "strategy"}
        try:
            plans = search(engine=engine, pins=fields["strategy"], top=3, **rest).plans
        except NotPossibleError as refused:
            plans = ()
            refusals_met += refused.field == f"strategy.{field}"
        for plan in plans:  # the exact door takes what the search found
            assert ask(engine=engine, **rest, strategy=plan.strategy.stated)
    assert refusals_met > len(REFUSED) / 2


def test_every_row_has_a_source_an_engine_and_a_case():
    engines = set(list_engines())
    tried = {(engine, field) for engine, field, _, _ in REFUSED}
    for row in option_pairs():
        assert row.source, row
        assert row.engines <= engines, row
        field = row.field.removeprefix("strategy.")
        assert any((engine, field) in tried for engine in row.engines), row


def test_a_search_never_produces_a_refused_pair_and_finds_the_budget_of_a_pinned_one():
    for engine in ("vllm", "tensorrt_llm"):
        for workload, pins in ((LONG, {"chunked_prefill": False}), (MANY, {}), (PROMPT, {})):
            for plan in search(engine=engine, workload=workload, pins=pins, devices=8).plans:
                assert ask(engine=engine, workload=workload, devices=8,
                           strategy=plan.strategy.stated)  # fmt: skip
    best = search(workload=LONG, engine="vllm", pins={"chunked_prefill": False}).plans[0]
    assert best.strategy.max_batch_tokens >= 16_384
    plans = search(model=MIXTRAL, engine="megatron", devices=8, workload=PRETRAIN,
                   pins={"tensor_parallel_size": 2}).plans  # fmt: skip
    assert plans
    assert all(plan.strategy.sequence_parallel for plan in plans)


SERVED = st.fixed_dictionaries(
    {
        "tensor_parallel_size": st.sampled_from([1, 2, 4]),
        "pipeline_parallel_size": st.sampled_from([1, 2]),
        "chunked_prefill": st.sampled_from([None, True, False]),
        "max_batch_tokens": st.sampled_from([None, 512, 2048, 16_384]),
        "attention": st.sampled_from([None, "eager"]),
        "kv_cache_dtype": st.sampled_from([None, "int8"]),
        "speculative": st.sampled_from([None, DRAFT]),
    }
)
LOADS = st.one_of(
    st.builds(
        lambda prompt, callers, longest: {
            "kind": "serve", "input_tokens": prompt, "output_tokens": 100, "concurrency": callers,
            "max_request_tokens": longest,
        },
        st.sampled_from([100, 9000]), st.sampled_from([1, 4000]), st.sampled_from([None, 12_000]),
    ),
    st.just({"kind": "generate", "batch_size": 20_000, "input_tokens": 100, "output_tokens": 50}),
)  # fmt: skip
TRAINED = st.fixed_dictionaries(
    {
        "tensor_parallel_size": st.sampled_from([1, 2, 8]),
        "pipeline_parallel_size": st.sampled_from([1, 2]),
        "context_parallel_size": st.sampled_from([1, 2, 4]),
        "expert_parallel_size": st.sampled_from([1, 2, 8]),
        "sequence_parallel": st.booleans(),
        "virtual_pipeline_size": st.sampled_from([None, 2]),
        "zero_stage": st.sampled_from([0, 1, 2, 3]),
        "offload": st.sampled_from([None, AWAY["offload"], {"optimizer": "cpu"}]),
        "activation_recomputation": st.sampled_from(["none", "full"]),
    }
)


def exported(engine, fields):
    """Return the commands of a request's export; a refused request is no case."""
    try:
        estimate = ask(engine=engine, **fields)
    except PlannerError:
        assume(False)
    request = PlanRequest.model_validate(
        {name: value for name, value in document(**fields).items() if name != "strategy"}
    )
    plan = PlannedStrategy.model_validate(
        {**estimate.model_dump(), "engine": engine, "cluster": request.cluster}
    )
    return commands(engine, export(engine, export_case(request, plan)).text)


@settings(max_examples=80, deadline=None)
@given(
    engine=st.sampled_from(["vllm", "sglang", "tensorrt_llm", "llama_cpp"]),
    strategy=SERVED,
    workload=LOADS,
)
def test_an_export_of_a_served_strategy_holds_no_refused_pair(engine, strategy, workload):
    stated = {name: value for name, value in strategy.items() if value is not None}
    fields = {"model": LLAMA_8B, "devices": 8, "strategy": stated, "workload": workload}
    for command in exported(engine, fields):
        assert refusals(engine, command) == []


@settings(max_examples=80, deadline=None)
@given(
    model=st.sampled_from([LLAMA_8B, MIXTRAL]),
    strategy=TRAINED,
    tokens=st.sampled_from([4096, 1004]),
)
def test_an_export_of_a_trained_strategy_holds_no_refused_pair(model, strategy, tokens):
    stated = {name: value for name, value in strategy.items() if value is not None}
    if model == LLAMA_8B:
        stated.pop("expert_parallel_size")
    workload = {**PRETRAIN, "sequence_length": tokens}
    fields = {"model": model, "devices": 16, "strategy": stated, "workload": workload}
    for command in exported("megatron", fields):
        assert refusals("megatron", command) == []
