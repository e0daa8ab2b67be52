"""What holds single streams back: the power limit of a card, scores that are written to memory."""

from dataclasses import replace

import numpy as np
import pytest

from planner.catalog.devices import get_device
from planner.catalog.engines import get_engine
from planner.catalog.reading import data_json
from planner.cost.quantity import Ledger
from planner.cost.roofline import power_wait_seconds
from planner.fitting.decode_fitting import (
    FAMILY_STIFFNESS,
    PARTS,
    common_factors,
    fit_family,
    fit_streams,
    fitted,
    fitted_here,
    stream_cases,
)
from planner.fitting.evidence import PREFILL, inference_request, speed_rows
from planner.specs.estimate import EstimateRequest
from planner.workload.generate import generate
from planner.workload.resolve import resolve
from tests.planner.asking import LLAMA_8B, ask, document

PROMPT = {"kind": "generate", "batch_size": 1, "input_tokens": 4096, "output_tokens": 16}


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


def test_products_wait_for_what_the_power_limit_allows():
    waits = [
        power_wait_seconds(
            work_flops=7e14, power_watts=350.0, flops_per_joule=1e12, products_s=products
        )
        for products in (0.5, 3.0)
    ]

    assert waits == [1.5, 0.0]


def test_a_card_with_much_peak_for_its_power_waits():
    found = recorded(device="rtx-6000-ada")

    assert found["prefill", "linear_power"].value > 0


def test_decode_waits_for_no_power():
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


def test_a_measured_card_has_shown_its_own_limit():
    card = {**get_device("rtx-6000-ada").model_dump(), "provenance": "measured"}

    assert ("prefill", "linear_power") not in recorded(device=card)


def test_a_card_without_a_published_limit_is_not_held_back():
    card = get_device("rtx-6000-ada").model_copy(update={"tdp_watts": None})

    assert ("prefill", "linear_power") not in recorded(device=card.model_dump(exclude_none=True))


def test_scores_that_are_written_grow_with_the_square_of_the_prompt():
    seconds = []
    for tokens in (2048, 4096):
        request = {**asked(), "workload": {**PROMPT, "input_tokens": tokens}}
        setting, ledger = resolve(EstimateRequest.model_validate(request)), Ledger()
        generate(setting, setting.workload, ledger)
        seconds.append(ledger.value_of("prefill", "scores"))

    assert seconds[1] / seconds[0] == pytest.approx(4, rel=1e-3)


def test_fused_attention_writes_no_scores():
    assert ("prefill", "scores") not in recorded(engine="exllamav2")
    assert get_engine("llama_cpp", "gpu").score_bytes == 16


def test_decode_writes_no_scores_worth_counting():
    assert ("decode", "scores") not in recorded()


def test_long_prompts_lose_more_speed_where_scores_are_written():
    losses = []
    for tokens in (512, 8192):
        found = ask(
            device="a100-pcie-80gb",
            engine="llama_cpp",
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


def test_a_family_moves_less_than_its_kind():
    cases = [replace(c, measured_s=3 * c.measured_s) for c in prefill_cases()[:20]]
    ones = np.ones(len(PARTS))

    def moved(factors):
        return float(np.abs(np.log(factors)).sum())

    assert FAMILY_STIFFNESS["prefill"] > 1
    assert moved(fit_family(cases, "prefill", ones)) <= moved(fit_streams(cases, ones)) + 1e-9


def test_an_engine_without_rows_takes_what_all_have_in_common():
    cases = [c for c in stream_cases() if c.kind == "uma" and c.group == "decode"]
    target = replace(cases[0], engine="nobody's", family="nobody's")

    assert fitted(cases, target) == pytest.approx(fit_streams(cases))


def test_the_file_holds_what_all_engines_have_in_common():
    kept = data_json("factors.json")["engines"]["common_serving"]["stream_factors"]

    assert set(kept) == set(common_factors(stream_cases())) >= {"gpu", "cpu", "uma"}


def test_streams_of_a_generic_engine_say_nothing_of_its_full_batches():
    serving = {"kind": "serve", "input_tokens": 512, "output_tokens": 128, "concurrency": 8}
    settings = [
        resolve(EstimateRequest.model_validate(document(engine="autoawq", workload=workload)))
        for workload in (serving, PROMPT)
    ]

    assert settings[0]._streams == {}
    assert settings[1]._streams != {}
