"""No package file is unpacked before its SHA-256 was compared: real pip, tiny wheels."""

import importlib.metadata
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.webapp.boot.wheels import make_source, make_wheel
from webapp.boot import environment, installer, pins
from webapp.boot.console import Problem
from webapp.boot.installer import PackageFile, Platform

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
        installer.write(installer.LIST, installer.merged([], rows, key))

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


def test_what_changes_after_the_comparison_is_refused_by_pip(index):
    wheel = make_wheel(index.folder, "later")
    pinned = index.folder / "requirements.txt"
    pinned.write_text(installer.requirement(PackageFile(wheel.name, installer.sha256_of(wheel))))
    make_wheel(index.folder, "later", text="evil = 1")

    with pytest.raises(Problem, match="other bytes"):
        installer.pip_install(
            index.venv / "bin" / "python", pinned, offline=True, log=index.venv / "later.log"
        )

    assert index.unpacked("later") is None


@pytest.mark.parametrize(
    ("key", "glibc", "outcome"),
    [
        pytest.param("cpython3.11-linux-x86_64", (2, 36), "refused", id="here"),
        pytest.param("cpython3.11-linux-x86_64", (2, 31), "unknown", id="older-glibc"),
        pytest.param("cpython3.11-linux-x86_64", (), "unknown", id="no-glibc"),
        pytest.param("cpython3.12-linux-x86_64", (2, 36), "unknown", id="other-python"),
    ],
)
def test_another_file_of_a_version_is_refused_where_the_listed_one_would_run(key, glibc, outcome):
    seen_on = frozenset({"cpython3.11-linux-x86_64"})
    listed = PackageFile("fast-1.0-cp311-abi3-manylinux_2_34_x86_64.whl", A, seen_on)
    found = PackageFile("fast-1.0-cp311-abi3-manylinux_2_28_x86_64.whl", B)

    verdict = installer.compare([found], [listed], Platform(key, glibc))

    assert [name for name, files in verdict._asdict().items() if files] == [outcome]


def test_a_build_of_torch_that_the_list_does_not_know_is_unknown_and_not_refused():
    listed = PackageFile("torch-2.13.0-py3-none-any.whl", A, frozenset({HERE.key}))

    verdict = installer.compare([PackageFile("torch-2.13.0+cu130-x-y-z.whl", B)], [listed], HERE)

    assert [file.version for file in verdict.unknown] == ["2.13.0+cu130"]


def test_a_wheel_names_the_oldest_glibc_that_it_runs_on():
    assert installer.glibc_of(
        "a-1-cp311-cp311-manylinux_2_27_x86_64.manylinux_2_28_x86_64.whl"
    ) == (
        2,
        27,
    )
    assert installer.glibc_of("a-1-py3-none-manylinux2014_x86_64.whl") == (2, 17)
    assert installer.glibc_of("a-1-py3-none-any.whl") == ()


@pytest.mark.skipif(
    not any(HERE.key in row.platforms for row in LISTED), reason="a platform without a list"
)
def test_the_list_covers_every_pinned_package_of_this_environment():
    pinned = pins.pinned(environment.CONSTRAINTS.read_text())
    here = {
        re.sub(r"[-_.]+", "-", dist.name).lower(): dist.version.partition("+")[0]
        for dist in importlib.metadata.distributions()
    }
    listed = {(row.project, row.version.partition("+")[0]) for row in LISTED if HERE.takes(row)}

    wanted = {(name, version) for name, version in pinned.items() if here.get(name) == version}

    assert wanted
    assert wanted - listed == set()


def test_every_row_of_the_list_is_of_a_pinned_version_and_has_a_digest():
    pinned = pins.pinned(environment.CONSTRAINTS.read_text())

    for row in LISTED:
        assert len(bytes.fromhex(row.sha256)) == 32
        assert pinned.get(row.project) in {None, row.version.partition("+")[0]}, row.file
        assert row.is_wheel, "a source archive would run before it is compared"


def test_a_platform_is_told_as_its_python_tells_it():
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"

    assert HERE.key == f"cpython{version}-{sys.platform}-{platform.machine()}"
