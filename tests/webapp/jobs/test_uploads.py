"""Files of artefacts as they arrive: confined, cut off, whole only with their digest."""

import hashlib
import io
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.webapp.conftest import batch_of
from tests.webapp.jobs.undone import undone
from webapp.agents.ingest import events_accept
from webapp.core.problems import (
    BusyProblem,
    ConflictProblem,
    InvalidProblem,
    NotFoundProblem,
    TooLargeProblem,
)
from webapp.jobs import artefacts
from webapp.jobs.models import Artefact

pytestmark = pytest.mark.django_db
WEIGHTS = bytes(range(256)) * 40
BODIES = {"model.safetensors": WEIGHTS, "config.json": b"{}", "empty.txt": b""}


def body_of(name="model", bodies=BODIES) -> dict:
    return {
        "name": name,
        "kind": "model",
        "total_bytes": sum(map(len, bodies.values())),
        "files": {path: len(data) for path, data in bodies.items()},
        "sha256": {path: hashlib.sha256(data).hexdigest() for path, data in bodies.items()},
    }


@pytest.fixture(autouse=True)
def _folder(settings, tmp_path):
    settings.ARTEFACTS_DIR = tmp_path


@pytest.fixture
def artefact(attempt) -> Artefact:
    events_accept(host=attempt.host, batch=batch_of(attempt, ("artefact", body_of())))
    return Artefact.objects.get()


@pytest.fixture
def find(attempt, artefact):
    def found(path: str, name: str = "model") -> artefacts.UploadFile:
        return artefacts.find(host=attempt.host, attempt_id=attempt.pk, name=name, path=path)

    return found


def send(file: artefacts.UploadFile, data: bytes, offset: int = 0) -> int:
    return artefacts.write_part(file, offset, io.BytesIO(data))


def is_complete() -> bool:
    return Artefact.objects.get().is_complete


def test_the_last_byte_of_the_last_file_completes_the_artefact(find):
    for path, data in BODIES.items():
        assert not is_complete()
        send(find(path), data)
    assert is_complete()


def test_a_file_goes_on_where_it_was_cut_off(find):
    for cut in (1, 255, 5000, len(WEIGHTS) - 1):
        with undone(cut):
            send(find("model.safetensors"), WEIGHTS[:cut])
            file = find("model.safetensors")
            assert artefacts.received_bytes(file) == cut
            assert not file.target.exists()  # before its digest is checked
            assert send(file, WEIGHTS[cut:], cut) == len(WEIGHTS)
            assert file.target.read_bytes() == WEIGHTS
        file.target.unlink()


def test_a_file_whose_check_was_cut_off_is_checked_when_its_host_asks(find):
    for path in ("config.json", "empty.txt"):
        send(find(path), BODIES[path])
    file = find("model.safetensors")
    file.partial.write_bytes(WEIGHTS)
    assert artefacts.received_bytes(file) == len(WEIGHTS)
    assert file.target.read_bytes() == WEIGHTS
    assert is_complete()


def test_a_damaged_file_whose_check_was_cut_off_starts_again(find):
    send(find("config.json"), b"{}")
    file = find("model.safetensors")
    file.partial.write_bytes(b"x" * len(WEIGHTS))
    assert artefacts.received_bytes(file) == 0
    assert send(file, WEIGHTS) == len(WEIGHTS)


def test_an_artefact_whose_last_note_was_cut_off_is_completed_when_its_host_asks(find):
    for path, data in BODIES.items():
        send(find(path), data)
    Artefact.objects.update(is_complete=False)
    artefacts.received_bytes(find("config.json"))
    assert is_complete()


def test_a_whole_file_that_is_sent_again_stays_as_it_is_and_asking_completes_no_other(find):
    send(find("config.json"), b"{}")
    artefacts.received_bytes(find("config.json"))
    assert not is_complete()
    assert send(find("config.json"), b"xx") == 2
    assert find("config.json").target.read_bytes() == b"{}"


def test_a_part_that_is_too_long_or_beyond_what_is_here_is_not_taken(find):
    assert send(find("model.safetensors"), WEIGHTS[9:], 9) == 0
    assert artefacts.received_bytes(find("model.safetensors")) == 0
    file = find("model.safetensors")
    send(file, WEIGHTS[:100])
    with pytest.raises(TooLargeProblem, match="The part is longer than"):
        send(file, WEIGHTS, 100)
    assert artefacts.received_bytes(file) == 100


