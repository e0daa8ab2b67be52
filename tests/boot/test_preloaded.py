"""A process that the preloaded server forks is, to its caller, a process like any other."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.boot.conftest import eventually
from tests.plugins import preloaded

ROOT = preloaded.ROOT
CODE = """
import os, signal, sys, time
print("out", os.getcwd(), os.environ.get("MARK"), os.getpid(), sys.argv[1:])
print("err", file=sys.stderr)
if "fd" in sys.argv:
    os.write(int(sys.argv[2]), b"told")
if "sleep" in sys.argv:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
    print("ready", flush=True)
    time.sleep(600)
sys.exit(3)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("preloaded")
    (made / "becomes.py").write_text(CODE)
    return made


@pytest.fixture(scope="module")
def server(folder):
    """A server of its own that imports next to nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{ROOT}:{folder}")
        patch.setenv(preloaded.SOCKET, "")
        patch.setattr(preloaded, "COMMAND", ["tests.plugins.preloaded", "numpy"])
        with preloaded.serving(folder):
            eventually((folder / "preloaded").exists)
            yield


@pytest.fixture(params=["cold", "preloaded"])
def start(request, server, folder):
    """A way to start the module, each way in turn."""
    way = preloaded.start if request.param == "preloaded" else subprocess.Popen

    def started(*words: str, **options) -> subprocess.Popen:
        command = [sys.executable, "-m", "becomes", *words]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        made = way(command, **(pipes | options))
        assert isinstance(made, preloaded.Preloaded) == (request.param == "preloaded")
        return made

    return started


def test_output_environment_folder_and_exit_code_are_its_own(start, tmp_path):
    process = start("a", "b", cwd=tmp_path, env=dict(os.environ) | {"MARK": "here"})

    out, err = process.communicate(timeout=60)

    assert out == f"out {tmp_path} here {process.pid} ['a', 'b']\n"
    assert err == "err\n"
    assert process.returncode == 3


def test_descriptors_that_are_passed_have_their_numbers(start):
    read, write = os.pipe()
    with start("fd", str(write), pass_fds=[write]) as process:
        os.close(write)
        assert os.read(read, 10) == b"told"
        assert os.read(read, 10) == b""
        process.communicate(timeout=60)
    os.close(read)


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGTERM, 7), (signal.SIGKILL, -9)])
def test_it_takes_signals_and_ends_by_them(start, sent, code):
    with start("sleep") as process:
        assert process.stdout.readline().startswith("out")
        assert process.stdout.readline() == "ready\n"
        assert process.poll() is None

        process.send_signal(sent)

        assert process.wait(60) == code


def test_one_that_has_ended_is_there_until_somebody_has_asked_how(start):
    with start() as process:
        process.stdout.read()
        eventually(lambda: psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE)
        assert process.wait(60) == 3
        eventually(lambda: not psutil.pid_exists(process.pid))


def test_a_wait_that_takes_too_long_is_given_up(start):
    with start("sleep") as process:
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.05)
        process.kill()


def test_two_draw_different_random_numbers(server, folder):
    (folder / "draws.py").write_text(
        "import numpy, random; print(numpy.random.rand(), random.random())"
    )
    drawn = set()
    for _ in range(2):
        process = preloaded.start(
            [sys.executable, "-m", "draws"], stdout=subprocess.PIPE, text=True
        )
        drawn |= set(process.communicate(timeout=60)[0].split())

    assert len(drawn) == 4


@pytest.mark.parametrize(
    ("command", "changes"),
    [
        (["python3", "-m", "becomes"], {}),
        ([sys.executable, "-c", "pass"], {}),
        ([sys.executable, "-m", "runners.jobs.drill"], {}),
        ([sys.executable, "-m", "becomes"], {"OMP_NUM_THREADS": "7"}),
        ([sys.executable, "-m", "becomes"], {"PYTHONPATH": "/elsewhere"}),
    ],
)
def test_what_a_forked_process_could_not_be_starts_cold(server, command, changes):
    assert not preloaded.can_be_preloaded(command, dict(os.environ) | changes)


def test_without_a_server_everything_starts_cold(monkeypatch):
    monkeypatch.delenv(preloaded.SOCKET, raising=False)

    process = preloaded.start([sys.executable, "-m", "this"], stdout=subprocess.PIPE)

    assert type(process) is subprocess.Popen
    process.communicate(timeout=60)
