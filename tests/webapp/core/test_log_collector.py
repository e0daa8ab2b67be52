"""A copy of the log goes to a syslog collector, and one that is gone disturbs nothing."""

import datetime as dt
import ipaddress
import json
import logging
import os
import re
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from tests.webapp.boot.conftest import free_port
from tests.webapp.conftest import client_of
from webapp.accounts.sign_in import event_write
from webapp.audit.chain import events_seal, head
from webapp.core import log_collector
from webapp.core.log_collector import MOST_WAITING, LogCollector, program_name
from webapp.core.logs import fault_logging
from webapp.core.site_settings import syslog_address

ROOT = Path(__file__).parents[3]
WAIT_S = 30.0
MESSAGE = re.compile(
    r"<(\d+)>1 (20\d\d-\d\d-\d\dT[\d:.]+\+00:00) (\S+) (slipway[\w-]*) (\d+) (log|audit) - (\{.*\})"
)


@pytest.fixture
def collector_at(monkeypatch) -> Iterator[Callable[[str], LogCollector]]:
    """Return what makes a collector of an address; its thread ends with the test."""
    made: list[LogCollector] = []

    def make(address: str) -> LogCollector:
        found = syslog_address({"SLIPWAY_SYSLOG": address})
        assert found is not None
        made.append(LogCollector(found))
        return made[-1]

    monkeypatch.setattr(log_collector, "RETRY_SECONDS", 0.05)
    yield make
    monkeypatch.setattr(log_collector, "EXIT_SECONDS", 0.0)
    for each in made:
        each.close()


def parsed(text: bytes) -> tuple[int, str, dict]:
    """Return priority, MSGID and fields of one message of RFC 5424."""
    found = MESSAGE.fullmatch(text.decode("ascii"))
    assert found is not None, text
    return int(found[1]), found[6], json.loads(found[7])


def server(port: int = 0) -> socket.socket:
    listening = socket.create_server(("127.0.0.1", port))
    listening.settimeout(WAIT_S)
    return listening


def lines_of(listening: socket.socket, number: int) -> list[bytes]:
    """Accept one stream and return its first lines."""
    stream, _ = listening.accept()
    with closing(stream):
        stream.settimeout(WAIT_S)
        file = stream.makefile("rb")
        return [file.readline().removesuffix(b"\n") for _ in range(number)]


def test_a_datagram_and_a_socket_take_whole_messages_in_json_of_one_line(tmp_path, collector_at):
    path = tmp_path / "collector.sock"
    for family, place in [(socket.AF_INET, ("127.0.0.1", 0)), (socket.AF_UNIX, str(path))]:
        with closing(socket.socket(family, socket.SOCK_DGRAM)) as listening:
            listening.bind(place)
            listening.settimeout(WAIT_S)
            is_path = family == socket.AF_UNIX
            port = "" if is_path else listening.getsockname()[1]
            sink = collector_at(f"unix://{path}" if is_path else f"udp://127.0.0.1:{port}")
            sink.put({"event": "refused\n<0>1 é", "actor": "ada"}, logging.WARNING)
            fields = {"event": "refused\n<0>1 é", "actor": "ada"}
            assert parsed(listening.recv(65_536).rstrip(b"\n")) == (3 * 8 + 4, "log", fields)


def test_what_waited_while_the_collector_was_gone_arrives_when_it_is_back(collector_at):
    port = free_port()
    sink = collector_at(f"tcp://127.0.0.1:{port}")
    for number in range(3):
        sink.put({"event": f"line {number}"}, logging.INFO)
    time.sleep(0.2)
    with closing(server(port)) as listening:
        events = [parsed(line)[2]["event"] for line in lines_of(listening, 3)]
    assert events == ["line 0", "line 1", "line 2"]


def test_a_collector_that_takes_nothing_neither_delays_nor_fails_nor_fills_the_memory(
    collector_at,
):
    with closing(server()) as listening:  # its queue takes the connection; nobody reads
        sink = collector_at(f"tcp://127.0.0.1:{listening.getsockname()[1]}")
        began = time.monotonic()
        for number in range(MOST_WAITING + 9_000):
            sink.put({"event": "x" * 1_000, "number": number}, logging.INFO)
        assert time.monotonic() - began < WAIT_S
        assert sink.num_dropped > 0
        assert sink._waiting.qsize() <= MOST_WAITING


