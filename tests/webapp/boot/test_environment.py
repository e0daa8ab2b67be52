"""The environment: its packages, pins, hashes, pip's words and the vendored files."""

import importlib.metadata
import json
import platform
import re
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest

from tests.webapp.boot.wheels import make_source, make_wheel
from webapp.boot import cli, environment, installer, vendor
from webapp.boot.console import Problem
from webapp.boot.installer import PackageFile, Platform


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


def test_only_an_environment_that_the_user_made_is_theirs(prefixes, tmp_path):
    own = str(tmp_path)
    for prefix, base, conda, expected in (
        ("/usr", "/usr", "", None),
        (environment.VENV, "/usr", "", None),
        (tmp_path, "/usr", "", own),
        (tmp_path, tmp_path, "work", own),
        (tmp_path, tmp_path, "base", None),
    ):
        named = {"CONDA_PREFIX": own, "CONDA_DEFAULT_ENV": conda} if conda else {}
        prefixes(prefix, base, **named)
        assert environment.users_own() == expected, (prefix, base, conda)


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


def test_the_test_set_holds_what_up_needs_and_every_wanted_package_is_pinned():
    run = environment.requirements(with_tests=False)
    test = environment.requirements(with_tests=True)
    assert set(run) < set(test)
    lines = environment.CONSTRAINTS.read_text().splitlines()
    pinned = {name_of(line) for line in lines if "==" in line}
    wanted = {name_of(need) for need in environment.requirements(with_tests=True)}
    assert wanted - pinned == set()


def name_of(requirement: str) -> str:
    return re.split(r"[^\w.-]", requirement, maxsplit=1)[0].lower().replace("_", "-")


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


