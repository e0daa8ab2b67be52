"""How the set-up speaks: one line per step with its seconds, one sentence per problem."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager


class Problem(Exception):  # noqa: N818 -- it is a message to a person, not a programming error
    """Something that the user has to know: the fact first, then the way out."""

    def __init__(self, fact: str, way_out: str) -> None:
        self.fact = fact
        self.way_out = way_out
        super().__init__(f"{fact} {way_out}")


def line(text: str = "") -> None:
    """Print one line at once, also into a pipe."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


@contextmanager
def step(title: str) -> Iterator[None]:
    """Announce a step, run it, and say how many seconds it took."""
    started = time.monotonic()
    line(f"  … {title}")
    yield
    line(f"  ✓ {title} ({time.monotonic() - started:.1f} s)")
