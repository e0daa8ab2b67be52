"""Single streams: published speeds as requests, what is fitted to them, what holds them back."""

from dataclasses import replace

import numpy as np
import pytest

from planner.api import estimate
from planner.catalog.devices import get_device
from planner.catalog.engines import get_engine
from planner.catalog.reading import data_json
from planner.cost.quantity import Ledger
from planner.cost.roofline import power_wait_seconds
from planner.fitting.decode_fitting import (
    FAMILY_STIFFNESS,
    LOWER_BOUNDS,
    PARTS,
    UPPER_BOUNDS,
    common_factors,
    engine_factors,
    fit_family,
    fit_streams,
    fit_target_chip,
    fitted_here,
    left_out,
    spread_of,
    stream_cases,
)
from planner.fitting.evidence import (
    ENOUGH_THREADS,
    PREFILL,
    engine_of,
    format_of,
    inference_request,
    model_named,
    speed_rows,
)
from planner.specs.cluster import DeviceSpec
from planner.specs.estimate import EstimateRequest
from planner.workload.generate import generate
from planner.workload.resolve import resolve
from tests.planner.asking import LLAMA_8B, ask, document

ONES = np.ones(len(PARTS))
STREAM = {"kind": "generate", "batch_size": 1, "input_tokens": 512, "output_tokens": 128}


def rows_of(source):
    return [row for row in speed_rows() if row["source_id"] == source]


def cases_of(engine, group="decode", kernels="gpu"):
    return [case for case in stream_cases() if case.place == (engine, group, kernels)]


def streaming(device, engine="llama_cpp", quantization="gguf:q4_k_m", model=LLAMA_8B, **fields):
    return ask(
        model=model,
        device=device,
        engine=engine,
        workload=STREAM,
        strategy={"quantization": quantization},
        **fields,
    ).performance


def streaming_wide(device):
    return ask(device=device, engine="llama_cpp", workload=STREAM).performance


def test_names_are_read_from_the_sources_spelling_and_shared_cards_are_a_pipeline():
    for written, expected in (
        ("gguf:q4_k_m (ollama default, assumed)", {"quantization": "gguf:q4_k_m"}),
        ("exl2 4.25 bpw", {"quantization": "exl2:4.25"}),
        ("fp16", {"weight_dtype": "fp16"}),
        ("quip# 2-bit", {"quantization": "quip:2.0"}),
        ("mlx q4", {"weight_dtype": "int4", "group_size": 64}),
        ("mlx q6", {"quantization": "gguf:6.5"}),
        ("mlx q5 g32", {"quantization": "gguf:6"}),
        ("gguf mix, file 307.20 GiB", {}),
    ):
        assert format_of({"weight_dtype": written}) == expected, (written, expected)

    found = format_of({"weight_dtype": "int4 (awq g128)"})
    assert found == {"weight_dtype": "int4", "quantization": "awq", "group_size": 128}
    assert model_named("Llama2-7B") == "meta-llama/Llama-2-7b"
    assert model_named("meta-llama/Llama-2-70b") == "meta-llama/Llama-2-70b"

    row = next(row for row in rows_of("xdai-llamacpp-2024-05") if row["num_gpus"] == "4")
    assert inference_request(row)["strategy"]["pipeline_parallel_size"] == 4
    assert not any("SUSPECT" in row["notes"] for row in speed_rows())


def test_a_row_of_llama_cpp_is_asked_with_its_build_or_with_that_of_its_day():
    for version, date, expected in (
        ("b9187 (0253fb21f)", "2026-05-16", "llama_cpp b9187"),
        ("858f6b73 (2797)", "2024-05", "llama_cpp b2797"),
        ("May 2024 (no flash attention flag)", "2024-05", "llama_cpp b2800"),
        ("before #14903", "2025-08", "llama_cpp b6000"),
        ("", "2026-07", "llama_cpp"),
    ):
        row = {"engine": "llama_cpp", "engine_version": version, "date": date}
        assert engine_of(row) == expected, version
    assert engine_of({"engine": "ollama/llama_cpp"}) == "ollama/llama_cpp"


def test_starved_runs_teach_nothing():
    rows = list(speed_rows())
    threads = [int(row["mode"].split()[1]) for row in rows if row["mode"].startswith("CPU, ")]
    assert threads
    assert min(threads) >= ENOUGH_THREADS
    # The cores of a chip say nothing of its GPU.
    on_cores = [row["gpu_slug"] for row in rows if row["mode"] == "single stream CPU"]
    assert on_cores
    assert all(slug.startswith("cpu-") for slug in on_cores)


