"""``--rewrite-books`` stores what the tests of ``tests/books`` compare, and compares nothing."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Take the option."""
    parser.addoption(
        "--rewrite-books", action="store_true", help="store the answers, pages and launches anew"
    )


@pytest.fixture
def is_rewriting(request: pytest.FixtureRequest) -> bool:
    """Return whether entries are stored instead of compared."""
    return bool(request.config.getoption("--rewrite-books"))
