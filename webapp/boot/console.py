"""Console output of the set-up: one line per step with its seconds, one sentence per problem."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress


class Problem(Exception):  # noqa: N818 -- it is a message to a person, not a programming error
    """An error for the user: the fact first, then what to do."""

    def __init__(self, fact: str, way_out: str) -> None:
        self.fact = fact
        self.way_out = way_out
        super().__init__(f"{fact} {way_out}".strip())


def line(text: str = "") -> None:
    """Print and flush one line; ignore write errors, such as a full disk."""
    with suppress(OSError):
        sys.stdout.write(text + "\n")
        sys.stdout.flush()


@contextmanager
def step(title: str) -> Iterator[None]:
    """Print a step's title, run it, and print its duration."""
    started = time.monotonic()
    line(f"  … {title}")
    yield
    line(f"  ✓ {title} ({time.monotonic() - started:.1f} s)")
