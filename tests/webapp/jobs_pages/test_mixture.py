"""The sources that a training mixes, as the job's page shows them, fixed and moving."""

import re

import pytest

from runners.jobspec import FileData, HostText, MixedData, WeightedData
from tests.webapp.conftest import client_of, new_attempt
from webapp.charts.catalog import charts_for
from webapp.jobs.training_page import UNKNOWN, mixture_of

pytestmark = pytest.mark.django_db(databases=["default", "metrics"])
PARTS = (
    WeightedData(data=HostText(), weight=3.0),
    WeightedData(data=FileData(path="notes/<b>.txt"), weight=1.0),
)


def mixed(job, **changes):
    """Have a job read two sources."""
    data = MixedData(parts=PARTS, **changes)
    job.spec |= {"data": data.model_dump(mode="json")}
    job.save(update_fields=["spec"])


def moved(step, shares, losses, references=(2.5, 2.0)):
    figures = {"weight": shares, "loss": losses, "reference": references}
    values = {
        f"source{at}_{name}": value
        for name, each in figures.items()
        for at, value in enumerate(each, start=1)
    }
    return "metric", {"source": "job", "values": values, "step": step}


def card(job, user) -> list[list[str]]:
    """Return the cells of the card's rows, as plain text."""
    html = client_of(user).get(f"/jobs/{job.pk}/").content.decode()
    if 'id="mixture-title"' not in html:
        return []
    table = html[html.index('id="mixture-title"') :].partition("<tbody>")[2]
    rows = table.partition("</tbody>")[0].split("</tr>")[:-1]
    cells = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in rows]
    return [[cell.replace("\N{NO-BREAK SPACE}", " ") for cell in row] for row in cells]


def test_a_training_on_one_source_has_no_card(running, alice):
    assert card(running, alice) == []
    running.spec |= {"data": {"source": "mixed", "parts": [], "of": "another version"}}
    running.save(update_fields=["spec"])
    assert card(running, alice) == []


def test_fixed_shares_are_shown_as_they_are(running, alice):
    mixed(running)

    rows = card(running, alice)

    assert [row[0::2] for row in rows] == [["1", "75 %"], ["2", "25 %"]]
    assert rows[1][1] == "notes/&lt;b&gt;.txt"


def test_the_shares_in_force_stand_beside_what_they_follow(running, report, alice):
    mixed(running, weights="dynamic", update_every_steps=20)
    begun = card(running, alice)
    assert [row[3:] for row in begun] == [[UNKNOWN] * 3] * 2

    report(moved(0, (0.7, 0.3), (2.5, 4.0)), moved(20, (0.4, 0.6), (2.25, 3.0)))

    rows = card(running, alice)
    assert [row[2:] for row in rows] == [
        ["75 %", "40 %", "2.250", "2.500"],
        ["25 %", "60 %", "3.000", "2.000"],
    ]
    text = client_of(alice).get(f"/jobs/{running.pk}/").content.decode()
    assert "moves every 20 steps" in text
    assert "Share of rows from source 2" in text
    told = client_of(alice).get(f"/jobs/{running.pk}/metrics/").content.decode()
    assert "Held-out loss on source 1" in told
    assert "Reference loss of source 2" in told


def test_after_a_restart_the_attempt_before_speaks_until_the_weights_move(running, report):
    mixed(running, weights="dynamic")
    report(moved(0, (0.7, 0.3), (2.5, 4.0)))
    running.current_attempt = new_attempt(running)

    found = mixture_of(running)

    assert found is not None
    assert [each.loss for each in found.rows] == ["2.500", "4.000"]


def test_sources_are_charted_in_the_order_of_their_numbers():
    metrics = [f"source{at}_{name}" for at in (10, 2, 1) for name in ("loss", "weight")]

    few, all_ = (charts_for("train", metrics, is_complete=each) for each in (False, True))

    assert [each.key for each in few[-3:]] == [f"source{at}_weight" for at in (1, 2, 10)]
    assert [each.title for each in all_[-3:]] == [
        f"Held-out loss on source {at}" for at in (1, 2, 10)
    ]
    assert len({each.metric for each in all_}) == len(all_)
