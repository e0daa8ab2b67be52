"""Pages and plans survive whatever figures, versions and names a host reports."""

import pytest

from runners.jobspec.base import plain
from runners.shared.messages import Beat, EnrollRequest
from tests.webapp.conftest import (
    EXIT_OK,
    STARTED,
    batch_of,
    make_beat,
    make_facts,
    make_microbench,
)
from webapp.agents.heartbeats import host_beat
from webapp.agents.ingest import events_accept
from webapp.core.problems import ConflictProblem
from webapp.hosts.machines import cluster_for_host
from webapp.hosts.services import host_enroll, token_create
from webapp.jobs.models import Job, Measurement
from webapp.modelhub.models import TeamModel

pytestmark = pytest.mark.django_db(databases="__all__")


GPU = {"index": 0, "uuid": "GPU-1", "name": "A GPU", "memory_bytes": 1024**3}
BUILT = {"packages": {"torch": "2"}, "torch_cuda_version": "twelve", "cuda_version": "x.y"}


def test_versions_that_are_no_numbers_leave_a_page(host, olga, client):
    facts = make_facts(gpus=[GPU], **BUILT)
    host_beat(host=host, beat=make_beat(facts=facts))
    client.force_login(olga)
    assert client.get(f"/hosts/{host.slug}/").status_code == 200


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("facts", "memory_bytes"), 0),
        (("microbench", "devices", 0, "memory_bandwidth_bytes_per_second"), 0),
        (("microbench", "devices", 0, "flops_per_second"), {"fp1": 1e9}),
    ],
)
def test_figures_that_no_machine_has_are_named_and_break_no_page(
    host, alice, client, place, value
):
    beat = make_beat(facts=make_facts(), microbench=make_microbench()).model_dump(mode="json")
    *way, last = place
    inner = beat
    for key in way:
        inner = inner[key]
    inner[last] = value
    host_beat(host=host, beat=Beat.model_validate(plain(beat)))
    host.refresh_from_db()
    with pytest.raises(ConflictProblem, match=f"{host.name} reported figures") as refused:
        cluster_for_host(host)
    assert refused.value.code == "host_unknown"
    client.force_login(alice)
    assert client.get("/models/llama-3.1-8b/").status_code == 200


def test_a_name_longer_than_its_column_is_refused_and_a_long_hostname_cut(team):
    body = {"facts": make_facts(hostname="h" * 200).model_dump(mode="json"), "sent_at_ms": 1}
    _, text = token_create(team=team, by=None, name="")
    named = body | {"token": text, "name": "n" * 81}
    request = EnrollRequest
    with pytest.raises(ValueError, match=r"name\n.*at most 80 characters"):
        request.model_validate(named)
    reply = host_enroll(request.model_validate(body | {"token": text}))
    assert reply.name == "h" * 80


def test_no_job_is_told_to_meet_at_what_is_no_address(host):
    strange = ("", "box", "10.0.0.1/8", "x" * 200, "fe80::1%" + "x" * 60)
    facts = make_facts(addresses=[*strange, "10.0.0.1", "fd00::1"])
    host_beat(host=host, beat=make_beat(facts=facts))
    assert host.facts["addresses"] == ["10.0.0.1", "fd00::1"]


def test_a_result_of_any_figure_leaves_the_pages_of_its_job_and_its_team(attempt, alice, client):
    predicted = {"value": 10.0, "low": 5.0, "high": 20.0, "unit": "seconds"}
    names = ("step_seconds", "tokens_per_second", "peak_memory_bytes", "final_loss")
    Job.objects.filter(pk=attempt.job_id).update(prediction=dict.fromkeys(names, predicted))
    ends = [("result", {"measured": dict.fromkeys(names, -10.0)}), ("exited", EXIT_OK)]
    events_accept(host=attempt.host, batch=batch_of(attempt, ("started", STARTED), *ends))
    client.force_login(alice)
    for value in (-10.0, 5e-324, 1e100):
        result = {"measured": dict.fromkeys(names, value), "notes": {}}
        Job.objects.filter(pk=attempt.job_id).update(result=result)
        Measurement.objects.update(measured=value, ratio=value / 10)
        for page in (f"/jobs/{attempt.job_id}/", "/jobs/", "/"):
            assert client.get(page).status_code == 200, (page, value)


@pytest.mark.parametrize(("parameters", "stored"), [(1e100, 0), (-5.0, 0), (1e9, 10**9)])
def test_no_number_of_parameters_keeps_a_job_from_its_end(attempt, parameters, stored):
    body = {"name": "model", "kind": "model", "total_bytes": 1, "files": {}, "sha256": {}}
    result = {"measured": {"parameters": parameters}}
    ends = [("result", result), ("artefact", body), ("exited", EXIT_OK)]
    events_accept(host=attempt.host, batch=batch_of(attempt, ("started", STARTED), *ends))
    assert Job.objects.get(pk=attempt.job_id).state == "succeeded"
    assert TeamModel.objects.get(attempt_id=attempt.pk).num_parameters == stored
