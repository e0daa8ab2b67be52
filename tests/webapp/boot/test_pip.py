import sys
from pathlib import Path

import pytest

from webapp.boot import installer
from webapp.boot.console import Problem

LOG = Path("pip.log")


def download(tmp_path, *names):
    pins = tmp_path / "constraints.txt"
    pins.write_text("")
    folder, log = tmp_path / "files", tmp_path / "log"
    installer.download(Path(sys.executable), list(names), pins, folder, log=log, only_binary=[])


def test_a_package_that_the_index_does_not_have_gets_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")

    with pytest.raises(Problem) as problem:
        download(tmp_path, "no-such-package-x")

    assert "does not offer a pinned version" in problem.value.fact
    assert "pip's own words" in problem.value.way_out


def test_an_index_that_cannot_be_reached_gets_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")

    with pytest.raises(Problem) as problem:
        download(tmp_path, "no-such-package-x")

    assert "cannot be reached" in problem.value.fact


@pytest.mark.parametrize(
    ("output", "fact"),
    [
        pytest.param(
            "error: command 'gcc' failed: No such file or directory",
            "no ready-made build",
            id="no-compiler",
        ),
        pytest.param(
            "ERROR: Failed building wheel for tokenizers", "no ready-made build", id="build"
        ),
        pytest.param(
            "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device",
            "disk became full",
            id="disk",
        ),
        pytest.param(
            "NewConnectionError: Temporary failure in name resolution",
            "cannot be reached",
            id="dns",
        ),
        pytest.param("ERROR: something new", "something new", id="unknown"),
    ],
)
def test_pip_s_failures_become_one_sentence(output, fact):
    assert fact in installer.explain(output, LOG).fact


def test_progress_names_the_package_that_is_on_its_way():
    progress = installer._Progress()

    progress.read("Collecting torch==2.13.0\n")
    progress.read("  Downloading torch-2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl (190.1 MB)\n")

    assert "1 seen · fetching torch (190.1 MB)" in str(progress)


def test_progress_counts_what_is_unpacked():
    progress = installer._Progress()

    progress.read("Installing collected packages: mpmath, sympy, torch\n")

    assert "unpacking 3 packages" in str(progress)
