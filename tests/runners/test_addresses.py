"""Which proxy a host's calls take: as the variables are written, and never for this machine."""

import psutil
import pytest

from runners.host.shipping import (
    ConnectionSettingError,
    ServerClient,
    UnreachableError,
)
from runners.shared import addresses
from runners.shared.addresses import Proxy, is_this_machine, proxy_lines, proxy_of
from runners.shared.messages import RotateRequest

DEAD = "http://127.0.0.1:9"


@pytest.fixture
def variables(monkeypatch):
    """Set the variables of proxies, and no others of them."""

    def put(**values: str) -> None:
        for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
            for form in (name, name.upper()):
                monkeypatch.delenv(form, raising=False)
        for name, value in values.items():
            monkeypatch.setenv(name, value)

    put()
    return put


def test_names_and_addresses_of_this_machine_are_known_by_its_interfaces():
    own = [
        each.address.partition("%")[0]
        for nic in psutil.net_if_addrs().values()
        for each in nic
        if each.family in (2, 10)
    ]
    for host in [*own, "localhost", "LOCALHOST.", "a.localhost", "127.0.0.2", "127.1", "0.0.0.0",
                 "[::1]", "::ffff:127.0.0.1"]:  # fmt: skip
        assert is_this_machine(host), host
    for host in ["203.0.113.5", "2001:db8::5", "no-such-name.invalid"]:
        assert not is_this_machine(host), host


def test_an_entry_of_no_proxy_is_a_name_an_address_or_a_network():
    for url, entry, is_exempt in [
        ("http://[2001:db8::1]:8000", "[2001:db8::1]", True),
        ("http://[2001:db8::1]:8000", "2001:DB8:0::1", True),
        ("http://[2001:db8::1]:8000", "[2001:db8::1]:8000", True),
        ("http://[2001:db8::1]:8000", "[2001:db8::1]:9000", False),
        ("http://[2001:db8::1]:8000", "2001:db8::/32", True),
        ("http://[2001:db8::1]:8000", "fd00::/8", False),
        ("http://203.0.113.5", "203.0.113.0/24", True),
        ("http://203.0.113.5", "203.0.113.5/24", True),
        ("http://203.0.113.5", "203.0.113.*", True),
        ("http://203.0.113.5", "10.0.0.0/8 203.0.113.5:80", True),
        ("https://a.example.org", "example.org", True),
        ("https://a.example.org", ".example.org", True),
        ("https://a.example.org", "*.Example.org", True),
        ("https://a.example.org", "https://a.example.org/", True),
        ("https://a.example.org", "a.example.org:443", True),
        ("https://a.example.org", "ample.org", False),
        ("https://a.example.org", "[::1],10.0.0.0/99, *", True),
        ("https://xn--bcher-kva.example", "bücher.example", True),
        ("https://a.example.org", "[::1", False),
        ("https://a.example.org", "", False),
    ]:
        for form in ("NO_PROXY", "no_proxy"):
            found = proxy_of(url, {"ALL_PROXY": "proxy:3128", form: entry})
            assert (found is None) == is_exempt, (url, entry)


def test_the_variable_of_the_scheme_comes_first_and_small_letters_before_capitals():
    url = "https://203.0.113.5"
    for variables, proxy in [
        ({"HTTPS_PROXY": "proxy:1 "}, Proxy("HTTPS_PROXY", "http://proxy:1")),
        ({"HTTP_PROXY": "proxy:1"}, None),
        ({"ALL_PROXY": "a:1", "HTTPS_PROXY": "b:1"}, Proxy("HTTPS_PROXY", "http://b:1")),
        ({"https_proxy": "a:1", "HTTPS_PROXY": "b:1"}, Proxy("https_proxy", "http://a:1")),
        ({"https_proxy": "", "HTTPS_PROXY": "b:1"}, None),
        ({}, None),
    ]:
        assert proxy_of(url, variables) == proxy, variables


def test_what_cannot_be_read_is_named_and_a_password_is_not_shown():
    lines = proxy_lines({"HTTP_PROXY": "http://me:secret@proxy:1", "NO_PROXY": "[::1,10.0.0.0/99"})
    assert "the proxy http://proxy:1 of HTTP_PROXY" in lines[0]
    assert "NO_PROXY has '[::1', '10.0.0.0/99'" in lines[1]
    assert proxy_lines({"NO_PROXY": "[::1"}) == []


def test_a_proxy_that_refuses_is_named(variables):
    variables(HTTP_PROXY=DEAD, NO_PROXY="[::1],fd00::/8,fe80::/10")
    client = ServerClient("http://203.0.113.5:8000", "secret")
    with pytest.raises(UnreachableError, match=f"the proxy {DEAD} of HTTP_PROXY.*NO_PROXY"):
        client.rotate(RotateRequest(credential_hash="0" * 64, redis_secret_hash="0" * 64))
    client.close()


def test_an_address_of_this_machine_is_asked_without_a_proxy(variables):
    variables(HTTP_PROXY=DEAD, ALL_PROXY=DEAD)
    for own in addresses.own_addresses():
        client = ServerClient(f"http://{addresses.in_url(own)}:8000", "secret")
        assert client.proxy is None, own
        client.close()


def test_a_proxy_or_an_address_that_cannot_be_used_is_named(variables):
    for value in ["http://[fd00::1:3128", "ftp://proxy:21", "http://proxy:port", "socks5://p:1"]:
        variables(HTTP_PROXY=value)
        with pytest.raises(ConnectionSettingError, match="of HTTP_PROXY cannot be used"):
            ServerClient("http://203.0.113.5")
    variables()
    for server in ["http://[::1", "http://box:port"]:
        with pytest.raises(ConnectionSettingError, match="is no address of a server"):
            ServerClient(server)


def test_certificates_that_cannot_be_read_are_named_where_they_are_needed(
    variables, monkeypatch, tmp_path
):
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "none.pem"))
    with pytest.raises(ConnectionSettingError, match="SSL_CERT_FILE"):
        ServerClient("https://203.0.113.5")
    ServerClient("http://203.0.113.5").close()
