"""Techniques write what plain greedy generation writes, and say what they did."""

import pytest

from runners.jobs.generate.batching import PAGE_TOKENS
from runners.jobspec import DemoPrompts, DraftModelSpeculation, PromptLookup
from tests.system.jobs.generate.reading import outputs

PILE = DemoPrompts(count=9, input_tokens=30, shortest=2)
DEFAULTS = {"prompts": PILE, "batch_size": 4, "output_tokens": 16}


@pytest.fixture(scope="module")
def plain(generate):
    return outputs(generate("plain", batch_size=1))


@pytest.fixture(scope="module")
def endless(generate):
    return outputs(generate("endless", batch_size=1, stop_at_end=False))


@pytest.mark.equality
@pytest.mark.parametrize("batching", ["packed", "continuous"])
@pytest.mark.parametrize("stop_at_end", [True, False])
def test_batches_without_padding_write_the_same(generate, plain, endless, batching, stop_at_end):
    asked = {"stop_at_end": stop_at_end}
    run = generate(f"{batching}-{stop_at_end}", batching=batching, **asked)

    assert outputs(run) == (plain if stop_at_end else endless)
    assert run.measured["tokens_per_second"] > 0
    assert run.measured["ttft_seconds"] > 0


@pytest.mark.equality
def test_looking_up_the_prompt_writes_the_same_and_counts_what_was_right(generate, plain):
    run = generate("lookup", speculation=PromptLookup(tokens=3))

    assert outputs(run) == plain
    assert 0 < run.measured["acceptance_ratio"] <= 1
    assert run.measured["accepted_tokens"] <= run.measured["output_tokens"]


@pytest.mark.equality
@pytest.mark.parametrize(("asked", "told"), [("flash", "sdpa"), ("eager", "eager")])
def test_either_attention_writes_the_same_and_is_named(generate, plain, asked, told):
    run = generate(f"attention-{asked}", attention=asked)

    assert outputs(run) == plain
    assert run.bodies("result")[0]["notes"]["attention"] == told


@pytest.mark.equality
def test_a_draft_of_its_own_weights_is_always_right(generate, plain, trained_model):
    guess = DraftModelSpeculation(model=trained_model, tokens=3)

    run = generate("draft", speculation=guess)

    assert outputs(run) == plain
    assert run.measured["acceptance_ratio"] > 0.9


LONGER = {
    "prompts": DemoPrompts(count=4, input_tokens=46),
    "batch_size": 1,
    "stop_at_end": False,
}


@pytest.fixture(scope="module")
def whole(generate):
    return generate("whole", **LONGER)


@pytest.mark.parametrize(("kind", "share"), [("fp8", 0.3), ("int4", 0.5), ("int2", 0.5)])
def test_a_narrow_cache_holds_less_and_changes_few_answers(generate, whole, kind, share):
    run = generate(kind, kv_cache=kind, **LONGER)

    same = [
        a["text"][:4] == b["text"][:4] for a, b in zip(outputs(run), outputs(whole), strict=True)
    ]
    assert run.measured["kv_cache_bytes"] < share * whole.measured["kv_cache_bytes"]
    assert sum(same) >= len(same) / 2


def test_the_paged_cache_is_sized_by_the_planned_batch_and_not_by_the_machine(generate):
    run = generate("pages", batching="continuous")

    layers, kv_heads, head_dim, width = 2, 2, 16, 4
    pages = 4 * -(-(30 + 16) // PAGE_TOKENS)
    assert run.measured["kv_cache_bytes"] == (
        2 * layers * kv_heads * head_dim * width * PAGE_TOKENS * pages
    )
