"""The command: its options, its output, and the packages that it does without."""

import json
import subprocess
import sys

import pytest

from runners.__main__ import main
from runners.prove import command
from runners.prove.report import Report
from runners.prove.run import ProofRun

# What a machine with torch and transformers alone does not have.
WEB = ("django", "celery", "redis", "kombu", "httpx", "psycopg", "plotly", "structlog", "ulid")
WITHOUT = f"""
import sys
for name in {WEB!r}:
    sys.modules[name] = None
from runners.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


def test_it_runs_where_no_package_of_the_site_is_installed(tmp_path):
    ended = subprocess.run(
        [
            *(sys.executable, "-c", WITHOUT, "prove", "--stages", "identity", "--small"),
            *("--device", "cpu", "--json", "--output", str(tmp_path), "--dir", str(tmp_path)),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    report = Report.model_validate_json(ended.stdout)
    assert (ended.returncode, report.verdict) == (0, "proven")
    assert report.device != "unknown"
    assert json.loads((tmp_path / "report.json").read_text()) == report.model_dump(mode="json")


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--stages", "rates,speeed", "no stage 'speeed'; there are identity, rates"),
        ("--minutes", "soon", "soon is not between 0.1 and 1440 minutes"),
        ("--minutes", "0", "0 is not between 0.1 and 1440 minutes"),
    ],
)
def test_a_wrong_option_names_the_value_and_the_limit(capsys, option, value, words):
    with pytest.raises(SystemExit) as ended:
        main(["prove", option, value])
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


def test_it_says_what_failed_and_where_the_report_lies(tmp_path, capsys, monkeypatch):
    bad = '{"record": "check", "name": "sum", "is_met": false, "expected": "3", "found": "4"}'
    monkeypatch.setattr(
        command,
        "ProofRun",
        lambda **options: ProofRun(
            **options, command=(sys.executable, "-c", f"print('''{bad}''')")
        ),
    )
    assert main(["prove", "--stages", "rates", "--dir", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert "FAIL   sum: 4" in said
    assert "rates: sum: expected 3, found 4" in said
    assert f"not signed: {tmp_path} holds no enrolled host" in said
    assert str(tmp_path / "prove" / "report.html") in said
