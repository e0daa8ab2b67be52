"""The one stream of a page: cut, taken up again, and done without."""

import pytest

pytestmark = [pytest.mark.browser, pytest.mark.slow]


def test_a_cut_stream_is_taken_up_without_a_gap(followed):
    assert followed["streams_after_the_cut"][-1]["last-event-id"]
    num_drawn, num_stored = followed["points_over_the_cut"]
    assert num_drawn == num_stored


def test_without_a_stream_the_page_polls_and_says_so(followed):
    before, after = followed["points_polled"]
    assert after > before
    assert "every 5 s" in followed["stamp_without_a_stream"]


def test_a_page_that_gets_no_stream_polls_and_takes_one_up_when_one_is_free(followed):
    assert "every 5 s" in followed["stamp_when_full"]
    assert followed["stream_once_there_is_room"] == "live"


def test_a_page_whose_stream_opens_late_shows_what_changed_before(followed):
    assert "Stopped" in followed["opened_late"]


def test_a_page_whose_open_stream_says_nothing_asks_by_itself(followed):
    assert "Stopped" in followed["told_nothing"]


def test_a_stream_closes_while_the_page_is_hidden(followed):
    assert followed["stream_while_hidden"] is None
    assert followed["stream_once_shown"] == "live"


def test_the_figures_and_charts_of_a_live_page_are_always_of_one_instant(followed):
    seen = followed["instants"]
    assert all({job} == set(charts) for job, charts, _ in seen)
    assert len({job for job, _, _ in seen}) >= 3
    assert len({caption for _, _, caption in seen}) >= 3
