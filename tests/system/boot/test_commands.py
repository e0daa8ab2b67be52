"""The commands bench and prepare, run for real."""

import json
import os
import subprocess
import sys

from tests.stack import copy_migrated
from tests.webapp.boot.test_up import told
from webapp.boot import vendor
from webapp.operations.management.commands import bench


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
