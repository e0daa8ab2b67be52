"""Generating one batch in our own runner: its times, its peak and its published rows."""

import pytest

from planner.catalog.models import get_model
from planner.cost.parameters import count_parameters
from planner.cost.weights import weight_bytes_per_element
from planner.fitting.generation_peaks import (
    PRIOR_BYTES,
    PeakCase,
    comparable_peaks,
    engine_of,
    fit_overhead,
    generation_request,
    generation_rows,
    left_out_generation,
    model_of,
    peak_cases,
)
from planner.fitting.serving_factors import SEEN
from tests.planner.asking import CPU, GENERATE, MIXTRAL, TINY, ask, held, search


def on_cpu(dtype="bf16", **workload):
    return ask(
        model=TINY, device=CPU, workload={**GENERATE, **workload}, strategy={"weight_dtype": dtype}
    )


def test_latency_is_one_prefill_and_a_step_per_further_token():
    found = on_cpu().performance
    expected = found.ttft_seconds + 63 * found.tpot_seconds
    assert found.latency_seconds == pytest.approx(expected)
    # Speeds are those of the whole batch.
    found = on_cpu(batch_size=4).performance
    assert found.prefill_tokens_per_second == pytest.approx(4 * 128 / found.ttft_seconds)
    assert found.decode_tokens_per_second == pytest.approx(4 / found.tpot_seconds)
    # One token has no gap.
    found = on_cpu(output_tokens=1).performance
    assert found.tpot_seconds is None
    assert found.latency_seconds == found.ttft_seconds
    # A batch that does not fit says memory.
    found = ask(workload={**GENERATE, "batch_size": 4096, "input_tokens": 8000})
    assert not found.fits
    assert found.bound_by == "memory_capacity"


def test_operators_bound_a_small_model_and_products_a_long_prompt():
    # Issuing operators dominates a small model.
    assert on_cpu().bound_by == "overhead"
    # Products dominate a long prompt.
    phase = on_cpu(batch_size=8, input_tokens=512).time_breakdown_seconds["prefill"]
    assert max(phase, key=phase.get) == "compute"
    # A slower operator slows every step.
    slow = {**CPU, "op_overhead_seconds": 5e-6}
    found = ask(model=TINY, device=slow, workload=GENERATE)
    assert found.performance.tpot_seconds > 3 * on_cpu().performance.tpot_seconds


def test_eager_kernels_save_memory_and_no_time_with_fewer_bits():
    for dtype in ["int8", "int4"]:
        plain, packed = on_cpu("bf16"), on_cpu(dtype)
        assert packed.memory.breakdown_bytes["weights"] < plain.memory.breakdown_bytes["weights"]
        assert packed.performance.tpot_seconds > plain.performance.tpot_seconds

    # int4 stands for NF4 in our own runner and its evidence is NF4's.
    assert "NF4" in on_cpu("int4").quality.evidence[0]


def test_what_a_host_measured_replaces_the_datasheet():
    # Measured rates are said to be measured with their date.
    sources = {term.source for term in on_cpu().terms if term.provenance == "measured"}
    assert sources == {"rates measured on this host on 2026-11-21"}
    # A measured device is surer than a datasheet.
    assert on_cpu().error_class == "same family"
    assert ask(workload=GENERATE).error_class == "datasheet only"
    # A measured stream rate replaces the share of the bandwidth.
    fast = {**CPU, "weight_stream_bytes_per_second": {"bf16": 100e9}}
    found = ask(model=TINY, device=fast, workload=GENERATE)
    assert found.performance.tpot_seconds < on_cpu().performance.tpot_seconds
    # What the host measured replaces the prior of the runtime.
    measured = {**CPU, "runtime_overhead_bytes": 380_000_000}
    found = ask(model=TINY, device=measured, workload=GENERATE)
    assert held(found, "runtime_overhead") == 380_000_000
    # Another engine keeps its own overhead.
    found = ask(model=TINY, device=measured, workload=GENERATE, engine="llama_cpp")
    assert held(found, "runtime_overhead") != 380_000_000


QWEN = "Qwen/Qwen2.5-0.5B"
WIDTH, INNER, VOCABULARY = 896, 4864, 151936
GIB = 1024**3


def held_by_one(engine="transformers", prompt=30720, answer=2048, **fields):
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


def test_a_batch_peaks_at_its_long_prompt_or_its_last_token():
    # A long prompt peaks in one feed forward block beside its cache.
    cache = 30720 * 24 * 2 * 2 * 64 * 2
    block = 30720 * (4 * WIDTH + 3 * INNER) * 2
    weights = 2 * count_parameters(get_model(QWEN)).total
    assert held_by_one() == pytest.approx(weights + cache + block + VOCABULARY * 6, rel=1e-3)

    # A long answer peaks at its last token.
    kept = 30721 * 24 * 2 * 2 * 64 * 2
    assert held_by_one(prompt=1, answer=30720) - held_by_one(prompt=1, answer=2) == pytest.approx(
        kept * 30718 / 30721, rel=1e-3
    )

    # A cache that is laid out at the start stands beside the widest step of the prompt.
    grown, laid_out = (held_by_one(engine) for engine in ("transformers", "gpt_fast"))
    assert laid_out - grown == pytest.approx(2048 * 24 * 2 * 2 * 64 * 2, rel=1e-6)

    # Old releases hold the logits of the whole prompt and a table in each layer.
    tables = 2 * 24 * 32768 * 64 * 2
    logits = 30720 * VOCABULARY * 6
    block = 30720 * (4 * WIDTH + 3 * INNER) * 2 + VOCABULARY * 6
    assert held_by_one("transformers_4.40") - held_by_one() == pytest.approx(
        tables + logits - block, rel=1e-3
    )


