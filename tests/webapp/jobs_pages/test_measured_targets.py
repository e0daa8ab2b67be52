"""A benchmark's page under load, and a plan's targets judged by their percentile."""

import pytest

from runners.jobspec.compress import LoadLimit, LoadReport, LoadRow, OperatorRow, ProfileReport
from tests.webapp.conftest import EXIT_OK, STARTED, batch_of, client_of
from tests.webapp.jobs.undone import undone
from webapp.agents.ingest import events_accept
from webapp.jobs.benchmark_reports import operators_of, under_load
from webapp.jobs.measured_figures import figures_of
from webapp.jobs.measured_targets import targets_of
from webapp.jobs.models import Job

pytestmark = pytest.mark.django_db(databases="__all__")
SPEC = {
    "kind": "benchmark",
    "model": {"source": "artefact", "attempt_id": "a1"},
    "batch_size": 4,
    "load": {"arrivals": {"kind": "closed", "concurrency": [1, 4]}},
}
PREDICTION = {
    "ttft_seconds": {"value": 0.1, "low": 0.05, "high": 0.2, "unit": "seconds"},
    "under_load": {
        "rows": [
            {"point": 1.0, "tokens_per_second": [80.0, 60.0, 100.0]},
            {"point": 4.0, "tokens_per_second": [280.0, 220.0, 350.0]},
        ]
    },
}
BREAKDOWN = {"decode": {"memory_bandwidth": 3.0, "overhead": 1.0}}


def row(point: float, rate: float, **changes) -> LoadRow:
    means = {"tokens_per_second": rate, "ttft_seconds": 0.05, "tpot_seconds": 0.01}
    spread = {f"ttft_p{each}_seconds": 0.001 * each for each in (50, 90, 99)}
    fields = {"requests": 24, "failed": 0, "repetitions": 2, "duration_seconds": 9.0}
    return LoadRow(point=point, measured=means | spread, **{**fields, **changes})


def operator(phase: str, name: str, seconds: float, bound: str) -> OperatorRow:
    fields = {"shapes": "2x64 64x64", "calls": 3, "flops": 1e6}
    return OperatorRow(phase=phase, name=name, seconds=seconds, bound=bound, **fields)


REPORT = LoadReport(
    arrivals="closed",
    prompt_tokens=16,
    output_tokens=8,
    places=4,
    seed=17,
    rows=(row(1, 70.0, notes=("24 answers are few for a p90: 100 would be enough",)),
          row(4, 250.0, failed=2, interval={"tokens_per_second": (200.0, 300.0)})),
)  # fmt: skip
PROFILE = ProfileReport(
    batch_size=2,
    prompt_tokens=16,
    decode_steps=8,
    slowdown_ratio=3.0,
    flops_per_second=1e9,
    bytes_per_second=1e9,
    rows=(
        operator("prefill", "aten::mm", 3.0, "compute"),
        operator("decode", "aten::mm", 3.0, "memory_bandwidth"),
        operator("decode", "<b>&", 1.0, "overhead"),
    ),
)


@pytest.fixture
def left(attempt):
    """Let a benchmark leave a report as its host announces it, and end well."""

    def leave(name: str, facts: dict) -> Job:
        Job.objects.filter(pk=attempt.job_id).update(
            kind="benchmark",
            spec=SPEC,
            prediction=PREDICTION,
            estimate={"time_breakdown_seconds": BREAKDOWN},
        )
        body = {"name": name, "kind": "report", "total_bytes": 2}
        files = {"files": {f"{name}.json": 2}, "sha256": {f"{name}.json": "a" * 64}}
        announced = ("artefact", {**body, **files, "facts": facts})
        batch = batch_of(attempt, ("started", STARTED), announced, ("exited", EXIT_OK))
        events_accept(host=attempt.host, batch=batch)
        return Job.objects.get(pk=attempt.job_id)

    return leave


def plain(text: object) -> str:
    return " ".join(str(text).split())


def test_each_point_of_a_sweep_stands_beside_what_the_plan_said_of_it(left, alice):
    job = left("load", REPORT.model_dump(mode="json"))
    found = under_load(job)
    rate, said = found.lines[1].rate, found.lines[1].rate_said
    assert [plain(each) for each in (rate, said)] == ["250 tok/s", "280 tok/s"]
    assert [each.chart.predicted for each in found.charts] == [
        "tokens_per_second",
        "ttft_seconds",
        "tpot_seconds",
    ]
    assert "11 % below the predicted" in plain(found.charts[0].words)
    # a figure that the plan does not have is drawn alone
    assert [each["name"] for each in found.charts[1].figure["data"]] == ["measured"]
    page = plain(client_of(alice).get(f"/jobs/{job.pk}/").content.decode())
    assert 'data-chart="sweep-tokens_per_second"' in page
    assert "24 answers are few for a p90: 100 would be enough." in page
    assert "seed 17" in page
    assert "4 clients" in page


