"""A benchmark's page: the sweep over the plan's curve, and the operators beside its classes."""

import pytest

from runners.jobspec.benchmark import LoadReport, LoadRow, OperatorRow, ProfileReport
from tests.webapp.conftest import EXIT_OK, STARTED, batch_of, client_of
from webapp.jobs.ingest import events_accept
from webapp.jobs.measured_load import operators_of, under_load
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
    return str(text).replace("\N{NO-BREAK SPACE}", " ").replace("\N{NARROW NO-BREAK SPACE}", " ")


def test_each_point_stands_beside_what_the_plan_said_of_it(left):
    found = under_load(left("load", REPORT.model_dump(mode="json")))

    rate, said = found.lines[1].rate, found.lines[1].rate_said
    assert [plain(each) for each in (rate, said)] == ["250 tok/s", "280 tok/s"]
    assert [each.chart.predicted for each in found.charts] == [
        "tokens_per_second",
        "ttft_seconds",
        "tpot_seconds",
    ]
    assert "11 % below the predicted" in plain(found.charts[0].words)


def test_a_figure_that_the_plan_does_not_have_is_drawn_alone(left):
    ttft = under_load(left("load", REPORT.model_dump(mode="json"))).charts[1]

    assert [each["name"] for each in ttft.figure["data"]] == ["measured"]


def test_the_page_draws_the_sweep_and_says_what_to_beware_of(left, alice):
    job = left("load", REPORT.model_dump(mode="json"))

    page = plain(client_of(alice).get(f"/jobs/{job.pk}/").content.decode())

    assert 'data-chart="sweep-tokens_per_second"' in page
    assert "24 answers are few for a p90: 100 would be enough." in page
    assert "seed 17" in page
    assert "4 clients" in page


def test_the_page_shows_operators_by_share_and_their_classes_beside_the_plans(left, alice):
    job = left("operators", PROFILE.model_dump(mode="json"))

    decode = operators_of(job).phases[1]
    page = plain(client_of(alice).get(f"/jobs/{job.pk}/").content.decode())

    assert [plain(bar.share) for bar in decode.bars] == ["75 %", "25 %"]
    assert [plain(line.predicted) for line in decode.classes] == ["75 %", "25 %"]
    assert "Writing each token: mm 75 %" in page
    assert "<b>&" not in page


@pytest.mark.parametrize(
    "facts",
    [{}, {"rows": []}, {**REPORT.model_dump(mode="json"), "rows": [{"point": "x"}]}, {"seed": []}],
)
def test_a_report_that_is_none_is_not_shown_and_breaks_nothing(left, alice, facts):
    job = left("load", facts)

    assert under_load(job) is None
    assert client_of(alice).get(f"/jobs/{job.pk}/").status_code == 200


def test_nobody_of_another_team_sees_it(left, charlie):
    job = left("load", REPORT.model_dump(mode="json"))

    assert client_of(charlie).get(f"/jobs/{job.pk}/").status_code == 404
