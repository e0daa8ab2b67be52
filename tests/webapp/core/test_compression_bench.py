"""The table of compressions: kept rows, the page made of them, the order that they show."""

import json

import pytest
from django.conf import settings

from runners import compress_bench
from runners.jobspec import CompressSpec, FolderModel
from webapp.core.benches import compression
from webapp.core.benches.compression import CLAIMS, Claim, page, stored, verdict

PAGE = settings.BASE_DIR / "templates" / "docs" / "compression.md"
EACH = pytest.mark.parametrize("claim", CLAIMS, ids=lambda each: f"{each.better} {each.worse}")


def row(perplexity, low, high):
    return {
        "perplexity": perplexity,
        "perplexity_ratio_low": low,
        "perplexity_ratio_high": high,
    }


def test_the_page_is_made_of_the_rows_that_were_kept():
    assert PAGE.read_text() == page(stored())


def test_every_kept_row_is_a_way_that_the_bench_knows():
    assert set(stored()) == set(compress_bench.SETTINGS)


def test_every_claim_is_about_ways_that_the_bench_knows():
    named = {name for claim in CLAIMS for name in (claim.better, claim.worse)}

    assert named <= set(compress_bench.SETTINGS)


@pytest.mark.parametrize("name", list(compress_bench.SETTINGS))
def test_every_way_of_the_bench_is_one_that_a_job_takes(name):
    chosen = compress_bench.SETTINGS[name]

    spec = CompressSpec(model=FolderModel(path="any"), **chosen)

    assert {key: getattr(spec, key) for key in chosen} == dict(chosen)


def test_a_claim_whose_rows_are_missing_is_not_judged():
    assert verdict(Claim("gone", "lost", "source"), stored()) == "not measured yet"


def test_every_kept_row_was_reloaded_and_measured():
    for name, measured in stored().items():
        assert measured["perplexity"] > 1, name
        assert measured["decode_tokens_per_second"] > 0, name


@EACH
def test_a_claim_that_the_rows_contradict_has_its_cause_on_the_page(claim):
    is_contradicted = verdict(claim, stored()) == "does not hold"

    assert is_contradicted == bool(claim.why_not)
    assert claim.why_not in PAGE.read_text().replace("\n", " ")


@pytest.mark.parametrize(
    ("better", "worse", "words"),
    [
        (row(10, 1.0, 1.1), row(12, 1.2, 1.3), "holds beyond both intervals"),
        (row(10, 1.0, 1.2), row(11, 1.1, 1.3), "holds, within the intervals"),
        (row(11, 1.0, 1.2), row(10, 0.9, 1.1), "not seen: too close for this text"),
        (row(12, 1.2, 1.3), row(10, 1.0, 1.1), "does not hold"),
    ],
)
def test_a_claim_is_judged_by_its_intervals(better, worse, words):
    assert verdict(Claim("a", "b", "source"), {"a": better, "b": worse}) == words


def test_a_page_with_other_rows_says_so(tmp_path):
    rows = {name: dict(each) for name, each in stored().items()}
    rows["gptq 3 bit"]["perplexity"] = 12345.0

    assert "12345.00" in page(rows)


def test_figures_carry_their_units(monkeypatch, tmp_path):
    kept = [compress_bench.Row("rtn", {"perplexity": 3.0, "disk_bytes": 7.0, "other": 1.0})]
    monkeypatch.setattr(compression, "rows", lambda _folder, _seconds: iter(kept))

    found = list(compression.figures(tmp_path))

    assert found == [("rtn: disk_bytes", 7.0, "bytes"), ("rtn: perplexity", 3.0, "")]
    assert json.dumps(found)


def test_rows_that_are_kept_take_the_place_of_those_before(monkeypatch, tmp_path):
    again = [compress_bench.Row(name, dict(each)) for name, each in stored().items()]
    again[1].measured["perplexity"] = 4321.0
    monkeypatch.setattr(compression, "rows", lambda _folder, _seconds: iter(again))
    monkeypatch.setattr(compression, "RAW", tmp_path / "rows.jsonl")
    monkeypatch.setattr(compression, "DOCS", tmp_path / "page.md")

    list(compression.figures(tmp_path, is_kept=True))

    assert stored()[again[1].name]["perplexity"] == 4321.0
    assert "4321.00" in (tmp_path / "page.md").read_text()