def test_what_a_search_found_stands_beside_the_plans_limit_on_the_page_and_in_the_api(left, alice):
    load = SPEC["load"] | {
        "arrivals": {"kind": "closed", "concurrency": [1]},
        "search": {"targets": {"ttft_p95_seconds": 1.0}, "highest": 64.0},
    }
    limit = LoadLimit(targets={"ttft_p95_seconds": 1.0}, met=1, missed=4, ending="seconds")
    rows = (row(1, 70.0, is_met=True), row(4, 250.0, is_met=False))
    report = REPORT.model_copy(update={"limit": limit, "rows": rows})
    job = left("load", report.model_dump(mode="json"))
    said = {"value": 3.0, "low": None, "high": None, "unit": "clients"}
    prediction = PREDICTION | {"slo_max_concurrency": said}
    Job.objects.filter(pk=job.pk).update(spec=SPEC | {"load": load}, prediction=prediction)

    client = client_of(alice)
    page = plain(client.get(f"/jobs/{job.pk}/").content.decode())
    words = "The limit lies between 1 and 4 clients; the search ended there, at its time limit."
    assert f"{words}</strong> The targets are TTFT p95 within 1 s. The plan predicted 3" in page
    assert [page.count(f"<td>{each}</td>") for each in ("met", "missed")] == [1, 1]
    told = client.get(f"/api/v1/jobs/{job.pk}").json()["load_limit"]
    assert (told["met"], told["missed"], told["ending"], told["predicted"]) == (1, 4, "seconds", 3)
    assert (told["figure"], told["unit"]) == ("slo_max_concurrency", "clients")
    assert told["words"] == words


def test_a_sweep_has_no_limit(left, alice):
    job = left("load", REPORT.model_dump(mode="json"))
    assert client_of(alice).get(f"/api/v1/jobs/{job.pk}").json()["load_limit"] is None


def test_the_page_shows_operators_by_share_and_their_classes_beside_the_plans(left, alice):
    job = left("operators", PROFILE.model_dump(mode="json"))
    decode = operators_of(job).phases[1]
    page = plain(client_of(alice).get(f"/jobs/{job.pk}/").content.decode())
    assert [plain(bar.share) for bar in decode.bars] == ["75 %", "25 %"]
    assert [plain(line.predicted) for line in decode.classes] == ["75 %", "25 %"]
    assert "Writing each token: mm 75 %" in page
    assert "<b>&" not in page


def test_a_report_that_is_none_is_not_shown_and_breaks_nothing(left, alice):
    for facts in [
        {},
        {"rows": []},
        {**REPORT.model_dump(mode="json"), "rows": [{"point": "x"}]},
        {"seed": []},
    ]:
        with undone(facts):
            job = left("load", facts)

            assert under_load(job) is None
            assert client_of(alice).get(f"/jobs/{job.pk}/").status_code == 200


def test_extreme_figures_of_a_report_leave_the_page(left, alice):
    client = client_of(alice)
    client.raise_request_exception = False
    profile, load = PROFILE.model_dump(mode="json"), REPORT.model_dump(mode="json")
    for value in (0.0, 5e-324, 1e308, 1.7e308):
        rows = [each | {"seconds": value, "flops": value} for each in profile["rows"]]
        with undone(value):
            job = left("operators", profile | {"rows": rows, "slowdown_ratio": value})
            assert operators_of(job)
            assert client.get(f"/jobs/{job.pk}/").status_code == 200, value
    for point in (-1.7e308, 0.0, 1.7e308):
        wide = {"tokens_per_second": [-1.7e308, 1.7e308]}
        rows = [load["rows"][0], load["rows"][1] | {"point": point, "interval": wide}]
        with undone(point):
            job = left("load", load | {"rows": rows})
            assert under_load(job)
            assert client.get(f"/jobs/{job.pk}/").status_code == 200, point


def test_nobody_of_another_team_sees_it(left, charlie):
    job = left("load", REPORT.model_dump(mode="json"))
    assert client_of(charlie).get(f"/jobs/{job.pk}/").status_code == 404


# A plan's targets are judged by their percentile: named, met or missed, with the chance.


ASKED = {"kind": "serve", "ttft_slo_seconds": 1.0, "tpot_slo_seconds": 0.05}


