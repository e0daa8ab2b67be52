"""Triggers with which the database itself refuses to change a sealed row or its seal."""

from typing import Any

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper

EVENTS, LINKS = "jobs_event", "audit_link"
REFUSAL = "the history is append-only"
DOINGS = ("UPDATE", "DELETE")
NAMES = [f"{table}_no_{doing.lower()}" for table in (EVENTS, LINKS) for doing in DOINGS]
_FUNCTION = """
CREATE OR REPLACE FUNCTION audit_refuse() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  IF TG_TABLE_NAME = 'audit_link' THEN
    RAISE EXCEPTION 'the history is append-only';
  END IF;
  IF EXISTS (SELECT 1 FROM audit_link WHERE event_id = OLD.id) THEN
    RAISE EXCEPTION 'the history is append-only';
  END IF;
  IF TG_OP = 'DELETE' THEN RETURN OLD; END IF;
  RETURN NEW;
END $$
"""


def guards_set(using: str = "default", **_others: Any) -> None:
    """Make the triggers that are missing; the signal of a migration calls this."""
    connection = connections[using]
    tables = connection.introspection.table_names()
    if not {EVENTS, LINKS} <= set(tables):
        return
    with connection.cursor() as cursor:
        for statement in _statements(connection):
            cursor.execute(statement)


def _statements(connection: BaseDatabaseWrapper) -> list[str]:
    if connection.vendor == "postgresql":
        return [_FUNCTION, *(_postgres(table, doing) for table, doing in _pairs())]
    return [_sqlite(table, doing) for table, doing in _pairs()]


def _pairs() -> list[tuple[str, str]]:
    return [(table, doing) for table in (EVENTS, LINKS) for doing in DOINGS]


def _postgres(table: str, doing: str) -> str:
    name = f"{table}_no_{doing.lower()}"
    return (
        f"CREATE OR REPLACE TRIGGER {name} BEFORE {doing} ON {table} "
        "FOR EACH ROW EXECUTE FUNCTION audit_refuse()"
    )


def _sqlite(table: str, doing: str) -> str:
    name = f"{table}_no_{doing.lower()}"
    sealed = "WHEN EXISTS (SELECT 1 FROM audit_link WHERE event_id = OLD.id)"
    when = sealed if table == EVENTS else ""
    return (
        f"CREATE TRIGGER IF NOT EXISTS {name} BEFORE {doing} ON {table} {when} "
        f"BEGIN SELECT RAISE(ABORT, '{REFUSAL}'); END"
    )


def guards_missing(using: str = "default") -> list[str]:
    """Return the names of triggers that somebody has taken away."""
    connection = connections[using]
    known = {
        "postgresql": "SELECT tgname FROM pg_trigger WHERE tgenabled <> 'D'",
        "sqlite": "SELECT name FROM sqlite_master WHERE type = 'trigger'",
    }
    with connection.cursor() as cursor:
        cursor.execute(known[connection.vendor])
        found = {row[0] for row in cursor.fetchall()}
    return sorted(set(NAMES) - found)
