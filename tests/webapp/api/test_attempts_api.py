"""The host's doors about an attempt: claim, events, artefacts."""

import hashlib

import pytest

from runners.messages import ClaimReply, ClaimRequest
from tests.webapp.conftest import EXIT_OK, STARTED, batch_of
from webapp.api import hosts
from webapp.jobs import artefacts
from webapp.jobs.ingest import events_accept
from webapp.jobs.models import Artefact, Job

pytestmark = pytest.mark.django_db(databases="__all__")
LINE = ("log", {"stream": "stdout", "text": "hello"})


def claim_request(attempt, claim_id: str = "folder-1") -> ClaimRequest:
    return ClaimRequest(fence=attempt.fence, claim_id=claim_id, boot_id="boot-1")


def test_a_claim_brings_the_spec(as_host, job):
    attempt = job.current_attempt
    answer = as_host.post(f"/attempts/{attempt.pk}/claim", claim_request(attempt))
    assert ClaimReply.model_validate(answer.json()).request.spec.kind == "train"


def test_a_second_claim_is_a_conflict(as_host, attempt):
    answer = as_host.post(f"/attempts/{attempt.pk}/claim", claim_request(attempt, "folder-2"))
    assert (answer.status_code, answer.json()["code"]) == (409, "not_claimable")


def test_events_run_a_job_to_its_end(as_host, attempt):
    batch = batch_of(attempt, ("started", STARTED), LINE, ("exited", EXIT_OK))
    answer = as_host.post(f"/attempts/{attempt.pk}/events", batch)
    assert answer.json() == {"attempt_id": attempt.pk, "acked_seq": 3}
    assert Job.objects.get(pk=attempt.job_id).state == "succeeded"


def test_events_about_another_attempt_than_the_addressed_are_refused(as_host, attempt):
    answer = as_host.post("/attempts/other/events", batch_of(attempt, LINE))
    assert (answer.status_code, answer.json()["code"]) == (422, "other_attempt")


def test_five_hundred_events_are_taken_and_more_are_not(as_host, attempt):
    batch = batch_of(attempt, *[LINE] * 500)
    assert as_host.post(f"/attempts/{attempt.pk}/events", batch).json()["acked_seq"] == 500
    text = batch.model_dump_json().replace('"events":[', '"events":[' + text_of_one(batch) + ",")
    assert as_host.post(f"/attempts/{attempt.pk}/events", text).status_code == 422


def text_of_one(batch) -> str:
    return batch.events[0].model_dump_json()


# Artefacts

WEIGHTS = bytes(range(256)) * 40


@pytest.fixture
def artefact(attempt, settings, tmp_path) -> Artefact:
    settings.ARTEFACTS_DIR = tmp_path
    announce(attempt, {"model.safetensors": WEIGHTS, "sub/config.json": b"{}"})
    return Artefact.objects.get()


def announce(attempt, files: dict[str, bytes]) -> None:
    body = {
        "name": "model",
        "kind": "model",
        "total_bytes": sum(map(len, files.values())),
        "files": {path: len(data) for path, data in files.items()},
        "sha256": {path: hashlib.sha256(data).hexdigest() for path, data in files.items()},
    }
    events_accept(host=attempt.host, batch=batch_of(attempt, ("artefact", body)))


def url(artefact: Artefact, path: str) -> str:
    return f"/attempts/{artefact.attempt_id}/artefacts/{artefact.name}/{path}"


def put(as_host, artefact, path: str, offset: int, data: bytes):
    return as_host.put(f"{url(artefact, path)}?offset={offset}", data)


def test_a_file_starts_from_nothing(as_host, artefact):
    answer = as_host.get(url(artefact, "model.safetensors"))
    assert answer.json() == {"received_bytes": 0}


def test_a_file_arrives_in_parts(as_host, artefact):
    assert (
        put(as_host, artefact, "model.safetensors", 0, WEIGHTS[:100]).json()["received_bytes"]
        == 100
    )
    answer = put(as_host, artefact, "model.safetensors", 100, WEIGHTS[100:])
    assert answer.json()["received_bytes"] == len(WEIGHTS)
    assert (artefacts.folder_of(artefact) / "model.safetensors").read_bytes() == WEIGHTS


