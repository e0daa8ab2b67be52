"""A chart is saved as a picture, a drawing and a table, as the page's content policy allows."""

import csv
import json
import struct
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from tests.system.browser.driving import violations

pytestmark = [pytest.mark.browser, pytest.mark.slow]
WORDS = {"png": "PNG picture", "svg": "SVG drawing", "csv": "CSV table"}


def saved(page, chart: str, form: str) -> Path:
    menu = page.locator(f"[data-chart='{chart}'] .menu.save")
    menu.locator("summary").click()
    with page.expect_download() as made:
        menu.get_by_role("button", name=WORDS[form]).click()
    assert made.value.suggested_filename.endswith(f"-{chart}.{form}")
    return Path(made.value.path())


def test_a_chart_is_saved_in_each_form(page, stack, finished_job, recorder, axe):
    page.goto(f"{stack.base_url}/jobs/{finished_job}/metrics/")
    chart = page.locator("[data-chart='loss']")
    chart.scroll_into_view_if_needed()
    page.locator("[data-chart='loss'][data-drawn]").wait_for()
    figure = json.loads(chart.locator("script").text_content())
    values = [value for value in figure["data"][-1]["y"] if value is not None]  # without gaps

    head = saved(page, "loss", "png").read_bytes()[:24]
    size = struct.unpack(">II", head[16:])
    assert (head[:8], size) == (b"\x89PNG\r\n\x1a\n", (1920, 840))

    drawing = ET.parse(saved(page, "loss", "svg"))  # noqa: S314 -- drawn here
    texts = {"".join(each.itertext()) for each in drawing.iter("{http://www.w3.org/2000/svg}text")}
    assert {"Training loss", "Step", "nats per token"} <= texts

    with saved(page, "loss", "csv").open() as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == [
        *("line", "seconds", "step"),
        *(f"{name} (nats per token)" for name in ("value", "low", "high")),
    ]
    measured = [row for row in rows if row["line"] == "measured"]
    assert [float(row["value (nats per token)"]) for row in measured] == values
    assert float(measured[0]["seconds"]) < float(measured[-1]["seconds"])
    assert float(measured[-1]["step"]) > 1

    page.locator("[data-view='axis'][value='training']").click()
    page.wait_for_function(
        "() => document.querySelector(\"[data-chart='loss'] .js-plotly-plot\")"
        ".layout.xaxis.type === 'date'"
    )
    page.locator("[data-chart='loss'] .menu.save summary").click()
    assert violations(page, axe) == []
    assert recorder.broken == []
