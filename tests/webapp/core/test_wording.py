"""Messages become sentences; names of the code stay as they are written."""

import pytest

from webapp.core.wording import capitalised, sentence


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("needs 80.0 GiB per device", "Needs 80.0 GiB per device"),
        ("", ""),
        ("8-bit weights", "8-bit weights"),
        ("éclair", "Éclair"),
        ("infeasible.", "Infeasible."),
        ("one gate, expert_parallel_size 4", "One gate, expert_parallel_size 4"),
    ],
)
def test_a_sentence_begins_with_a_capital(text, shown):
    assert capitalised(text) == shown


@pytest.mark.parametrize(
    "text",
    [
        "tpot_seconds is 0.2 s, the limit is 0.1 s",
        "longest_context is a question about serve and generate",
        "workload.kind is train",
        "pins.weight_dtype: no such format",
        "bf16 weights need more",
        "max_concurrency",
        "vLLM before 0.20 takes another flag",
        "llama.cpp is needed",
    ],
)
def test_a_name_of_the_code_keeps_its_small_letter(text):
    assert capitalised(text) == text


@pytest.mark.parametrize("text", ["the model is unknown", "the model is unknown."])
def test_a_sentence_ends_with_one_full_stop(text):
    assert sentence(text) == "The model is unknown."
