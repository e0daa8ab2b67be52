"""The report: its verdict, its signature, its numbers and its page."""

import pytest

from runners.prove.page import number, render
from runners.prove.report import Check, Figure, Missing, Prediction, Report, Stage

MET = Check(name="sum", is_met=True, expected="3", found="3")
UNMET = Check(name="sum", is_met=False, expected="3", found="<4>", advice="Replace it.")
NO_UNITS = Missing(name="matmul fp8", why="a CPU has no units for FP8")
NO_LIBRARY = Missing(name="qlora", cause="library", why="bitsandbytes is missing")
SPEED = Figure(
    name="decode bf16, batch 1",
    unit="tokens/s",
    value=20.0,
    samples=(19.0, 20.0, 21.0),
    device="cpu",
    prediction=Prediction(value=30.0, low=25.0, high=36.0, source="datasheet", term="weights"),
)


def report_of(*stages: Stage) -> Report:
    """Return a report with these stages."""
    return Report(began_at_ms=1_790_000_000_000, hostname="h<1>", stages=stages)


def done(*records, state="done", problem=None) -> Stage:
    """Return a stage with these records."""
    return Stage(name="rates", state=state, records=records, problem=problem)


@pytest.mark.parametrize(
    ("stages", "verdict"),
    [
        ([done(MET, NO_UNITS)], "proven"),
        ([done(MET, NO_LIBRARY)], "incomplete"),
        ([done(MET), Stage(name="jobs")], "incomplete"),
        ([done(MET, state="cut")], "incomplete"),
        ([done(UNMET, NO_LIBRARY)], "failed"),
        ([done(MET, state="failed", problem="its process died by SIGSEGV")], "failed"),
    ],
)
def test_a_run_is_proven_only_if_every_stage_ended_and_every_check_is_met(stages, verdict):
    assert report_of(*stages).verdict == verdict


def test_a_changed_report_is_not_the_signed_one():
    signed = report_of(done(UNMET)).signed("key")
    assert signed.is_signed_with("key")
    assert Report.model_validate_json(signed.model_dump_json()).is_signed_with("key")
    assert not signed.is_signed_with("another key")
    assert not signed.model_copy(update={"stages": (done(MET),)}).is_signed_with("key")
    assert not report_of(done(MET)).is_signed_with("key")


def test_the_page_names_what_failed_and_what_to_do_and_escapes_what_it_shows():
    page = render(report_of(done(UNMET, SPEED, NO_LIBRARY)))
    for words in (
        "Something is wrong",
        "sum: expected 3, found &lt;4&gt;. Replace it.",
        "h&lt;1&gt;",
        "20 tokens/s",
        "25 to 36 tokens/s<br>outside",
        "weights",
        "qlora: bitsandbytes is missing",
        "Not signed.",
    ):
        assert words in page


@pytest.mark.parametrize(
    ("value", "unit", "words"),
    [
        (3.35e12, "bytes/s", "3.35 TB/s"),
        (9.89e14, "op/s", "989 Top/s"),
        (0.0, "bytes", "0 B"),
        (0.0042, "s", "4.2 ms"),
        (2.5, "s", "2.5 s"),
        (12345.6, "tokens/s", "12,346 tokens/s"),
    ],
)
def test_a_number_has_three_digits_and_its_units_prefix(value, unit, words):
    assert number(value, unit) == words
