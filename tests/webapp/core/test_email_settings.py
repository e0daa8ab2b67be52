"""One address becomes Django's settings of e-mail, or is refused in words."""

import pytest

from webapp.core.site_settings import EmailUrlError, email_settings

SENDER = "slipway@example.org"


def test_without_an_address_nothing_is_set():
    assert email_settings("", "") == {}


@pytest.mark.parametrize(
    ("url", "port", "starts_tls", "is_tls"),
    [
        ("smtp://mail.example.org", 25, False, False),
        ("smtp+tls://mail.example.org", 587, True, False),
        ("smtps://mail.example.org", 465, False, True),
        ("smtps://mail.example.org:2465", 2465, False, True),
    ],
)
def test_the_scheme_says_how_it_is_secured(url, port, starts_tls, is_tls):
    found = email_settings(url, SENDER)

    assert found["EMAIL_HOST"] == "mail.example.org"
    assert (found["EMAIL_PORT"], found["EMAIL_USE_TLS"], found["EMAIL_USE_SSL"]) == (
        port,
        starts_tls,
        is_tls,
    )


def test_a_name_and_a_password_may_hold_any_character():
    found = email_settings("smtps://me%40example.org:p%2Fw%3A@mail.example.org", SENDER)

    assert (found["EMAIL_HOST_USER"], found["EMAIL_HOST_PASSWORD"]) == ("me@example.org", "p/w:")


@pytest.mark.parametrize(
    ("url", "sender", "words"),
    [
        ("mail.example.org", SENDER, "SLIPWAY_EMAIL_URL begins with ''"),
        ("http://mail.example.org", SENDER, "begins with 'http'"),
        ("smtp://", SENDER, "names the server None"),
        ("smtp://mail:port", SENDER, "SLIPWAY_EMAIL_URL: "),
        ("smtp://mail", "", "SLIPWAY_EMAIL_FROM is ''"),
    ],
)
def test_what_is_no_address_is_refused_in_words(url, sender, words):
    with pytest.raises(EmailUrlError, match=words):
        email_settings(url, sender)
