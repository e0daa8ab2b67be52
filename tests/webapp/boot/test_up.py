import http.server
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections import namedtuple

import pytest

from webapp.boot import up
from webapp.boot.console import Problem


@pytest.fixture
def taken_port():
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        yield holder.getsockname()[1]


def test_a_taken_port_gets_a_sentence_with_another_port(taken_port):
    with pytest.raises(Problem) as problem:
        up.check_port("127.0.0.1", taken_port, running=None)

    assert f"Port {taken_port} on 127.0.0.1 cannot be used" in problem.value.fact
    assert f"--port {taken_port + 1}" in problem.value.way_out


@pytest.mark.parametrize("port", [-1, 0, 65536, 700000])
def test_a_port_that_is_none_gets_a_sentence(port):
    with pytest.raises(Problem, match="ports are 1 to 65535"):
        up.check_port("127.0.0.1", port, running=None)


def test_a_public_address_without_tls_gets_a_sentence():
    with pytest.raises(Problem) as problem:
        up.check_public_url("http://slipway.example.org")

    assert "SLIPWAY_PUBLIC_URL is 'http://slipway.example.org'" in problem.value.fact


def test_no_public_address_is_no_trouble():
    up.check_public_url("")


def test_up_says_that_the_port_is_taken_without_a_traceback(taken_port, tmp_path):
    done = subprocess.run(
        [sys.executable, "manage.py", "up", "--port", str(taken_port)],
        cwd=up.ROOT,
        env=os.environ | {"SLIPWAY_DATA_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 1
    assert done.stderr.startswith(f"Port {taken_port} on 127.0.0.1 cannot be used")
    assert "Traceback" not in done.stderr


def test_a_second_up_says_that_one_runs_and_where(tmp_path):
    with (tmp_path / "up.lock").open("a+") as lock:
        up.take_lock(lock, tmp_path, "http://127.0.0.1:8123")

        words = up.running_elsewhere(tmp_path)

    assert "already runs at http://127.0.0.1:8123" in words
    assert f"process {os.getpid()}" in words


def test_a_second_lock_on_one_data_folder_is_refused(tmp_path):
    with (tmp_path / "up.lock").open("a+") as first, (tmp_path / "up.lock").open("a+") as second:
        up.take_lock(first, tmp_path, "http://127.0.0.1:8123")

        with pytest.raises(Problem, match="already runs"):
            up.take_lock(second, tmp_path, "http://127.0.0.1:9000")


def test_the_lock_of_a_process_that_ended_does_not_count(tmp_path):
    (tmp_path / "up.lock").write_text(json.dumps({"pid": 1, "url": "http://old"}))

    assert up.running_elsewhere(tmp_path) is None


def test_the_data_folder_is_for_its_owner_only(tmp_path):
    up.make_data_folder(tmp_path / "data")

    assert (tmp_path / "data").stat().st_mode & 0o777 == 0o700


def test_a_data_folder_that_is_a_file_gets_a_sentence(tmp_path):
    (tmp_path / "data").write_text("")

    with pytest.raises(Problem) as problem:
        up.make_data_folder(tmp_path / "data")

    assert "cannot be written" in problem.value.fact
    assert "SLIPWAY_DATA_DIR" in problem.value.way_out


def test_a_nearly_full_disk_is_refused_before_the_database_is_touched(tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")(10**12, 10**12, 90_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)

    with pytest.raises(Problem) as problem:
        up.make_data_folder(tmp_path)

    assert "90 MB free" in problem.value.fact


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8000"),
        ("0.0.0.0", "http://127.0.0.1:8000"),
        ("::1", "http://[::1]:8000"),
        ("10.1.2.3", "http://10.1.2.3:8000"),
    ],
)
def test_the_printed_address_can_be_opened_on_this_machine(host, url):
    assert up.address(host, 8000) == url


def test_a_bound_address_is_an_allowed_host():
    assert up.allowed_hosts("10.1.2.3", {}) == ["10.1.2.3"]


def test_hosts_that_the_user_allowed_stay_allowed():
    assert "slipway.example" in up.allowed_hosts(
        "127.0.0.1", {"SLIPWAY_ALLOWED_HOSTS": "slipway.example"}
    )


def test_binding_everywhere_allows_this_machine_s_name():
    assert socket.gethostname() in up.allowed_hosts("0.0.0.0", {})


class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/healthz" else 404)
        self.end_headers()

    def log_message(self, *_):
        """Stay silent."""


def test_a_site_answers_when_its_health_page_does(tmp_path):
    server = http.server.HTTPServer(("127.0.0.1", 0), Answer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        assert up.Site("127.0.0.1", server.server_port, tmp_path).health() == 200
    finally:
        server.shutdown()
        server.server_close()


def test_a_site_does_not_answer_where_nobody_listens(tmp_path):
    assert up.Site("127.0.0.1", 9, tmp_path).health() is None


def test_a_failed_step_names_the_command_and_its_log(tmp_path):
    site = up.Site("127.0.0.1", 9, tmp_path)

    with pytest.raises(Problem) as problem:
        site._checked("manage.py", "no_such_command")

    assert "`manage.py no_such_command` failed" in problem.value.fact
    assert (tmp_path / "logs" / "set-up.log").read_text()


def test_a_changed_port_reaches_the_host_s_credential(tmp_path):
    credential = tmp_path / "credential.json"
    credential.write_text(
        json.dumps({"server": "http://old", "redis_url": "unix:///a", "name": "x"})
    )

    up.readdress(credential, "http://127.0.0.1:8001", "unix://slipway:secret@/b")

    told = json.loads(credential.read_text())
    assert told == {"server": "http://127.0.0.1:8001", "redis_url": "unix:///b", "name": "x"}
    assert credential.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("told", "lacks"),
    [
        ({"redis_url": "unix:///r"}, True),
        ({"redis_url": "unix:///r", "redis_secret": "s"}, False),
        ({"redis_url": None}, False),
    ],
)
def test_a_host_of_an_open_redis_is_noticed(tmp_path, told, lacks):
    (tmp_path / "credential.json").write_text(json.dumps(told))

    assert up.lacks_redis_user(tmp_path / "credential.json") is lacks


def test_a_host_without_doorbell_stays_without(tmp_path):
    credential = tmp_path / "credential.json"
    credential.write_text(json.dumps({"server": "http://old", "redis_url": None}))

    up.readdress(credential, "http://new", "unix:///b")

    assert json.loads(credential.read_text()) == {"server": "http://new", "redis_url": None}


def test_another_database_needs_its_own_preparation():
    here = up.schema_state({})

    assert here == up.schema_state({"PATH": "/bin"})
    assert here != up.schema_state({"DATABASE_URL": "postgresql://db/slipway"})


def test_a_new_migration_needs_a_preparation(tmp_path, monkeypatch):
    folder = tmp_path / "webapp" / "jobs" / "migrations"
    folder.mkdir(parents=True)
    monkeypatch.setattr(up, "ROOT", tmp_path)
    before = up.schema_state({})

    (folder / "0002_more.py").write_text("operations = []")

    assert up.schema_state({}) != before


@pytest.mark.parametrize(
    ("variables", "is_believed"),
    [
        ({}, False),
        ({"SLIPWAY_PUBLIC_URL": "https://slipway.example.org"}, True),
        ({"FORWARDED_ALLOW_IPS": "10.0.0.7"}, True),
    ],
)
def test_the_header_of_a_proxy_is_believed_only_where_there_is_one(
    monkeypatch, tmp_path, variables, is_believed
):
    for name in ("SLIPWAY_PUBLIC_URL", "FORWARDED_ALLOW_IPS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    command = up.Site("127.0.0.1", 9, tmp_path)._web_command()

    assert ("--no-proxy-headers" not in command) == is_believed
