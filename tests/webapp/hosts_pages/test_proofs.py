"""The proof of a host: the button, its job, and its report."""

import pytest

from runners.prove.report import Check, Report, Stage
from tests.webapp.conftest import client_of, make_microbench, new_attempt
from tests.webapp.hosts_pages.test_hosts_pages import page_of, plain
from webapp.core.clock import now
from webapp.hosts.machines import cluster_for_host
from webapp.jobs.artefacts import folder_of
from webapp.jobs.calibration import attributed_measurements, recalibrate
from webapp.jobs.models import Artefact, Job
from webapp.jobs.proofs import prove_host
from webapp.jobs.results import store_measurements_and_models

pytestmark = pytest.mark.django_db(databases=["default", "metrics"])

WRONG = Report(
    began_at_ms=1_790_000_000_000,
    hostname="<b>lab</b>",
    stages=(
        Stage(
            name="rates",
            state="done",
            records=(Check(name="sum", is_met=False, expected="3", found="4"),),
        ),
    ),
)


@pytest.fixture
def proof(host, olga, settings, tmp_path) -> Job:
    """A proof whose report has arrived and says that something is wrong."""
    settings.ARTEFACTS_DIR = tmp_path
    job = prove_host(host=host, owner=olga)
    artefact = Artefact.objects.create(
        attempt=new_attempt(job),
        name="proof",
        kind="report",
        total_bytes=1,
        files={"report.json": 1},
        facts={"verdict": "failed", "problems": ["rates: sum: expected 3, found 4"]},
        is_complete=True,
    )
    job.refresh_from_db()
    folder_of(artefact).mkdir(parents=True)
    (folder_of(artefact) / "report.json").write_text(WRONG.model_dump_json())
    return job


def test_an_operator_proves_a_host_on_all_its_devices(host, olga):
    assert "This host has not been validated yet" in page_of(olga, host)
    response = client_of(olga).post(f"/hosts/{host.slug}/prove/")
    job = Job.objects.get(kind="prove")
    assert response["Location"] == f"/jobs/{job.pk}/"
    assert (job.requested_host, job.devices_per_host) == (host, None)
    assert job.spec["stages"][0] == "identity"
    assert "no report yet" in page_of(olga, host)
    assert "Validation" in plain(client_of(olga).get(f"/jobs/{job.pk}/"))


def test_only_an_operator_proves_a_host_and_only_one_that_takes_jobs(host, alice, olga):
    assert "Validate this host" not in page_of(alice, host)
    assert client_of(alice).post(f"/hosts/{host.slug}/prove/").status_code == 403
    host.state = "retired"
    host.save()
    response = client_of(olga).post(f"/hosts/{host.slug}/prove/", follow=True)
    assert "retired; choose another host" in plain(response)
    assert not Job.objects.filter(kind="prove").exists()


def test_the_page_says_what_is_wrong_and_the_report_is_shown_without_scripts_to_its_team(
    proof, host, alice, charlie
):
    shown = page_of(alice, host)
    assert "Some tests failed on this host" in shown
    assert "rates: sum: expected 3, found 4" in shown
    report = client_of(alice).get(f"/jobs/{proof.pk}/proof/")
    assert "&lt;b&gt;lab" in report.content.decode()
    assert "default-src 'none'" in report["Content-Security-Policy"]
    assert "script-src" not in report["Content-Security-Policy"]
    assert client_of(charlie).get(f"/jobs/{proof.pk}/proof/").status_code == 404


def test_a_damaged_or_absent_report_answers_404(proof, alice, job):
    for artefact in Artefact.objects.all():
        (folder_of(artefact) / "report.json").write_text('{"stages": "none"}')
    for job_id in (proof.pk, job.pk):
        assert client_of(alice).get(f"/jobs/{job_id}/proof/").status_code == 404


