"""The virtual environment: which packages it needs, and whether all are installed."""

import argparse
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import unquote

from runners.shared.log_text import last_line
from webapp.boot import console, installer
from webapp.boot.installer import PackageFile, install

# ---------------------------------------------------------------------------
# Create ``.venv`` with the pinned packages, or check the user's own environment.
#
# A warm start computes one digest: the stamp in ``.venv`` contains the digest of the required
# packages, and pip runs only if it differs.
# ---------------------------------------------------------------------------


ROOT = Path(__file__).resolve().parents[2]
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "slipway-stamp.json"
CONSTRAINTS = ROOT / "constraints.txt"
RUN_EXTRAS = ("web", "worker", "gpu", "broker")
NEEDED_BYTES = 4_000_000_000  # CPU build of torch: 1.3 GB, and as much again during installation


def ensure(arguments: list[str], *, with_tests: bool) -> None:
    """Ensure that this process has the packages; restart it in ``.venv`` if needed."""
    if os.name == "nt":
        raise console.Problem(
            "Slipway's processes need a POSIX system, and this is Windows.",
            "Run Slipway inside WSL 2: https://learn.microsoft.com/windows/wsl/install.",
        )
    packages = requirements(with_tests=with_tests)
    own = users_own()
    if own is not None:
        lacking = missing_packages(packages)
        if lacking:
            quoted = " ".join(f'"{need}"' for need in lacking)
            raise console.Problem(
                f"Your own environment {own} lacks {len(lacking)} packages.",
                f"Install them with: python -m pip install -c constraints.txt {quoted}\nOr leave "
                "that environment and start again: a .venv is then created.",
            )
        return
    kind = "test" if with_tests else "run"
    if _stamp().get(kind) != digest(packages):
        with _locked():
            if _stamp().get(kind) != digest(packages):
                _build(packages, kind)
    write_scripts()
    if Path(sys.prefix).resolve() != VENV.resolve():
        enter(arguments)


def enter(arguments: list[str]) -> None:
    """Replace this process by the same command under ``.venv``'s Python.

    Bytecode is written even if the user's environment disables it (as container images often do):
    without it, every process of a job compiles torch and transformers again, which takes 25 s of
    CPU time instead of 8 s.
    """
    sys.stdout.flush()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.execv(PYTHON, [str(PYTHON), str(ROOT / "manage.py"), *arguments])  # noqa: S606 -- no shell


def users_own() -> str | None:
    """Return the path of the user's own environment, if this Python belongs to one."""
    prefix = Path(sys.prefix).resolve()
    if prefix == VENV.resolve():
        return None
    conda = os.environ.get("CONDA_PREFIX")
    in_conda = conda is not None and Path(conda).resolve() == prefix
    if in_conda and os.environ.get("CONDA_DEFAULT_ENV") != "base":
        return str(prefix)
    return str(prefix) if sys.prefix != sys.base_prefix else None


def scripts() -> dict[Path, str]:
    """Return the project's commands in ``.venv``, such as ``slipway``, and what each calls."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    return {VENV / "bin" / name: called for name, called in project["scripts"].items()}


def write_scripts() -> None:
    """Write the project's commands, which pip would write if it installed this folder.

    One that is there already stays, unless it calls something else, as of a moved folder.
    """
    for path, called in scripts().items():
        module, function = called.split(":")
        # A shebang line may neither be long nor have spaces, so that a shell starts Python.
        text = f"""#!/bin/sh
'''exec' "{PYTHON}" "$0" "$@"
' '''
import sys

from {module} import {function}

sys.exit({function}())
"""
        if not path.exists() or path.read_text("utf-8", "replace") != text:
            path.write_text(text, "utf-8")
            path.chmod(0o755)


def requirements(*, with_tests: bool) -> list[str]:
    """Return the packages that ``up`` (and the tests) need, from pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    packages = list(project["project"]["dependencies"])
    for extra in RUN_EXTRAS:
        packages += project["project"]["optional-dependencies"][extra]
    if with_tests:
        packages += project["dependency-groups"]["dev"]
    return list(dict.fromkeys(packages))


def digest(wanted: list[str]) -> str:
    """Return the stamp of an environment with these packages."""
    content = json.dumps([wanted, CONSTRAINTS.read_text("utf-8"), sys.version_info[:2]])
    return hashlib.sha256(content.encode()).hexdigest()


def missing_packages(wanted: list[str]) -> list[str]:
    """Return the required packages that this Python lacks."""
    return [
        need for need in wanted if not _is_installed(re.split(r"[^\w.-]", need, maxsplit=1)[0])
    ]


def _is_installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _stamp() -> dict[str, str]:
    try:
        return dict(json.loads(STAMP.read_text("utf-8")))
    except (OSError, ValueError):
        return {}


def _build(wanted: list[str], kind: str) -> None:
    """Create ``.venv`` if missing, install the packages, and write its stamp."""
    _check_disk()
    if not PYTHON.exists():
        with console.step("Making .venv"):
            _create()
    with console.step(f"Installing {len(wanted)} packages and what they need into .venv"):
        install(PYTHON, wanted, CONSTRAINTS, log=VENV / "slipway-install.log")
    done = _stamp() | {kind: digest(wanted)}
    if kind == "test":  # the test set includes everything that `up` needs
        done["run"] = digest(requirements(with_tests=False))
    # A .pth file in site-packages makes this folder importable.
    packages = next(VENV.glob("lib/python*/site-packages"))
    packages.joinpath("slipway.pth").write_text(f"{ROOT}\n", "utf-8")
    STAMP.write_text(json.dumps(done), "utf-8")


