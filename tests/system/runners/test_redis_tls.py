"""TLS to Redis with a certificate authority of our own: verified or refused."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import redis
from celery import Celery
from kombu.exceptions import OperationalError

from runners.host.app import settings
from runners.host.redis_access import celery_options, connect
from runners.host.shipping import RedisStream
from tests.runners.tools import wait_for
from tests.stack import free_port


class Authority(NamedTuple):
    """A certificate authority, and a server's certificate from it."""

    ca: Path
    certificate: Path
    key: Path


def openssl(*words: object) -> None:
    subprocess.run(["openssl", *map(str, words)], check=True, capture_output=True)


def make_authority(folder: Path, name: str = "localhost") -> Authority:
    folder.mkdir()
    made = Authority(folder / "ca.pem", folder / "server.pem", folder / "server.key")
    new_key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    openssl("req", "-x509", *new_key, "-keyout", folder / "ca.key", "-out", made.ca,
            "-subj", "/CN=Our own authority", "-days", "2",
            "-addext", "keyUsage=critical,keyCertSign,cRLSign")  # fmt: skip
    openssl("req", "-x509", *new_key, "-keyout", made.key, "-out", made.certificate,
            "-CA", made.ca, "-CAkey", folder / "ca.key", "-subj", f"/CN={name}", "-days", "2",
            "-addext", f"subjectAltName=DNS:{name}", "-addext", "basicConstraints=CA:FALSE",
            "-addext", "authorityKeyIdentifier=keyid")  # fmt: skip
    return made


class TlsRedis:
    """A server that speaks TLS alone."""

    def __init__(self, authority: Authority, folder: Path) -> None:
        self.port = free_port()
        self.url = f"rediss://localhost:{self.port}/0"
        self.authority = authority
        self.process = subprocess.Popen(
            ["redis-server", "--port", "0", "--tls-port", str(self.port), "--dir", str(folder),
             "--tls-cert-file", str(authority.certificate), "--tls-key-file", str(authority.key),
             "--tls-ca-cert-file", str(authority.ca), "--tls-auth-clients", "no", "--save", ""],
            stdout=subprocess.DEVNULL,
        )  # fmt: skip
        wait_for(self.answers)

    def answers(self) -> bool:
        try:
            with connect(self.url, self.authority.ca) as client:
                return bool(client.ping())
        except redis.ConnectionError:
            return False

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="module")
def authority(tmp_path_factory) -> Authority:
    if not (shutil.which("openssl") and shutil.which("redis-server")):
        pytest.skip("needs openssl and a redis-server with TLS")
    return make_authority(tmp_path_factory.mktemp("tls") / "ours")


@pytest.fixture(scope="module")
def tls_redis(authority, tmp_path_factory) -> Iterator[TlsRedis]:
    server = TlsRedis(authority, tmp_path_factory.mktemp("r"))
    yield server
    server.end()


@pytest.fixture(scope="module")
def stranger(tmp_path_factory) -> Authority:
    """Another authority, which vouches for nobody here."""
    return make_authority(tmp_path_factory.mktemp("tls") / "stranger")


def publish(url: str, ca: Path | None) -> None:
    with Celery("test") as app:
        app.conf.update(celery_options(url, ca), broker_transport_options={"socket_timeout": 2})
        with app.connection_for_write() as connection:
            app.send_task("runners.ping", queue="jobs", connection=connection, retry=False)


def test_the_right_authority_lets_doorbells_pass(tls_redis, authority):
    publish(tls_redis.url, authority.ca)

    with connect(tls_redis.url, authority.ca) as client:
        assert client.llen("jobs") == 1


@pytest.mark.parametrize("whose", ["stranger", "nobody"])
def test_a_publisher_refuses_a_server_that_nobody_vouches_for(tls_redis, stranger, whose):
    ca = stranger.ca if whose == "stranger" else None

    with pytest.raises(OperationalError, match="CERTIFICATE_VERIFY_FAILED"):
        publish(tls_redis.url, ca)


@pytest.mark.parametrize("whose", ["stranger", "nobody"])
def test_a_client_refuses_a_server_that_nobody_vouches_for(tls_redis, stranger, whose):
    with connect(tls_redis.url, stranger.ca if whose == "stranger" else None) as client:
        with pytest.raises(redis.ConnectionError, match="CERTIFICATE_VERIFY_FAILED"):
            client.ping()


def test_a_certificate_for_another_name_is_refused(tls_redis, authority):
    with connect(tls_redis.url.replace("localhost", "127.0.0.1"), authority.ca) as client:
        with pytest.raises(redis.ConnectionError, match="CERTIFICATE_VERIFY_FAILED"):
            client.ping()


def test_a_shipper_ships_to_the_right_server_alone(tls_redis, authority, stranger):
    for ca, acked in ((authority.ca, 0), (stranger.ca, None)):
        stream = RedisStream(tls_redis.url, "h1", ca)
        assert stream.acked("a") == acked
        stream.close()


def test_the_worker_is_told_to_verify(host_dir, credential, authority):
    host_dir.save_redis_ca(authority.ca.read_text())
    changed = credential.model_copy(update={"redis_url": "rediss://b:1/0", "redis_secret": "s"})

    found = settings(changed, host_dir.redis_ca())

    assert found["broker_url"] == "rediss://h_h1:s@b:1/0"
    assert found["broker_use_ssl"]["ssl_ca_certs"] == str(host_dir.path / "redis-ca.pem")
