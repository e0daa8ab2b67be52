"""What tests share that go through the rows of a table."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def refused(kind: type[Exception], words: str | None, case: object) -> Iterator[None]:
    """Expect an error of a kind in these words; a failure names the case."""
    try:
        with pytest.raises(kind, match=words):
            yield
    except (AssertionError, pytest.fail.Exception) as failure:
        raise AssertionError(f"{case}: {failure}") from failure
