"""Tiny wheels and pins made on the spot: an environment is built from them without a network."""

import zipfile
from pathlib import Path

from runners.environments.builder import Store
from runners.shared.config import HostDir

PINS = """# A tiny environment of the tests, on any hardware; 1 MB.
# probe: {probe}
# size-bytes: 1000
# tried: yes, here
tiny-part==1.0
tiny-whole==2.0
"""
METADATA = "Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}"
WHEEL = "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def make_wheel(
    folder: Path, name: str, version: str, needs: str = "", source: str = "VERSION = '{}'"
) -> None:
    """Write a wheel of one module."""
    module = name.replace("-", "_")
    info = f"{module}-{version}.dist-info"
    needed = f"Requires-Dist: {needs}\n" if needs else ""
    files = {
        f"{module}.py": source.format(version),
        f"{info}/METADATA": METADATA.format(name=name, version=version, needs=needed),
        f"{info}/WHEEL": WHEEL,
    }
    record = "".join(f"{path},,\n" for path in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(folder / f"{module}-{version}-py3-none-any.whl", "w") as wheel:
        for path, text in {**files, f"{info}/RECORD": record}.items():
            wheel.writestr(path, text)


def make_pins(host_dir: HostDir, name: str = "tiny", probe: str = "tiny_whole tiny_part") -> Store:
    """Pin a tiny environment on a host, and return the host's store."""
    folder = host_dir.path / "environments" / "pins"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.txt").write_text(PINS.format(probe=probe))
    return Store(host_dir)
