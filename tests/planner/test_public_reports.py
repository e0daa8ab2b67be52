"""Public reports of memory and of refusals, as the planner answers them now.

The questions are those of ``planner/validation/public_reports.jsonl``, by their name.
"""

import json
from pathlib import Path

import pytest

from planner.api import estimate
from planner.catalog.models import get_model
from planner.cost.page_pools import block_bytes, page_pool, pooled_cache_bytes
from planner.specs.estimate import EstimateRequest
from tests.planner.asking import ask, held

REPORTS = Path(__file__).parents[2] / "planner" / "validation" / "public_reports.jsonl"
GIB = 1024**3
SERVED = {"kind": "serve", "input_tokens": 2048, "output_tokens": 256, "concurrency": 1}


def question(name):
    """Return the document of a question, by the first word of its name."""
    rows = [json.loads(line) for line in REPORTS.read_text().splitlines()]
    asked = {q["id"].split()[0]: q for row in rows for q in row["questions"]}
    return {field: value for field, value in asked[name].items() if field != "id"}


def answer(name, **changes):
    return estimate(EstimateRequest.model_validate(question(name) | changes))


def test_symmetric_groups_of_four_bits_have_no_zero_point():
    """Kimi-K2.5 has 595 GB (vllm-project/recipes @8959cf6); MLA's latents are on every rank."""
    latents = 7 * 60 * 7168 * (1536 + 512 + 64) * 2

    on_all = 8 * held(answer("R40"), "weights")

    assert on_all - latents == pytest.approx(595e9, rel=0.01)


@pytest.mark.parametrize(
    ("tokens", "step", "gib"),
    [(30_000, 16_384, 6.66), (13_528, 13_528, 5.44)],
    ids=["needed", "longest"],
)
def test_deepseek_v4s_windows_and_states_take_the_tokens_of_a_step(tokens, step, gib):
    """vllm-project/vllm issue 44376: V4-Flash on two GH200, 16,384 tokens a step."""
    layers = get_model("deepseek-ai/DeepSeek-V4-Flash").layers_by_attention
    pool = page_pool(layers)
    assert pool is not None

    needed = pooled_cache_bytes(
        bytes_per_block=block_bytes(pool, 1.0),
        num_requests=1,
        num_tokens=tokens,
        window_blocks=pool.window_blocks,
        blocks_per_step_token=pool.blocks_per_step_token,
        step_tokens=step,
    )

    assert needed / GIB == pytest.approx(gib, rel=0.005)


def test_a_long_request_of_deepseek_v4_holds_gibibytes_before_its_first_token():
    """Issue 51041 of vLLM: 3.2 GB of a request do not grow, 3.3 kB a token do."""
    short, long = (
        held(answer("R16", workload=SERVED | {"input_tokens": tokens}), "kv_cache")
        for tokens in (20_000, 120_000)
    )

    assert (long - short) / 100_000 == pytest.approx(3.3e3, rel=0.3)
    assert short - 20_000 * 3.3e3 == pytest.approx(3.2e9, rel=0.15)


def test_a_sliding_layer_of_vllm_holds_the_step_beside_its_window():
    """SlidingWindowSpec.max_memory_usage_bytes: the window and max_num_batched_tokens."""
    model = get_model("openai/gpt-oss-120b")
    asked = {"model": "openai/gpt-oss-120b", "workload": SERVED | {"input_tokens": 100_000}}
    sliding = next(g for g in model.layers_by_attention if getattr(g, "window", None))
    each = 2 * 8 * 64 * 2 * sliding.count

    step, none = (held(ask(**asked, engine=engine), "kv_cache") for engine in ("vllm", "sglang"))

    assert step - none == each * (8192 - sliding.window)
