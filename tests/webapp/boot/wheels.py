"""Package files of a few hundred bytes, made on the spot."""

import io
import tarfile
import zipfile
from pathlib import Path


def make_wheel(folder: Path, name: str, version: str = "1.0", *, build: str = "", text: str = ""):
    """Write a wheel with one module of the given text; return its path."""
    path = folder / f"{name}-{version}{build}-py3-none-any.whl"
    about = f"{name}-{version}.dist-info"
    files = {
        f"{name}.py": text,
        f"{about}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{file},,\n" for file in [*files, f"{about}/RECORD"])
    with zipfile.ZipFile(path, "w") as archive:
        for file, content in (files | {f"{about}/RECORD": record}).items():
            archive.writestr(zipfile.ZipInfo(file), content)  # no time stamp: the same bytes
    return path


def make_source(folder: Path, name: str, version: str, setup: str) -> Path:
    """Write a source archive whose setup.py has the given text; return its path."""
    path = folder / f"{name}-{version}.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        info = tarfile.TarInfo(f"{name}-{version}/setup.py")
        info.size = len(setup.encode())
        archive.addfile(info, io.BytesIO(setup.encode()))
    return path
