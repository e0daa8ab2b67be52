import json

import pytest

from webapp.boot import cli, environment, installer, pins
from webapp.boot.console import Problem
from webapp.boot.installer import PackageFile

A, B = "a" * 64, "b" * 64
ABOUT = {
    "implementation_name": "cpython", "python_version": "3.12", "sys_platform": "linux",
    "platform_machine": "aarch64",
}  # fmt: skip
KEY = "cpython3.12-linux-aarch64"


@pytest.fixture
def listed(tmp_path, monkeypatch):
    """The list and the pins, moved to a folder of the test."""
    monkeypatch.setattr(installer, "LIST", tmp_path / "hashes.csv")
    monkeypatch.setattr(environment, "CONSTRAINTS", tmp_path / "constraints.txt")
    environment.CONSTRAINTS.write_text("# pins\nNew_Name==2.0\n")
    return installer.LIST


def report(folder, name, digests):
    info = {"url": f"https://index/{name}", "archive_info": {"hashes": digests}}
    path = folder / "report.json"
    path.write_text(json.dumps({"environment": ABOUT, "install": [{"download_info": info}]}))
    return path


def test_a_report_of_pip_is_recorded_for_its_platform(listed, tmp_path):
    path = report(tmp_path, "new_name-2.0%2Bcpu-py3-none-any.whl", {"sha256": A})

    assert cli.main(["pins", "--record", str(path)]) == 0

    assert installer.read(listed) == [
        PackageFile("new_name-2.0+cpu-py3-none-any.whl", A, frozenset({KEY}))
    ]


def test_recording_leaves_out_versions_that_are_pinned_no_more(listed):
    installer.write(listed, [PackageFile("new_name-1.0-py3-none-any.whl", A, frozenset({KEY}))])

    pins.record([PackageFile("new_name-2.0-py3-none-any.whl", B)], KEY)

    assert [row.version for row in installer.read(listed)] == ["2.0"]


def test_recording_adds_a_platform_to_a_file_that_is_listed(listed):
    file = PackageFile("new_name-2.0-py3-none-any.whl", A)

    for key in ("cpython3.11-linux-x86_64", KEY):
        pins.record([file], key)

    (row,) = installer.read(listed)
    assert row.platforms == {"cpython3.11-linux-x86_64", KEY}


def test_a_report_without_digests_is_refused_by_name(tmp_path):
    with pytest.raises(Problem, match="no report of pip with digests"):
        pins.from_report(report(tmp_path, "a-1-py3-none-any.whl", {}))


def test_reports_are_not_taken_for_a_comparison(tmp_path, capsys):
    with pytest.raises(SystemExit):
        pins.main([str(tmp_path / "report.json")])

    assert "add --record" in capsys.readouterr().err


@pytest.fixture
def given(listed, monkeypatch):
    """What the index gives: one file."""
    found = [PackageFile("new_name-2.0-py3-none-any.whl", A)]
    monkeypatch.setattr(pins, "_fetch", lambda *_: found)
    return found


def test_the_command_tells_how_many_files_are_as_recorded(given, capsys):
    assert cli.main(["pins", "--record"]) == 0

    assert cli.main(["pins"]) == 0

    assert "1 of 1 packages" in capsys.readouterr().out


def test_the_command_names_what_is_not_listed(given, capsys):
    assert cli.main(["pins"]) == 0

    assert "no recorded hash: new_name-2.0-py3-none-any.whl" in capsys.readouterr().out


def test_the_command_fails_where_the_index_gives_another_file(given, listed, capsys):
    installer.write(listed, [PackageFile(given[0].file, B, frozenset({KEY}))])

    assert cli.main(["pins"]) == 1

    assert f"recorded {given[0].file} with {B}" in capsys.readouterr().err
