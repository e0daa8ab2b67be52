"""A benchmark under load as a job: rows of a real endpoint, and its end when that is killed."""

import signal
import subprocess

import psutil
import pytest

from runners.jobs.load import benchmark
from runners.jobs.load.job import serve_spec_of
from runners.jobs.runtime import BadInputError, MissingModelError
from runners.jobspec import BenchmarkSpec, RandomModel
from runners.jobspec.compress import ClosedLoop, LoadOptions, LoadReport
from runners.jobspec.serve import key_hash
from runners.shared.reasons import Reason
from runners.supervision.classification import Ending, classify
from tests.runners.jobs.tiny import TINY_CONFIG
from tests.system.jobs.serve.serving import Endpoint, until

SWEEP = LoadOptions(
    arrivals=ClosedLoop(concurrency=(1, 4)),
    requests_per_repetition=12,
    warm_up_requests=2,
    repetitions=2,
)
SMALL = {"weight_dtype": "fp32", "batch_size": 4, "prompt_tokens": 16, "output_tokens": 8}


def spec_of(model, load=SWEEP, **changes):
    return BenchmarkSpec(model=model, load=load, **{**SMALL, **changes})


@pytest.fixture(scope="module")
def run(host, trained_model):
    return host.run_here("load-closed", spec_of(trained_model), benchmark.work)


@pytest.fixture(scope="module")
def report(run):
    return LoadReport.model_validate(run.bodies("artefact")[0]["facts"])


@pytest.mark.slow
def test_the_endpoint_answers_every_request_of_the_generator_in_full(report):
    assert [row.point for row in report.rows] == [1, 4]
    assert [(row.requests, row.failed, row.errors) for row in report.rows] == [(24, 0, {})] * 2
    for row in report.rows:
        answered = row.measured["requests_per_second"] * 8
        assert row.measured["tokens_per_second"] == pytest.approx(answered)


def test_each_point_has_the_planners_figures_with_percentiles_and_intervals(report):
    for row in report.rows:
        measured = row.measured
        assert 0 < measured["ttft_p50_seconds"] <= measured["ttft_p99_seconds"]
        assert measured["latency_seconds"] > measured["ttft_seconds"] > 0
        assert row.interval["tpot_seconds"][0] <= measured["tpot_seconds"]
        assert any("few for a p90" in note for note in row.notes)


def test_the_result_is_the_point_that_the_plan_has_with_the_endpoints_own_peak(run, report):
    measured = run.measured

    assert measured["tokens_per_second"] == report.rows[1].measured["tokens_per_second"]
    assert measured["peak_memory_bytes"] > 0
    assert "with 4 clients" in run.bodies("result")[0]["notes"]["ttft_seconds"]


def test_the_endpoints_own_charts_are_the_jobs(run):
    assert run.metric("held_kv_cache_bytes")
    assert run.metric("tokens_per_second")
    assert run.bodies("progress")[-1]["done"] == pytest.approx(100.0)


def test_the_endpoint_reserves_what_the_sweep_takes_at_most():
    model = RandomModel(config=TINY_CONFIG)
    spec = serve_spec_of(spec_of(model, batch_size=2), SWEEP, "a key")
    narrow = serve_spec_of(spec_of(model, max_batch_tokens=32), SWEEP, "a key")

    assert (spec.max_batch_tokens, narrow.max_batch_tokens) == (512, 32)
    assert (spec.max_concurrency, spec.max_length, spec.kv_cache_tokens) == (4, 24, 96)
    assert (spec.host, spec.key_hashes) == ("127.0.0.1", (key_hash("a key"),))


def killed_child(process: subprocess.Popen[str]) -> None:
    """Kill the endpoint that a load job started."""
    children = psutil.Process(process.pid).children()
    serving = [each for each in children if "runners.jobs.serve" in each.cmdline()]
    assert len(serving) == 1
    serving[0].kill()


@pytest.mark.faults
@pytest.mark.slow
def test_killed_under_load_each_client_hears_it_in_seconds_and_the_job_ends_by_name(
    host, trained_model
):
    many = SWEEP.model_copy(update={"requests_per_repetition": 100_000})
    folder = host.attempt("load-killed", spec_of(trained_model, many))
    job = Endpoint(host, folder, host.start(folder))
    begun = {"name": "Under load: 1 client"}
    until(lambda: begun in job.said("phase") or job.process.poll(), "no load came")

    killed_child(job.process)

    ended = job.end()
    assert ended.returncode == -signal.SIGKILL
    assert "ENDPOINT_ENDED: the endpoint ended under load; each of 1 clients" in ended.stderr
    assert classify(Ending(None, 9, ended.stderr)) == Reason.KILLED_EXTERNALLY
    assert not ended.bodies("result")


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"model": RandomModel(config=TINY_CONFIG)}, MissingModelError, "no tokenizer.json"),
        ({"prompt_tokens": 10**7}, BadInputError, "prompt_tokens is 10000000, but the host's"),
    ],
)
def test_what_cannot_be_asked_is_refused_before_an_endpoint_starts(
    host, trained_model, changes, error, message
):
    spec = spec_of(trained_model).model_copy(update=changes)

    with pytest.raises(error, match=message):
        host.run_here(f"load-refused-{next(iter(changes))}", spec, benchmark.work)


@pytest.mark.slow
def test_an_endpoint_that_does_not_come_up_ends_the_job_as_it_ended(
    host, trained_model, capfd, monkeypatch
):
    spec = spec_of(trained_model, prompt_tokens=60)

    with pytest.raises(SystemExit) as ended:
        host.run_here("load-too-long", spec, benchmark.work)

    told = capfd.readouterr().err
    assert ended.value.code == 3
    assert "max_length is 68, but the model has 64 positions" in told
    assert "did not come up: it ended by exit code 3" in told
