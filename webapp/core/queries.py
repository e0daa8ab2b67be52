"""Queries, locks and the state of the schema."""

import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

from django.apps import apps
from django.core.management import call_command
from django.core.paginator import Page, Paginator
from django.db import DEFAULT_DB_ALIAS, connections, models, router
from django.db.migrations.recorder import MigrationRecorder
from django.db.models import Model, QuerySet
from django.db.models.expressions import OrderBy
from django.utils.timezone import localtime

from runners.host.inventory import AGENT_VERSION
from webapp.core.problems import ConflictProblem

# ---------------------------------------------------------------------------
# Bulk updates through one statement, and pagination of tables with wide rows.
# ---------------------------------------------------------------------------


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
        raise TypeError(f"{name} of {model.__name__} is not a database column")
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

    def pairs(self, number: int) -> list[tuple[Any, str]]:
        """Return the first ``number`` pairs of the field's value and the key."""
        return list(self.sorted[:number])


class InOrder:
    """The keys of rows in any order; counted and sliced in SQL, which sorts every row."""

    def __init__(self, rows: QuerySet[Row], *order: OrderBy | str) -> None:
        self.sorted = rows.order_by(*order, "-id").values_list("pk", flat=True)

    def count(self) -> int:
        """Return the number of rows."""
        return self.sorted.count()

    def __len__(self) -> int:
        return self.count()

    def __getitem__(self, part: slice) -> list[str]:
        return list(self.sorted[part])


def page_by_key(
    keys: NewestFirst | InOrder, rows: QuerySet[Row], number: int, size: int
) -> Page[Row]:
    """Return one page of ``rows``, in the order of ``keys``.

    A number beyond the last page yields the last one, because lists become shorter.
    """
    page: Page[Row] = Paginator(cast("Sequence[Row]", keys), size).get_page(number)
    page.object_list = in_order(rows, cast("list[str]", list(page.object_list)))
    return page


def in_order(rows: QuerySet[Row], keys: Sequence[str]) -> list[Row]:
    """Return the rows with these keys, in their order."""
    by_key = rows.in_bulk(list(keys))
    return [by_key[key] for key in keys if key in by_key]


# ---------------------------------------------------------------------------
# Comparison of a database's schema with the schema of this version.
#
# Django applies missing migrations but ignores unknown ones, so that an older version could write
# rows that the newer one cannot read. A schema is identified by its migrations, ``app.0012_name``.
# Before release 0.1, tables were made in many steps, which each app's first migration replaces:
# Django records their names for new databases too, and cannot complete a part of them.
# ---------------------------------------------------------------------------


VERSION = AGENT_VERSION  # server and hosts are one distribution
WAY_OUT = (
    "Start the newer version of Slipway that wrote it, or restore a backup of this version with "
    "`python3 manage.py restore`."
)


class SchemaError(Exception):
    """This version cannot work with a schema; the message says why and what to do."""


def applied_migrations(alias: str = "default") -> dict[str, list[str]]:
    """Return the sorted names of the applied migrations of a database, by app label."""
    by_app: dict[str, list[str]] = {}
    for app, name in sorted(MigrationRecorder(connections[alias]).applied_migrations()):
        by_app.setdefault(app, []).append(name)
    return by_app


def known_migrations() -> dict[str, list[str]]:
    """Return the sorted names of this version's migrations, by app label."""
    return {
        config.label: sorted(
            path.stem
            for path in (Path(config.path) / "migrations").glob("*.py")
            if path.stem != "__init__"
        )
        for config in apps.get_app_configs()
    }


@cache
def replaced_migrations() -> dict[str, list[str]]:
    """Return the names of the migrations that this version's own replace, by app label."""
    replaced: dict[str, list[str]] = {}
    for config in apps.get_app_configs():
        for name in known_migrations()[config.label] if config.name.startswith("webapp.") else ():
            migration = import_module(f"{config.name}.migrations.{name}").Migration
            for app, old in migration.replaces:
                replaced.setdefault(app, []).append(old)
    return replaced


def newer_migrations(applied: Mapping[str, Iterable[str]]) -> list[str]:
    """Return the applied migrations that this version neither has nor replaces."""
    own, replaced = known_migrations(), replaced_migrations()
    return [
        f"{app}.{name}"
        for app, names in sorted(applied.items())
        for name in names
        if name not in own.get(app, []) and name not in replaced.get(app, [])
    ]


