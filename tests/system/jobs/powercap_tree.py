"""A powercap tree as Linux lays it out, and a process that draws power from it."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

RANGE = 262_143_328_850  # microjoules, of a counter of 32 bits in steps of 61 of them
DRAW = """
import os, sys, time
path, watts, start, limit = sys.argv[1], *map(float, sys.argv[2:])
began = time.monotonic()
while os.getppid() == int(os.environ["DRAWN_BY"]):
    count = int(start + watts * 1e6 * (time.monotonic() - began)) % int(limit)
    with open(path + ".new", "w") as file:
        file.write(f"{count}\\n")
    os.replace(path + ".new", path)
    time.sleep(0.005)
"""


def zone(root: Path, path: str, name: str, microjoules: int) -> Path:
    """Add a zone below the root; return its counter."""
    folder = root / path
    folder.mkdir(parents=True)
    (folder / "name").write_text(f"{name}\n")
    (folder / "max_energy_range_uj").write_text(f"{RANGE}\n")
    counter = folder / "energy_uj"
    counter.write_text(f"{microjoules}\n")
    return counter


@contextlib.contextmanager
def drawing(counter: Path, watts: float) -> Iterator[None]:
    """Let another process advance a counter by so many watts while the block runs."""
    words = [str(counter), str(watts), counter.read_text().strip(), str(RANGE)]
    env = os.environ | {"DRAWN_BY": str(os.getpid())}
    process = subprocess.Popen([sys.executable, "-c", DRAW, *words], env=env)
    try:
        yield
    finally:
        process.kill()
        process.wait()
