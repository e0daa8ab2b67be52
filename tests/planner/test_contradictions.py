"""Published peaks that contradict themselves are found and named, never dropped."""

import pytest

from planner.fitting.evidence import table, usable
from planner.fitting.generation_peaks import contradictions, rows_over_device_memory, section
from tests.planner.test_accuracy import PAGE


def row(peak, micro="1", length="512", **fields):
    """Return a row of the memory table, empty but for its work and its peak."""
    empty = dict.fromkeys(table("memory")[0], "")
    told = {"source_id": "s", "gpu": "A100-SXM-80GB", "micro_batch_size": micro}
    return {**empty, **told, "sequence_length": length, "peak_memory_bytes": str(peak), **fields}


def test_more_tokens_in_less_memory_contradict_each_other():
    (pair,) = contradictions([row(20e9), row(10e9, length="1024")])

    assert pair.gap == pytest.approx(1.0)
    assert pair.more["sequence_length"] == "1024"


def test_more_tokens_in_more_memory_do_not():
    assert not list(contradictions([row(10e9), row(20e9, length="1024")]))


def test_a_difference_within_the_printed_digits_is_none():
    assert not list(contradictions([row(10.1e9), row(10e9, length="1024")]))


def test_other_settings_are_not_compared():
    assert not list(contradictions([row(20e9), row(10e9, length="1024", method="lora")]))


def test_a_longer_sequence_in_a_smaller_batch_is_no_more_work():
    assert not list(contradictions([row(20e9, micro="4"), row(10e9, length="1024")]))


def test_of_one_setting_measured_twice_the_higher_row_contradicts_the_lower():
    (pair,) = contradictions([row(20e9), row(15e9)])

    assert pair.gap == pytest.approx(1 / 3)


def test_a_peak_above_the_cards_memory_is_named():
    found = list(rows_over_device_memory([row(90e9), row(80e9)]))

    assert [(one["peak_memory_bytes"], has) for one, has in found] == [
        ("90000000000.0", 80 * 2**30)
    ]


def test_what_contradicts_itself_takes_part_in_the_fit():
    kept = {one["row_id"] for one in usable(table("memory"))}
    trained = [p for p in contradictions(table("memory")) if p.less["kind"] == "train"]

    assert trained
    assert {pair.less["row_id"] for pair in trained} <= kept


def test_the_page_names_them():
    assert section() in PAGE.read_text(encoding="utf-8")
