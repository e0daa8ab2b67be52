"""The longest request of a serving plan: asked for, checked, and what the exports take."""

import pytest

from webapp.plans.exporting import exports_of
from webapp.plans.planning import current_answer

pytestmark = pytest.mark.django_db


@pytest.fixture
def serving(walk):
    walker = walk("?preset=serve")
    walker.press("hardware", choice="catalog", device="h100-sxm5-80gb", devices_per_node=1)
    return walker


def vllm_of(plan):
    return next(one.text for one in exports_of(plan, current_answer(plan)) if one.key == "vllm")


def test_the_longest_request_that_is_asked_for_is_what_a_server_takes(serving):
    serving.press("workload", max_request_tokens="20000")

    assert "--max-model-len 20000" in vllm_of(serving.plan)


def test_without_one_the_server_takes_four_times_the_typical_request(serving):
    assert serving.plan.draft["workload"]["serve"]["max_request_tokens"] is None
    assert "--max-model-len 5120" in vllm_of(serving.plan)


def test_a_longest_request_below_the_typical_one_is_refused_with_both_numbers(serving):
    html = serving.press("workload", max_request_tokens="1000").content.decode()

    assert "Longest request is 1,000 tokens, and a typical one has 1,280" in html
