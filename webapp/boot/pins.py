"""``manage.py pins``: compare the index's files with ``hashes.csv``, or record them."""

import argparse
import json
import re
import tempfile
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import unquote

from webapp.boot import console, environment, installer
from webapp.boot.installer import PackageFile


def main(arguments: list[str]) -> int:
    """Return 0 if every file matches the list or has been recorded."""
    options = _options(arguments)
    if options.reports:
        for report in options.reports:
            record(*from_report(report))
        return 0
    python = environment.any_python()
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
        "--record", action="store_true", help="accept what the index gives and write it down"
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
    packages = environment.requirements(with_tests=True)
    log = Path(tempfile.gettempdir()) / "slipway-pins.log"
    with console.step("Fetching the packages"):
        return installer.fetch(
            python, packages, environment.CONSTRAINTS, folder / "files", log=log
        )


def record(found: Iterable[PackageFile], key: str) -> None:
    """Add the files to the list, and drop files of versions that are no longer pinned."""
    pins = pinned(environment.CONSTRAINTS.read_text("utf-8"))
    current = [
        row
        for row in installer.read(installer.LIST)
        if pins.get(row.project) in (None, row.version.partition("+")[0])
    ]
    fresh = list(found)
    installer.write(installer.LIST, installer.merged(current, fresh, key))
    console.line(
        f"  ✓ {len(fresh)} packages for {key} recorded; read the difference before you keep it"
    )


def pinned(text: str) -> dict[str, str]:
    """Return the version of each package that a constraints file pins."""
    lines = [line.partition("#")[0].strip() for line in text.splitlines()]
    pairs = [line.split("==") for line in lines if "==" in line]
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in pairs}


def from_report(path: Path) -> tuple[list[PackageFile], str]:
    """Return the files of a pip report, and the platform on which it was made.

    Raises:
        Problem: it is not such a report, or a file has no digest.
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
            f"{path} is no report of pip with digests ({type(error).__name__}: {error}).",
            "Make it with: pip install --dry-run --ignore-installed --report FILE.",
        ) from error


def _package_file(info: dict[str, dict[str, dict[str, str]]]) -> PackageFile:
    name = unquote(str(info["url"]).rsplit("/", 1)[-1])
    return PackageFile(name, info["archive_info"]["hashes"]["sha256"])