# Decode of one stream, in tokens per second, that no factor was fitted to. Sources:
# ikawrakow/ik_llama.cpp#1075, kyuz0/amd-strix-halo-toolboxes#76 and docs/results.json (of which
# the fit has other models), lhl/strix-halo-testing#33,
# intel/ipex-llm#12991, ikawrakow/ik_llama.cpp#1593 (experts of 14 of 40 layers on the host, whose
# two channels of DDR4-3200 are assumed).
Q4, Q5 = {"quantization": "gguf:q4_k_m"}, {"quantization": "gguf:q5_k_m"}
ON_HOST = {**Q4, "offload": {"weights_cpu": 0.321}}
UNSEEN = (
    ("llama_cpp", "cpu-ryzen-7950x", "Qwen/Qwen3-30B-A3B", Q4, 27.2),
    ("llama_cpp", "cpu-ryzen-7950x", "openai/gpt-oss-20b", {}, 21.5),
    ("llama_cpp", "strix-halo-395", "google/gemma-4-31B-it", Q4, 11.0),
    ("llama_cpp", "strix-halo-395", "Qwen/Qwen3.5-27B", Q4, 11.6),
    ("llama_cpp", "strix-halo-395", "Qwen/Qwen3.5-122B-A10B", Q5, 22.3),
    ("llama_cpp", "strix-halo-395", "openai/gpt-oss-120b", {}, 47.4),
    ("llama_cpp", "arc-b580", "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", Q4, 66.5),
    ("llama_cpp", "rtx-5060-ti-16gb", "Qwen/Qwen3.5-35B-A3B", ON_HOST, 52.0),
    ("ik_llama_cpp", "rtx-5060-ti-16gb", "Qwen/Qwen3.5-35B-A3B", ON_HOST, 62.3),
)


@pytest.mark.parametrize(("engine", "device", "model", "strategy", "measured"), UNSEEN)
def test_streams_of_unseen_reports_are_within_a_quarter(engine, device, model, strategy, measured):
    host = {"host_memory_bytes": 64 * 2**30, "host_memory_bandwidth_bytes_per_second": 51.2e9}
    answer = ask(
        model=model,
        cluster={"device": device, "devices_per_node": 1}
        | (host if "offload" in strategy else {}),
        engine=engine,
        workload=STREAM,
        strategy=strategy,
    )
    assert answer.performance.decode_tokens_per_second == pytest.approx(measured, rel=0.25)


def test_a_format_of_more_bits_decodes_slower_and_a_width_of_one_source_is_told():
    formats = ("gguf:q4_k_m", "gguf:q5_k_m", "gguf:q6_k", "gguf:q8_0")
    speeds = [streaming("rtx-4090", quantization=name).tpot_seconds for name in formats]
    speeds.append(streaming_wide("rtx-4090").tpot_seconds)
    assert speeds == sorted(speeds)

    # Decode of exllamav2's 8-bit weights is of one table on one device, of its 4-bit ones not.
    widths = {}
    for dtype, is_told in (("int8", True), ("int4", False)):
        weights = {"weight_dtype": dtype}
        answer = ask(device="rtx-4090", engine="exllamav2", workload=STREAM, strategy=weights)
        told = [one for one in answer.warnings if "one published source" in one]
        assert any("decode" in one for one in told) == is_told, dtype
        low, high = answer.interval["decode_tokens_per_second"]
        widths[dtype] = high / low
    assert widths["int8"] > widths["int4"]


def test_the_estimate_says_what_the_factors_say_and_none_beats_the_bandwidth():
    row = rows_of("xdai-llamacpp-2024-05")[0]
    case = next(case for case in stream_cases() if case.source == row["source_id"])
    found = estimate(EstimateRequest.model_validate(inference_request(row))).performance
    assert found.tpot_seconds == pytest.approx(case.seconds(fitted_here(case)), rel=2e-3)
    for case in stream_cases():
        factors = fitted_here(case)
        assert np.all(factors >= LOWER_BOUNDS - 1e-9)
        assert np.all(factors <= UPPER_BOUNDS + 1e-9)


def test_without_rows_the_physics_stays_and_few_rows_stay_near_their_prior():
    assert np.array_equal(fit_streams(()), ONES)
    prior = ONES * 1.3
    one = cases_of("llama_cpp")[:1]
    assert np.abs(np.log(fit_streams(one, prior) / prior)).sum() < 2


