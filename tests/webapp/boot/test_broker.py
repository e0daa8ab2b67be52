import os
import shutil
import signal
import socket
import stat
import tempfile
from pathlib import Path

import psutil
import pytest

from tests.webapp.boot.conftest import eventually
from webapp.boot import broker
from webapp.boot.console import Problem
from webapp.boot.processes import Child


@pytest.fixture
def data(tmp_path_factory):
    """A data folder with a path that is short enough for a socket."""
    return tmp_path_factory.mktemp("d")


@pytest.fixture
def path_with(tmp_path):
    """A function that makes a PATH holding only the given program, under the given name."""

    def build(name: str, script: str) -> str:
        folder = tmp_path / "bin"
        folder.mkdir(exist_ok=True)
        program = folder / name
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        return str(folder)

    return build


def test_an_installed_server_is_used_before_the_embedded_one_and_valkey_before_redis(
    data, path_with
):
    path = path_with("redis-server", "echo 'Redis server v=7.0.15 sha=0'")
    chosen = broker.choose(data, {"PATH": path})
    assert chosen.words == "redis-server 7.0.15"
    path = path_with("redis-server", "echo 'Redis server v=7.0.15 sha=0'")
    path_with("valkey-server", "echo 'Valkey server v=8.1.0 sha=0'")
    assert broker.choose(data, {"PATH": path}).words == "valkey-server 8.1.0"


def test_a_server_that_is_old_or_does_not_run_is_passed_over(data, path_with):
    path = path_with("redis-server", "echo 'Redis server v=6.0.16 sha=0'")
    assert broker.choose(data, {"PATH": path}).command[0] == broker.wheel()
    path = path_with("redis-server", "exit 127")
    assert broker.choose(data, {"PATH": path}).command[0] == broker.wheel()
    assert broker.version_of(broker.wheel()) >= (9, 1)


def test_without_any_server_one_sentence_names_three_ways_out(data, tmp_path, monkeypatch):
    monkeypatch.setattr(broker, "wheel", lambda: None)
    with pytest.raises(Problem) as problem:
        broker.choose(data, {"PATH": str(tmp_path)})
    assert "No Redis" in problem.value.fact
    for way in ("apt install redis-server", "brew install valkey", "REDIS_URL="):
        assert way in problem.value.way_out


def test_a_redis_that_the_user_named_is_never_replaced_or_taken_unchecked(data):
    with pytest.raises(Problem) as problem:
        broker.choose(data, {"REDIS_URL": "redis://127.0.0.1:1/0", "PATH": os.environ["PATH"]})
    assert "which does not answer" in problem.value.fact
    with pytest.raises(Problem) as problem:
        broker.choose(data, {"REDIS_URL": "rediss://127.0.0.1:1/0?ssl_cert_reqs=none"})
    assert "switches off the check of its certificate" in problem.value.fact


def test_a_redis_that_the_user_named_is_used_as_it_is(data, group):
    ours = broker.choose(data, {"PATH": "/nowhere"})
    group.start(Child("redis", ours.command))
    assert broker.wait_until_up(ours.socket)
    chosen = broker.choose(data, {"REDIS_URL": ours.url})
    assert (chosen.url, chosen.command) == (ours.url, None)


def test_a_shown_address_has_no_password():
    for url, shown in [
        ("redis://:secret@db.example:6379/0", "redis://db.example:6379/0"),
        ("rediss://ann:pw@db.example/1", "rediss://db.example/1"),
        ("unix:///run/redis.sock", "unix:///run/redis.sock"),
    ]:
        assert broker.url_without_password(url) == shown, url


def servers():
    """Every real server of this machine, so that each is started for real."""
    installed = [shutil.which(name) for name in broker.SERVER_NAMES]
    found = [program for program in [*installed, broker.wheel()] if program]
    return [pytest.param(program, id=Path(program).name) for program in found]


