"""Starting the site: the commands, what they print, and an old Python."""

import ast
import http.server
import io
import json
import os
import runpy
import shutil
import socket
import subprocess
import sys
import threading
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from django.core.management import CommandError, call_command

from runners.shared import addresses
from webapp.boot import cli, environment, up, vendor
from webapp.boot.console import Problem
from webapp.boot.front import WEB, Front


@pytest.fixture
def taken_port():
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        yield holder.getsockname()[1]


def test_a_taken_port_gets_a_sentence_with_another_port_and_one_that_is_none_too(taken_port):
    with pytest.raises(Problem) as problem:
        up.check_port("127.0.0.1", taken_port, running=None)
    assert f"Port {taken_port} on 127.0.0.1 cannot be used" in problem.value.fact
    assert f"--port {taken_port + 1}" in problem.value.way_out
    for port in [-1, 0, 65536, 700000]:
        with pytest.raises(Problem, match="it can be 1 to 65535"):
            up.check_port("127.0.0.1", port, running=None)


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
    with (tmp_path / "up.lock").open("a+") as first, (tmp_path / "up.lock").open("a+") as second:
        up.take_lock(first, tmp_path, "http://127.0.0.1:8123")
        with pytest.raises(Problem, match="already runs"):
            up.take_lock(second, tmp_path, "http://127.0.0.1:9000")
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


def test_the_printed_address_can_be_opened_and_bound_ones_are_allowed():
    for host, url in [
        ("127.0.0.1", "http://127.0.0.1:8000"),
        ("0.0.0.0", "http://127.0.0.1:8000"),
        ("::1", "http://[::1]:8000"),
        ("10.1.2.3", "http://10.1.2.3:8000"),
    ]:
        assert up.address(host, 8000) == url, host
    assert up.allowed_hosts("10.1.2.3", {}) == ["10.1.2.3"]
    assert up.allowed_hosts("fd00::2", {}) == ["[fd00::2]"]
    assert "slipway.example" in up.allowed_hosts(
        "127.0.0.1", {"SLIPWAY_ALLOWED_HOSTS": "slipway.example"}
    )
    assert socket.gethostname() in up.allowed_hosts("0.0.0.0", {})


def test_every_address_of_the_interfaces_is_answered_and_told(monkeypatch):
    """In /etc/hosts of most images the machine's name stands for loopback alone."""
    nic = namedtuple("nic", "family address")
    interfaces = {
        "lo": [nic(socket.AF_INET, "127.0.0.1"), nic(socket.AF_INET6, "::1")],
        "eth0": [
            nic(socket.AF_INET6, "fe80::1%eth0"),
            nic(socket.AF_INET6, "fd00::2"),
            nic(socket.AF_INET, "192.0.2.2"),
            nic(socket.AF_PACKET, "02:fc:00:00:00:01"),
        ],
    }
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: interfaces)
    state = SimpleNamespace(isup=True)
    monkeypatch.setattr(psutil, "net_if_stats", lambda: dict.fromkeys(interfaces, state))
    own = addresses.own_addresses()
    assert own == ("192.0.2.2", "fd00::2")
    for host in ("0.0.0.0", "::"):
        assert {"192.0.2.2", "[fd00::2]"} <= {*up.allowed_hosts(host, {})}, host
    for bound, told in [
        ("", ["http://192.0.2.2:8000", "http://[fd00::2]:8000"]),
        ("0.0.0.0", ["http://192.0.2.2:8000"]),
        ("::", ["http://[fd00::2]:8000"]),
        ("192.0.2.2", ["http://192.0.2.2:8000"]),
        ("127.0.0.1", []),
        ("::1", []),
    ]:
        assert up.addresses_for_others(bound, 8000, own) == told, bound


def test_every_address_is_bound_in_both_families_that_the_machine_has(monkeypatch):
    refused: set[str] = set()

    def bind(host, _port):
        if host in refused:
            raise OSError(97, "Address family not supported by protocol")

    monkeypatch.setattr(up, "_bind", bind)
    for lacking, bound in [(set(), ""), ({"::"}, "0.0.0.0"), ({"0.0.0.0"}, "::")]:
        refused.clear()
        refused |= lacking
        assert {up.bound_host(host, 8000) for host in ("0.0.0.0", "::")} == {bound}, lacking
    assert up.bound_host("10.1.2.3", 8000) == "10.1.2.3"
    assert up._parse(["--host", "[::1] "]).host == "::1"