def test_decode_of_llama_cpp_is_within_a_tenth_for_a_card_left_out_too():
    errors = [abs(case.error(fitted_here(case))) for case in cases_of("llama_cpp")]
    assert np.median(errors) < 0.05
    assert np.median([abs(case.error(ONES)) for case in cases_of("llama_cpp")]) > 0.1

    for card in ("l40s", "rtx-6000-ada"):
        errors = [
            error
            for case, error in left_out(cases_of("llama_cpp"), lambda case: case.device)
            if case.device == card
        ]
        assert np.median(np.abs(errors)) < 0.12, card

    cases = [case for case in stream_cases() if case.engine == "gpt_fast"]
    fitted = data_json("factors.json")["engines"]
    kept, common = (fitted[name]["stream_factors"] for name in ("gpt_fast", "common_serving"))
    assert kept == engine_factors(cases, common)


def test_cards_families_and_aliases_take_what_was_measured_on_their_like():
    factors = engine_factors([case for case in stream_cases() if case.engine == "llama_cpp"])
    assert factors["turing"]["prefill_linear"] == factors["gpu"]["prefill_linear"]
    case = cases_of("llama_cpp")[0]
    few, many = ([(case, float(index >= good)) for index in range(10)] for good in (8, 5))
    assert spread_of(few) < spread_of(many)
    assert get_engine("ollama/llama_cpp", "gpu") == get_engine("llama_cpp", "gpu")

    for device, family in (
        ("rtx-4090", "ada"), ("l40s", "ada"), ("l4", "ada"), ("rtx-6000-ada", "ada"),
        ("a40", "ampere-graphics"), ("a100-sxm-80gb", "ampere"), ("h100-sxm-80gb", "hopper"),
        ("t4", "turing"), ("apple-m3-ultra", "apple"), ("cpu-ryzen-7950x", "cpu"),
        ("mi300x", "cdna"),
    ):  # fmt: skip
        assert get_device(device).family == family, (device, family)
    for device, kernels in (
        ("rtx-4090", "gpu"), ("h100-sxm-80gb", "gpu"), ("gb10-dgx-spark", "gb10"), ("arc-b580", "arc"),
        ("strix-halo-395", "rdna"), ("rx-7900-xtx", "rdna"), ("apple-m3-max", "apple"),
    ):  # fmt: skip
        assert get_device(device).kernels == kernels, (device, kernels)

    cards = {name: get_device(name).halves_wide_sums for name in ("rtx-4090", "rtx-6000-ada")}
    assert cards == {"rtx-4090": True, "rtx-6000-ada": False}
    # A P40 computes 64 times slower in fp16 than in fp32: kernels take the wide units.
    assert streaming("p40").prefill_tokens_per_second > 200


def test_chips_of_other_kernels_share_no_factor():
    cases = [case for case in stream_cases() if case.engine == "llama_cpp"]
    for kernels in ("apple", "rdna", "gb10", "cpu"):
        target = next(case for case in cases if case.kernels == kernels)
        alone = [case for case in cases if case.kernels == kernels]
        assert np.array_equal(fit_target_chip(cases, target), fit_target_chip(alone, target))

    fitted = data_json("factors.json")["engines"]
    for engine, fields in fitted.items():
        places = fields.get("stream_factors", {}).keys() & {"apple", "rdna", "gb10"}
        assert "uma" not in places or len(places) > 1, engine  # one of them speaks for itself


def test_a_batch_is_issued_as_ever_and_one_stream_replays_what_was_recorded():
    two = {"device": "h100-sxm-80gb", "devices": 2}
    layout = {"pipeline_parallel_size": 2, "data_parallel_size": 1}

    def rate(engine, batch_size):
        workload = {**STREAM, "batch_size": batch_size}
        answer = ask(engine=engine, workload=workload, strategy=layout, model=LLAMA_8B, **two)
        return answer.performance.decode_tokens_per_second

    assert rate("llama_cpp", 16) == rate("llama_cpp b2700", 16)
    assert rate("llama_cpp", 1) > 1.1 * rate("llama_cpp b2700", 1)
    assert rate("ollama 0.32.1", 1) == rate("llama_cpp", 1)  # a front end's numbers are its own
    for device, build, replays in (("t4", "b6000", False), ("t4", "", True), ("p40", "", False)):
        times = [streaming(device, f"llama_cpp {each}").tpot_seconds for each in (build, "b2700")]
        assert (times[0] < 0.99 * times[1]) == replays, (device, build)

    # Rows of single streams that replay say next to nothing of steps that do not.
    cases = cases_of("llama_cpp")
    eager = [case for case in cases if not case.is_replayed]
    assert len(cases) - len(eager) > 150
    for family in ("hopper", "ampere", "ada", "ampere-graphics"):
        for width, most in (("wide", 0.05), ("4bit", 0.08)):
            case = next(c for c in eager if (c.family, c.width) == (family, width))
            before = case.seconds(fit_target_chip(eager, case))
            assert case.seconds(fitted_here(case)) == pytest.approx(before, rel=most), family