def test_a_part_that_starts_elsewhere_changes_nothing(as_host, artefact):
    put(as_host, artefact, "model.safetensors", 0, WEIGHTS[:100])
    answer = put(as_host, artefact, "model.safetensors", 50, b"x" * 10)
    assert answer.json()["received_bytes"] == 100


def test_a_repeated_part_changes_nothing(as_host, artefact):
    for _ in range(2):
        answer = put(as_host, artefact, "model.safetensors", 0, WEIGHTS[:100])
    assert answer.json()["received_bytes"] == 100


def test_the_artefact_is_complete_with_its_last_file(as_host, artefact):
    put(as_host, artefact, "model.safetensors", 0, WEIGHTS)
    assert not Artefact.objects.get().is_complete
    put(as_host, artefact, "sub/config.json", 0, b"{}")
    assert Artefact.objects.get().is_complete


def test_another_digest_starts_again_from_nothing(as_host, artefact):
    answer = put(as_host, artefact, "model.safetensors", 0, b"x" * len(WEIGHTS))
    assert (answer.status_code, answer.json()["code"]) == (409, "digest_differs")
    assert as_host.get(url(artefact, "model.safetensors")).json()["received_bytes"] == 0


def test_more_than_was_announced_is_refused_and_cut_off(as_host, artefact):
    put(as_host, artefact, "model.safetensors", 0, WEIGHTS[:100])
    answer = put(as_host, artefact, "model.safetensors", 100, WEIGHTS)
    assert answer.status_code == 413
    assert as_host.get(url(artefact, "model.safetensors")).json()["received_bytes"] == 100


def test_a_part_larger_than_a_form_may_be_is_taken(as_host, attempt, settings, tmp_path):
    settings.ARTEFACTS_DIR = tmp_path
    data = bytes(3_000_000)
    announce(attempt, {"big": data})
    answer = put(as_host, Artefact.objects.get(), "big", 0, data)
    assert answer.json()["received_bytes"] == len(data)


def test_an_empty_file_is_complete_with_an_empty_part(as_host, attempt, settings, tmp_path):
    settings.ARTEFACTS_DIR = tmp_path
    announce(attempt, {"empty": b""})
    assert put(as_host, Artefact.objects.get(), "empty", 0, b"").status_code == 200
    assert Artefact.objects.get().is_complete


def test_a_file_that_was_not_announced_is_unknown(as_host, artefact):
    answer = put(as_host, artefact, "extra.bin", 0, b"x")
    assert (answer.status_code, answer.json()["code"]) == (404, "unknown_file")


def test_an_artefact_that_was_not_announced_is_unknown(as_host, attempt):
    answer = as_host.get(f"/attempts/{attempt.pk}/artefacts/model/config.json")
    assert (answer.status_code, answer.json()["code"]) == (404, "unknown_artefact")


@pytest.mark.parametrize("path", ["../../outside", "/etc/passwd", "a/../../b", ".hidden", "a\\b"])
def test_a_path_that_climbs_is_refused_even_when_announced(attempt, settings, tmp_path, path):
    settings.ARTEFACTS_DIR = tmp_path / "artefacts"
    announce(attempt, {path: b"x"})
    with pytest.raises(artefacts.InvalidProblem, match="path"):
        artefacts.find(host=attempt.host, attempt_id=attempt.pk, name="model", path=path)


def test_a_full_disk_asks_for_a_pause(as_host, artefact, monkeypatch):
    monkeypatch.setattr(artefacts, "MIN_FREE_BYTES", 2**62)
    answer = put(as_host, artefact, "model.safetensors", 0, WEIGHTS)
    assert (answer.status_code, answer.headers["Retry-After"]) == (429, "60")


def test_another_host_sees_no_artefact(artefact, team):
    from tests.webapp.api.conftest import HostClient
    from tests.webapp.conftest import enrol

    _, credential = enrol(team, name="Stranger")
    assert HostClient(credential).get(url(artefact, "model.safetensors")).status_code == 404


def test_events_wait_at_their_host_while_the_disk_is_full(as_host, attempt, monkeypatch):
    monkeypatch.setattr(hosts, "MIN_FREE_BYTES", 2**62)
    answer = as_host.post(f"/attempts/{attempt.pk}/events", batch_of(attempt, LINE))
    assert (answer.status_code, answer.json()["code"]) == (429, "disk_full")
