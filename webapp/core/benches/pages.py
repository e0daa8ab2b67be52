"""Benchmark of the CPU time of pages by number of jobs, on sites with a long history.

Each size is a separate site, filled by SQL from one host, one plan and one job with documents of
realistic size. Its pages are requested through Django in a separate process.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from math import log
from pathlib import Path

from webapp.core.benches.long_history import names

ROOT = Path(__file__).resolve().parents[3]
ASK = "from webapp.core.benches import long_history; long_history.main({})"
SIZES = (1_000, 10_000, 100_000)


def figures(data: Path, sizes: Sequence[int] = SIZES) -> Iterator[tuple[str, float, str]]:
    """Yield each page's CPU seconds at each size, and the exponent of their growth."""
    by_size = {size: _measured(data / str(size), size) for size in sizes}
    for page in names():
        for size in sizes:
            yield f"{page}, {size} jobs", by_size[size][page], "s"
        if len(sizes) > 1:
            growth = log(by_size[sizes[-1]][page] / by_size[sizes[0]][page])
            yield f"{page}: exponent of growth", growth / log(sizes[-1] / sizes[0]), ""


def _measured(data: Path, num_jobs: int) -> dict[str, float]:
    """Fill a site and measure its pages in a separate process."""
    data.mkdir(parents=True)
    done = subprocess.run(
        [sys.executable, "-m", "django", "shell", "--no-imports", "-c", ASK.format(num_jobs)],
        cwd=ROOT,
        env=os.environ
        | {"SLIPWAY_DATA_DIR": str(data), "DJANGO_SETTINGS_MODULE": "webapp.settings"},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    seconds: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return seconds
