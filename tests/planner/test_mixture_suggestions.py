"""A mixture that does not fit is still answered: its experts may leave the device."""

import pytest

from tests.planner.asking import MIXTRAL, search

OFFLINE = {"kind": "generate", "batch_size": 8, "input_tokens": 128, "output_tokens": 32}


@pytest.mark.parametrize("engine", [None, "vllm", "transformers"])
def test_a_mixture_too_large_for_a_card_gets_an_answer(engine):
    found = search(model=MIXTRAL, device="rtx-4090", workload=OFFLINE, engine=engine)

    assert found.plans or found.rejected
    assert all(one.estimate.fits for one in found.suggestions)


def test_experts_in_host_memory_are_scored_as_columns_too():
    offload = {"offload": {"weights_cpu": 0.8}}

    found = search(model=MIXTRAL, device="rtx-4090", devices=2, workload=OFFLINE, pins=offload)

    assert found.searched.strategies > 0
    assert all(plan.strategy.offload.weights_cpu == 0.8 for plan in found.plans)