@pytest.fixture
def endpoint(attempt, report):
    """Let an endpoint report its requests; more changes may be made to its job."""

    def make(points: list[dict], **fields) -> Job:
        changes = {"kind": "serve", "spec": {"kind": "serve"}} | fields
        request = {"plan_request": {"workload": ASKED}}
        Job.objects.filter(pk=attempt.job_id).update(**{**request, **changes})
        report(("started", STARTED))
        for values in points:
            report(("metric", {"source": "job", "values": values}))
        return Job.objects.get(pk=attempt.job_id)

    return make


def point(answered: float, mean: float, p95: float) -> dict:
    return {
        "answered_requests": answered,
        "ttft_mean_seconds": mean,
        "ttft_p95_seconds": p95,
        "tpot_p95_seconds": 0.02,
    }


def states(job: Job) -> dict[str, tuple[str, str]]:
    return {one.name: (one.state, plain(one.words)) for one in targets_of(job, figures_of(job))}


def test_a_target_is_missed_by_its_percentile_however_good_the_mean_is(endpoint):
    found = states(endpoint([point(100, 0.333, 1.3)]))
    assert found["ttft"] == ("missed", "Time to first token, p95: 1.3 s so far")


def test_a_target_that_is_met_is_said_to_be_met(endpoint, as_alice):
    job = endpoint([point(100, 0.333, 0.8)])
    page = plain(as_alice.get(f"/jobs/{job.pk}/").content.decode())
    assert states(job)["ttft"][0] == "met"
    assert "First token within 1.0 s" in page
    assert "Each further token within 50 ms" in page
    assert page.count("Met</span>") == 2


def test_a_few_requests_judge_no_target(endpoint):
    state, words = states(endpoint([point(3, 0.3, 1.3)]))["ttft"]
    assert state == "unjudged"
    assert "not compared yet: warm-up, 3 of 20 requests" in words


def test_without_a_target_nothing_is_judged(endpoint):
    job = endpoint([point(100, 0.3, 0.3)], plan_request={"workload": {"kind": "serve"}})
    assert targets_of(job, figures_of(job)) == []


def test_one_batch_has_no_percentile_and_says_so(endpoint):
    found = states(endpoint([], kind="benchmark", spec={"kind": "benchmark"}))
    assert found["ttft"][0] == "unjudged"
    assert "measure the plan under load" in found["ttft"][1]


@pytest.fixture
def swept(attempt):
    """Let a benchmark leave rows whose p95 has the given value and interval."""

    def leave(value: float, interval: tuple[float, float] | None, limit: float) -> Job:
        rows = [row.model_dump(mode="json") for row in REPORT.rows]
        rows[-1]["measured"]["ttft_p95_seconds"] = value
        rows[-1]["interval"] = {} if interval is None else {"ttft_p95_seconds": interval}
        facts = REPORT.model_dump(mode="json") | {"rows": rows}
        workload = {"kind": "serve", "ttft_slo_seconds": limit}
        Job.objects.filter(pk=attempt.job_id).update(
            kind="benchmark", spec=SPEC, plan_request={"workload": workload}
        )
        body = {"name": "load", "kind": "report", "total_bytes": 2, "facts": facts}
        files = {"files": {"load.json": 2}, "sha256": {"load.json": "a" * 64}}
        events = (("started", STARTED), ("artefact", body | files), ("exited", EXIT_OK))
        events_accept(host=attempt.host, batch=batch_of(attempt, *events))
        return Job.objects.get(pk=attempt.job_id)

    return leave


def test_the_chance_follows_from_the_interval_of_the_percentile(swept):
    for value, interval, limit, state, words in [
        (0.9, (0.8, 1.0), 1.0, "met", "chance 90 %"),
        (1.1, (1.0, 1.2), 1.0, "missed", "chance 10 %"),
        (1.0, (0.9, 1.1), 1.0, "met", "chance 50 %"),
        (0.5, (0.49, 0.51), 1.0, "met", "chance above 99 %"),
        (2.0, (1.9, 2.1), 1.0, "missed", "chance below 1 %"),
        (0.9, None, 1.0, "met", ""),
    ]:
        with undone(value, interval, limit, state, words):
            job = swept(value, interval, limit)

            (target,) = targets_of(job, figures_of(job))

            assert target.state == state
            assert plain(target.chance_words).startswith(words)
            assert bool(target.chance_words) == bool(words)


def test_the_api_has_the_target_as_the_page_has_it(swept, alice):
    job = swept(0.9, (0.8, 1.0), 1.0)
    client = client_of(alice)
    (told,) = client.get(f"/api/v1/jobs/{job.pk}/figures").json()["targets"]
    page = plain(client.get(f"/jobs/{job.pk}/").content.decode())
    assert (told["figure"], told["state"], told["percentile"]) == ("ttft_p95_seconds", "met", 95)
    assert told["chance"] == pytest.approx(0.9)
    assert "Time to first token, p95: 900 ms" in page
