"""Passwords known from breaches: a file is searched where it is, an API learns five digits."""

import gzip
import io
import re
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import structlog
from django.contrib.auth import password_validation
from django.contrib.auth.models import User
from hypothesis import given
from hypothesis import strategies as st

from tests.stack import free_port
from tests.webapp.conftest import client_of
from webapp.accounts import breached_passwords
from webapp.accounts.breached_passwords import is_breached
from webapp.accounts.sign_in import link_path
from webapp.core.password_files import PasswordFileError, has_hash, has_hashes, sha1_of

OLD, BREACHED, FRESH = "correct horse battery", "iloveyou for ever", "a fresh staple of words"
VALIDATOR = "webapp.accounts.breached_passwords.BreachedPasswordValidator"
ASVS = Path(__file__).parents[3] / "templates/docs/asvs.md"


class CountedReads(io.BytesIO):
    """A file that counts the lines that are read from it."""

    num_lines = 0

    def readline(self, size: int | None = -1, /) -> bytes:
        self.num_lines += 1
        return super().readline(size)


def test_a_file_of_hashes_is_searched_by_bisection():
    assert sha1_of("password") == "5BAA61E4C9B93F3F0682250B6CF8331B7EE68FD8"  # as published
    hashes = sorted(sha1_of(f"password {number}") for number in range(5_000))
    for end, bom, change in [("\n", b"", str), ("\r\n", b"\xef\xbb\xbf", str.lower)]:
        lines = end.join(f"{change(each)}:{number}" for number, each in enumerate(hashes))
        text = bom + lines.encode()
        for each in hashes[:: 1 if end == "\n" else 50]:
            file = CountedReads(text)
            assert has_hash(file, each)
            assert file.num_lines <= 2 * 20  # 5,000 lines, 2^18 bytes
        assert not any(has_hash(io.BytesIO(text), sha1_of(f"other {n}")) for n in range(500))


digits = st.text("0123456789ABCDEF", min_size=2, max_size=2)


@given(there=st.sets(digits, max_size=20), wanted=digits, counts=st.lists(st.integers(0, 10**9)))
def test_bisection_finds_what_a_set_has(there, wanted, counts):
    """Neighbours of all lengths, at both ends and between."""
    counts = [*counts, *[1] * len(there)]
    lines = [f"{each:0<40}:{count}\n" for each, count in zip(sorted(there), counts, strict=False)]
    file = io.BytesIO("".join(lines).encode())
    assert has_hash(file, f"{wanted:0<40}") == (wanted in there)


def test_a_list_of_passwords_is_searched_by_whole_lines(tmp_path):
    file = tmp_path / "list"
    file.write_bytes("first one here\nsecond из многих\r\nthird one here".encode())
    assert not has_hashes(file)
    for password, is_there in [
        ("first one here", True),
        ("First One HERE", True),
        ("second из многих", True),
        ("third one here", True),
        ("one here", False),
        ("second из", False),
        ("third one here ", False),
        ("first one here\nsecond из многих", False),
    ]:
        assert is_breached(str(file), password) == is_there, password


def test_a_file_that_would_find_nothing_is_refused_with_the_cause(tmp_path):
    lines = [f"{sha1_of(str(number))}:1\n" for number in range(300)]
    file = tmp_path / "list"
    for text, words in [
        ("", "empty"),
        (f"{'0' * 32}:4\n", "NTLM"),
        ("".join(lines), "not in order"),
        ("".join(sorted(lines)) + "a password\n" * 300, "is no hash"),
    ]:
        file.write_text(text)
        with pytest.raises(PasswordFileError, match=words):
            has_hashes(file)
    file.write_text("".join(sorted(lines)))
    assert has_hashes(file)


@contextmanager
def range_api(answer: str, status: int = 200, wait_s: float = 0) -> Iterator[tuple[str, list]]:
    """Answer as the range API does, and note what it was asked for."""
    requests: list[tuple[str, str]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            requests.append((self.path, self.headers["Add-Padding"]))
            time.sleep(wait_s)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(answer.encode())

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", requests
    finally:
        server.shutdown()
        server.server_close()


def test_a_range_api_is_told_five_digits_and_one_that_fails_keeps_nobody_out(monkeypatch):
    suffix, padding = sha1_of(BREACHED)[5:], sha1_of(FRESH)[5:]
    with range_api(f"{'0' * 35}:3\r\n{suffix}:12\r\n{padding}:0\r\n") as (url, requests):
        assert is_breached(url, BREACHED)
        assert requests == [(f"/range/{sha1_of(BREACHED)[:5]}", "true")]
        assert not is_breached(url, FRESH)
    monkeypatch.setattr(breached_passwords, "TIMEOUT_SECONDS", 0.2)
    failing = [
        (range_api(f"{suffix}:12", status=503), "503"),
        (range_api(f"{suffix}:12", wait_s=1.0), "timed out"),
    ]
    for api, words in failing:
        with api as (url, _), structlog.testing.capture_logs() as lines:
            began = time.monotonic()
            assert not is_breached(url, BREACHED)
            assert time.monotonic() - began < 5
        assert [line["event"] for line in lines] == ["breached passwords were not checked"]
        assert words in lines[0]["cause"]
        assert BREACHED not in str(lines)
    for source in (f"http://127.0.0.1:{free_port()}", "/no/such/file", "https://"):
        with structlog.testing.capture_logs() as lines:
            assert not is_breached(source, BREACHED)
        assert len(lines) == 1, source


@pytest.fixture
def refusing(settings, tmp_path):
    """A site with a file of breached passwords."""
    file = tmp_path / "hashes.txt"
    file.write_text("".join(sorted(f"{sha1_of(each)}:9\n" for each in (BREACHED, "other"))))
    added = {"NAME": VALIDATOR, "OPTIONS": {"source": str(file)}}
    settings.AUTH_PASSWORD_VALIDATORS = [*settings.AUTH_PASSWORD_VALIDATORS, added]


@pytest.mark.django_db
def test_a_password_known_from_breaches_is_refused_in_every_form(refusing, client):
    root = User.objects.create_superuser("root", password=OLD)
    browser = client_of(root)
    own = {"old_password": OLD, "new_password1": BREACHED, "new_password2": BREACHED}
    link = {"new_password1": BREACHED, "new_password2": BREACHED}
    new = {"username": "eve", "password1": BREACHED, "password2": BREACHED,
           "usable_password": "true"}  # fmt: skip
    for page in (
        browser.post("/settings/password/", own),
        client.post(link_path(root), link),
        browser.post("/admin/auth/user/add/", new),
    ):
        assert "known from a breach of other sites" in page.content.decode()
    assert User.objects.get().check_password(OLD)
    fresh = own | {"new_password1": FRESH, "new_password2": FRESH}
    assert browser.post("/settings/password/", fresh).status_code == 302


def test_djangos_list_has_too_few_long_passwords_which_the_page_counts():
    file = Path(password_validation.__file__).with_name("common-passwords.txt.gz")
    with closing(gzip.open(file, "rt", encoding="utf-8")) as lines:
        common = {line.strip() for line in lines}
    long = {password for password in common if len(password) >= 12}
    (told,) = re.findall(r"Django's ([\d,]+) common passwords are, of which only (\d+)",
                         ASVS.read_text("utf-8"))  # fmt: skip
    assert told == (f"{len(common):,}", str(len(long)))
    assert len(long) < 3_000
