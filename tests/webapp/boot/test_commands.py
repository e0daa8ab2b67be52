"""The commands that operators run: doctor, vendor and bench."""

import io

import pytest
from django.core.management import CommandError, call_command

from webapp.boot import vendor


def told(*arguments, **options) -> str:
    out = io.StringIO()
    call_command(*arguments, stdout=out, **options)
    return out.getvalue()


def test_doctor_names_everything_that_up_needs():
    words = told("doctor")

    for topic in ("Python", "torch", "Disk", "Memory", "Redis", "Database", "GPU", "Chromium"):
        assert f" {topic} " in words


def test_doctor_says_that_a_named_redis_does_not_answer(monkeypatch):
    monkeypatch.setenv("REDIS_URL", "redis://127.0.0.1:1/0")

    assert "✗ Redis        REDIS_URL names redis://127.0.0.1:1/0, which does not answer" in told(
        "doctor"
    )


def test_doctor_says_that_remote_hosts_need_another_door_than_the_embedded_redis(monkeypatch):
    monkeypatch.delenv("REDIS_URL", raising=False)

    assert "other hosts speak HTTPS, or a rediss:// in REDIS_URL" in told("doctor")


def test_vendor_check_finds_the_published_bytes():
    assert "Every vendored file has the bytes" in told("vendor", check=True)


def test_vendor_check_names_a_file_that_differs(monkeypatch):
    monkeypatch.setattr(vendor, "changed_files", lambda: ["static/vendor/htmx.min.js"])

    with pytest.raises(CommandError, match=r"htmx\.min\.js"):
        call_command("vendor", check=True)


def test_bench_refuses_an_unknown_name():
    with pytest.raises(CommandError, match="invalid choice: 'speed'"):
        call_command("bench", "speed")