@pytest.mark.parametrize("program", servers())
def test_the_socket_is_for_its_owner_only_without_a_port_and_nobody_is_served_without_a_name(
    program, data, group
):
    chosen = broker._embedded(program, broker.version_of(program), data)
    child = Child("redis", chosen.command)
    group.start(child)
    assert broker.wait_until_up(chosen.socket)
    assert stat.S_IMODE(chosen.socket.stat().st_mode) == 0o600
    assert psutil.Process(child.process.pid).net_connections("inet") == []
    with socket.socket(socket.AF_UNIX) as door:
        door.connect(str(chosen.socket))
        door.sendall(b"GET live\r\n")
        assert door.recv(64).startswith(b"-NOAUTH")


def test_the_sites_password_and_the_users_of_hosts_stay(data):
    first = broker.choose(data, {"PATH": "/nowhere"})
    secret = data / "redis.secret"
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    assert stat.S_IMODE((data / "redis" / "users.acl").stat().st_mode) == 0o600
    assert broker.choose(data, {"PATH": "/nowhere"}).url == first.url == broker.own_url(data)
    assert secret.read_text() not in first.words
    broker.choose(data, {"PATH": "/nowhere"})
    users = data / "redis" / "users.acl"
    users.write_text(users.read_text() + "user h_1 on #00 ~host:1:* -@all +ping\n")
    broker.choose(data, {"PATH": "/nowhere"})
    names = [line.split()[1] for line in users.read_text().splitlines()]
    assert names == ["default", "slipway", "h_1"]


@pytest.mark.faults
@pytest.mark.parametrize("program", servers())
def test_a_kill_loses_nothing_that_was_acknowledged(program, data, group):
    chosen = broker._embedded(program, broker.version_of(program), data)
    child = Child("redis", chosen.command)
    group.start(child)
    assert broker.wait_until_up(chosen.socket)
    for number in range(100):
        assert ask(chosen.socket, f"XADD s * n {number}").startswith(b"$")
    os.kill(child.process.pid, signal.SIGKILL)
    eventually(group.restart_dead)
    eventually(lambda: group.restart_dead() or broker.answers(chosen.socket))
    assert ask(chosen.socket, "XLEN s") == b":100\r\n"


def test_a_long_data_path_gets_a_short_socket_of_its_own(tmp_path, monkeypatch):
    data = tmp_path / ("x" * 120)
    (tmp_path / ("t" * 90)).mkdir()
    for temporary in (tempfile.gettempdir(), str(tmp_path / ("t" * 90))):
        monkeypatch.setattr(tempfile, "tempdir", temporary)
        path = broker.socket_path(data)
        assert len(os.fsencode(path)) <= broker.LONGEST_SOCKET_PATH, temporary
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700, temporary
        path.parent.rmdir()


def test_nobody_answers_on_a_socket_without_a_server(tmp_path):
    assert not broker.wait_until_up(tmp_path / "none.sock", timeout_s=0.05)


def ask(path: Path, command: str) -> bytes:
    """Return what the site's own user is answered."""
    with socket.socket(socket.AF_UNIX) as door:
        door.connect(str(path))
        door.sendall(broker._login(path))
        assert door.recv(64) == b"+OK\r\n"
        door.sendall(f"{command}\r\n".encode())
        return door.recv(4096)


@pytest.mark.faults
@pytest.mark.parametrize("lost", ["redis/users.acl", "redis", "redis.secret"])
def test_a_killed_server_comes_back_without_the_files_that_it_started_with(data, group, lost):
    chosen = broker.choose(data, {"PATH": "/nowhere"})
    child = Child("redis", chosen.command, prepare=chosen.prepare)
    group.start(child)
    assert broker.wait_until_up(chosen.socket)
    os.kill(child.process.pid, signal.SIGKILL)
    path = data / lost
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    eventually(group.restart_dead)
    eventually(lambda: group.restart_dead() or broker.answers(chosen.socket))
    url = broker.choose(data, {"PATH": "/nowhere"}).url
    assert url == chosen.url
    assert ask(chosen.socket, "PING") == b"+PONG\r\n"
    assert stat.S_IMODE((data / "redis" / "users.acl").stat().st_mode) == 0o600