def test_packed_weights_carry_the_scales_of_their_groups():
    # int8 keeps scales only where it has groups.
    assert weight_bytes_per_element("int8") == 1.0
    assert weight_bytes_per_element("int8", 128) == pytest.approx(1 + 3 / 128)
    # Scales that are not quantised again take four bytes a group.
    assert weight_bytes_per_element("nf4", 64, whole_scales=True) == pytest.approx(0.5625)

    # A published spelling says the format and its groups.
    for spelling, dtype, group in [
        ("gptq-int4", "int4", 128),
        ("gptq-int8", "int8", 128),
        ("awq-int4", "int4", 128),
        ("bnb.nf4", "nf4", 64),
        ("bnb.int8", "int8", None),
    ]:
        strategy = ask(engine="transformers", strategy={"quantization": spelling}).strategy
        assert (strategy.weight_dtype, strategy.group_size) == (dtype, group)

    # An embedding beside packed weights is in fp32 where the plugin casts it.
    model = "meta-llama/Llama-2-7b-hf"
    packed = [
        ask(model=model, engine=engine, strategy={"quantization": "nf4"}).memory.breakdown_bytes
        for engine in ("litgpt", "exllamav2")
    ]
    assert packed[0]["weights"] - packed[1]["weights"] == pytest.approx(32000 * 4096 * 2, rel=1e-3)


def test_the_overhead_is_fitted_to_rows_of_its_own_kind():
    # The overhead of exact rows is what they say.
    rows = [case(tensors=size * GIB, measured=(size + 0.5) * GIB) for size in (4, 8, 16, 32)]
    assert fit_overhead(rows) == pytest.approx(0.5 * GIB)
    # Without rows an engine holds what is usual.
    assert fit_overhead([case(measured=0.0)]) == PRIOR_BYTES
    # A row of the device is foreseen from rows of the device.
    shown, handed_out = case(by_allocator=False), case()
    elsewhere = case(engine="other", by_allocator=False)
    assert comparable_peaks(shown, [handed_out, elsewhere]) == [elsewhere]


def test_what_is_left_out_has_no_say_in_peak_or_verdict():
    # The own rows of a model left out have no say.
    rest = [case(model="a"), case(model="a", row_id="q")]
    odd = case(model="b", measured=30 * GIB)
    found, _ = left_out_generation([*rest, odd], model_of, SEEN)
    assert next(row for row in found if row.part == "b").predicted == pytest.approx(11 * GIB, 1e-3)

    # A verdict says what was foreseen and what was.
    told = [case(model="a"), case(model="b", tensors=90 * GIB, measured=0.0, ran=False)]
    _, verdicts = left_out_generation(told, model_of, SEEN)
    assert verdicts == [(False, False)]


def test_every_row_that_generates_is_asked_as_it_ran():
    assert len(peak_cases()) == len(list(generation_rows())) > 200
    # A row before the release runs in the older one.
    row = next(r for r in generation_rows() if r["source_id"] == "qwen2-speed")
    assert engine_of(row) == "transformers_4.40"
    assert engine_of({**row, "source_date": "2024-10-01"}) == "transformers"
    # A row without groups shares a scale among all inputs.
    row = next(r for r in generation_rows() if " g- " in r["quantization"])
    assert generation_request(row)["strategy"]["group_size"] == 16384


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


OFFLINE = {"kind": "generate", "batch_size": 8, "input_tokens": 128, "output_tokens": 32}


def test_a_mixture_too_large_for_a_card_gets_an_answer():
    for engine in [None, "vllm", "transformers"]:
        found = search(model=MIXTRAL, device="rtx-4090", workload=OFFLINE, engine=engine)
        assert found.plans or found.rejected
        assert all(one.estimate.fits for one in found.suggestions)


def test_an_engine_that_schedules_steps_queues_the_prompts_that_memory_does_not_hold():
    batch = {"kind": "generate", "batch_size": 1000, "input_tokens": 1024, "output_tokens": 256}
    fields = {"device": "rtx-4090", "workload": batch}
    for plan in search(**fields, engine="vllm").plans:
        figures = plan.performance
        assert figures.max_concurrency < 1000
        assert figures.latency_seconds * figures.requests_per_second == pytest.approx(1000)
        assert any("vLLM queues the rest" in warning for warning in plan.warnings)
    assert search(**{**fields, "workload": {**batch, "at_once": True}}, engine="vllm").plans == ()

    # A runner that holds its batch as a whole is told of an engine that queues.
    runner = search(**fields)
    assert runner.plans == ()
    assert runner.suggestions[0].changes == {"engine": "vllm"}


def test_experts_in_host_memory_are_scored_as_columns_too():
    offload = {"offload": {"weights_cpu": 0.8}}
    found = search(model=MIXTRAL, device="rtx-4090", devices=2, workload=OFFLINE, pins=offload)
    assert found.searched.strategies > 0
    assert all(plan.strategy.offload.weights_cpu == 0.8 for plan in found.plans)