def any_python() -> Path:
    """Return the Python of the current environment; create ``.venv`` if there is none."""
    if users_own() is not None:
        return Path(sys.executable)
    if not PYTHON.exists():
        _create()
    return PYTHON


def _check_disk() -> None:
    free = shutil.disk_usage(ROOT).free
    if free < NEEDED_BYTES:
        raise console.Problem(
            f"The environment needs about {NEEDED_BYTES / 1e9:.0f} GB, but {ROOT} has "
            f"{free / 1e9:.1f} GB free.",
            "Free some space, or move this folder to a larger disk.",
        )


def _create() -> None:
    """Create an empty virtual environment with pip."""
    if importlib.util.find_spec("ensurepip") is None or importlib.util.find_spec("venv") is None:
        version = f"{sys.version_info[0]}.{sys.version_info[1]}"
        raise console.Problem(
            f"This Python ({sys.executable}) cannot make virtual environments.",
            f"On Debian and Ubuntu: sudo apt install python{version}-venv.",
        )
    command = [sys.executable, "-m", "venv", "--clear", str(VENV)]
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode != 0:
        words = last_line(done.stderr or done.stdout, "no message")
        raise console.Problem(
            f"Python could not make {VENV}: {words}", "Check its owner and mode."
        )


@contextmanager
def _locked() -> Iterator[None]:
    """Hold the environment's lock, so that concurrent first starts install one after another."""
    import fcntl  # not on Windows, which ``ensure`` rejects before

    with CONSTRAINTS.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            with console.step("Waiting for another manage.py that is making the environment"):
                fcntl.flock(file, fcntl.LOCK_EX)
        yield


# ---------------------------------------------------------------------------
# ``manage.py pins``: compare the index's files with ``hashes.csv``, or record them.
# ---------------------------------------------------------------------------


def main(arguments: list[str]) -> int:
    """Return 0 if every file matches the list or has been recorded."""
    options = _options(arguments)
    if options.reports:
        for report in options.reports:
            record(*from_report(report))
        return 0
    python = any_python()
    with tempfile.TemporaryDirectory() as folder:
        files = _fetch(python, Path(folder))
    here = installer.platform_of(python)
    if options.record:
        record(files, here.key)
        return 0
    verdict = installer.compare(files, installer.read(installer.LIST), here)
    installer.refuse(verdict)
    console.line(
        f"  ✓ {len(verdict.right)} of {len(files)} packages for {here.key} are as recorded"
    )
    for file in verdict.unknown:
        console.line(f"    no recorded hash: {file.file}")
    return 0


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="manage.py pins",
        description="Fetch the pinned packages and compare them with the recorded SHA-256.",
    )
    parser.add_argument(
        "--record",
        action="store_true",
        help="record the hashes of the packages that the index serves now",
    )
    parser.add_argument(
        "reports",
        nargs="*",
        type=Path,
        metavar="REPORT",
        help="with --record: what `pip install --dry-run --ignore-installed --report` wrote "
        "elsewhere",
    )
    options = parser.parse_args(arguments)
    if options.reports and not options.record:
        parser.error("reports are only recorded: add --record")
    return options


def _fetch(python: Path, folder: Path) -> list[PackageFile]:
    packages = requirements(with_tests=True)
    log = Path(tempfile.gettempdir()) / "slipway-pins.log"
    with console.step("Fetching the packages"):
        return installer.fetch(python, packages, CONSTRAINTS, folder / "files", log=log)


def record(found: Iterable[PackageFile], key: str) -> None:
    """Add the files to the list, and drop files of versions that are no longer pinned."""
    pins = pinned_versions(CONSTRAINTS.read_text("utf-8"))
    current = [
        row
        for row in installer.read(installer.LIST)
        if pins.get(row.project) in (None, row.version.partition("+")[0])
    ]
    fresh = list(found)
    installer.write(installer.LIST, installer.merge_package_files(current, fresh, key))
    console.line(
        f"  ✓ {len(fresh)} packages for {key} recorded; read the difference before you keep it"
    )


def pinned_versions(text: str) -> dict[str, str]:
    """Return the version of each package that a constraints file pins."""
    lines = [line.partition("#")[0].strip() for line in text.splitlines()]
    pairs = [line.split("==") for line in lines if "==" in line]
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in pairs}


def from_report(path: Path) -> tuple[list[PackageFile], str]:
    """Return the files of a pip report, and the platform on which it was made.

    Raises:
        Problem: the file is not a pip report, or a package in it has no digest.
    """
    try:
        report = json.loads(path.read_text("utf-8"))
        about = report["environment"]
        key = installer.key_of(
            about["implementation_name"],
            about["python_version"],
            about["sys_platform"],
            about["platform_machine"],
        )
        return [_package_file(row["download_info"]) for row in report["install"]], key
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise console.Problem(
            f"{path} is not a valid pip report with digests ({type(error).__name__}: {error}).",
            "Create the report with: pip install --dry-run --ignore-installed --report FILE.",
        ) from error


def _package_file(info: dict[str, dict[str, dict[str, str]]]) -> PackageFile:
    name = unquote(str(info["url"]).rsplit("/", 1)[-1])
    return PackageFile(name, info["archive_info"]["hashes"]["sha256"])


# ---------------------------------------------------------------------------
# Find system programs that the product or its tests can use.
# ---------------------------------------------------------------------------


CHROMIUM_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def find_chromium() -> str | None:
    """Return the path of a Chromium: the one set in SLIPWAY_CHROMIUM, or one on PATH."""
    named = os.environ.get("SLIPWAY_CHROMIUM", "").strip()
    if named:
        return shutil.which(named)
    return next(filter(None, map(shutil.which, CHROMIUM_NAMES)), None)
