"""Model FLOP utilisation of a training: the plan says it, and its measured speed."""

import re

import pytest

from webapp.charts.figures import Prediction
from webapp.jobs.measured_figures import utilisation_of
from webapp.jobs.models import Job

pytestmark = pytest.mark.django_db(databases="__all__")

SPEED = Prediction(3000.0, 2700.0, 3400.0)
PLANNED = Prediction(0.4, 0.3, 0.5)


@pytest.fixture
def draft(draft) -> Job:
    said = {"value": 0.4, "low": 0.3, "high": 0.5, "unit": "share"}
    draft.prediction = draft.prediction | {"mfu": said}
    draft.save()
    return draft


def test_it_moves_as_the_speed_does():
    said = {"mfu": PLANNED, "tokens_per_second": SPEED}

    assert utilisation_of(said, {"tokens_per_second": 1500.0}) == {"mfu": pytest.approx(0.2)}
    assert utilisation_of(said, {"tokens_per_second": 3000.0}) == {"mfu": pytest.approx(0.4)}


@pytest.mark.parametrize(
    ("said", "measured"),
    [
        ({"tokens_per_second": SPEED}, {"tokens_per_second": 1500.0}),
        ({"mfu": PLANNED}, {"tokens_per_second": 1500.0}),
        ({"mfu": PLANNED, "tokens_per_second": SPEED}, {}),
        ({"mfu": PLANNED, "tokens_per_second": Prediction(0.0, None, None)}, {"x": 1.0}),
    ],
)
def test_without_plan_or_speed_there_is_none(said, measured):
    assert utilisation_of(said, measured) == {}


def test_the_jobs_page_has_it_beside_the_plans(running, report, client, alice):
    report(("result", {"measured": {"tokens_per_second": 3600.0}, "notes": {}}))
    client.force_login(alice)

    page = client.get(f"/jobs/{running.pk}/").content.decode()
    text = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", page).replace("\N{NO-BREAK SPACE}", " "))

    assert "Model FLOP utilisation" in text
    assert "48.0 %" in text  # 0.4 x 3600 / 3000
    assert "predicted 40.0 %" in text