def test_a_release_before_the_present_kernels_has_factors_of_its_own():
    def prefill(engine):
        return streaming("strix-halo-395", engine=engine).prefill_tokens_per_second

    assert prefill("llama_cpp b6400") < 0.9 * prefill("llama_cpp b9187")
    assert prefill("llama_cpp") == prefill("llama_cpp b9187")
    engines = {
        name: get_engine(f"llama_cpp {name}", "gpu") for name in ("b2700", "b6000", "b9187")
    }
    assert [engine.score_bytes for engine in engines.values()] == [16, 16, 0]


def test_a_gpu_measured_as_healthy_streams_as_published_and_a_slower_one_in_proportion():
    published = get_device("rtx-4090")
    bandwidth = published.memory_bandwidth_bytes_per_second
    for engine in ("llama_cpp", "gpt_fast", "torch", "vllm"):
        base = streaming("rtx-4090", engine=engine).tpot_seconds
        for ratio, issue_s, least, most in (
            (0.9, 7e-6, 0.98, 1.02),  # what a micro-benchmark finds on a healthy one
            (0.9, 2e-6, 0.98, 1.02),  # a fast host is not known to gain
            (0.45, 7e-6, 1.0, 2.02),
            (0.45, 14e-6, 1.0, 2.02),
        ):
            own = {
                **published.model_dump(),
                "provenance": "measured",
                "memory_bandwidth_bytes_per_second": ratio * bandwidth,
                "op_overhead_seconds": issue_s,
            }
            found = streaming(DeviceSpec.model_validate(own), engine=engine).tpot_seconds
            assert least <= found / base <= most, (engine, ratio, issue_s, found / base)


def test_long_prompts_keep_every_stage_busy_and_a_short_one_visits_them_in_turn():
    long = {**STREAM, "input_tokens": 8192}
    speeds = []
    for devices in (1, 4):
        fields = {"device": "rtx-4090", "devices": devices, "engine": "llama_cpp"}
        strategy = {"pipeline_parallel_size": devices, "data_parallel_size": 1}
        found = ask(model=LLAMA_8B, workload=long, strategy=strategy, **fields)
        speeds.append(found.performance.prefill_tokens_per_second)
    assert 2.5 < speeds[1] / speeds[0] < 4

    strategy = {"pipeline_parallel_size": 4, "data_parallel_size": 1}
    fields = {"device": "rtx-4090", "engine": "llama_cpp", "workload": STREAM}
    one, four = ask(**fields), ask(**fields, devices=4, strategy=strategy)
    assert four.performance.ttft_seconds >= one.performance.ttft_seconds


PROMPT = {"kind": "generate", "batch_size": 1, "input_tokens": 4096, "output_tokens": 16}


WRITES_SCORES = "llama_cpp b2800"


def asked(device="rtx-6000-ada", engine="llama_cpp", **fields):
    strategy = {"quantization": "gguf:q4_k_m"}
    return document(
        model=LLAMA_8B, device=device, engine=engine, workload=PROMPT, strategy=strategy, **fields
    )


def recorded(**fields):
    setting, ledger = resolve(EstimateRequest.model_validate(asked(**fields))), Ledger()
    generate(setting, setting.workload, ledger)
    return {(entry.group, entry.key): entry for entry in ledger.entries}


def prefill_cases(engine="llama_cpp"):
    return [c for c in stream_cases() if c.place == (engine, "prefill", "gpu")]


def test_products_wait_for_power_where_the_peak_is_high_and_decode_does_not():
    waits = [
        power_wait_seconds(
            work_flops=7e14, power_watts=350.0, flops_per_joule=1e12, products_s=products
        )
        for products in (0.5, 3.0)
    ]

    assert waits == [1.5, 0.0]

    found = recorded(device="rtx-6000-ada")
    assert found["prefill", "linear_power"].value > 0
    assert ("decode", "linear_power") not in recorded(device="rtx-6000-ada")


