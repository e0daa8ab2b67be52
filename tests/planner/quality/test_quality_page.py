"""The quality page says what the rows give, and names what is unknown."""

from pathlib import Path

from planner.__main__ import main
from planner.fitting.quality_fit import HELD_OUT, MODELS, SHOWN, quality_page

PAGE = Path("templates/docs/quality.md")


def test_the_page_is_what_the_rows_give_today():
    assert PAGE.read_text(encoding="utf-8") == quality_page()


def test_the_page_shows_every_source_that_was_left_out():
    assert all(f"| {source} |" in quality_page() for source in HELD_OUT)


def test_the_page_has_a_figure_for_every_scheme_and_model():
    lines = [line for line in quality_page().splitlines() if line.startswith("| ")]
    rows = [line for line in lines if line.split(" | ")[0].removeprefix("| ") in SHOWN]
    assert len(rows) == len(SHOWN)
    assert all(line.count(" / ") == 2 * len(MODELS) for line in rows)


def test_the_command_prints_the_page(capsys):
    assert main(["quality"]) == 0
    assert capsys.readouterr().out == quality_page()