@pytest.mark.django_db
def test_pages_fail_and_events_are_sealed_as_ever_while_the_collector_is_gone(
    alice, collector_at, monkeypatch
):
    port = free_port()
    sink = collector_at(f"tcp://127.0.0.1:{port}")
    monkeypatch.setattr(log_collector, "collector", sink)
    handler = fault_logging(sink)["handlers"]["collected_faults"]["()"]()
    monkeypatch.setattr(logging.getLogger("django.request"), "handlers", [handler])

    def failing(*_args: object, **_kwargs: object) -> None:
        raise ZeroDivisionError("no such speed")

    monkeypatch.setattr("webapp.pages.home.render", failing)
    browser = client_of(alice)
    browser.raise_request_exception = False
    assert browser.get("/").status_code == 500
    event_write(kind="account.login", user=alice, actor="alice")
    assert events_seal() == 1
    with closing(server(port)) as listening:
        fault, sealed = [parsed(line) for line in lines_of(listening, 2)]
    assert fault[2]["event"] == "Internal Server Error: /"
    assert fault[2]["exception"].endswith("ZeroDivisionError: no such speed")
    assert sealed[1:] == ("audit", sealed[2] | {"kind": "account.login", "actor": "alice"})


@pytest.mark.django_db
def test_an_event_of_the_audit_is_sent_with_its_link_once_it_is_sealed(
    alice, collector_at, monkeypatch
):
    with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as listening:
        listening.bind(("127.0.0.1", 0))
        listening.settimeout(WAIT_S)
        sink = collector_at(f"udp://127.0.0.1:{listening.getsockname()[1]}")
        monkeypatch.setattr(log_collector, "collector", sink)
        event_write(kind="account.login", user=alice, actor="alice", way="password")
        assert events_seal() == 1
        _, kind, fields = parsed(listening.recv(65_536))
    assert kind == "audit"
    assert (fields["kind"], fields["actor"]) == ("account.login", "alice")
    assert fields["detail"] == {"account": "alice", "way": "password"}
    assert f"{fields['position']}:{fields['digest']}" == head()


def test_tls_is_verified(tmp_path, collector_at, monkeypatch):
    certificate = self_signed(tmp_path)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate)
    with closing(context.wrap_socket(server(), server_side=True)) as listening:
        sink = collector_at(f"tls://127.0.0.1:{listening.getsockname()[1]}")
        sink.put({"event": "over TLS"}, logging.INFO)
        with pytest.raises(ssl.SSLError, match=r"unknown ca|UNKNOWN_CA"):
            lines_of(listening, 1)
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        while True:
            try:
                (line,) = lines_of(listening, 1)
                break
            except ssl.SSLError:
                continue
    assert parsed(line)[2] == {"event": "over TLS"}


def self_signed(folder: Path) -> Path:
    """Return the file of a certificate for 127.0.0.1 with its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "collector")])
    instant = dt.datetime.now(dt.UTC)
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(instant - dt.timedelta(days=1))
        .not_valid_after(instant + dt.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    written = key.private_bytes(
        pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ) + made.public_bytes(pem)
    file = folder / "collector.pem"
    file.write_bytes(written)
    return file


LOGS = """
import structlog
from webapp import settings
log = structlog.get_logger("test")
log.warning("request refused", actor="ada", status=403)
try:
    1 / 0
except ZeroDivisionError:
    log.exception("round failed")
"""


def test_the_variable_alone_sends_the_lines_of_a_process_and_its_exit_waits_for_them(tmp_path):
    with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as listening:
        listening.bind(("127.0.0.1", 0))
        listening.settimeout(WAIT_S)
        port = listening.getsockname()[1]
        named = {"SLIPWAY_SYSLOG": f"udp://127.0.0.1:{port}", "SLIPWAY_DATA_DIR": str(tmp_path)}
        command = [sys.executable, "-c", LOGS]
        done = subprocess.run(
            command, env=os.environ | named, cwd=ROOT, check=True, capture_output=True, text=True
        )
        (_, _, first), (priority, _, second) = [parsed(listening.recv(65_536)) for _ in range(2)]
    assert first | {"event": "request refused", "actor": "ada", "level": "warning"} == first
    assert priority % 8 == 3
    assert "ZeroDivisionError: division by zero" in second["exception"]
    assert "request refused" in done.stdout


def test_the_programs_of_a_site_have_names_of_their_own():
    names = {
        program_name(each)
        for each in (["manage.py", "control"], ["/x/manage.py", "ticker"], ["uvicorn", "a:b"])
    }
    assert names == {"slipway-control", "slipway-ticker", "slipway-web"}
