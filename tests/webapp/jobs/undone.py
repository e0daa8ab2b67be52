"""Writes that a test takes back: its next case finds what the first one found."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from django.db import connections, transaction


@contextmanager
def undone(*case: object) -> Iterator[None]:
    """Take back all that is written inside; what fails is told with its case."""
    with ExitStack() as stack:
        aliases = [alias for alias in connections if connections[alias].in_atomic_block]
        for alias in aliases:
            stack.enter_context(transaction.atomic(using=alias))
        try:
            yield
        except BaseException as problem:
            problem.add_note(f"in the case {case!r}")
            raise
        for alias in aliases:
            transaction.set_rollback(True, using=alias)
