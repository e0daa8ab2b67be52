"""What real ranks hold, against the planner's terms: kept rows and their page."""

import pytest

from runners.bench_cases import CASES, Held
from webapp.core.benches import memory
from webapp.core.benches.memory import Row, planned, rows_of, sharding_ratios, stored

FOUND = stored()[1]
TERMS = [(name, term) for name in FOUND for term in Held.TERMS]


def total(name):
    return sum(getattr(FOUND[name], term) for term in Held.TERMS)


def test_every_case_was_counted():
    assert set(FOUND) == {case.name for case in CASES}


@pytest.mark.parametrize(("name", "term"), TERMS)
def test_what_ranks_hold_of_a_term_is_within_a_tenth_of_the_plan(name, term):
    row = next((each for each in rows_of(FOUND[name]) if each.term == term), None)

    assert row is None or abs(row.error) <= memory.WITHIN, row


def test_memory_falls_in_the_order_of_the_literature():
    for ranks in (2, 4):
        sizes = [total(f"{name} on {ranks} ranks") for name in ("DDP", "ZeRO-1", "ZeRO-2")]
        assert sizes == sorted(sizes, reverse=True)
        assert total(f"ZeRO-3 on {ranks} ranks") < sizes[-1]
    ways = ["AdamW", "selective recomputation", "full recomputation"]
    held = [FOUND[name].activations for name in ways]
    assert held == sorted(held, reverse=True)
    assert total("AdamW") > total("AdamW 8-bit") > total("LOMO") > total("LoRA") > total("QLoRA")


def test_the_planner_puts_the_cases_in_the_same_order_of_states():
    cases = {case.name: planned(case) for case in CASES}

    for term in ("weights", "gradients", "optimizer_states"):
        for stage in ("ZeRO-1", "ZeRO-2", "ZeRO-3"):
            four, two = (cases[f"{stage} on {ranks} ranks"][term] for ranks in (4, 2))
            held = [getattr(FOUND[f"{stage} on {ranks} ranks"], term) for ranks in (4, 2)]
            assert (four < two) == (held[0] < held[1])


def test_each_stage_of_zero_divides_its_term_by_the_ranks():
    found = {each.name: each.value for each in sharding_ratios(FOUND)}

    assert len(found) == 3
    assert all(value == pytest.approx(4, rel=0.01) for value in found.values())


def test_an_error_is_of_what_was_held():
    assert Row("a", "weights", 110.0, 100.0).error == pytest.approx(0.1)
    assert Row("a", "weights", 1.0, 0.0).error == 1.0
    assert Row("a", "weights", 0.0, 0.0).error == 0.0


def test_the_page_is_what_the_kept_rows_say():
    assert memory.DOCS.read_text() == memory.page()
