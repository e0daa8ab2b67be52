"""Give every test process its own data folder before Django reads its settings.

Loaded with ``-p`` from pyproject.toml, because pytest-django reads the settings before any
conftest. The user's own data, database and broker are never touched; to run the suite on
PostgreSQL, set SLIPWAY_TEST_DATABASE_URL.
"""

import os
import shutil
import tempfile
from pathlib import Path

WORKSPACE = Path(tempfile.mkdtemp(prefix="slipway-test-"))

for name in ("REDIS_URL", "DATABASE_URL", "SLIPWAY_SECRET_KEY", "SLIPWAY_DEBUG"):
    os.environ.pop(name, None)
if url := os.environ.get("SLIPWAY_TEST_DATABASE_URL"):
    os.environ["DATABASE_URL"] = url
os.environ["SLIPWAY_DATA_DIR"] = str(WORKSPACE)
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_unconfigure() -> None:
    shutil.rmtree(WORKSPACE, ignore_errors=True)