def test_what_up_and_doctor_understood_is_a_line_for_each_variable_that_is_set():
    variables = {
        "SLIPWAY_PUBLIC_URL": "https://bücher.example:443/ ",
        "SLIPWAY_ALLOWED_HOSTS": "slipway.lan, 10.0.0.5",
        "HTTP_PROXY": "http://user:secret@proxy.lan:3128",
        "NO_PROXY": "[::1],10.0.0.0/99",
    }
    words = "\n".join(up.understood(variables))
    for expected in (
        "Public address: https://xn--bcher-kva.example",
        "Names of SLIPWAY_ALLOWED_HOSTS: slipway.lan, 10.0.0.5",
        "Trusted proxies: 127.0.0.1, ::1 (for one on another machine set FORWARDED_ALLOW_IPS",
        "The proxy http://proxy.lan:3128 of HTTP_PROXY",
        "NO_PROXY has '10.0.0.0/99'",
    ):
        assert expected in words
    assert "secret" not in words
    assert up.understood({}) == []


class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/healthz" else 404)
        self.end_headers()

    def log_message(self, *_):
        """Stay silent."""


def test_a_site_answers_when_its_health_page_does(tmp_path):
    assert up.Site("127.0.0.1", 9, tmp_path).health() is None
    server = http.server.HTTPServer(("127.0.0.1", 0), Answer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        assert up.Site("127.0.0.1", server.server_port, tmp_path).health() == 200
    finally:
        server.shutdown()
        server.server_close()


def test_a_web_process_that_computes_for_minutes_is_waited_for_and_no_longer(
    tmp_path, monkeypatch
):
    site, clock = up.Site("127.0.0.1", 9, tmp_path), iter(range(0, 10_000, 50))
    web = SimpleNamespace(process=SimpleNamespace(poll=lambda: None), name="web")
    answers = [None, None, None, None, 200]
    monkeypatch.setattr(site, "health", lambda: answers.pop(0))
    monkeypatch.setattr("webapp.boot.up.time.monotonic", lambda: next(clock))
    site._wait_for_web(web)
    answers += [None] * 50
    with pytest.raises(Problem, match="does not answer"):
        site._wait_for_web(web)


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
    credential = tmp_path / "credential.json"
    credential.write_text(json.dumps({"server": "http://old", "redis_url": None}))
    up.readdress(credential, "http://new", "unix:///b")
    assert json.loads(credential.read_text()) == {"server": "http://new", "redis_url": None}


def test_a_host_of_an_open_redis_is_noticed(tmp_path):
    for told, lacks in [
        ({"redis_url": "unix:///r"}, True),
        ({"redis_url": "unix:///r", "redis_secret": "s"}, False),
        ({"redis_url": None}, False),
    ]:
        (tmp_path / "credential.json").write_text(json.dumps(told))
        assert up.lacks_redis_user(tmp_path / "credential.json") is lacks, told


def test_another_database_migration_style_sheet_or_package_is_prepared_first(
    tmp_path, monkeypatch
):
    here = up.state_to_prepare({})
    assert here == up.state_to_prepare({"PATH": "/bin"})
    assert here != up.state_to_prepare({"DATABASE_URL": "postgresql://db/slipway"})
    folder = tmp_path / "webapp" / "jobs" / "migrations"
    folder.mkdir(parents=True)
    monkeypatch.setattr(up, "ROOT", tmp_path)
    before = up.state_to_prepare({})
    (folder / "0002_more.py").write_text("operations = []")
    (tmp_path / "static" / "css").mkdir(parents=True)
    states = [before, up.state_to_prepare({})]
    for path in (tmp_path / "static" / "css" / "base.css", tmp_path / "constraints.txt"):
        path.write_text("new")  # the web process reads the digests of static files once
        states.append(up.state_to_prepare({}))
    assert len(set(states)) == len(states)


def test_the_header_of_a_proxy_is_believed_only_where_there_is_one(monkeypatch, tmp_path):
    for variables, is_believed in [
        ({}, False),
        ({"SLIPWAY_PUBLIC_URL": "https://slipway.example.org"}, True),
        ({"FORWARDED_ALLOW_IPS": "10.0.0.7"}, True),
    ]:
        for name in ("SLIPWAY_PUBLIC_URL", "FORWARDED_ALLOW_IPS"):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        front = Front("127.0.0.1", 0)
        command = up.Site("127.0.0.1", 9, tmp_path)._child_at(front, WEB).command
        front.close()
        given = variables.get("FORWARDED_ALLOW_IPS")
        trusted = ",".join(filter(None, ["127.0.0.1", "::1", given]))
        assert (command[-2:] == ["--proxies", trusted]) == is_believed, variables
        assert ("--proxies" in command) == is_believed, variables


def test_the_address_is_said_to_be_taken_by_another_program(tmp_path):
    taken = Front("127.0.0.1", 0)
    port = taken._sockets[0].getsockname()[1]
    with pytest.raises(Problem, match=f"Port {port} on 127.0.0.1 cannot be used"):
        up.Site("127.0.0.1", port, tmp_path)._listen()
    taken.close()
    up.Site("127.0.0.1", port, tmp_path)._listen().close()


def run(*arguments: str, flags: tuple[str, ...] = ()) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *flags, "manage.py", *arguments],
        cwd=cli.ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_django_command_runs_inside_the_environment():
    assert "5.2" in run("version").stdout


