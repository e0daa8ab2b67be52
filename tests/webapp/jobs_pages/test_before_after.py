"""What a compression changed, as its page tells it."""

import pytest

from webapp.jobs.figures import before_after
from webapp.jobs.models import Job

MEASURED = {
    "original_disk_bytes": 12_000_000.0,
    "disk_bytes": 6_000_000.0,
    "original_perplexity": 60.0,
    "perplexity": 60.3,
    "original_decode_tokens_per_second": 100.0,
    "decode_tokens_per_second": 150.0,
    "peak_memory_bytes": 5.0,
    "original_parameter_bytes": 10.0,
    "parameter_bytes": 10.001,
}


@pytest.fixture
def changes():
    rows = before_after(Job(kind="compress", spec={}, result={"measured": MEASURED}))
    return {row.label: row for row in rows}


def test_a_halved_file_is_fifty_percent_smaller(changes):
    assert changes["Size on disk"].words == "\N{MINUS SIGN}50 %"


def test_a_small_change_keeps_a_decimal(changes):
    assert changes["Perplexity"].words == "+0.5 %"


def test_what_did_not_change_is_said_to_be_unchanged(changes):
    assert changes["Weights in memory"].words == "unchanged"


def test_more_speed_is_a_plus(changes):
    assert changes["Decode speed"].words == "+50 %"


def test_a_figure_that_was_taken_only_once_is_left_out(changes):
    assert "Peak memory" not in changes


def test_a_job_without_result_has_no_table():
    assert before_after(Job(kind="train", spec={})) == []