def test_the_environment_has_the_commands_of_the_project(monkeypatch, tmp_path):
    venv = tmp_path / "a folder" / ".venv"
    venv.joinpath("bin").mkdir(parents=True)
    monkeypatch.setattr(environment, "VENV", venv)
    monkeypatch.setattr(environment, "PYTHON", Path(sys.executable))
    venv.joinpath("bin", "slipway").write_text("#!/old/.venv/bin/python\n")  # of a moved folder
    environment.write_scripts()
    written = venv.joinpath("bin", "slipway").stat()
    environment.write_scripts()
    assert venv.joinpath("bin", "slipway").stat() == written  # read, and not written again
    done = subprocess.run(
        [venv / "bin" / "slipway", "plan", "serve", "--help"],
        cwd="/", env={"PYTHONPATH": str(environment.ROOT)}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.startswith("Usage: slipway plan serve")
    assert venv.joinpath("bin", "slipway-host").exists()


def test_an_interrupted_installation_leaves_no_stamp(elsewhere, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(environment, "_create", elsewhere.mkdir)
    monkeypatch.setattr(environment, "install", interrupted)

    with pytest.raises(KeyboardInterrupt):
        environment._build(["torch"], "run")

    assert environment._stamp() == {}


# No package file is unpacked before its SHA-256 was compared: real pip, tiny wheels.


HERE = installer.platform_of(Path(sys.executable))
LISTED = installer.read(installer.LIST)
A, B = "a" * 64, "b" * 64


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """An environment with pip and nothing else."""
    venv = tmp_path_factory.mktemp("hashes") / ".venv"
    subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    return venv


class Index:
    """A folder that pip takes packages from, a list of digests, and an environment."""

    def __init__(self, venv: Path, folder: Path) -> None:
        self.venv, self.folder = venv, folder / "index"
        self.folder.mkdir()
        self.pins = folder / "constraints.txt"
        self.pins.write_text("")

    def record(self, *files: Path, key: str = HERE.key) -> None:
        rows = [PackageFile(file.name, installer.sha256_of(file)) for file in files]
        installer.write(installer.LIST, installer.merge_package_files([], rows, key))

    def install(self, name: str) -> None:
        python, log = self.venv / "bin" / "python", self.venv / "install.log"
        installer.install(python, [name], self.pins, log=log)

    def unpacked(self, name: str) -> str | None:
        module = next(self.venv.glob("lib/python*/site-packages")) / f"{name}.py"
        return module.read_text() if module.exists() else None


@pytest.fixture
def index(made, tmp_path, monkeypatch):
    found = Index(made, tmp_path)
    for name, value in {
        "PIP_CONFIG_FILE": "/dev/null", "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(found.folder),
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(installer, "LIST", tmp_path / "hashes.csv")
    yield found
    (made / installer.STATE_NAME).unlink(missing_ok=True)


def test_a_package_with_its_recorded_hash_is_installed(index, capsys):
    index.record(make_wheel(index.folder, "right", text="good = 1"))
    index.install("right")
    assert index.unpacked("right") == "good = 1"
    assert "no recorded hash" not in capsys.readouterr().out
    assert not (index.venv / "slipway-wheels").exists()


def test_a_swapped_wheel_of_the_same_version_is_refused_before_it_is_unpacked(index):
    wheel = make_wheel(index.folder, "swapped", text="good = 1")
    index.record(wheel)
    recorded = installer.sha256_of(wheel)
    make_wheel(index.folder, "swapped", text="evil = 1")
    with pytest.raises(Problem) as problem:
        index.install("swapped")
    for word in ("swapped 1.0", wheel.name, recorded, installer.sha256_of(wheel)):
        assert word in problem.value.fact
    assert "pins --record" in problem.value.way_out
    assert index.unpacked("swapped") is None


def test_one_swapped_package_keeps_all_others_away(index):
    right, wrong = (make_wheel(index.folder, name) for name in ("others", "another"))
    index.record(right, wrong)
    make_wheel(index.folder, "another", text="evil = 1")
    with pytest.raises(Problem, match="1 packages"):
        installer.install(
            index.venv / "bin" / "python", ["others", "another"], index.pins,
            log=index.venv / "install.log",
        )  # fmt: skip
    assert index.unpacked("others") is None


def test_a_second_build_of_a_recorded_version_is_refused(index):
    index.record(make_wheel(index.folder, "rebuilt"))
    make_wheel(index.folder, "rebuilt", build="-1", text="evil = 1")
    with pytest.raises(Problem, match=r"rebuilt-1\.0-1-py3-none-any\.whl"):
        index.install("rebuilt")


def test_a_version_with_a_label_of_its_own_does_not_pass_for_the_pinned_one(index):
    index.record(make_wheel(index.folder, "labelled"))
    index.pins.write_text("labelled==1.0\n")
    make_wheel(index.folder, "labelled", "1.0+evil")
    with pytest.raises(Problem, match=r"labelled 1\.0\+evil"):
        index.install("labelled")


def test_a_source_archive_in_place_of_a_recorded_wheel_does_not_run(index, tmp_path):
    wheel = make_wheel(index.folder, "sourced")
    index.record(wheel)
    wheel.unlink()
    make_source(index.folder, "sourced", "1.0", f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(Problem, match="does not offer"):
        index.install("sourced")
    assert not (tmp_path / "ran").exists()


def test_an_unknown_package_is_recorded_and_compared_from_then_on(index, capsys):
    make_wheel(index.folder, "unknown", text="good = 1")
    index.install("unknown")
    assert "1 of 1 packages have no recorded hash" in capsys.readouterr().out
    make_wheel(index.folder, "unknown", text="evil = 1")
    with pytest.raises(Problem, match=r"unknown-1\.0-py3-none-any\.whl"):
        index.install("unknown")
    assert index.unpacked("unknown") == "good = 1"


@pytest.mark.slow
def test_what_changes_after_the_comparison_is_refused_by_pip(index):
    wheel = make_wheel(index.folder, "later")
    pinned = index.folder / "requirements.txt"
    pinned.write_text(installer.requirement(PackageFile(wheel.name, installer.sha256_of(wheel))))
    make_wheel(index.folder, "later", text="evil = 1")
    with pytest.raises(Problem, match="differs from the hash in its index"):
        installer.pip_install(
            index.venv / "bin" / "python", pinned, offline=True, log=index.venv / "later.log"
        )
    assert index.unpacked("later") is None


def test_another_file_of_a_version_is_refused_where_the_listed_one_would_run():
    for key, glibc, outcome in [
        ("cpython3.11-linux-x86_64", (2, 36), "refused"),
        ("cpython3.11-linux-x86_64", (2, 31), "unknown"),
        ("cpython3.11-linux-x86_64", (), "unknown"),
        ("cpython3.12-linux-x86_64", (2, 36), "unknown"),
    ]:
        seen_on = frozenset({"cpython3.11-linux-x86_64"})
        listed = PackageFile("fast-1.0-cp311-abi3-manylinux_2_34_x86_64.whl", A, seen_on)
        found = PackageFile("fast-1.0-cp311-abi3-manylinux_2_28_x86_64.whl", B)
        verdict = installer.compare([found], [listed], Platform(key, glibc))
        assert [name for name, files in verdict._asdict().items() if files] == [outcome], key


def test_a_wheel_names_the_oldest_glibc_that_it_runs_on():
    both = "a-1-cp311-cp311-manylinux_2_27_x86_64.manylinux_2_28_x86_64.whl"
    assert installer.glibc_of(both) == (2, 27)
    assert installer.glibc_of("a-1-py3-none-manylinux2014_x86_64.whl") == (2, 17)
    assert installer.glibc_of("a-1-py3-none-any.whl") == ()
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    assert HERE.key == f"cpython{version}-{sys.platform}-{platform.machine()}"
    listed = PackageFile("torch-2.13.0-py3-none-any.whl", A, frozenset({HERE.key}))
    verdict = installer.compare([PackageFile("torch-2.13.0+cu130-x-y-z.whl", B)], [listed], HERE)
    assert [file.version for file in verdict.unknown] == ["2.13.0+cu130"]


@pytest.mark.skipif(
    not any(HERE.key in row.platforms for row in LISTED), reason="a platform without a list"
)
def test_the_list_covers_every_pinned_package_of_this_environment():
    pinned = environment.pinned_versions(environment.CONSTRAINTS.read_text())
    here = {
        re.sub(r"[-_.]+", "-", dist.name).lower(): dist.version.partition("+")[0]
        for dist in importlib.metadata.distributions()
    }
    listed = {(row.project, row.version.partition("+")[0]) for row in LISTED if HERE.takes(row)}
    wanted = {(name, version) for name, version in pinned.items() if here.get(name) == version}
    assert wanted
    assert wanted - listed == set()


def test_every_row_of_the_list_is_of_a_pinned_version_and_has_a_digest():
    pinned = environment.pinned_versions(environment.CONSTRAINTS.read_text())
    for row in LISTED:
        assert len(bytes.fromhex(row.sha256)) == 32
        assert pinned.get(row.project) in {None, row.version.partition("+")[0]}, row.file
        assert row.is_wheel, "a source archive would run before it is compared"


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
    environment.record([PackageFile("new_name-2.0-py3-none-any.whl", B)], KEY)
    assert [row.version for row in installer.read(listed)] == ["2.0"]


def test_recording_adds_a_platform_to_a_file_that_is_listed(listed):
    file = PackageFile("new_name-2.0-py3-none-any.whl", A)
    for key in ("cpython3.11-linux-x86_64", KEY):
        environment.record([file], key)
    (row,) = installer.read(listed)
    assert row.platforms == {"cpython3.11-linux-x86_64", KEY}


def test_a_report_without_digests_or_for_a_comparison_is_refused(tmp_path, capsys):
    with pytest.raises(Problem, match="not a valid pip report with digests"):
        environment.from_report(report(tmp_path, "a-1-py3-none-any.whl", {}))
    with pytest.raises(SystemExit):
        environment.main([str(tmp_path / "report.json")])
    assert "add --record" in capsys.readouterr().err


@pytest.fixture
def given(listed, monkeypatch):
    """What the index gives: one file."""
    found = [PackageFile("new_name-2.0-py3-none-any.whl", A)]
    monkeypatch.setattr(environment, "_fetch", lambda *_: found)
    return found


def test_the_command_names_what_is_not_listed_and_how_many_are_as_recorded(given, capsys):
    assert cli.main(["pins"]) == 0
    assert "no recorded hash: new_name-2.0-py3-none-any.whl" in capsys.readouterr().out
    assert cli.main(["pins", "--record"]) == 0
    assert cli.main(["pins"]) == 0
    assert "1 of 1 packages" in capsys.readouterr().out


def test_the_command_fails_where_the_index_gives_another_file(given, listed, capsys):
    installer.write(listed, [PackageFile(given[0].file, B, frozenset({KEY}))])
    assert cli.main(["pins"]) == 1
    assert f"recorded {given[0].file} with {B}" in capsys.readouterr().err


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


def test_pip_s_failures_become_one_sentence():
    for output, fact in [
        ("error: command 'gcc' failed: No such file or directory", "no ready-made build"),
        ("ERROR: Failed building wheel for tokenizers", "no ready-made build"),
        (
            "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device",
            "disk became full",
        ),
        ("NewConnectionError: Temporary failure in name resolution", "cannot be reached"),
        ("ERROR: something new", "something new"),
    ]:
        assert fact in installer.explain(output, LOG).fact, output


def test_progress_names_the_package_on_its_way_and_counts_what_is_unpacked():
    progress = installer._Progress()
    progress.read("Collecting torch==2.13.0\n")
    progress.read("  Downloading torch-2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl (190.1 MB)\n")
    assert "1 seen · fetching torch (190.1 MB)" in str(progress)
    progress = installer._Progress()
    progress.read("Installing collected packages: mpmath, sympy, torch\n")
    assert "unpacking 3 packages" in str(progress)


def test_every_vendored_file_is_locked_to_one_version_with_its_published_bytes():
    assert vendor.changed_files() == []
    locked = {file.target for file in vendor.locked_files()} | {"static/vendor/vendor.lock"}
    found = {
        path.relative_to(vendor.ROOT).as_posix()
        for path in (vendor.ROOT / "static" / "vendor").iterdir()
    }
    assert found <= locked
    for file in vendor.locked_files():
        name, _, version = file.package.rpartition("@")
        assert name, file
        assert version.count(".") == 2, file


def test_a_changed_byte_is_named(tmp_path):
    lock = tmp_path / "vendor.lock"
    row = {"target": "a.js", "package": "a@1.0.0", "member": "a.js", "licence": "MIT"}
    lock.write_text(json.dumps({"files": [row | {"sha384": vendor.sha384(b"published")}]}))
    (tmp_path / "a.js").write_bytes(b"tampered")
    assert vendor.changed_files(tmp_path, lock) == ["a.js"]
