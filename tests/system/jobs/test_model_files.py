"""Only a model's own data files are read: links, swaps, pickles, code and absurd configs."""

import subprocess
import sys

import pytest

BOUNDED = """
import os, resource, sys
from pathlib import Path
from runners.jobs.model_files import check_config, read_config
for path in sys.argv[1:]:
    if os.fork():
        os.wait()
        continue
    resource.setrlimit(resource.RLIMIT_AS, (3 * 2**30, 3 * 2**30))
    resource.setrlimit(resource.RLIMIT_CPU, (10, 10))
    try:
        check_config(read_config(Path(path)), "model")
    except Exception as error:
        print(path, type(error).__name__, flush=True)
    os._exit(0)
"""
HOSTILE = {
    "deep lists": b"[" * 500_000,
    "deep objects": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "long": b'{"a": "' + b"x" * 2_000_000 + b'"}',
    "no end": b'{"a": "',
    "a number of a million digits": b'{"hidden_size": ' + b"9" * 1_000_000 + b"}",
    "many layers": b'{"num_hidden_layers": 1000000000}',
    "large": b'{"vocab_size": 10000000000000}',
    "hidden inside": b'{"text_config": {"num_local_experts": 99999}}',
    "no object": b"[1, 2]",
    "no text": b"\xff\xfe\x00",
}


@pytest.fixture(scope="module")
def refused(tmp_path_factory) -> dict[str, str]:
    """Return how a fork of its own, with bounds, ended on each hostile config."""
    paths = {name: tmp_path_factory.mktemp("hostile") / "config.json" for name in HOSTILE}
    for name, path in paths.items():
        path.write_bytes(HOSTILE[name])
    command = [sys.executable, "-c", BOUNDED, *map(str, paths.values())]
    done = subprocess.run(command, capture_output=True, timeout=600, check=True, text=True)
    words = dict(line.split() for line in done.stdout.splitlines())
    return {name: words.get(str(path), done.stderr) for name, path in paths.items()}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_config_is_refused_within_ten_seconds_and_three_gigabytes(refused, name):
    assert refused[name] == "BadInputError"
