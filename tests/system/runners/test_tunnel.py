"""The tunnel's process: it connects with the host's credential, and ends with its agent."""

import contextlib
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
from websockets.exceptions import ConnectionClosedError
from websockets.sync.server import ServerConnection, serve

from runners.host.companions import TunnelSupervisor
from runners.shared.config import Credential, HostDir
from runners.supervision import procfs
from tests.runners.tools import wait_for

AGENT = """
import sys, time
from pathlib import Path
from runners.host.companions import TunnelSupervisor
from runners.shared.config import HostDir
tunnel = TunnelSupervisor(HostDir(Path(sys.argv[1])))
tunnel.obey(("/tunnel/", sys.argv[2]))
tunnel.keep_running()
time.sleep(600)
"""  # an agent with nothing but its tunnel


class Gateway:
    """Accepts every connection, and sees where it went and with which credential."""

    def __init__(self) -> None:
        self.opened: list[tuple[str, str]] = []
        self.num_open = 0
        self.codes: list[int | None] = []  # with which connections were closed
        self.server = serve(self._take, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self.server.socket.getsockname()[1]}"

    def _take(self, connection: ServerConnection) -> None:
        request = connection.request
        self.opened.append((request.path, request.headers["Authorization"]))
        self.num_open += 1
        with contextlib.suppress(ConnectionClosedError):  # of a killed agent
            for _ in connection:
                pass
        self.num_open -= 1
        self.codes.append(connection.close_code)


@pytest.fixture
def gateway() -> Iterator[Gateway]:
    made = Gateway()
    thread = threading.Thread(target=made.server.serve_forever)
    thread.start()
    yield made
    made.server.shutdown()
    thread.join()


@pytest.fixture
def enrolled(host_dir: HostDir, credential: Credential, gateway: Gateway) -> HostDir:
    host_dir.save_credential(credential.model_copy(update={"server": f"http://{gateway.address}"}))
    return host_dir


def test_it_connects_to_every_gateway_and_ends_when_it_is_stopped(enrolled, gateway):
    tunnel = TunnelSupervisor(enrolled)
    tunnel.keep_running()
    assert tunnel.pid is None
    tunnel.obey(("/tunnel/", f"ws://{gateway.address}/other/", "https://no.gateway/"))
    tunnel.keep_running()
    wait_for(lambda: gateway.num_open == 2)
    bearer = "Bearer host-credential"
    assert sorted(gateway.opened) == [("/other/", bearer), ("/tunnel/", bearer)]
    process = tunnel._child
    tunnel.stop()
    assert process.returncode == 0
    wait_for(lambda: gateway.codes == [1001, 1001])


@pytest.mark.faults
def test_it_does_not_outlive_its_killed_agent(enrolled, gateway):
    other = f"ws://{gateway.address}/"
    agent = subprocess.Popen([sys.executable, "-c", AGENT, str(enrolled.path), other])
    wait_for(lambda: gateway.num_open == 2)
    theirs = procfs.descendants(agent.pid)
    agent.kill()
    agent.wait()
    assert len(theirs) == 1
    wait_for(lambda: not any(procfs.is_running(one.pid, one.start_ticks) for one in theirs))