def test_without_packages_a_command_says_how_to_get_them(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda _: None)
    monkeypatch.setattr(environment, "users_own", lambda: None)
    monkeypatch.setattr(environment, "PYTHON", tmp_path / "python")
    assert cli.main(["migrate"]) == 1
    words = capsys.readouterr().err
    assert "`manage.py migrate` needs the environment" in words
    assert "`python3 manage.py up` creates the environment" in words


def test_the_set_up_code_imports_only_the_standard_library_and_ours():
    code = (
        "import sys\n"
        "from webapp.boot import broker, cli, environment, installer, processes, suite, up, vendor\n"
        "known = set(sys.stdlib_module_names) | {'webapp', 'runners', '__main__'}\n"
        "print(sorted({name.split('.')[0] for name in sys.modules} - known))"
    )
    # -S leaves the packages of the environment out, -E the variables that could add them.
    done = subprocess.run(
        [sys.executable, "-S", "-E", "-c", code],
        cwd=cli.ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip() == "[]", done.stderr


def test_help_of_up_names_what_it_honours(capsys):
    with pytest.raises(SystemExit):
        cli.main(["up", "--help"])
    words = capsys.readouterr().out
    assert all(name in words for name in ("SLIPWAY_DATA_DIR", "DATABASE_URL", "REDIS_URL"))


# The commands that operators run: doctor, vendor and bench.


def told(*arguments, **options) -> str:
    out = io.StringIO()
    call_command(*arguments, stdout=out, **options)
    return out.getvalue()


def test_doctor_says_that_a_named_redis_does_not_answer(monkeypatch):
    monkeypatch.setenv("REDIS_URL", "redis://127.0.0.1:1/0")
    assert "✗ Redis        REDIS_URL names redis://127.0.0.1:1/0, which does not answer" in told(
        "doctor"
    )


def test_doctor_says_that_remote_hosts_need_another_door_than_the_embedded_redis(monkeypatch):
    monkeypatch.delenv("REDIS_URL", raising=False)
    assert "other hosts speak HTTPS, or a rediss:// in REDIS_URL" in told("doctor")


def test_vendor_check_finds_the_published_bytes_or_names_what_differs(monkeypatch):
    assert "Every vendored file has the bytes" in told("vendor", check=True)
    monkeypatch.setattr(vendor, "changed_files", lambda: ["static/vendor/htmx.min.js"])
    with pytest.raises(CommandError, match=r"htmx\.min\.js"):
        call_command("vendor", check=True)


MANAGE = Path(__file__).resolve().parents[3] / "manage.py"


def test_an_old_python_reads_manage_py_and_gets_one_sentence_with_the_way_out(monkeypatch):
    ast.parse(MANAGE.read_text(), feature_version=(3, 6))
    monkeypatch.setattr(sys, "version_info", (3, 8, 18, "final", 0))
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(MANAGE), run_name="__main__")
    assert "needs Python 3.11 or newer" in str(stopped.value)
    assert "python3.12 manage.py up" in str(stopped.value)
