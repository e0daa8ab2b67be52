"""What a compression changed, as its page tells it."""

import pytest

from webapp.jobs.evaluating import before_after, significance_note, won_words
from webapp.jobs.measured_figures import figures_of
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
    rows = before_after(figures_of(Job(kind="compress", spec={}, result={"measured": MEASURED})))
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
    assert before_after(figures_of(Job(kind="train", spec={}))) == []


def told(low: float, high: float) -> str:
    names = ("perplexity_ratio", "perplexity_ratio_low", "perplexity_ratio_high")
    measured = dict(zip(names, ((low + high) / 2, low, high), strict=True))
    return significance_note(Job(kind="evaluate", spec={}, result={"measured": measured}))


@pytest.mark.parametrize(
    ("low", "high", "words"),
    [
        (1.01, 1.03, "1.010 to 1.030, window by window: worse than the original beyond chance"),
        (0.96, 0.98, "better than the original beyond chance"),
        (0.99, 1.02, "no difference that this much text can show"),
    ],
)
def test_a_changed_perplexity_is_called_a_change_only_beyond_chance(low, high, words):
    assert words in told(low, high)


def test_without_an_original_nothing_is_said_of_chance():
    measured = {"perplexity": 60.0, "next_token_accuracy": 0.25}

    assert significance_note(Job(kind="evaluate", spec={}, result={"measured": measured})) == ""


def test_a_share_is_shown_as_per_cent():
    measured = {"original_next_token_accuracy": 0.25, "next_token_accuracy": 0.2}

    (row,) = before_after(figures_of(Job(kind="evaluate", spec={}, result={"measured": measured})))
    assert (str(row.before), str(row.after)) == (
        "25.0\N{NO-BREAK SPACE}%",
        "20.0\N{NO-BREAK SPACE}%",
    )


# The sentence that a compression opens with


def won(kind: str = "compress", **measured: float) -> str:
    base = {"original_disk_bytes": 100.0, "disk_bytes": 75.0}
    speeds = {"original_decode_tokens_per_second": 90.0, "decode_tokens_per_second": 30.0}
    interval = {
        "perplexity_ratio": 1.002,
        "perplexity_ratio_low": 0.99,
        "perplexity_ratio_high": 1.01,
    }
    job = Job(kind=kind, spec={}, result={"measured": base | speeds | interval | measured})
    return won_words(job, figures_of(job))


def test_a_compression_says_what_was_won_and_what_it_cost():
    assert won() == "25 % smaller, same quality, 3.0\N{MULTIPLICATION SIGN} slower here."


@pytest.mark.parametrize(
    ("measured", "words"),
    [
        ({"disk_bytes": 100.5}, "The same size,"),
        ({"disk_bytes": 130.0}, "30 % larger,"),
        ({"decode_tokens_per_second": 180.0}, "2.0\N{MULTIPLICATION SIGN} faster here."),
        ({"decode_tokens_per_second": 99.0}, "10 % faster here."),
        ({"decode_tokens_per_second": 89.5}, "as fast here."),
        (
            {"perplexity_ratio": 1.023, "perplexity_ratio_low": 1.01},
            "2.3 % higher perplexity",
        ),
        ({"perplexity_ratio_low": 0.0}, "quality not measured"),
    ],
)
def test_each_part_of_the_sentence_follows_from_what_was_measured(measured, words):
    high = {"perplexity_ratio_high": 1.04} if "perplexity_ratio" in measured else {}

    assert words in won(**measured, **high)


def test_one_model_alone_won_nothing():
    assert won("train") == ""
    assert won(original_disk_bytes=0.0) == ""
