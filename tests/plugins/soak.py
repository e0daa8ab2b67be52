"""The seed of the soak, and its place: it runs when it is asked for, and never by the way."""

import os
import random

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Take the seed of a run that is to be repeated."""
    parser.addoption("--soak-seed", type=int, help="repeat the soak that printed this seed")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave ten minutes of kills out unless `-m` names them or one test was chosen."""
    if "soak" in config.option.markexpr or any("test_soak.py::" in one for one in config.args):
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
