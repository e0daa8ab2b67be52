"""Addresses of Redis: users, secrets, and checks that none may switch off."""

import pytest

from runners.redis_access import celery_options, connect
from runners.redis_address import UnsafeAddressError, bare, celery_url, with_user

ADDRESSES = [
    ("redis://h:6379/0", "redis://u:s@h:6379/0"),
    ("rediss://h/1?health_check_interval=5", "rediss://u:s@h/1?health_check_interval=5"),
    ("unix:///run/r.sock", "unix://u:s@/run/r.sock"),
    ("unix:///run/r.sock?db=2", "unix://u:s@/run/r.sock?db=2"),
]


@pytest.mark.parametrize(("plain", "named"), ADDRESSES)
def test_an_address_takes_a_user_and_gives_it_up(plain, named):
    assert with_user(plain, "u", "s") == named
    assert bare(named) == plain
    assert with_user(named, "u", "s") == named


def test_a_password_in_the_query_is_given_up_too():
    assert bare("unix:///r.sock?db=1&password=secret&username=me") == "unix:///r.sock?db=1"


def test_celery_is_told_user_and_secret_of_a_socket():
    url = with_user("unix:///run/r.sock?db=2", "u", "s")

    assert celery_url(url) == "redis+socket://u:s@/run/r.sock?virtual_host=2"


@pytest.mark.parametrize("query", ["ssl_cert_reqs=none", "ssl_cert_reqs=optional", "ssl_check_hostname=False"])  # fmt: skip
@pytest.mark.parametrize("speak", [connect, celery_options])
def test_an_address_that_switches_the_check_off_is_refused(query, speak):
    with pytest.raises(UnsafeAddressError, match="SLIPWAY_REDIS_CA"):
        speak(f"rediss://broker:6380/0?{query}")
