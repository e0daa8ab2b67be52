"""Speculative decoding: rounds of guesses, what they make, cost and hold."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.cost.queueing import speculative_gap, tokens_per_round
from planner.errors import NotCoveredError, NotPossibleError, UnknownModelError
from tests.planner.asking import LLAMA_70B, SERVE, ask, search

DRAFT = "meta-llama/Llama-3.2-1B"
CHANCES = st.floats(min_value=0.0, max_value=1.0)
GUESSES = st.integers(min_value=1, max_value=16)


def serving(acceptance=0.7, tokens=4, concurrency=1, draft=DRAFT, **strategy):
    guess = {"draft_model": draft, "tokens": tokens, "acceptance_ratio": acceptance}
    strategy = {"tensor_parallel_size": 4, **strategy}
    if draft:
        strategy["speculative"] = guess
    return ask(
        model=LLAMA_70B,
        devices=4,
        engine="vllm",
        workload={**SERVE, "concurrency": concurrency},
        strategy=strategy,
    )


@given(chance=CHANCES, guesses=GUESSES)
def test_a_round_makes_as_many_tokens_as_counting_guess_by_guess_says(chance, guesses):
    """One token is sure; the i-th guess counts when all up to it are right."""
    counted = 1 + sum(chance**i for i in range(1, guesses + 1))

    found = tokens_per_round(acceptance_ratio=chance, drafted_tokens=guesses)
    assert found == pytest.approx(counted, rel=1e-6)


def test_the_published_example_comes_out():
    """Leviathan et al. 2023, figure 2: at 0.8 with five guesses about 3.7 tokens a round."""
    found = tokens_per_round(acceptance_ratio=0.8, drafted_tokens=5)

    assert found == pytest.approx(3.69, abs=0.01)


def test_columns_make_what_single_numbers_make():
    chances = np.array([0.0, 0.5, 1.0])
    found = tokens_per_round(acceptance_ratio=chances, drafted_tokens=3.0)

    assert found == pytest.approx([1.0, 1.875, 4.0])


def test_a_round_is_shared_by_the_tokens_that_it_makes():
    gap = speculative_gap(drafted_tokens=4, draft_s=1.0, verify_s=6.0, round_tokens=2.5)

    assert gap == 4.0


def test_good_guesses_of_a_small_model_speed_up_a_single_stream():
    """Leviathan et al. report two to three times."""
    plain, fast = serving(draft=None), serving(acceptance=0.8)

    assert 1.3 < plain.performance.tpot_seconds / fast.performance.tpot_seconds < 3.7


def test_guesses_that_are_never_right_only_cost():
    plain, useless = serving(draft=None), serving(acceptance=0.0)

    assert useless.performance.tpot_seconds > plain.performance.tpot_seconds


def test_better_guesses_are_faster():
    gaps = [serving(acceptance=a).performance.tpot_seconds for a in (0.2, 0.5, 0.8, 1.0)]

    assert gaps == sorted(gaps, reverse=True)


def test_the_gain_shrinks_as_the_batch_grows():
    """Checking guesses is free while weights are read anyway, not once products are the limit."""
    gains = [
        serving(draft=None, concurrency=n).performance.tpot_seconds
        / serving(concurrency=n).performance.tpot_seconds
        for n in (1, 64, 256)
    ]

    assert gains == sorted(gains, reverse=True)


def test_the_draft_takes_memory_of_its_own():
    plain, fast = (found.memory.breakdown_bytes for found in (serving(draft=None), serving()))

    assert fast["weights"] - plain["weights"] == pytest.approx(1.236e9 * 2 / 4, rel=0.05)
    assert fast["kv_cache"] > plain["kv_cache"]


def test_fewer_requests_fit_beside_a_draft():
    plain, fast = serving(draft=None), serving()

    assert fast.performance.max_concurrency < plain.performance.max_concurrency


def test_the_prompt_is_read_by_both_models():
    assert serving().performance.prefill_seconds > serving(draft=None).performance.prefill_seconds


def test_a_round_is_explained():
    terms = {term.key: term for term in serving().terms}

    assert terms["round_tokens"].value == pytest.approx((1 - 0.7**5) / 0.3)
    assert "2211.17192" in terms["round_tokens"].source
    assert terms["speculative_gap"].unit == "s"


def test_an_unknown_draft_is_refused_by_name():
    with pytest.raises(UnknownModelError, match="no-such"):
        serving(draft="meta-llama/no-such-1B")


def test_a_draft_of_another_family_is_refused():
    with pytest.raises(NotPossibleError, match="vocabulary"):
        serving(draft="Qwen/Qwen3-32B")


def test_a_draft_beside_pipeline_stages_is_refused():
    with pytest.raises(NotCoveredError, match="pipeline"):
        serving(tensor_parallel_size=2, pipeline_parallel_size=2)


def test_a_fixed_batch_has_no_speculation():
    with pytest.raises(NotCoveredError, match="costed for workload") as caught:
        ask(
            workload={"kind": "generate", "batch_size": 1, "input_tokens": 8, "output_tokens": 8},
            strategy={"speculative": {"draft_model": DRAFT}},
        )

    assert caught.value.field == "strategy.speculative"


def test_a_search_takes_a_draft_as_a_pin():
    """Every layout of the grid is costed with the draft, and the exact answer agrees."""
    guess = {"draft_model": DRAFT, "tokens": 4, "acceptance_ratio": 0.8}
    found = search(
        model=LLAMA_70B, devices=4, engine="vllm", pins={"speculative": guess}, top=1
    ).plans

    assert found[0].strategy.speculative.draft_model == DRAFT


# Bits of the 973,078,528 weights of Llama-3.2-1B's layers; the vocabulary and norms stay in 16.
@pytest.mark.parametrize(
    ("draft", "bits"),
    [
        ("RedHatAI/Llama-3.2-1B-FP8", 8),
        ("meta-llama/Llama-3.2-1B-AWQ", 4 + (16 + 4) / 128),
        ("unsloth/Llama-3.2-1B-bnb-4bit", 4 + 8.128 / 64),
    ],
)
def test_a_draft_holds_the_weights_that_its_name_states(draft, bits):
    plain, named = (
        serving(draft=name).memory.breakdown_bytes["weights"] for name in (DRAFT, draft)
    )

    linear = 16 * (2048 * (2 * 2048 + 2 * 512) + 3 * 2048 * 8192)
    assert plain - named == pytest.approx(linear * (16 - bits) / 8 / 4, rel=1e-3)


def test_a_draft_that_the_engine_does_not_load_is_refused():
    with pytest.raises(NotPossibleError, match="does not load") as refused:
        serving(draft="mlx-community/Llama-3.2-1B-4bit")

    assert refused.value.field == "strategy.speculative.draft_model"