def missing_migrations(applied: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the last replaced migration that each app has not applied although it has others."""
    missing = {
        app: [name for name in names if name not in applied[app]]
        for app, names in replaced_migrations().items()
        if applied.get(app)
    }
    return [f"{app}.{names[-1]}" for app, names in sorted(missing.items()) if names]


def check_migrations(
    applied: Mapping[str, Sequence[str]], what: str, way_out: str = WAY_OUT
) -> None:
    """Raise if this release cannot work with ``applied`` migrations; ``what`` names their source.

    Raises:
        SchemaError: they are of a newer release (``way_out`` says what to do), or only a part of
            those from before release 0.1.
    """
    if newer := newer_migrations(applied):
        known = known_migrations()
        labels = list(dict.fromkeys(name.partition(".")[0] for name in newer))
        latest = [f"{app}.{known[app][-1]}" if known.get(app) else f"no {app}" for app in labels]
        raise SchemaError(
            f"{what} has the schema of a newer version ({', '.join(newer)}); this is Slipway "
            f"{VERSION}, which knows {', '.join(latest)}. {way_out}"
        )
    if missing := missing_migrations(applied):
        raise SchemaError(
            f"{what} is from before release 0.1 and has not taken its last steps "
            f"({', '.join(missing)}), which Slipway {VERSION} no longer has. Start the last "
            "version from before 0.1 with it once, and then this one; or begin with an empty "
            "SLIPWAY_DATA_DIR."
        )


def migrate_databases() -> None:
    """Apply every migration to every database, recorded only where its app has no tables.

    Django would apply those too, and compute the models after each of them, only to find that the
    router sends no operation to this database: five seconds of CPU time for an empty one.

    Raises:
        OperationalError: a database is unavailable.
    """
    known = known_migrations()
    for alias in connections:
        is_default = alias == DEFAULT_DB_ALIAS
        for label, names in ({} if is_default else known).items():
            if names and router.allow_migrate(alias, label):
                call_command("migrate", label, database=alias, interactive=False, verbosity=0)
        call_command(
            "migrate", database=alias, fake=not is_default, interactive=False, verbosity=0
        )


def check_schema() -> None:
    """Check that this version can work with the configured databases, including empty ones.

    Raises:
        SchemaError: one of them is of a newer release, or incomplete from before 0.1.
        OperationalError: a database is unavailable.
    """
    for alias in connections:
        check_migrations(applied_migrations(alias), "The database")


# ---------------------------------------------------------------------------
# Optimistic locking of forms: reject a change if the values changed since the form opened.
#
# A form carries a version mark of the values that it showed. The service compares it with the mark
# of the current values, under the same lock or condition as the write.
# ---------------------------------------------------------------------------


SEEN = "seen"  # the form field that carries the mark


def mark_of(value: object) -> str:
    """Return a short version mark (a hash) of a JSON value."""
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def changed_words(what: str, by: str, at: datetime | str | None, *, reader: str = "") -> str:
    """Return a sentence that says who changed an object since the page was opened, and when.

    ``at`` is an instant or its ISO text; ``reader`` is the user name of the reader.
    """
    who = "you, in another window" if by and by == reader else by or "somebody"
    return f"{what} changed by {who}{_when(at)} since you opened this page."


def _when(at: datetime | str | None) -> str:
    instant = datetime.fromisoformat(at) if isinstance(at, str) and at else at
    return f" on {localtime(instant):%-d %b at %H:%M:%S}" if isinstance(instant, datetime) else ""


def refuse_stale(
    seen: str, now_there: object, what: str, by: str, at: datetime | str | None, *, reader: str
) -> None:
    """Reject a form whose mark differs from the current values; a form without a mark passes.

    Raises:
        ConflictProblem: the values differ; the message says who changed them and when.
    """
    if seen and seen != mark_of(now_there):
        sentence = changed_words(what, by, at, reader=reader)
        raise ConflictProblem(
            "changed_meanwhile",
            f"{sentence} Your change was not saved. These are the current values; make "
            "your change again.",
        )