def test_another_digest_is_refused_by_the_files_name(find):
    with pytest.raises(ConflictProblem, match=r"config\.json"):
        send(find("config.json"), b"[]")
    assert artefacts.received_bytes(find("config.json")) == 0


def test_a_part_holds_no_more_than_its_limit(find, monkeypatch):
    monkeypatch.setattr(artefacts, "MAX_PART_BYTES", 1000)
    with pytest.raises(TooLargeProblem, match="1000 bytes"):
        send(find("model.safetensors"), WEIGHTS)


def test_an_empty_file_arrives_with_an_empty_part(find):
    assert send(find("empty.txt"), b"") == 0
    assert find("empty.txt").target.read_bytes() == b""


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cuts=st.lists(st.integers(0, len(WEIGHTS)), max_size=8))
def test_any_parts_in_any_order_never_spoil_a_file(find, cuts):
    file = find("model.safetensors")
    file.target.unlink(missing_ok=True)
    file.partial.unlink(missing_ok=True)
    for start in cuts:
        send(file, WEIGHTS[start : start + 3000], start)
    have = artefacts.received_bytes(file)
    while have < len(WEIGHTS):
        have = send(file, WEIGHTS[have : have + 4096], have)

    assert file.target.read_bytes() == WEIGHTS


def test_a_path_lies_in_its_folder_or_is_refused_with_what_is_wrong(tmp_path):
    for path in [
        "",
        ".",
        "..",
        "/etc/passwd",
        "../secret",
        "sub/../../secret",
        ".hidden",
        "sub/.hidden",
        "a\x00b",
        "a\\b",
    ]:
        with pytest.raises(InvalidProblem, match="path"):
            artefacts.path_inside(tmp_path, path)

    for path in ["a.bin", "sub/a.bin", "sub/sub/a b.bin", "größe.json", "a..b"]:
        assert artefacts.path_inside(tmp_path, path) == tmp_path / path, path

    for path in ["x" * 252, "ä" * 126, "/".join(["x" * 99] * 11)]:
        with pytest.raises(InvalidProblem, match="shorten the file's name"):
            artefacts.path_inside(tmp_path, path)


@given(st.text(min_size=1, max_size=40))
def test_no_path_ever_leaves_its_folder(path):
    folder = Path("/srv/artefacts/one")
    try:
        target = artefacts.path_inside(folder, path)
    except InvalidProblem:
        return
    assert target.is_relative_to(folder)
    assert ".." not in target.parts


def test_what_was_not_announced_is_not_found(find):
    for name, path in [("other", "config.json"), ("model", "other.json")]:
        with pytest.raises(NotFoundProblem):
            find(path, name)


def test_an_artefact_with_a_name_that_climbs_is_refused(attempt):
    for name in ["../up", ".hidden", "a/b"]:
        with undone(name):
            events_accept(host=attempt.host, batch=batch_of(attempt, ("artefact", body_of(name))))
            assert Artefact.objects.count() == 0
            with pytest.raises(NotFoundProblem):
                artefacts.find(
                    host=attempt.host, attempt_id=attempt.pk, name=name, path="config.json"
                )


def test_a_full_disk_takes_no_part_and_says_when_to_come_back(find, monkeypatch):
    monkeypatch.setattr(artefacts, "MIN_FREE_BYTES", 2**62)
    with pytest.raises(BusyProblem) as caught:
        send(find("config.json"), b"{}")
    assert caught.value.facts == {"retry_after_seconds": 60}


def test_the_job_page_is_told_when_the_last_file_is_there(
    find, monkeypatch, django_capture_on_commit_callbacks
):
    told = []
    monkeypatch.setattr(artefacts, "publish", lambda *message: told.append(message))
    for path, data in BODIES.items():
        with django_capture_on_commit_callbacks(execute=True):
            send(find(path), data)
    assert [(event, data["name"]) for _, event, data in told] == [("job.artefact", "model")]


@pytest.mark.parametrize("order", [("a", "a/b"), ("a/b", "a")])
def test_of_a_file_and_a_folder_of_one_name_the_later_is_refused(attempt, order):
    bodies = dict.fromkeys(order, b"x")
    events_accept(host=attempt.host, batch=batch_of(attempt, ("artefact", body_of(bodies=bodies))))
    files = [
        artefacts.find(host=attempt.host, attempt_id=attempt.pk, name="model", path=path)
        for path in order
    ]
    assert send(files[0], b"x") == 1
    with pytest.raises(ConflictProblem) as refused:
        send(files[1], b"x")
    assert refused.value.code == "path_taken"
