"""What a plan needs besides the stored checkpoint, in the verdict and beside each plan."""

import pytest

from tests.webapp.plans.test_verdict_words import answer_of, draft_of
from webapp.plans.alternatives import comparison
from webapp.plans.verdict import verdict_of

TWO_H100 = {"device": "h100-sxm5-80gb", "devices_per_node": 2}


def starts(**more) -> str:
    return verdict_of(answer_of(**more), draft_of()).start


@pytest.fixture(scope="module")
def dense():
    """A checkpoint in 16 bits on devices with FP8 arithmetic."""
    return answer_of("Qwen/Qwen3-32B", TWO_H100, engine="vllm")


def test_the_verdict_says_that_the_stored_checkpoint_is_started_and_what_would_be_faster(dense):
    words = verdict_of(dense, draft_of()).start
    assert words.startswith("Planned for vLLM, which starts the checkpoint as it is stored. FP8 w")
    assert words.endswith("% faster (quantised to FP8 while loading).")


def test_each_plan_says_which_checkpoint_it_needs(dense):
    rows = comparison(dense, draft_of())
    assert rows[0].why == "Best of those that start the checkpoint as it is stored"
    needs = {row.words.split()[0]: row.why.rpartition("; ")[2] for row in rows[1:]}
    assert needs["FP8"] == "quantised to FP8 while loading"
    assert needs["INT8"] == "needs a checkpoint in INT8 (W8A8)"


def test_a_pinned_precision_says_what_it_needs():
    for pinned, words in [
        ({"weight_dtype": "fp8"}, "Planned for vLLM: quantised to FP8 while loading."),
        ({"weight_dtype": "int4"}, "Planned for vLLM: needs a checkpoint in INT4 (AWQ)."),
        (
            {"weight_dtype": "bf16"},
            "Planned for vLLM, which starts the checkpoint as it is stored.",
        ),
    ]:
        assert starts(engine="vllm", pins=pinned) == words, pinned


def test_a_quantised_checkpoint_starts_as_stored_and_llama_cpp_names_its_gguf_file():
    model, card = "openai/gpt-oss-20b", {"device": "h100-sxm5-80gb"}
    words = starts(model=model, cluster=card, engine="vllm")
    assert words == "Planned for vLLM, which starts the checkpoint as it is stored."

    words = starts(
        cluster={"device": "apple-m3-max"}, engine="llama_cpp", pins={"weight_dtype": "int8"}
    )
    assert words == "Planned for llama.cpp: needs a GGUF file of type Q8_0."


def test_without_a_request_or_where_any_checkpoint_is_converted_nothing_is_said(dense):
    answer = answer_of()
    assert verdict_of(answer, draft_of()).start == ""
    assert "checkpoint" not in " ".join(row.why for row in comparison(answer, draft_of()))
    stored = dense.model_copy(update={"request": None})
    assert verdict_of(stored, draft_of()).start == ""
