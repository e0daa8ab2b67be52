import re
import shutil
import subprocess
import sys
from collections import namedtuple

import pytest

from tests.webapp.boot.wheels import make_wheel
from webapp.boot import environment
from webapp.boot.console import Problem


@pytest.fixture
def prefixes(monkeypatch):
    """A function that lets this Python look as if it ran in the given environment."""

    def pretend(prefix, base, **variables):
        monkeypatch.setattr(sys, "prefix", str(prefix))
        monkeypatch.setattr(sys, "base_prefix", str(base))
        for name in ("CONDA_PREFIX", "CONDA_DEFAULT_ENV"):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return pretend


def test_the_systems_python_is_no_environment_of_the_users_making(prefixes):
    prefixes("/usr", "/usr")

    assert environment.users_own() is None


def test_the_projects_own_venv_is_not_the_users(prefixes):
    prefixes(environment.VENV, "/usr")

    assert environment.users_own() is None


def test_another_venv_is_the_users(prefixes, tmp_path):
    prefixes(tmp_path, "/usr")

    assert environment.users_own() == str(tmp_path)


def test_a_named_conda_environment_is_the_users(prefixes, tmp_path):
    prefixes(tmp_path, tmp_path, CONDA_PREFIX=str(tmp_path), CONDA_DEFAULT_ENV="work")

    assert environment.users_own() == str(tmp_path)


def test_conda_s_base_is_not_of_the_users_making(prefixes, tmp_path):
    prefixes(tmp_path, tmp_path, CONDA_PREFIX=str(tmp_path), CONDA_DEFAULT_ENV="base")

    assert environment.users_own() is None


def test_the_users_environment_gets_the_line_that_completes_it(prefixes, tmp_path, monkeypatch):
    prefixes(tmp_path, "/usr")
    monkeypatch.setattr(environment, "requirements", lambda **_: ["pytest", "no-such-thing>=3"])

    with pytest.raises(Problem) as problem:
        environment.ensure(["up"], with_tests=False)

    assert "lacks 1 packages" in problem.value.fact
    assert 'pip install -c constraints.txt "no-such-thing>=3"' in problem.value.way_out


def test_a_complete_environment_of_the_user_is_used_without_a_venv(
    prefixes, tmp_path, monkeypatch
):
    prefixes(tmp_path, "/usr")
    monkeypatch.setattr(environment, "VENV", tmp_path / ".venv")

    environment.ensure(["test"], with_tests=True)

    assert not (tmp_path / ".venv").exists()


def test_the_test_set_holds_everything_that_up_needs():
    run = environment.requirements(with_tests=False)
    test = environment.requirements(with_tests=True)

    assert set(run) < set(test)


def name_of(requirement: str) -> str:
    return re.split(r"[^\w.-]", requirement, maxsplit=1)[0].lower().replace("_", "-")


def test_every_wanted_package_is_pinned():
    lines = environment.CONSTRAINTS.read_text().splitlines()
    pinned = {name_of(line) for line in lines if "==" in line}
    wanted = {name_of(need) for need in environment.requirements(with_tests=True)}

    assert wanted - pinned == set()


def test_a_changed_pin_changes_the_stamp(tmp_path, monkeypatch):
    pins = tmp_path / "constraints.txt"
    monkeypatch.setattr(environment, "CONSTRAINTS", pins)
    pins.write_text("torch==2.13.0\n")
    before = environment.digest(["torch"])

    pins.write_text("torch==2.14.0\n")

    assert environment.digest(["torch"]) != before


def test_a_full_disk_gets_a_sentence_before_anything_is_made(tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")(10**12, 10**12, 700_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)

    with pytest.raises(Problem) as problem:
        environment._build(["torch"], "run")

    assert "about 4 GB" in problem.value.fact
    assert "0.7 GB free" in problem.value.fact


def test_a_python_without_venv_gets_the_debian_package_to_install(monkeypatch):
    monkeypatch.setattr(environment.importlib.util, "find_spec", lambda _: None)

    with pytest.raises(Problem) as problem:
        environment._create()

    assert "cannot make virtual environments" in problem.value.fact
    assert f"python{sys.version_info[0]}.{sys.version_info[1]}-venv" in problem.value.way_out


def test_a_damaged_stamp_counts_as_none(tmp_path, monkeypatch):
    monkeypatch.setattr(environment, "STAMP", tmp_path / "stamp.json")
    environment.STAMP.write_text("{")

    assert environment._stamp() == {}


def test_a_second_start_waits_for_the_first_to_finish_the_environment(tmp_path):
    code = (
        "import sys; from webapp.boot import environment\n"
        "with environment._locked(): print('mine', flush=True); sys.stdin.read()"
    )
    first = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    second = None
    try:
        assert first.stdout.readline() == "mine\n"
        second = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert "Waiting for another manage.py" in second.stdout.readline()
        first.communicate("")
        assert "mine" in second.communicate("")[0]
    finally:
        for process in filter(None, (first, second)):
            process.kill()
            process.communicate()


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """The environment's paths moved to an empty folder."""
    venv = tmp_path / ".venv"
    monkeypatch.setattr(environment, "VENV", venv)
    monkeypatch.setattr(environment, "PYTHON", venv / "bin" / "python")
    monkeypatch.setattr(environment, "STAMP", venv / "slipway-stamp.json")
    return venv


@pytest.mark.slow
def test_a_real_environment_is_made_filled_and_stamped(elsewhere, tmp_path, monkeypatch, capsys):
    make_wheel(tmp_path, "tiny")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))

    environment._build(["tiny"], "run")

    assert environment._stamp()["run"] == environment.digest(["tiny"])
    assert "✓ Making .venv" in capsys.readouterr().out
    done = subprocess.run(
        [elsewhere / "bin" / "python", "-c", "import tiny, webapp.boot, sys; print(sys.prefix)"],
        cwd="/",
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == str(elsewhere)


def test_a_test_environment_counts_as_one_to_run_in(elsewhere, monkeypatch):
    elsewhere.joinpath("lib/python3/site-packages").mkdir(parents=True)
    environment.PYTHON.parent.mkdir()
    environment.PYTHON.symlink_to(sys.executable)
    monkeypatch.setattr(environment, "install", lambda *_, **__: None)

    environment._build(["pytest"], "test")

    run = environment.requirements(with_tests=False)
    assert environment._stamp()["run"] == environment.digest(run)


def test_an_interrupted_installation_leaves_no_stamp(elsewhere, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(environment, "_create", elsewhere.mkdir)
    monkeypatch.setattr(environment, "install", interrupted)

    with pytest.raises(KeyboardInterrupt):
        environment._build(["torch"], "run")

    assert environment._stamp() == {}
