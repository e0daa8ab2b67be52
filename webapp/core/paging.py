"""Pagination of tables with wide rows: page keys from an index, then the rows by key."""

from collections.abc import Sequence
from typing import TypeVar, cast

from django.core.paginator import Page, Paginator
from django.db.models import Model, QuerySet

Row = TypeVar("Row", bound=Model)
MOST_ROWS = 2**31 - 1  # a LIMIT that makes COUNT keep the ORDER BY, and so its index


class NewestFirst:
    """The keys of teams' rows, newest first by the field ``by``; counted and sliced in SQL.

    An index on (team, ``by``) yields each team's rows in order; those of several teams are merged,
    because one query for all teams would sort every row.
    """

    def __init__(self, rows: QuerySet[Row], by: str, team_ids: Sequence[str]) -> None:
        keyed = rows.order_by().values_list(by, "pk")
        if len(team_ids) > 1:
            first, *others = (keyed.filter(team_id=team) for team in team_ids)
            keyed = first.union(*others, all=True)
        self.sorted = keyed.order_by(f"-{by}", "-id")

    def count(self) -> int:
        """Return the number of rows, counted with the index of the page's order.

        Without an ORDER BY, SQLite may choose an index that lacks columns of the filters.
        """
        return self.sorted[:MOST_ROWS].count()

    def __len__(self) -> int:
        return self.count()

    def __getitem__(self, part: slice) -> list[str]:
        return [key for _, key in self.sorted[part]]


def page_by_key(
    keys: NewestFirst, rows: QuerySet[Row], number: str | None, size: int
) -> Page[Row]:
    """Return one page of ``rows``, in the order of ``keys``.

    An invalid number yields the first page; a number beyond the last page yields the last one.
    """
    page: Page[Row] = Paginator(cast("Sequence[Row]", keys), size).get_page(number)
    page_keys = cast("list[str]", list(page.object_list))
    by_key = rows.in_bulk(page_keys)
    page.object_list = [by_key[key] for key in page_keys if key in by_key]
    return page
