"""What a process takes from the environment of its user: folders, certificates, encodings."""

import io
import os
import pwd
import subprocess
import sys

import pytest
from celery import Celery

from runners.host.redis_access import celery_options, connect
from runners.shared.config import DEFAULT_HOST_DIR, HostConfigError, HostDir
from runners.shared.environment import NOT_USED, environment_lines, escape_unknown_characters
from runners.shared.redis_address import bare, socket_url, with_user
from tests.stack import ROOT


def test_certificates_and_folders_that_cannot_be_used_are_named_and_others_told(tmp_path):
    file = tmp_path / "ca.pem"
    file.touch()
    for name, value, is_used in [
        ("SSL_CERT_FILE", file, True),
        ("SSL_CERT_FILE", tmp_path, False),
        ("SSL_CERT_FILE", tmp_path / "none.pem", False),
        ("SSL_CERT_DIR", tmp_path, True),
        ("SSL_CERT_DIR", file, False),
        ("TMPDIR", tmp_path / "none", False),
        ("TMPDIR", file, False),
    ]:
        (line,) = environment_lines({name: str(value)})
        assert (NOT_USED not in line) == is_used, (name, value)
        assert f"{name}" in line, (name, value)
    assert environment_lines({"TMPDIR": str(tmp_path), "SSL_CERT_FILE": ""}) == []


def test_a_host_folder_that_cannot_be_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert HostDir(DEFAULT_HOST_DIR).path == tmp_path / ".slipway" / "host"
    monkeypatch.delenv("HOME")  # in a container, with a user number that has no name

    def nobody(_number):
        raise KeyError

    monkeypatch.setattr(pwd, "getpwuid", nobody)
    with pytest.raises(HostConfigError, match=r"HOME is not set.*--dir"):
        HostDir(DEFAULT_HOST_DIR)
    (tmp_path / "file").touch()
    sentence = (
        "file/host cannot be created: Not a directory. Correct the owner of the folder above it, "
        "or name another folder with --dir."
    )
    with pytest.raises(HostConfigError, match=sentence):
        HostDir(tmp_path / "file" / "host").make()


def test_output_that_the_terminal_cannot_show_is_escaped(monkeypatch):
    for encoding, shown in [("ascii", b"\\u2713 Gr\\xf6\\xdfe"), ("utf-8", "✓ Größe".encode())]:
        written = io.BytesIO()
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding=encoding))
        escape_unknown_characters()
        sys.stdout.write("✓ Größe")
        sys.stdout.flush()
        assert written.getvalue() == shown, encoding


def test_a_socket_in_any_folder_is_reached_by_every_library(redis_server, tmp_path):
    for name in ["a b", "100%25", "größe", "x#y?z@w:1", "50%"]:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "r.sock").symlink_to(redis_server.socket)
        url = socket_url(str(folder / "r.sock"))
        assert bare(with_user(url, "u", "s")) == url, name
        with connect(url) as client:
            assert client.ping(), name
        with Celery("test") as app:
            app.conf.update(celery_options(url))
            with app.connection_for_write() as connection:
                connection.ensure_connection(max_retries=1)


def test_the_commands_start_where_python_does_not_search_their_folder():
    done = subprocess.run(
        [sys.executable, "-I", "-S", ROOT / "manage.py", "up", "--help"],  # without any package
        cwd="/", env={"PATH": os.defpath}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
