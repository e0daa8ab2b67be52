"""Random valid questions keep the laws; ``python -m tests.planner.laws SEED COUNT`` asks more.

The last test asks new questions in every run, the gate's too. Their seed is that of the order,
which every run prints at its end: ``--randomly-seed=N`` repeats them.
"""

import json
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.planner.laws import checkers, growth
from tests.planner.laws.fields import BUILT, SPECS, value_of
from tests.planner.laws.questions import Questions, fresh_questions

SEEDS = st.integers(0, 2**32)
few, fewer = settings(max_examples=30), settings(max_examples=5)


def violations(documents, *laws):
    answers = [checkers.estimated(document) for document in documents]
    found = [
        words
        for document, answer in zip(documents, answers, strict=True)
        for checker in checkers.OF_ONE_ANSWER
        if answer is not None
        for words in checker(document, answer)
    ]
    return found + [words for law in laws for words in law(documents, answers)]


@few
@given(seed=SEEDS)
def test_an_answer_fits_within_memory_has_ordered_figures_and_keeps_to_physics(seed):
    assert violations([Questions(seed).estimate()]) == []


@few
@given(seed=SEEDS)
def test_the_more_is_offloaded_the_slower(seed):
    assert violations(Questions(seed).offloads(), checkers.offload_is_no_faster) == []


@few
@given(seed=SEEDS)
def test_a_batch_of_one_takes_the_memory_of_one_caller(seed):
    assert violations(Questions(seed).one_caller(), checkers.one_memory) == []


@few
@given(seed=SEEDS)
def test_the_busiest_rank_holds_whole_sequences(seed):
    assert violations(Questions(seed).batches(), checkers.whole_sequences) == []


def test_a_rank_with_more_sequences_than_it_holds_fills_its_cache():
    """Each rank holds 1.8 prompts: the fifth of five on four ranks waits as those of eight do."""
    batch = {"kind": "generate", "input_tokens": 32_768, "output_tokens": 128}
    documents = [
        on(
            "a10g",
            "vllm",
            model="baidu/ERNIE-4.5-VL-28B-A3B-PT",
            workload={**batch, "batch_size": size},
            strategy={"data_parallel_size": 4, "tensor_parallel_size": 1},
        )
        for size in (5, 8)
    ]
    for document in documents:
        document["cluster"]["devices_per_node"] = 4
    assert violations(documents, checkers.whole_sequences) == []


@fewer
@given(seed=SEEDS)
def test_a_limit_fits_and_one_step_beyond_does_not(seed):
    assert list(checkers.limit_is_the_limit(Questions(seed).inverse())) == []


@fewer
@given(seed=SEEDS)
def test_every_export_starts_the_devices_of_the_plan(seed):
    questions = Questions(seed)
    assert list(checkers.exports_start_the_plan(questions.plan())) == []
    assert list(checkers.exports_start_the_plan(questions.plan(training=True))) == []


SMOLLM3 = {
    "id": "smollm3-3b",
    "model_type": "smollm3",
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 128256,
    "max_position_embeddings": 65536,
    "tie_word_embeddings": True,
}
QUEUED = {"kind": "generate", "input_tokens": 8192, "output_tokens": 256, "batch_size": 256}


def on(device, engine, **fields):
    return {"cluster": {"device": device}, "engine": engine, **fields}


def test_longer_prompts_and_more_layers_take_no_less_memory_while_requests_wait():
    on_vllm = on("rtx-a4500", "vllm", model="Qwen/Qwen3-1.7B")
    for fields, less, more in (
        (on_vllm, {"workload": {**QUEUED, "input_tokens": 4096}}, {"workload": QUEUED}),
        (
            on("rtx-3070-ti", "llama_cpp", strategy={"quantization": "gguf:q4_k_m"}),
            {"model": {**SMOLLM3, "num_hidden_layers": 36}, "workload": QUEUED},
            {"model": {**SMOLLM3, "num_hidden_layers": 72}, "workload": QUEUED},
        ),
        *(
            (
                on("rtx-a4500", "vllm", model="Qwen/Qwen3-1.7B"),
                {"workload": {"kind": "serve", **lengths, **load, "input_tokens": 4096}},
                {"workload": {"kind": "serve", **lengths, **load, "input_tokens": 8192}},
            )
            for lengths in ({"output_tokens": 256},)
            for load in ({"concurrency": 300}, {"burst_requests": 256})
        ),
    ):
        documents = [{"strategy": {}, **fields, **each} for each in (less, more)]
        assert violations(documents, growth.takes_no_less_memory) == [], documents


def test_many_short_prompts_keep_to_the_rate_that_the_engine_reaches():
    short = {"kind": "serve", "input_tokens": 17, "output_tokens": 1}
    for device, engine, model, load in (
        ("apple-m1-8gpu", "llama_cpp", "google/gemma-4-E2B-it", {"concurrency": 16}),
        ("rtx-a4000", "vllm", "facebook/opt-13b", {"request_rate_per_second": 1000}),
    ):
        document = on(device, engine, model=model, workload={**short, **load}, strategy={})
        answer = checkers.estimated(document)
        assert list(growth.keeps_to_reached_rate(document, answer)) == [], document


def test_no_estimate_fits_beyond_the_longest_context_of_a_batch():
    batch = {"kind": "generate", "input_tokens": 512, "output_tokens": 16}
    one = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "kv_cache_dtype": "bf16"}
    for device, engine, model, size in (
        ("t4", "ktransformers", "google/gemma-2-9b", 4),
        ("rtx-4090", "vllm", "meta-llama/Llama-3.1-8B", 4),
    ):
        document = on(device, engine, model=model, workload={**batch, "batch_size": size})
        document |= {"question": "longest_context", "pins": {**one, "weight_dtype": "int8"}}
        assert list(growth.no_estimate_fits_beyond(document)) == [], document


@few
@given(seed=SEEDS)
def test_what_grows_takes_no_less_memory(seed):
    assert violations(growth.grown(Questions(seed)), growth.takes_no_less_memory) == []


@few
@given(seed=SEEDS)
def test_the_shortest_answers_keep_to_the_rate_that_the_engine_reaches(seed):
    document = growth.shortest(Questions(seed))
    answer = checkers.estimated(document)
    assert answer is None or list(growth.keeps_to_reached_rate(document, answer)) == []


@fewer
@given(seed=SEEDS)
def test_no_estimate_fits_beyond_the_longest_context_with_a_pinned_layout(seed):
    assert list(growth.no_estimate_fits_beyond(growth.pinned_limit(Questions(seed)))) == []


def test_every_field_of_a_request_is_drawn():
    draw = Questions(0).draw
    own = {"input_tokens": 8, "output_tokens": 8, "sequence_length": 64, "global_batch_size": 8}
    for spec in SPECS:
        for name in set(spec.model_fields) - BUILT:
            value_of(draw, spec, name, own)  # names the field that has no drawer


QUESTIONS, PARTS = 270, 7


@pytest.mark.parametrize("part", range(PARTS))
def test_a_fresh_question_has_an_answer_or_a_refusal_in_words(part, request):
    seed = request.config.getoption("randomly_seed")
    for question in islice(fresh_questions(seed, QUESTIONS, quick=True), part, None, PARTS):
        where = f"{question.ask} {question.seed}: {json.dumps(question.document)}"
        try:
            _, words = checkers.violations_of(question.ask, question.document)
        except Exception as error:
            raise AssertionError(f"{error!r}; {where}") from error
        assert words == [], where
