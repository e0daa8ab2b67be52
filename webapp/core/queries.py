"""Bulk updates through one statement, and pagination of tables with wide rows."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, cast

from django.core.paginator import Page, Paginator
from django.db import connections, models, router
from django.db.models import Model, QuerySet

# Bulk updates of rows with different values, through one statement.


AnyField = models.Field[Any, Any]


class RowChange(NamedTuple):
    """The primary key of a row, and new values by field name."""

    pk: str
    values: Mapping[str, Any]


def update_each(model: type[models.Model], changes: Iterable[RowChange]) -> None:
    """Write every change; changes of the same fields share one statement.

    The ORM compiles one UPDATE per row, and ``bulk_update`` one CASE branch per row: both take
    several times the CPU time of this function.
    """
    batches: dict[tuple[str, ...], list[RowChange]] = defaultdict(list)
    for change in changes:
        batches[tuple(change.values)].append(change)
    connection = connections[router.db_for_write(model)]
    with connection.cursor() as cursor:
        for names, rows in batches.items():
            fields = [_field(model, name) for name in (*names, "pk")]
            values = [(*row.values.values(), row.pk) for row in rows]
            cursor.executemany(
                _statement(model, fields, connection.ops.quote_name),
                [
                    [
                        f.get_db_prep_save(v, connection)
                        for f, v in zip(fields, row_values, strict=True)
                    ]
                    for row_values in values
                ],
            )


def _field(model: type[models.Model], name: str) -> AnyField:
    field = model._meta.pk if name == "pk" else model._meta.get_field(name)
    if not isinstance(field, models.Field):
        raise TypeError(f"{name} of {model.__name__} is no column")
    return field


def _statement(
    model: type[models.Model], fields: Sequence[AnyField], quote: Callable[[str], str]
) -> str:
    """Return the UPDATE of all fields but the last, which is the key; no user input in it."""
    *names, key = [quote(str(field.column)) for field in fields]
    sets = ", ".join(f"{name} = %s" for name in names)
    return f"UPDATE {quote(model._meta.db_table)} SET {sets} WHERE {key} = %s"  # noqa: S608 - names of a model


# Pagination of tables with wide rows: page keys from an index, then the rows by key.


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
