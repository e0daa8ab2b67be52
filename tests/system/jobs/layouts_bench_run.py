"""Runs the bench of layouts as the server does: in a process of its own."""

import json
import subprocess
import sys


def told(asked, folder):
    """Return what it said: exchanges, step times, and the judgement."""
    command = [sys.executable, "-W", "ignore", "-m", "runners.jobs.bench.layouts_bench"]
    pipe = subprocess.PIPE
    bench = subprocess.Popen(command, cwd=folder, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    said, words = bench.communicate(asked.model_dump_json(), timeout=600)
    assert bench.returncode == 0, words[-3000:]
    lines = [json.loads(line) for line in said.splitlines()]
    exchanges = [each for each in lines if isinstance(each, dict) and "collective" in each]
    steps = [each for each in lines if isinstance(each, dict) and "layout" in each]
    return exchanges, steps, lines[-1]
