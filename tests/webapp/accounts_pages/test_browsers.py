"""A browser is named as its user knows it."""

import pytest

from webapp.accounts.models import browser_words

KHTML = "AppleWebKit/537.36 (KHTML, like Gecko)"
MAC = "Mozilla/5.0 (Macintosh; Intel Mac OS X 10_15_7)"
WINDOWS = "Mozilla/5.0 (Windows NT 10.0; Win64; x64)"
PHONE = "Mozilla/5.0 (iPhone; CPU iPhone OS 18_0 like Mac OS X) AppleWebKit/605.1.15"


@pytest.mark.parametrize(
    ("user_agent", "words"),
    [
        (f"Mozilla/5.0 (X11; Linux x86_64) {KHTML} Chrome/140.0.0.0 Safari/537.36", "Chrome 140 on Linux"),
        (f"{WINDOWS} {KHTML} Chrome/140.0 Safari/537.36 Edg/140.0.1", "Edge 140 on Windows"),
        (f"{WINDOWS} {KHTML} Chrome/130.0 Safari/537.36 OPR/115.0", "Opera 115 on Windows"),
        ("Mozilla/5.0 (X11; Linux x86_64; rv:145.0) Gecko/20100101 Firefox/145.0", "Firefox 145 on Linux"),
        (f"{MAC} AppleWebKit/605.1.15 (KHTML, like Gecko) Version/18.1 Safari/605.1.15", "Safari 18 on macOS"),
        (f"{PHONE} (KHTML, like Gecko) Version/18.0 Mobile/15E148 Safari/604.1", "Safari 18 on iPhone"),
        (f"Mozilla/5.0 (Linux; Android 15) {KHTML} Chrome/140.0 Mobile", "Chrome 140 on Android"),
    ],
)  # fmt: skip
def test_a_browser_is_called_by_its_own_name(user_agent, words):
    assert browser_words(user_agent) == words


@pytest.mark.parametrize(("text", "words"), [("", "unknown"), ("curl/8.5.0", "curl/8.5.0")])
def test_what_is_no_known_browser_is_shown_as_it_says(text, words):
    assert browser_words(text) == words


def test_a_text_without_end_is_cut():
    assert len(browser_words("x" * 10_000)) == 40
