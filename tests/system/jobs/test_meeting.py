"""A host waits for the one that opens the meeting point, which may still load its libraries."""

import socket
import threading
import time

import pytest

from runners.jobs import meeting
from tests.stack import free_port


@pytest.fixture
def options(monkeypatch):
    """What torchrun is given, each time that it is started."""
    given = []
    monkeypatch.setattr(meeting, "torchrun", given.append)
    return given


def test_torchrun_starts_once_somebody_listens(options):
    port, opened = free_port(), []

    def open_late() -> None:
        time.sleep(1.0)
        opened.append(socket.create_server(("127.0.0.1", port)))

    late = threading.Thread(target=open_late)
    late.start()
    meeting.main(["127.0.0.1", str(port), "60", "--nnodes=2", "-m", "job"])
    late.join()

    assert options == [["--nnodes=2", "-m", "job"]]
    assert opened
    opened[0].close()


def test_a_meeting_point_that_never_opens_is_named_with_what_to_look_at(options):
    port = free_port()

    with pytest.raises(SystemExit) as ended:
        meeting.main(["127.0.0.1", str(port), "0.2", "--nnodes=2"])

    assert str(ended.value).startswith("RANK_LOST: the first host did not open its port")
    assert f"{port} at 127.0.0.1 within 0.2 s" in str(ended.value)
    assert options == []