def test_a_lower_power_limit_reads_prompts_more_slowly():
    card = get_device("rtx-6000-ada")
    fields = {"engine": "llama_cpp", "workload": PROMPT}
    speeds = [
        ask(device=card.model_copy(update={"tdp_watts": watts}), **fields).performance
        for watts in (150.0, 300.0)
    ]
    assert speeds[0].prefill_tokens_per_second < 0.8 * speeds[1].prefill_tokens_per_second
    assert speeds[0].tpot_seconds == speeds[1].tpot_seconds


def test_a_measured_card_or_one_without_a_published_limit_is_not_held_back():
    card = {**get_device("rtx-6000-ada").model_dump(), "provenance": "measured"}
    assert ("prefill", "linear_power") not in recorded(device=card)
    card = get_device("rtx-6000-ada").model_copy(update={"tdp_watts": None})
    assert ("prefill", "linear_power") not in recorded(device=card.model_dump(exclude_none=True))


def test_scores_that_are_written_grow_with_the_square_of_the_prompt_in_unfused_prefill():
    seconds = []
    for tokens in (2048, 4096):
        request = {**asked(engine=WRITES_SCORES), "workload": {**PROMPT, "input_tokens": tokens}}
        setting, ledger = resolve(EstimateRequest.model_validate(request)), Ledger()
        generate(setting, setting.workload, ledger)
        seconds.append(ledger.value_of("prefill", "scores"))

    assert seconds[1] / seconds[0] == pytest.approx(4, rel=1e-3)
    assert ("prefill", "scores") not in recorded(engine="exllamav2")
    assert ("prefill", "scores") not in recorded()
    assert ("decode", "scores") not in recorded(engine=WRITES_SCORES)


def test_long_prompts_lose_more_speed_where_scores_are_written():
    losses = []
    for tokens in (512, 8192):
        found = ask(
            device="a100-pcie-80gb",
            engine=WRITES_SCORES,
            workload={**PROMPT, "input_tokens": tokens},
        )
        losses.append(found.performance.prefill_tokens_per_second)

    assert losses[1] < 0.75 * losses[0]


def test_the_estimate_reads_prompts_as_the_fitted_factors_say():
    row = next(
        r
        for r in speed_rows()
        if r["metric"] == PREFILL and r["gpu_slug"] == "rtx-6000-ada" and r["num_gpus"] == "1"
    )
    case = next(
        c
        for c in prefill_cases()
        if c.device == "rtx-6000-ada"
        and c.measured_s == pytest.approx(float(row["input_len"]) / float(row["value"]))
    )
    found = ask(**{k: v for k, v in inference_request(row).items() if k != "id"})

    assert found.performance.ttft_seconds == pytest.approx(
        case.seconds(fitted_here(case)), rel=0.02
    )


def test_the_slower_of_peak_and_power_counts():
    case = prefill_cases()[0]
    free = replace(case, linear_s=1.0, power_s=0.5, attention_s=0.0, scores_s=0.0, issue_s=0.0)
    held = replace(free, power_s=3.0)
    factors = np.ones(len(PARTS))
    assert held.seconds(factors) - free.seconds(factors) == pytest.approx(2.0)


def test_families_and_engines_without_rows_stay_near_what_all_have_in_common():
    cases = [replace(c, measured_s=3 * c.measured_s) for c in prefill_cases()[:20]]
    ones = np.ones(len(PARTS))

    def moved(factors):
        return float(np.abs(np.log(factors)).sum())

    assert FAMILY_STIFFNESS["prefill"] > 1
    assert moved(fit_family(cases, "prefill", ones)) <= moved(fit_streams(cases, ones)) + 1e-9

    cases = [c for c in stream_cases() if c.kernels == "apple" and c.group == "decode"]
    target = replace(cases[0], engine="nobody's", family="nobody's")
    assert fit_target_chip(cases, target) == pytest.approx(fit_streams(cases))
    kept = data_json("factors.json")["engines"]["common_serving"]["stream_factors"]
    assert set(kept) == set(common_factors(stream_cases())) >= {"gpu", "cpu", "uma"}


def test_streams_of_a_generic_engine_say_nothing_of_its_full_batches():
    serving = {"kind": "serve", "input_tokens": 512, "output_tokens": 128, "concurrency": 8}
    settings = [
        resolve(EstimateRequest.model_validate(document(engine="autoawq", workload=workload)))
        for workload in (serving, PROMPT)
    ]
    assert settings[0]._single_stream_factors == {}
    assert settings[1]._single_stream_factors != {}