def test_a_proof_becomes_the_first_calibration_of_its_host(proof, host):
    host.microbench = make_microbench().model_dump(mode="json")
    host.save()
    Job.objects.filter(pk=proof.pk).update(state="succeeded", host=host, ended_at=now())
    question = {
        "model": {
            "model_type": "llama",
            "hidden_size": 256,
            "intermediate_size": 512,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 512,
        },
        "workload": {"kind": "generate", "batch_size": 1, "input_tokens": 16, "output_tokens": 4},
        "strategy": {"weight_dtype": "bf16"},
        "metric": "decode_tokens_per_second",
    }
    lesson = {"question": question, "metric": "tpot_seconds", "seconds": 9.0}
    artefact = Artefact.objects.filter(name="proof")
    artefact.update(facts={"lessons": [lesson]})
    (one,) = attributed_measurements(Job.objects.get(pk=proof.pk), host)
    artefact.update(facts={"lessons": [{**lesson, "seconds": 2 * one.measurement.predicted}]})
    (factor,) = recalibrate(host).factors.values()
    assert (factor.n, factor.factor > 1) == (1, True)

    artefact.update(facts={"lessons": [{**lesson, "seconds": "x"}]})
    assert recalibrate(host).factors == {}


PROVEN = {
    "device": {
        "device": "cpu",
        "memory_bandwidth_bytes_per_second": 24e9,
        "flops_per_second": {"fp32": 90e9, "bf16": 99e9},
        "op_overhead_seconds": 4e-6,
    },
    "disk_write_bytes_per_second": 900e6,
}


@pytest.fixture
def finish(proof, host, django_capture_on_commit_callbacks):
    """Return a function that ends the proof successfully with these facts of its report."""

    def end(facts) -> None:
        with django_capture_on_commit_callbacks(execute=True):
            end_proof(proof, host, facts)
        host.refresh_from_db()

    return end


def end_proof(proof, host, facts) -> None:
    Artefact.objects.filter(name="proof").update(facts=facts)
    Job.objects.filter(pk=proof.pk).update(
        state="succeeded", reason="ok", host=host, ended_at=now()
    )
    store_measurements_and_models(Job.objects.get(pk=proof.pk), proof.current_attempt)


def test_a_proofs_rates_replace_those_of_the_micro_benchmark_and_say_so(finish, host, alice):
    host.microbench = make_microbench().model_dump(mode="json")
    host.save()
    assert "Measured by a validation run" not in page_of(alice, host)
    finish({"rates": PROVEN})
    cluster = cluster_for_host(host)
    assert cluster.device.memory_bandwidth_bytes_per_second == 24e9
    assert cluster.device.peak_flops_per_second == {"fp32": 90e9, "bf16": 99e9}
    assert cluster.device.runtime_overhead_bytes == 350_000_000  # not measured by a validation
    assert cluster.disk_bandwidth_bytes_per_second == 900e6
    assert cluster.device.source == "measured on Box by a validation run"
    assert cluster.device.as_of == now().date().isoformat()
    shown = page_of(alice, host)
    assert "24.0" in shown
    assert "Measured by a validation run" in shown


@pytest.mark.parametrize("rates", [None, {"device": {"device": "cpu"}}, "fast"])
def test_a_proof_without_valid_rates_leaves_the_micro_benchmark(finish, host, rates):
    host.microbench = before = make_microbench().model_dump(mode="json")
    host.save()
    finish({"rates": rates})
    assert host.microbench == before


HOSTILE = (0, 5, -1e308, True, "x", [5], ["x"], [None], [[]], [{}], [{"x": 1}], {}, {"x": 1})


def test_no_fact_of_a_report_stops_a_calibration_or_breaks_the_page_of_its_host(
    finish, host, alice
):
    host.microbench = make_microbench().model_dump(mode="json")
    host.save()
    client = client_of(alice)
    client.raise_request_exception = False
    for name in ("lessons", "rates", "problems", "verdict"):
        for value in HOSTILE:
            finish({"verdict": "failed", "problems": [], name: value})
            assert recalibrate(host).factors == {}, (name, value)
            assert client.get(f"/hosts/{host.slug}/").status_code == 200, (name, value)
    assert "The summary of" in page_of(alice, host)
    assert "is damaged. Validate the host again." in page_of(alice, host)
