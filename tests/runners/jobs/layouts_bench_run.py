"""Runs the bench of layouts as the server does: in a process of its own."""

import json
import subprocess
import sys


def told(asked, folder):
    """Return what it said: exchanges, step times, and the judgement."""
    command = [sys.executable, "-W", "ignore", "-m", "runners.jobs.layouts_bench"]
    ended = subprocess.run(
        command, cwd=folder, input=asked.model_dump_json(), capture_output=True, text=True,
        timeout=600, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-3000:]
    lines = [json.loads(line) for line in ended.stdout.splitlines()]
    exchanges = [each for each in lines if isinstance(each, dict) and "collective" in each]
    steps = [each for each in lines if isinstance(each, dict) and "layout" in each]
    return exchanges, steps, lines[-1]
