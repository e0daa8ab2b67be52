"""The operator profile: rows of both phases, classes by what bounds them, and the artefact."""

from runners.jobs.load import benchmark
from runners.jobspec import BenchmarkSpec
from runners.jobspec.compress import ProfileReport
from tests.runners.jobs.test_evaluation import (  # noqa: F401 -- some are fixtures
    report,
)


def test_a_benchmark_leaves_the_operators_of_both_phases(host, trained_model):
    spec = BenchmarkSpec(
        model=trained_model,
        weight_dtype="fp32",
        prompt_tokens=16,
        output_tokens=4,
        repetitions=1,
        evaluation_tokens=512,
        profile=True,
    )

    run = host.run_here("bench-profiled", spec, benchmark.work)

    body = run.bodies("artefact")[0]
    report = ProfileReport.model_validate(body["facts"])
    assert (body["name"], body["kind"], list(body["files"])) == (
        "operators",
        "report",
        ["operators.json"],
    )
    assert report.of("prefill")
    assert report.of("decode")
    assert run.measured["tpot_seconds"] > 0
