"""Which forwarded addresses a real server believes when it guards the administration."""

import http.client
import os
import socket
import subprocess
import sys

import pytest

from tests.stack import ROOT, copy_migrated, wait_for


@pytest.fixture
def serve(tmp_path):
    """Start a real server with an allow-list; return what it answers to a forwarded address."""
    processes = []

    def start(**environment: str):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        own = {"SLIPWAY_DATA_DIR": str(tmp_path), "SLIPWAY_ADMIN_NETWORKS": "192.0.2.0/24"}
        copy_migrated(tmp_path)  # the log-in page has a token, which lies in a session
        command = [sys.executable, "-m", "uvicorn", "webapp.asgi:application", "--port", str(port)]
        processes.append(subprocess.Popen(command, cwd=ROOT, env=os.environ | own | environment))

        def ask(**headers: str) -> int:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
            sent = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request("GET", "/admin/login/", headers=sent)
            status = connection.getresponse().status
            connection.close()
            return status

        def is_up() -> bool:
            with socket.socket() as knock:
                return knock.connect_ex(("127.0.0.1", port)) == 0

        wait_for(is_up, "the server")
        return ask

    yield start
    for process in processes:
        process.kill()
        process.wait()


def test_a_proxy_on_this_machine_is_believed_and_nobody_else(serve):
    ask = serve()
    assert ask() == 404
    assert ask(X_Forwarded_For="192.0.2.9") == 200
    assert ask(X_Forwarded_For="192.0.2.9, 203.0.113.4") == 404


def test_the_header_of_a_machine_that_is_no_proxy_of_ours_is_not_believed(serve):
    ask = serve(FORWARDED_ALLOW_IPS="10.9.9.9")
    assert ask(X_Forwarded_For="192.0.2.9") == 404
