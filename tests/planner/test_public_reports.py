"""Public reports of memory and of refusals, as the planner answers them now.

The questions are those of ``planner/validation/public_reports.jsonl``, by their name.
"""

import json
from pathlib import Path

import pytest

from planner.api import estimate
from planner.specs.estimate import EstimateRequest
from tests.planner.asking import held

REPORTS = Path(__file__).parents[2] / "planner" / "validation" / "public_reports.jsonl"
GIB = 1024**3


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
