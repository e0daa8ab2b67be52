"""Give a test run one temporary folder, and every process in it a data folder of its own.

Loaded with ``-p`` from pyproject.toml, because pytest-django reads the settings before any
conftest. The process that starts the run makes the folder, names it in ``TMPDIR`` and removes it;
xdist's workers and pytest runs that a test starts use it. The user's own data, database and broker
are never touched; to run the suite on PostgreSQL, set SLIPWAY_TEST_DATABASE_URL.
"""

import os
import shutil
import tempfile
from pathlib import Path

import pytest

VARIABLE = "SLIPWAY_TEST_RUN"
IS_OWNER = VARIABLE not in os.environ
FOLDER = Path(os.environ.get(VARIABLE) or tempfile.mkdtemp(prefix="slw-"))
DATA = FOLDER / f"data-{os.getpid()}"


def _prepare() -> None:
    for name in ("REDIS_URL", "DATABASE_URL", "SLIPWAY_SECRET_KEY", "SLIPWAY_DEBUG"):
        os.environ.pop(name, None)
    if url := os.environ.get("SLIPWAY_TEST_DATABASE_URL"):
        os.environ["DATABASE_URL"] = url
    FOLDER.chmod(0o755)  # services of other users (munge, PostgreSQL) have folders inside
    os.environ[VARIABLE] = os.environ["TMPDIR"] = tempfile.tempdir = str(FOLDER)
    os.environ["SLIPWAY_DATA_DIR"] = str(DATA)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # No test asks a hub but its own (tests/hub), nor finds what the machine's user has downloaded.
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(FOLDER / "huggingface")}
    DATA.mkdir(mode=0o700, exist_ok=True)


_prepare()


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Shorten the paths of temporary folders: a socket's path has at most 107 characters."""
    if IS_OWNER and config.option.basetemp is None:
        config.option.basetemp = FOLDER / "t"
        if factory := getattr(config, "_tmp_path_factory", None):
            factory._given_basetemp = FOLDER / "t"


@pytest.hookimpl(trylast=True)
def pytest_unconfigure() -> None:
    """Remove the run's folder."""
    if IS_OWNER:
        shutil.rmtree(FOLDER, ignore_errors=True)
