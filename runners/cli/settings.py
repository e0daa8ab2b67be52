"""``--set FIELD=VALUE``: a field of a document by its dotted path."""

from typing import Any

from runners.cli.errors import CliError
from runners.cli.quantities import value_of_field


def read_setting(text: str) -> tuple[str, object]:
    """Return the path and the value of a ``--set`` option.

    Raises:
        CliError: it has not the form FIELD=VALUE, or the value is no quantity of the field's.
    """
    path, equals, value = (part.strip() for part in text.partition("="))
    if not equals or not all(path.split(".")):
        raise CliError(
            f"--set is {text!r}: write it as FIELD=VALUE, such as workload.concurrency=8",
            field="--set",
        )
    return path, value_of_field(path, value)


def place_of(document: dict[str, Any], path: str) -> tuple[dict[str, Any], str]:
    """Return the object that has the field of a path, made if it is absent, and the field's name.

    Raises:
        CliError: a part of the path is a value instead of an object.
    """
    *parents, last = path.split(".")
    place = document
    for depth, name in enumerate(parents, 1):
        inner = place.setdefault(name, {})
        if not isinstance(inner, dict):
            raise CliError(
                f"--set {path}: {'.'.join(parents[:depth])} is {inner!r}, which has no fields; "
                f"give it whole, such as --set '{parents[depth - 1]}={{…}}'",
                field=path,
            )
        place = inner
    return place, last
