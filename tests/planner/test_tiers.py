"""Tiers of deployment, and rules of thumb that a plan's figures contradict."""

import pytest

from planner.search.offer import RULES
from planner.techniques.registry import TECHNIQUES
from tests.planner.asking import GENERATE, LLAMA_8B, LLAMA_70B, LLAMA_405B, TRAIN, search


def advice(**fields):
    return " ".join(search(engine="vllm", **fields).plans[0].advice)


@pytest.mark.parametrize(
    ("fields", "tier"),
    [
        ({"device": "m2-max"}, "tier_local_machine"),
        ({"device": "rtx-4090"}, "tier_local_machine"),
        ({"device": "rtx-4090", "devices": 2}, "tier_local_server"),
        ({"device": "h100-sxm-80gb"}, "tier_local_server"),
        ({"cluster": "aws/p5.48xlarge"}, "tier_cloud"),
        ({"cluster": {"device": "h100", "devices_per_node": 8, "nodes": 2}}, "tier_hpc"),
    ],
)
def test_every_plan_names_its_tier(fields, tier):
    engine = "llama_cpp" if fields.get("device") == "m2-max" else "vllm"
    assert search(engine=engine, **fields).plans[0].tier == tier
    assert tier in TECHNIQUES


def test_eight_billion_parameters_do_not_fit_twelve_gigabytes_in_half_precision():
    said = advice(model=LLAMA_8B, device="rtx-3060-12gb", workload=GENERATE)

    assert "fits a 12 GB card in FP16" in said
    assert "16-bit weights are 16.1 GB" in said


def test_seventy_billion_parameters_need_few_bits_on_one_professional_card():
    said = advice(model=LLAMA_70B, device="rtx-a6000", workload=GENERATE)

    assert "141 GB against 52 GB" in said


def test_one_server_can_hold_what_the_guide_gives_a_cluster():
    said = advice(model=LLAMA_405B, device="b200", devices=8, workload=GENERATE)

    assert "8 devices of one server hold it" in said


def test_a_long_cache_is_more_than_a_fifth_of_the_weights():
    long = {"kind": "serve", "input_tokens": 30000, "output_tokens": 1000, "concurrency": 8}
    said = advice(device="h100-sxm-80gb", workload=long, pins={"weight_dtype": "bf16"})

    assert "that is 19 GB" in said


def test_adapters_take_far_less_than_sixteen_bytes_a_parameter():
    lora = search(device="h100-sxm-80gb", workload={**TRAIN, "method": "lora"}).plans[0]

    assert any("16 bytes per parameter" in one and "here it takes 2" in one for one in lora.advice)


def test_a_plan_that_the_rules_hold_for_has_no_advice():
    short = {"kind": "serve", "input_tokens": 128, "output_tokens": 64, "concurrency": 2}

    assert advice(device="h100-sxm-80gb", workload=short) == ""


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.says)
def test_every_rule_names_who_says_it(rule):
    assert rule.source
    assert rule.says[0].islower()
