"""Artefacts on their way to the server: in parts, resumed, and never from elsewhere."""

from pathlib import Path

import pytest

from runners import shipping
from runners.attempts import AttemptFolder
from runners.client import RefusedError, ServerClient, UnreachableError
from runners.shipping import upload_artefacts
from runners.supervision import record
from tests.runners.tools import ids_of

A1, _ = ids_of(__name__)


@pytest.fixture
def client(acceptor):
    made = ServerClient(acceptor.url, "host-credential")
    yield made
    made.close()


@pytest.fixture
def folder(attempts) -> AttemptFolder:
    made = attempts.make()
    (made.output / "model" / "sub").mkdir(parents=True)
    return made


def announce(folder: AttemptFolder, contents: dict[str, bytes], **changes: object) -> None:
    for path, data in contents.items():
        (folder.output / "model" / path).write_bytes(data)
    body = {
        "name": "model",
        "kind": "model",
        "total_bytes": sum(map(len, contents.values())),
        "files": {path: len(data) for path, data in contents.items()},
        "sha256": dict.fromkeys(contents, ""),
    }
    record.write_json(folder.path / "artefacts.json", {"artefacts": [body | changes]})


def arrived(acceptor, path: str) -> bytes:
    return (acceptor.uploads / A1 / "artefacts/model" / path).read_bytes()


def test_all_files_arrive(acceptor, client, folder):
    announce(folder, {"config.json": b"{}", "sub/weights": b"w" * 1000, "empty": b""})

    assert upload_artefacts(folder, client, 10**6) == 1002
    assert arrived(acceptor, "sub/weights") == b"w" * 1000
    assert arrived(acceptor, "empty") == b""
    assert folder.is_uploaded


def test_a_large_file_goes_in_parts(acceptor, client, folder, monkeypatch):
    monkeypatch.setattr(shipping, "PART_BYTES", 100)
    data = bytes(range(250)) * 2
    announce(folder, {"weights": data})

    upload_artefacts(folder, client, 10**6)

    assert arrived(acceptor, "weights") == data


def test_an_upload_goes_on_where_it_stopped(acceptor, client, folder):
    announce(folder, {"weights": b"0123456789"})
    target = acceptor.uploads / A1 / "artefacts/model/weights"
    target.parent.mkdir(parents=True)
    target.write_bytes(b"0123")

    assert upload_artefacts(folder, client, 10**6) == 6
    assert arrived(acceptor, "weights") == b"0123456789"


def test_what_exceeds_the_cap_stays_on_the_host(acceptor, client, folder):
    announce(folder, {"weights": b"x" * 100})

    assert upload_artefacts(folder, client, 99) == 0
    assert folder.is_uploaded
    assert not acceptor.uploads.exists()


def test_an_absent_server_leaves_the_upload_for_later(folder):
    announce(folder, {"weights": b"x"})

    with pytest.raises(UnreachableError):
        upload_artefacts(folder, ServerClient("http://127.0.0.1:9"), 10**6)
    assert not folder.is_uploaded


@pytest.mark.parametrize("status", [401, 403, 408, 429, 500, 503])
def test_an_answer_that_may_change_leaves_the_upload_for_later(
    client, folder, monkeypatch, status
):
    def refuse(*_):
        raise RefusedError(status, "not now")

    announce(folder, {"weights": b"x"})
    monkeypatch.setattr(client, "received_bytes", refuse)

    with pytest.raises(RefusedError, match="not now"):
        upload_artefacts(folder, client, 10**6)
    assert not folder.is_uploaded


@pytest.mark.parametrize("status", [404, 409, 422])
def test_a_refusal_for_good_is_not_asked_again(client, folder, monkeypatch, status, caplog):
    def refuse(*_):
        raise RefusedError(status, "that job was deleted")

    announce(folder, {"weights": b"x"})
    monkeypatch.setattr(client, "received_bytes", refuse)

    assert upload_artefacts(folder, client, 10**6) == 0
    assert folder.is_uploaded
    assert "that job was deleted" in caplog.text


@pytest.mark.parametrize("path", ["../../spec.json", "/etc/passwd", "sub/../../../spec.json"])
def test_a_path_out_of_the_artefact_is_not_read(acceptor, client, folder, path):
    announce(folder, {})
    size = Path(folder.output / "model" / path).stat().st_size
    announce(folder, {}, files={path: size}, sha256={path: ""})

    assert upload_artefacts(folder, client, 10**9) == 0
    assert not acceptor.uploads.exists()


def test_a_link_in_the_artefact_is_not_followed(acceptor, client, folder):
    (folder.output / "model" / "link").symlink_to("/etc/passwd")
    size = Path("/etc/passwd").stat().st_size
    announce(folder, {}, files={"link": size}, sha256={"link": ""})

    assert upload_artefacts(folder, client, 10**9) == 0


def test_an_artefact_named_as_a_path_is_not_read(acceptor, client, folder):
    announce(folder, {}, name="../..", files={"spec.json": 1}, sha256={"spec.json": ""})

    assert upload_artefacts(folder, client, 10**9) == 0


def test_a_file_that_changed_after_its_announcement_is_left_out(acceptor, client, folder):
    announce(folder, {"weights": b"12345"})
    (folder.output / "model" / "weights").write_bytes(b"1234567")

    assert upload_artefacts(folder, client, 10**6) == 0
