"""The commands that tell about the house itself."""

import io
import json
import os
import subprocess
import sys

import pytest
from django.core.management import CommandError, call_command

from tests.stack import copy_migrated
from webapp.boot import vendor
from webapp.core.management.commands import bench


def told(*arguments, **options) -> str:
    out = io.StringIO()
    call_command(*arguments, stdout=out, **options)
    return out.getvalue()


def test_house_prints_the_figures_of_the_house_rules():
    words = told("house")

    for name in ("test functions", "test/code ratio", "function p90 lines", "typed functions %"):
        assert name in words


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


def test_bench_measures_the_import_of_the_planner(monkeypatch):
    monkeypatch.setattr(bench, "ROUNDS", 3)
    figures = {row["name"]: row for row in json.loads(told("bench", "import", json=True))}

    assert figures["import planner"]["unit"] == "s"
    assert figures["import planner"]["value"] < 0.3
    doors = [
        row["value"] for name, row in figures.items() if name.startswith("import planner.api")
    ]
    bare, compiled, estimated, planned = doors
    assert 0 < bare < min(compiled, estimated, planned)


def test_bench_refuses_an_unknown_name():
    with pytest.raises(CommandError, match="invalid choice: 'speed'"):
        call_command("bench", "speed")


def test_prepare_says_that_a_named_database_cannot_be_reached(tmp_path):
    named = {"DATABASE_URL": "postgresql://127.0.0.1:9/none", "SLIPWAY_DATA_DIR": str(tmp_path)}

    done = subprocess.run(
        [sys.executable, "manage.py", "prepare"],
        cwd=vendor.ROOT,
        env=os.environ | named,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 1
    assert "CommandError: the database cannot be used" in done.stderr
    assert "Traceback" not in done.stderr


def test_prepare_makes_an_admin_and_its_password_once(tmp_path):
    """``test_whole_up`` lets it begin without databases."""
    copy_migrated(tmp_path)
    named = {"SLIPWAY_DATA_DIR": str(tmp_path)}
    command = [sys.executable, "manage.py", "prepare"]

    first, second = (
        subprocess.run(
            command,
            cwd=vendor.ROOT,
            env=os.environ | named,
            capture_output=True,
            text=True,
            check=True,
        )
        for _ in range(2)
    )

    assert "password: " in first.stdout
    assert second.stdout == ""
