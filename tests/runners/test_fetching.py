"""Training data on its way from the server: whole and as it was meant, or not at all."""

import hashlib

import pytest

from runners.attempts import AttemptFolder
from runners.client import ServerClient
from runners.jobspec import BenchmarkSpec, DemoModel, TrainSpec, UploadedData
from runners.launch import LaunchRefusedError
from runners.reasons import Reason
from runners.reconcile import Fetcher
from tests.runners.tools import ids_of

A1, _ = ids_of(__name__)

CONTENT = b'{"text": "one"}\n' * 1000


def training(content=CONTENT):
    digest = hashlib.sha256(content).hexdigest()
    data = UploadedData(dataset_id="d1", name="a.jsonl", sha256=digest, size_bytes=len(content))
    return TrainSpec(data=data)


@pytest.fixture
def folder(host_dir) -> AttemptFolder:
    found = AttemptFolder(host_dir.attempts / A1)
    found.make_claim("fence", "boot")
    return found


@pytest.fixture
def fetcher(acceptor):
    client = ServerClient(acceptor.url, "host-credential")
    yield Fetcher(client)
    client.close()


def test_a_job_that_names_no_upload_has_all(fetcher, folder):
    assert fetcher.has_all(folder, BenchmarkSpec(model=DemoModel()))
    assert fetcher.has_all(folder, TrainSpec())


def test_a_file_is_fetched_once_and_goes_with_what_is_forgotten(acceptor, fetcher, folder):
    acceptor.data["d1"] = CONTENT

    assert fetcher.has_all(folder, training())
    acceptor.data.clear()
    assert fetcher.has_all(folder, training())

    assert (folder.data / "d1.jsonl").read_bytes() == CONTENT
    folder.forget()
    assert not folder.data.exists()


@pytest.mark.parametrize("held", [CONTENT + b"x", CONTENT[:-1], CONTENT[:-2] + b"]\n"])
def test_another_file_than_was_meant_is_refused_and_not_kept(acceptor, fetcher, folder, held):
    acceptor.data["d1"] = held

    with pytest.raises(LaunchRefusedError, match=r"a\.jsonl arrived with .*upload") as refused:
        fetcher.has_all(folder, training())

    assert refused.value.reason is Reason.MODEL_OR_DATA_MISSING
    assert list(folder.data.iterdir()) == []


def test_what_the_server_no_longer_has_ends_the_attempt(fetcher, folder):
    with pytest.raises(LaunchRefusedError, match="no longer has the training data"):
        fetcher.has_all(folder, training())


def test_an_absent_server_is_asked_again(acceptor, folder):
    client = ServerClient("http://127.0.0.1:9", "host-credential")
    away = Fetcher(client)

    assert not away.has_all(folder, training())
    client.close()


def test_a_slow_file_holds_nothing_up(acceptor, fetcher, folder, monkeypatch):
    acceptor.data["d1"] = CONTENT
    monkeypatch.setattr("runners.reconcile.PATIENCE_SECONDS", 0.0)

    answers = [fetcher.has_all(folder, training())]
    while not answers[-1]:
        answers.append(fetcher.has_all(folder, training()))

    assert answers[-1]
