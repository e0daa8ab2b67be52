"""Prices: of all devices together, by the hour, for the run and for a million tokens."""

import pytest

from planner.catalog.devices import get_device
from tests.webapp.plans.test_verdict_words import CARD, NODE, SERVE, WORK, answer_of, draft_of
from webapp.core.units import NBSP
from webapp.plans.verdict import estimate_figures, price_of

LLAMA_70B = "meta-llama/Llama-3.1-70B"


def test_a_price_is_of_all_devices_and_says_so_and_its_providers_stand_apart():
    price = price_of(answer_of(LLAMA_70B, NODE, engine="vllm").plans[0])
    hourly = get_device("h100-sxm5-80gb").price_usd_per_hour
    assert price.total == f"{8 * hourly:.1f}{NBSP}$ an hour for all 8 GPUs"
    assert price.each == f"{hourly}{NBSP}$ an hour for each"
    assert price.more[0].endswith("$ for a million tokens")

    price = price_of(answer_of(LLAMA_70B, NODE, engine="vllm").plans[0])
    assert "offers" not in str(price)
    assert price.sources.startswith("median of 21 on-demand offers of ")


def test_a_training_says_the_money_of_its_run_and_its_utilisation():
    work = {**WORK["pretrain"], "tokens": 10**9}
    answer = answer_of("HuggingFaceTB/SmolLM2-135M", CARD, work)
    best = answer.plans[0]

    price = price_of(best)
    shown = {one.label: one.value for one in estimate_figures(best, draft_of("pretrain"))}

    assert price.more[0].endswith("$ for the run")
    assert shown["Money for the run"] == pytest.approx(best.run_cost_usd)
    assert shown["Model FLOP utilisation"] == pytest.approx(best.performance.mfu)


def test_hardware_without_a_price_has_none():
    for cluster in [{"device": "rtx-3070-ti"}, {"device": "cpu-ryzen-7950x"}]:
        answer = answer_of("HuggingFaceTB/SmolLM2-135M", cluster, SERVE)
        assert price_of(answer.plans[0]) is None, cluster
        assert price_of(None) is None, cluster
