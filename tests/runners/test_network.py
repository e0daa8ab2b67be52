"""The way to the server, measured over the way that everything takes."""

import time

import pytest

from runners import inventory
from runners.client import RefusedError, ServerClient, UnreachableError


@pytest.fixture
def client(acceptor):
    made = ServerClient(acceptor.url, "host-credential")
    yield made
    made.close()


def test_the_way_to_the_server_is_measured_in_both_directions(client):
    found = inventory.measure(client)

    assert found.round_trip_seconds > 0
    assert found.upload_bytes_per_second > 0
    assert found.download_bytes_per_second > 0


def test_no_piece_is_larger_than_the_server_takes(acceptor, client):
    inventory.measure(client)

    assert max(acceptor.echoed) <= inventory.MAX_BYTES


def test_a_slow_line_is_given_small_pieces(acceptor, client, monkeypatch):
    answer = acceptor.echo

    def slow(num_bytes: int) -> bytes:
        time.sleep(num_bytes / 100_000)
        return answer(num_bytes)

    monkeypatch.setattr(acceptor, "echo", slow)

    found = inventory.measure(client)

    assert max(acceptor.echoed) == inventory.FIRST_BYTES
    assert 50_000 < found.download_bytes_per_second < 110_000


def test_an_absent_server_is_told(credential):
    with pytest.raises(UnreachableError):
        inventory.measure(ServerClient("http://127.0.0.1:9", "host-credential"))


def test_a_stranger_measures_nothing(acceptor):
    client = ServerClient(acceptor.url, "stranger")
    with pytest.raises(RefusedError):
        inventory.measure(client)
    client.close()
