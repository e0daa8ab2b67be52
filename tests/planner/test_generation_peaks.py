"""The peak of generating one batch: its moments by hand, its rows, and rows it never saw."""

import pytest

from planner.catalog.models import get_model
from planner.cost.parameters import count_parameters
from planner.cost.weights import weight_bytes_per_element
from planner.fitting.generation_peaks import (
    PRIOR_BYTES,
    PeakCase,
    alike,
    engine_of,
    fit_overhead,
    generation_request,
    generation_rows,
    left_out_generation,
    model_of,
    peak_cases,
)
from planner.fitting.serving.factors import SEEN
from tests.planner.asking import ask

QWEN = "Qwen/Qwen2.5-0.5B"
WIDTH, INNER, VOCABULARY = 896, 4864, 151936
GIB = 1024**3


def held(engine="transformers", prompt=30720, answer=2048, **fields):
    """Return what generating one sequence holds, without the runtime."""
    lengths = {"input_tokens": prompt, "output_tokens": answer}
    workload = {"kind": "generate", "batch_size": 1, **lengths}
    memory = ask(model=QWEN, workload=workload, engine=engine, **fields).memory
    return memory.per_device_peak_bytes - memory.breakdown_bytes.get("runtime_overhead", 0)


def case(tensors=10 * GIB, measured=11 * GIB, **fields):
    """Return a row of one engine."""
    plain = {"row_id": "r", "engine": "e", "source": "s", "model": "m", "ran": True}
    plain |= {"usable_bytes": 80 * GIB, "by_allocator": True}
    return PeakCase(tensor_bytes=tensors, measured_bytes=measured, **{**plain, **fields})


def test_a_long_prompt_peaks_in_one_feed_forward_block_beside_its_cache():
    cache = 30720 * 24 * 2 * 2 * 64 * 2
    block = 30720 * (4 * WIDTH + 3 * INNER) * 2
    weights = 2 * count_parameters(get_model(QWEN)).total

    assert held() == pytest.approx(weights + cache + block + VOCABULARY * 6, rel=1e-3)


def test_a_long_answer_peaks_at_its_last_token():
    cache = 30721 * 24 * 2 * 2 * 64 * 2

    assert held(prompt=1, answer=30720) - held(prompt=1, answer=2) == pytest.approx(
        cache * 30718 / 30721, rel=1e-3
    )


def test_a_cache_that_is_laid_out_at_the_start_stands_beside_the_prompts_widest_step():
    grown, laid_out = (held(engine) for engine in ("transformers", "gpt_fast"))

    assert laid_out - grown == pytest.approx(2048 * 24 * 2 * 2 * 64 * 2, rel=1e-6)


def test_old_releases_hold_the_logits_of_the_whole_prompt_and_a_table_in_each_layer():
    tables = 2 * 24 * 32768 * 64 * 2
    logits = 30720 * VOCABULARY * 6
    block = 30720 * (4 * WIDTH + 3 * INNER) * 2 + VOCABULARY * 6

    assert held("transformers_4.40") - held() == pytest.approx(tables + logits - block, rel=1e-3)


def test_int8_keeps_scales_only_where_it_has_groups():
    assert weight_bytes_per_element("int8") == 1.0
    assert weight_bytes_per_element("int8", 128) == pytest.approx(1 + 3 / 128)


def test_scales_that_are_not_quantised_again_take_four_bytes_a_group():
    assert weight_bytes_per_element("nf4", 64, whole_scales=True) == pytest.approx(0.5625)


@pytest.mark.parametrize(
    ("spelling", "dtype", "group"),
    [
        ("gptq-int4", "int4", 128),
        ("gptq-int8", "int8", 128),
        ("awq-int4", "int4", 128),
        ("bnb.nf4", "nf4", 64),
        ("bnb.int8", "int8", None),
    ],
)
def test_a_published_spelling_says_the_format_and_its_groups(spelling, dtype, group):
    strategy = ask(engine="transformers", strategy={"quantization": spelling}).strategy

    assert (strategy.weight_dtype, strategy.group_size) == (dtype, group)


def test_an_embedding_beside_packed_weights_is_in_fp32_where_the_plugin_casts_it():
    model = "meta-llama/Llama-2-7b-hf"
    packed = [
        ask(model=model, engine=engine, strategy={"quantization": "nf4"}).memory.breakdown_bytes
        for engine in ("litgpt", "exllamav2")
    ]

    assert packed[0]["weights"] - packed[1]["weights"] == pytest.approx(32000 * 4096 * 2, rel=1e-3)


def test_the_overhead_of_exact_rows_is_what_they_say():
    rows = [case(tensors=size * GIB, measured=(size + 0.5) * GIB) for size in (4, 8, 16, 32)]

    assert fit_overhead(rows) == pytest.approx(0.5 * GIB)


def test_without_rows_an_engine_holds_what_is_usual():
    assert fit_overhead([case(measured=0.0)]) == PRIOR_BYTES


def test_a_row_of_the_device_is_foreseen_from_rows_of_the_device():
    shown, handed_out = case(by_allocator=False), case()
    elsewhere = case(engine="other", by_allocator=False)

    assert alike(shown, [handed_out, elsewhere]) == [elsewhere]


def test_a_left_out_models_own_rows_have_no_say():
    rest = [case(model="a"), case(model="a", row_id="q")]
    odd = case(model="b", measured=30 * GIB)

    found, _ = left_out_generation([*rest, odd], model_of, SEEN)

    assert next(row for row in found if row.part == "b").predicted == pytest.approx(11 * GIB, 1e-3)


def test_a_verdict_says_what_was_foreseen_and_what_was():
    rows = [case(model="a"), case(model="b", tensors=90 * GIB, measured=0.0, ran=False)]

    _, verdicts = left_out_generation(rows, model_of, SEEN)

    assert verdicts == [(False, False)]


def test_a_row_before_the_release_runs_in_the_older_one():
    row = next(r for r in generation_rows() if r["source_id"] == "qwen2-speed")

    assert engine_of(row) == "transformers_4.40"
    assert engine_of({**row, "source_date": "2024-10-01"}) == "transformers"


def test_a_row_without_groups_shares_a_scale_among_all_inputs():
    row = next(r for r in generation_rows() if " g- " in r["quantization"])

    assert generation_request(row)["strategy"]["group_size"] == 16384


def test_every_row_that_generates_is_asked():
    assert len(peak_cases()) == len(list(generation_rows())) > 200


def test_half_of_the_unseen_models_peaks_are_foreseen_within_a_thirtieth():
    found, _ = left_out_generation(peak_cases(), model_of, SEEN)
    errors = sorted(abs(row.error) for row in found)

    assert errors[len(errors) // 2] < 1 / 30


def test_a_verdict_leaves_room_for_the_context_that_allocators_do_not_count():
    workload = {"kind": "generate", "batch_size": 1, "input_tokens": 512, "output_tokens": 128}
    card = {"device": "rtx-4060-ti-16gb"}
    found = ask(
        model="meta-llama/Llama-3.1-8B", cluster=card, workload=workload, engine="transformers"
    )

    assert found.memory.per_device_peak_bytes < found.memory.capacity_bytes * 0.97
    assert not found.fits
