"""A whole proof on this machine's CPU, and its page in a browser, wide and narrow."""

import json
import subprocess
import sys

import pytest

from runners.jobspec.compress import STAGES
from runners.prove.report import Report


@pytest.fixture(scope="module")
def proof(tmp_path_factory):
    """The folder of a whole run in the smallest sizes."""
    folder = tmp_path_factory.mktemp("proof")
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "runners", "prove", "--small", "--minutes", "10"),
            *("--dir", str(folder), "--output", str(folder)),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    return folder, ended


def test_every_stage_ends_and_every_check_is_met(proof):
    folder, ended = proof
    report = Report.model_validate(json.loads((folder / "report.json").read_text()))
    assert [(stage.name, stage.state) for stage in report.stages] == [
        (name, "done") for name in STAGES
    ]
    assert list(report.failures()) == [], ended.stdout
    assert (report.verdict, ended.returncode) == ("proven", 0), ended.stdout
    predicted = {each.name for stage in report.stages for each in stage.figures if each.prediction}
    assert {"prefill of 16", "decode bf16, batch 1, eager", "training step"} <= predicted
    assert report.calibration.factors


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_its_page_fits_the_screen_and_says_the_verdict(proof, browser, width, scheme):
    folder, _ended = proof
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page.goto(f"file://{folder / 'report.html'}")
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert page.locator("h2").first.inner_text() == "Everything that was run is right"
    assert page.locator("tbody tr").count() > 40
    page.close()
