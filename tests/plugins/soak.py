"""The seed of the soaks, and their place: they run when they are asked for."""

import os
import random

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Take the seed of a run that is to be repeated."""
    parser.addoption("--soak-seed", type=int, help="repeat the soak that printed this seed")
    parser.addoption("--soak-examples", type=int, help="fuzzing cases of an operation of the API")
    parser.addoption("--soak-share", type=int, help="one in so many of its coverage cases is sent")
    parser.addoption("--hostile-seconds", type=float, default=600.0, help="of the hostile host")
    parser.addoption("--hostile-messages", type=int, default=2000, help="of each wire shape")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave what takes minutes out unless `-m`, `--nightly` or a name asks for them."""
    is_chosen = any("soak.py::" in one for one in config.args)
    if is_chosen or "soak" in config.option.markexpr or config.getoption("nightly"):
        return
    left_out = [item for item in items if item.get_closest_marker("soak")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


@pytest.fixture
def soak_seed(request: pytest.FixtureRequest) -> int:
    """Return the seed to repeat, or a new one."""
    given = request.config.getoption("--soak-seed") or os.environ.get("SLIPWAY_SOAK_SEED")
    return int(given) if given else random.SystemRandom().randrange(10**6)


@pytest.fixture
def soak_extent(request: pytest.FixtureRequest) -> dict[str, int]:
    """Return how much of an operation is tried, as fields of a caller; empty: the caller's own."""
    found = {name: request.config.getoption(f"--soak-{name}") for name in ("examples", "share")}
    return {name: each for name, each in found.items() if each}


@pytest.fixture
def hostile_extent(request: pytest.FixtureRequest) -> tuple[float, int]:
    """Return for how many seconds a hostile host sends, and how many messages of each shape."""
    option = request.config.getoption
    return float(option("--hostile-seconds")), int(option("--hostile-messages"))
