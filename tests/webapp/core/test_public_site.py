"""A site that is named by its https address keeps to TLS; one on loopback does without."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from webapp.core.site_settings import YEAR_SECONDS, PublicUrlError, public_hosts, public_site

ROOT = Path(__file__).resolve().parents[3]
SITE = "https://slipway.example.org"
ASK = """
import json, sys, django
django.setup()
from django.test import Client
client = Client(SERVER_NAME="slipway.example.org")
answers = [client.get(path) for path in sys.argv[1:]]
print(json.dumps([[answer.status_code, answer.headers.get("Location", "")] for answer in answers]))
"""


def python(tmp_path, *arguments: str, url: str = SITE) -> subprocess.CompletedProcess[str]:
    """Run this Python on a data folder of its own, as a site of that address."""
    environment = os.environ | {
        "SLIPWAY_DATA_DIR": str(tmp_path),
        "SLIPWAY_PUBLIC_URL": url,
        "DJANGO_SETTINGS_MODULE": "webapp.settings",
    }
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_djangos_own_check_for_production_finds_nothing(tmp_path):
    done = python(tmp_path, "manage.py", "check", "--deploy", "--fail-level", "WARNING")

    assert (done.returncode, done.stderr) == (0, "")


def test_a_plain_request_is_sent_to_the_https_address(tmp_path):
    done = python(tmp_path, "-c", ASK, "/accounts/login/?next=/")

    assert json.loads(done.stdout) == [[301, f"{SITE}/accounts/login/?next=/"]]


def test_this_machine_asks_after_its_own_health_without_tls(tmp_path):
    done = python(tmp_path, "-c", ASK, "/healthz")

    [[status, location]] = json.loads(done.stdout)
    assert status != 301
    assert location == ""


def test_a_wrong_address_stops_the_start_with_the_way_out(tmp_path):
    done = python(tmp_path, "manage.py", "check", url="http://slipway.example.org")

    assert done.returncode != 0
    assert "SLIPWAY_PUBLIC_URL is 'http://slipway.example.org'" in done.stderr


@pytest.mark.parametrize(
    "url", ["http://a.org", "a.org", "https://", "https://a.org/slipway", "ftp://a.org"]
)
def test_only_the_https_address_of_a_whole_site_will_do(url):
    with pytest.raises(PublicUrlError, match=r"https://slipway\.example\.org"):
        public_site(url)


def test_without_an_address_nothing_is_set():
    assert (public_site(""), public_hosts("")) == ({}, [])


def test_cookies_are_bound_to_the_host_and_to_tls(settings):
    site = public_site(SITE)

    assert site["SESSION_COOKIE_SECURE"]
    assert settings.CSRF_USE_SESSIONS  # so there is no other cookie
    assert site["SESSION_COOKIE_NAME"].startswith("__Host-")


def test_browsers_keep_to_tls_for_a_year():
    assert public_site(SITE)["SECURE_HSTS_SECONDS"] == YEAR_SECONDS == 365 * 24 * 3600


def test_a_port_is_part_of_the_origin_and_not_of_the_name():
    url = "https://slipway.example.org:8443/"

    assert public_site(url)["CSRF_TRUSTED_ORIGINS"] == ["https://slipway.example.org:8443"]
    assert public_hosts(url) == ["slipway.example.org"]
