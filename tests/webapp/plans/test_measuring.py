"""A serve plan measured: the load that is asked for, what the plan says of it, what is refused."""

import pytest

from runners.jobspec import BenchmarkSpec
from runners.jobspec.benchmark import ClosedLoop, OpenLoop
from tests.webapp.conftest import client_of
from tests.webapp.plans.conftest import with_model
from tests.webapp.plans.test_serving import plan  # noqa: F401
from webapp.core.problems import InvalidProblem
from webapp.jobs.models import Job
from webapp.plans.errors import DraftProblem
from webapp.plans.launching import launch_of
from webapp.plans.measuring import CURVE, Measuring, curve_points, measuring_of, usual_points

pytestmark = pytest.mark.django_db(databases="__all__")
POSTED = {"arrivals": "closed", "points": "1, 2 4;8", "requests": "16", "repetitions": "2"}


def asked(**changes) -> Measuring:
    return measuring_of({**POSTED, **changes}, is_load=True)


def test_the_form_says_who_asks_and_how_often():
    load = asked().load

    assert load.arrivals == ClosedLoop(concurrency=(1, 2, 4, 8))
    assert (load.requests_per_repetition, load.repetitions) == (16, 2)
    assert asked(arrivals="open", points="0.5 2").load.arrivals == OpenLoop(
        request_rate_per_second=(0.5, 2.0)
    )


def test_what_cannot_be_measured_is_refused_with_the_limits():
    for changes, words in [
        ({"points": "4, 2"}, "“Points” are 4, 2; give 1 to 12 rising numbers of clients"),
        ({"points": "many"}, "“Points” are many"),
        ({"points": "nan"}, "“Points” are nan"),
        ({"points": ""}, "“Points” are ; give"),
        ({"points": "1.5"}, "“Points” are 1.5"),
        ({"points": "0", "arrivals": "open"}, "requests a second above 0"),
        ({"arrivals": "flood"}, "“Arrivals” is flood"),
        ({"requests": "0"}, "“Requests” is 0; it can be 1 to 100000"),
        ({"repetitions": "99"}, "“Repetitions” is 99; it can be 1 to 20"),
    ]:
        with pytest.raises(InvalidProblem, match=words):
            asked(**changes)


def test_the_usual_sweep_doubles_and_the_curve_has_every_measured_point():
    assert [usual_points(each) for each in (1, 4, 6)] == ["1", "1, 2, 4", "1, 2, 4, 6"]
    assert len(usual_points(1024 * 1024).split(", ")) == 12
    assert curve_points((1.0, 4.0), whole=True) == [1.0, 2.0, 3.0, 4.0]
    assert len(curve_points((1.0, 4.0), whole=False)) == 18
    assert curve_points((2.0,), whole=False) == [2.0]


def test_a_launch_under_load_predicts_the_plans_clients_and_every_other_point(plan):
    launch = launch_of(plan, measuring=asked())

    said = launch.prediction
    rows = {row["point"]: row for row in said[CURVE]["rows"]}
    assert {1.0, 2.0, 4.0, 8.0} <= set(rows)
    assert said["ttft_seconds"]["value"] == pytest.approx(rows[4.0]["ttft_seconds"][0])
    assert rows[1.0]["tokens_per_second"][0] < rows[8.0]["tokens_per_second"][0]
    assert said["peak_memory_bytes"]["value"] > 0


def test_the_plan_has_a_figure_for_each_kind_of_arrival(plan):
    for kind, points in [("open", "0.5 1"), ("burst", "2 8")]:
        prediction = launch_of(plan, measuring=asked(arrivals=kind, points=points)).prediction
        assert prediction["ttft_seconds"]["value"] > 0, kind
        assert all("tokens_per_second" in row for row in prediction[CURVE]["rows"]), kind


def test_a_model_without_weights_is_not_put_under_load(serve_plan):
    with pytest.raises(DraftProblem, match="Load on an endpoint needs trained weights"):
        launch_of(serve_plan, measuring=asked())


def test_the_review_page_launches_it(plan, alice):
    client = client_of(alice)
    page = client.get(f"/plans/{plan.pk}/edit/review/").content.decode()

    client.post(f"/plans/{plan.pk}/launch/", {**POSTED, "go": "load", "key": "k1"})

    spec = BenchmarkSpec.model_validate(Job.objects.get().spec)
    assert 'value="1, 2, 4"' in page
    assert spec.load == asked().load
    assert not spec.profile


def test_a_ticked_box_profiles_the_plain_measurement_and_bad_points_go_back(plan, alice):
    posted = {**POSTED, "points": "9, 3", "go": "load"}
    page = client_of(alice).post(f"/plans/{plan.pk}/launch/", posted, follow=True)
    assert "“Points” are 9, 3" in page.content.decode()
    assert not Job.objects.exists()

    client_of(alice).post(f"/plans/{plan.pk}/launch/", {"go": "launch", "profile": "1"})
    spec = BenchmarkSpec.model_validate(Job.objects.get().spec)
    assert (spec.profile, spec.load) == (True, None)
