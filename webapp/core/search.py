"""Searches text as people read it: in any alphabet and any case, alike on every database.

SQLite knows the cases of ASCII only; PostgreSQL folds by its locale and knows no normal forms.
Both compare here what ``folded`` gives: ``name__folded_contains="größe"`` finds GRÖSSE. Numbers
beyond a column's range, which both drivers refuse, are found in no row.
"""

import unicodedata
from typing import Any

from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import CharField, IntegerField, Lookup, TextField
from django.db.models.lookups import In

FUNCTION = "slipway_folded"
# PostgreSQL's lower() keeps what casefold() writes with other letters; those in use are replaced.
REPLACED = (("ß", "ss"), ("\N{GREEK SMALL LETTER FINAL SIGMA}", "\N{GREEK SMALL LETTER SIGMA}"))
Condition = tuple[str, tuple[Any, ...]]


def folded(text: str) -> str:
    """Return a text for comparison: without case, and with accents in one form."""
    if text.isascii():
        return text.lower()
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", text).casefold())


def _folded_or_null(text: str | None) -> str | None:
    return None if text is None else folded(str(text))


def register_function(connection: BaseDatabaseWrapper, **_signal: object) -> None:
    """Give a new connection to SQLite the function that PostgreSQL needs none of."""
    if connection.vendor == "sqlite":
        connection.connection.create_function(FUNCTION, 1, _folded_or_null, deterministic=True)


@CharField.register_lookup
@TextField.register_lookup
class CasefoldContains(Lookup[str]):
    """Whether a column contains a text, both folded."""

    lookup_name = "folded_contains"
    prepare_rhs = False

    def get_db_prep_lookup(self, value: object, connection: Any) -> Condition:  # noqa: ANN401, ARG002 -- as Django has it
        """Return the folded text as the parameter."""
        return "%s", (folded(str(value)),)

    def as_sql(self, compiler: Any, connection: Any) -> Condition:  # noqa: ANN401 -- as Django has it
        """Return SQLite's condition; it folds ASCII by itself, without a call into Python."""
        column, of_column = self.process_lhs(compiler, connection)
        text, of_text = self.process_rhs(compiler, connection)
        own = f"CASE WHEN {column} GLOB '*[^ -~]*' THEN {FUNCTION}({column}) ELSE LOWER({column})"
        return f"INSTR({own} END, {text}) > 0", (*of_column, *of_column, *of_column, *of_text)

    def as_postgresql(self, compiler: Any, connection: Any) -> Condition:  # noqa: ANN401 -- as Django has it
        """Return PostgreSQL's condition."""
        column, of_column = self.process_lhs(compiler, connection)
        text, of_text = self.process_rhs(compiler, connection)
        column = f"LOWER(NORMALIZE(({column})::text, NFC))"
        for letter, letters in REPLACED:
            column = f"REPLACE({column}, '{letter}', '{letters}')"
        return f"STRPOS(NORMALIZE({column}, NFC), {text}) > 0", (*of_column, *of_text)


@IntegerField.register_lookup
class InRange(In):
    """``in`` for whole numbers: one beyond the column's range is equal to no row's.

    Django's ``exact`` and comparisons know the range (``IntegerFieldOverflow``); its ``in`` hands
    the number to the database, whose driver fails.
    """

    def as_sql(self, compiler: Any, connection: Any) -> Any:  # noqa: ANN401 -- as Django has it
        """Return the condition for the numbers that the column can hold."""
        if self.rhs_is_direct_value():
            kind = self.lhs.output_field.get_internal_type()
            least, most = connection.ops.integer_field_range(kind)
            self.rhs = [each for each in self.rhs if _lies_within(each, least, most)]
        return super().as_sql(compiler, connection)


def _lies_within(value: object, least: int | None, most: int | None) -> bool:
    if not isinstance(value, int):
        return True
    return (least is None or value >= least) and (most is None or value <= most)
