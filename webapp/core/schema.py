"""Comparison of a database's schema with the schema of this version.

Django applies missing migrations but ignores unknown ones, so that an older version could write
rows that the newer one cannot read. A schema is identified by its migrations, ``app.0012_name``.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path

from django.apps import apps
from django.db import connections
from django.db.migrations.recorder import MigrationRecorder

from runners.inventory import AGENT_VERSION

VERSION = AGENT_VERSION  # server and hosts are one distribution
WAY_OUT = (
    "Start the newer version of Slipway that wrote it, or restore a backup of this version with "
    "`python3 manage.py restore`."
)


class SchemaTooNewError(Exception):
    """A schema has migrations that this version lacks; the message says what to do."""


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


def newer_migrations(applied: Mapping[str, Iterable[str]]) -> list[str]:
    """Return the migrations that this version lacks, except squashed ones.

    A squashed migration has a lower number than the app's last one.
    """
    own = known_migrations()
    return [
        f"{app}.{name}"
        for app, names in sorted(applied.items())
        for name in names
        if name not in own.get(app, []) and _number(name) >= _last_number(own.get(app, []))
    ]


def _number(name: str) -> str:
    return name.partition("_")[0]


def _last_number(names: list[str]) -> str:
    return _number(names[-1]) if names else ""


def refuse_newer(applied: Mapping[str, Iterable[str]], what: str, way_out: str = WAY_OUT) -> None:
    """Check that this version has every migration of ``what``.

    Raises:
        SchemaTooNewError: some are missing.
    """
    newer = newer_migrations(applied)
    if not newer:
        return
    known = known_migrations()
    labels = list(dict.fromkeys(name.partition(".")[0] for name in newer))
    latest = [f"{app}.{known[app][-1]}" if known.get(app) else f"no {app}" for app in labels]
    raise SchemaTooNewError(
        f"{what} has the schema of a newer version ({', '.join(newer)}); this is Slipway "
        f"{VERSION}, which knows {', '.join(latest)}. {way_out}"
    )


def check_schema() -> None:
    """Check that this version can work with the configured databases, including empty ones.

    Raises:
        SchemaTooNewError: a newer version migrated one of them.
        OperationalError: a database is unavailable.
    """
    for alias in connections:
        refuse_newer(applied_migrations(alias), "The database")
