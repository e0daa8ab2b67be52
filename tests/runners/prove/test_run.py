"""The parent of the stages: a stage may crash, hang, babble or fill the disk."""

import json
import shutil
import sys
from collections import namedtuple
from pathlib import Path

import pytest

from runners.config import Credential
from runners.prove.report import Report, Stage
from runners.prove.run import ProofRun, exit_code

GOOD = '{"record": "figure", "name": "threads", "unit": "threads", "value": 1e9, "device": "cpu"}'
CREDENTIAL = Credential(
    server="http://127.0.0.1:8000",
    host_id="host-1",
    name="lab",
    credential="c",
    command_key="k",
    redis_url=None,
    beat_seconds=5.0,
)


def proof(folder, code: str, **options) -> Report:
    """Run two stages whose process is ``code``, with the stage's name in sys.argv[1]."""
    return ProofRun(
        folder=folder,
        stages=("identity", "rates"),
        command=(sys.executable, "-c", code),
        **options,
    ).run()


@pytest.mark.parametrize(
    ("code", "state", "words"),
    [
        (f"print('''{GOOD}''')", "done", ""),
        ("import os; os.kill(os.getpid(), 11)", "failed", "died by SIGSEGV"),
        ("raise SystemExit('no driver')", "failed", "code 1. no driver"),
        ("print('loading ...')", "failed", "no record: loading ..."),
        (f"print('''{GOOD.replace('1e9', 'NaN')}''')", "failed", "no record"),
        ("while True: print('loading ...')", "cut", "killed after 1 s"),
        (
            f"print('''{GOOD}''', flush=True); import time; time.sleep(99)",
            "cut",
            "the last that it said is: threads",
        ),
    ],
)
def test_a_stage_that_ends_badly_is_named_and_the_next_one_runs(
    tmp_path, monkeypatch, code, state, words
):
    monkeypatch.setattr("runners.prove.run.GRACE_SECONDS", -4.0)  # a second for a stage
    bad = f"import sys\nif sys.argv[1] == 'identity':\n  {code}\nelse:\n  print('''{GOOD}''')"
    report = proof(tmp_path, bad, seconds=1.0)
    first, second = report.stages
    assert (first.state, words in (first.problem or "")) == (state, True)
    assert (second.state, len(second.figures)) == ("done", 1)
    assert exit_code(report) == {"done": 0, "failed": 1, "cut": 3}[state]


def test_a_cut_leaves_the_report_of_what_was_done(tmp_path):
    seen: list[Report] = []

    def cut(stage: Stage, record: object) -> None:
        seen.append(Report.model_validate_json((tmp_path / "report.json").read_bytes()))

    proof(tmp_path, f"print('''{GOOD}''')", credential=CREDENTIAL, say=cut)
    first = seen[0]
    assert [(stage.state, len(stage.records)) for stage in first.stages] == [
        ("cut", 1),
        ("not run", 0),
    ]
    assert first.verdict == "incomplete"
    assert all(each.is_signed_with("k") for each in seen)
    assert "Identity" in (tmp_path / "report.html").read_text()


def test_a_full_disk_is_named_before_a_stage_fails_on_it(tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage(10**12, 10**12, 10**6))
    report = proof(tmp_path, f"print('''{GOOD}''')")
    assert {stage.state for stage in report.stages} == {"failed"}
    assert "0.0 GB free" in report.stages[0].problem


def test_what_a_stage_wrote_and_started_is_gone_after_it(tmp_path):
    code = (
        "import pathlib, subprocess, sys\n"
        "pathlib.Path(sys.argv[2], 'left').write_text('x')\n"
        "child = subprocess.Popen(['sleep', '60'])\n"
        f"print('''{GOOD.replace('threads', 'pid')}'''.replace('1e9', str(child.pid)))"
    )
    report = proof(tmp_path, code)
    assert sorted(path.name for path in tmp_path.glob("[!.]*")) == ["report.html", "report.json"]
    for stage in report.stages:
        (pid,) = (int(each.value) for each in stage.figures)
        assert not _runs(pid)
    assert json.loads((tmp_path / "report.json").read_text())["seconds"] > 0


def _runs(pid: int) -> bool:
    try:
        with Path(f"/proc/{pid}/stat").open() as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
