"""Query parameters of pages: what a page does not read is refused by its name, never left out."""

import difflib
import re
from collections.abc import Callable, Collection, Iterable
from datetime import date
from functools import wraps
from typing import TypeVar, cast

from django.http import HttpRequest, HttpResponseBase
from django.utils.dateparse import parse_date

from webapp.core.problems import QueryProblem

View = TypeVar("View", bound=Callable[..., HttpResponseBase])
WHOLE = re.compile(r"\d{1,40}", re.ASCII)
DAY = re.compile(r"\d{4}-\d\d-\d\d", re.ASCII)
MOST_SHOWN = 40
LISTED = 12  # values named where a parameter has none of them


def reads_query(*names: str, repeated: Collection[str] = ()) -> Callable[[View], View]:
    """Refuse a request whose query has other parameters than ``names``, or one of them twice.

    Those in ``repeated`` may stand several times.
    """

    def decorate(view: View) -> View:
        @wraps(view)
        def checked(request: HttpRequest, *args: object, **kwargs: object) -> HttpResponseBase:
            query_check(request, names, repeated)
            return view(request, *args, **kwargs)

        return cast("View", checked)

    return decorate


def query_check(request: HttpRequest, names: Iterable[str], repeated: Collection[str]) -> None:
    """Check that the query has no other parameters than these, each once.

    Raises:
        QueryProblem: it has, or one stands twice that is not in ``repeated``.
    """
    known = sorted({*names, *repeated})
    for name, values in request.GET.lists():
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"Did you mean {near[0]}? " if near else ""
            raise QueryProblem(
                name[:MOST_SHOWN],
                f"This page has no parameter “{name[:MOST_SHOWN]}”. {hint}"
                f"It reads {', '.join(known)}.",
            )
        if len(values) > 1 and name not in repeated:
            raise QueryProblem(
                name, f"The parameter “{name}” stands {len(values)} times; it is read once."
            )


def _problem(name: str, text: str, limits: str) -> QueryProblem:
    return QueryProblem(name, f"The parameter “{name}” is “{text[:MOST_SHOWN]}”; {limits}.")


def whole_in_query(request: HttpRequest, name: str, *, least: int, default: int) -> int:
    """Return a whole number of the query; the default if it is missing or empty.

    Raises:
        QueryProblem: it is no whole number from ``least`` on.
    """
    text = request.GET.get(name, "").strip()
    if not text:
        return default
    if not WHOLE.fullmatch(text) or int(text) < least:
        raise _problem(name, text, f"it is a whole number from {least} on")
    return int(text)


def page_number(request: HttpRequest) -> int:
    """Return the number of the page of a list, from 1 on.

    Raises:
        QueryProblem: it is none.
    """
    return whole_in_query(request, "page", least=1, default=1)


def day_in_query(request: HttpRequest, name: str) -> date | None:
    """Return a day of the query; None if it is missing or empty.

    Raises:
        QueryProblem: it is no day as YYYY-MM-DD.
    """
    text = request.GET.get(name, "").strip()
    if not text:
        return None
    try:
        day = parse_date(text) if DAY.fullmatch(text) else None
    except ValueError:
        day = None
    if day is None:
        raise _problem(name, text, "it is a day such as 2026-11-28")
    return day


def choice_in_query(request: HttpRequest, name: str, values: Collection[str]) -> str:
    """Return one of ``values`` of the query; "" if it is missing or empty.

    Raises:
        QueryProblem: it is none of them.
    """
    text = request.GET.get(name, "").strip()
    if text and text not in values:
        listed = list(values)
        more = f" and {len(listed) - LISTED} more" if len(listed) > LISTED else ""
        raise _problem(name, text, f"it is one of {', '.join(listed[:LISTED])}{more}")
    return text
