"""How many bytes a request may have: a door for files states its limit at its view, once."""

from collections.abc import Callable
from typing import Any, TypeVar

from django.urls import Resolver404, resolve

from planner.specs.units import MIB

ANONYMOUS_BYTES = MIB  # enough for login and enrolment
DEFAULT_BYTES = 8 * MIB  # without a file; Django's own limit of what is read into memory too
FORM_BYTES = 8 * MIB  # beside a file: the form around it; the view checks the exact limit
FILES = "largest_files"  # of a view: bytes of a file, by method

View = TypeVar("View", bound=Callable[..., Any])


def takes_file(num_bytes: int, method: str = "POST") -> Callable[[View], View]:
    """Let a view take a file of so many bytes; any other takes bodies of ``DEFAULT_BYTES``."""

    def marked(view: View) -> View:
        setattr(view, FILES, {method: num_bytes})
        return view

    return marked


def largest_file(method: str, path: str) -> int | None:
    """Return the bytes of the largest file that an address takes; None: it takes no file."""
    try:
        view = resolve(path).func
    except Resolver404:
        return None
    found: dict[str, int] = getattr(view, FILES, {})
    return found.get(method)


def limit_at(method: str, path: str) -> int:
    """Return the maximum body size, in bytes, at an address, of somebody who is known."""
    file_bytes = largest_file(method, path)
    return DEFAULT_BYTES if file_bytes is None else file_bytes + FORM_BYTES
