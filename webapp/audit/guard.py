"""Database triggers that reject changes to sealed events and their links."""

from typing import Any

from django.db import connections, transaction

EVENTS, LINKS, CUTS = "jobs_event", "audit_link", "audit_cut"
REFUSAL = "the history is append-only"
_CUT = f"COALESCE((SELECT MAX(position) FROM {CUTS}), 0)"  # noqa: S608 (names of our own)
_SEALED = f"EXISTS (SELECT 1 FROM {LINKS} WHERE event_id = OLD.id)"  # noqa: S608 (as above)
_KEPT = f"EXISTS (SELECT 1 FROM {LINKS} WHERE event_id = OLD.id AND position > {_CUT})"  # noqa: S608
_ANCHORED = (
    f"EXISTS (SELECT 1 FROM {LINKS} WHERE position = NEW.position AND digest = NEW.digest) "  # noqa: S608
    f"AND EXISTS (SELECT 1 FROM {LINKS} JOIN {EVENTS} ON {EVENTS}.id = {LINKS}.event_id "
    f"WHERE {EVENTS}.id = NEW.event_id AND {EVENTS}.kind = 'audit.cut' "
    f"AND {LINKS}.position > NEW.position)"
)
# (table, operation) -> condition of rejection: sealed events and links can only be deleted before
# a cut, and a cut needs its sealed event.
RULES: dict[tuple[str, str], str] = {
    (EVENTS, "UPDATE"): _SEALED,
    (EVENTS, "DELETE"): _KEPT,
    (LINKS, "UPDATE"): "",
    (LINKS, "DELETE"): f"OLD.position > {_CUT}",
    (CUTS, "UPDATE"): "",
    (CUTS, "DELETE"): "",
    (CUTS, "INSERT"): f"NOT ({_ANCHORED})",
}
NAMES = [f"{table}_no_{doing.lower()}" for table, doing in RULES]


def guards_set(using: str = "default", **_others: Any) -> None:
    """Create this version's triggers again; called by the post_migrate signal."""
    connection = connections[using]
    tables = connection.introspection.table_names()
    if not {EVENTS, LINKS, CUTS} <= set(tables):
        return
    make = _postgres if connection.vendor == "postgresql" else _sqlite
    with transaction.atomic(using=using), connection.cursor() as cursor:
        for (table, doing), refused in RULES.items():
            for statement in make(table, doing, refused):
                cursor.execute(statement)
        if connection.vendor == "postgresql":
            for table in (EVENTS, LINKS, CUTS):
                # TRUNCATE runs no row triggers in PostgreSQL.
                cursor.execute(
                    f"CREATE OR REPLACE TRIGGER {table}_no_truncate BEFORE TRUNCATE ON {table} "
                    f"FOR EACH STATEMENT EXECUTE FUNCTION {LINKS}_no_update()"
                )


def _postgres(table: str, doing: str, refused: str) -> tuple[str, str]:
    name = f"{table}_no_{doing.lower()}"
    returned = "OLD" if doing == "DELETE" else "NEW"
    raising = f"RAISE EXCEPTION '{REFUSAL}';"
    body = f"IF {refused} THEN {raising} END IF; RETURN {returned};" if refused else raising
    function = f"CREATE OR REPLACE FUNCTION {name}() RETURNS trigger LANGUAGE plpgsql AS"
    trigger = f"CREATE OR REPLACE TRIGGER {name} BEFORE {doing} ON {table}"
    return (
        f"{function} $$ BEGIN {body} END $$",
        f"{trigger} FOR EACH ROW EXECUTE FUNCTION {name}()",
    )


def _sqlite(table: str, doing: str, refused: str) -> tuple[str, str]:
    name = f"{table}_no_{doing.lower()}"
    when = f"WHEN {refused}" if refused else ""
    refusing = f"BEGIN SELECT RAISE(ABORT, '{REFUSAL}'); END"
    trigger = f"CREATE TRIGGER {name} BEFORE {doing} ON {table}"
    return f"DROP TRIGGER IF EXISTS {name}", f"{trigger} {when} {refusing}"


def guards_missing(using: str = "default") -> list[str]:
    """Return the names of missing triggers."""
    connection = connections[using]
    queries = {
        "postgresql": "SELECT tgname FROM pg_trigger WHERE tgenabled <> 'D'",
        "sqlite": "SELECT name FROM sqlite_master WHERE type = 'trigger'",
    }
    with connection.cursor() as cursor:
        cursor.execute(queries[connection.vendor])
        present = {row[0] for row in cursor.fetchall()}
    return sorted(set(NAMES) - present)
