"""Form fields of a weighted data mixture, one row per source."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from django import forms

from runners.datasets.records import DataError, suffix_of
from webapp.core.wording import sentence
from webapp.plans.training_data import MIX_ROWS
from webapp.wizard.fields import DecimalNumber, StepForm, WholeNumber

FEWEST_SOURCES = 2
FIELDS = ("source", "path", "weight")
REFERENCES = tuple(f"mix_reference_{row}" for row in MIX_ROWS)
NAMES = (
    *(f"mix_{name}_{row}" for row in MIX_ROWS for name in FIELDS),
    *("mix_weights", "mix_every", *REFERENCES),
)
WEIGHTS = [("fixed", "Stay as they are"), ("dynamic", "Follow each source's loss")]


class Row(NamedTuple):
    """The three form fields of one source."""

    source: forms.BoundField
    path: forms.BoundField
    weight: forms.BoundField


def checked_path(text: str) -> str:
    """Return a file's path without surrounding blanks.

    Raises:
        ValidationError: the path contains “..”, or the file type is not supported.
    """
    path = text.strip()
    if ".." in path.split("/") or "\x00" in path:
        raise forms.ValidationError("A file's path may not climb with “..”.")
    try:
        if path:
            suffix_of(path)
    except DataError as error:
        raise forms.ValidationError(sentence(str(error))) from None
    return path


class MixtureForm(StepForm):
    """A form with rows of sources and weights, used if ``data_source`` is ``mixed``.

    The interval and the reference losses are used if the weights are dynamic.
    """

    mix_weights = forms.ChoiceField(label="The weights", choices=WEIGHTS, required=False)
    mix_every = WholeNumber(
        "Steps between two moves",
        *(1, 1_000_000),
        "The held-out loss on each source is taken before each move",
        required=False,
    )

    def offer_sources(self, listed: Sequence[tuple[str, str]]) -> None:
        """Add the rows; each offers the host's own text, a file on it, and the team's uploads."""
        own = [("", "None"), ("host", "The host's own text"), ("file", "A file on the host")]
        for row in MIX_ROWS:
            source = forms.ChoiceField(
                label=f"Source {row}", choices=[*own, *listed], required=False
            )
            path = forms.CharField(label=f"File of source {row}", required=False, max_length=1000)
            weight = DecimalNumber(f"Weight of source {row}", 0.001, 1000, required=False)
            for name, field in zip(FIELDS, (source, path, weight), strict=True):
                self.fields[f"mix_{name}_{row}"] = field
            label = f"Reference loss of source {row}"
            self.fields[f"mix_reference_{row}"] = DecimalNumber(label, 0, 20, required=False)

    @property
    def mixture(self) -> Iterator[Row]:
        """Yield the rows in order."""
        for row in MIX_ROWS:
            yield Row(*(self[f"mix_{name}_{row}"] for name in FIELDS))

    @property
    def references(self) -> Iterator[forms.BoundField]:
        """Yield the reference loss fields of the rows, for dynamic weights."""
        for name in REFERENCES:
            yield self[name]

    def check_mixture(self, values: dict[str, Any]) -> None:
        """Reject fewer than two sources, missing weights or paths, and duplicates."""
        seen = set()
        for row in MIX_ROWS:
            source, path, weight = (values.get(f"mix_{name}_{row}") for name in FIELDS)
            if not source:
                continue
            if source == "file":
                path = self._check_path(row, str(path or ""))
            if weight is None and f"mix_weight_{row}" not in self.errors:
                self.add_error(f"mix_weight_{row}", "Give it a weight, for example 1.")
            if (key := (source, path if source == "file" else "")) in seen:
                self.add_error(f"mix_source_{row}", "This source is already listed. Remove one.")
            seen.add(key)
        if len(seen) < FEWEST_SOURCES:
            error_text = (
                f"{len(seen)} of these rows name a source. Choose at least {FEWEST_SOURCES}."
            )
            self.add_error("mix_source_1", error_text)
        is_dynamic = values.get("mix_weights") == "dynamic"
        if is_dynamic and values.get("mix_every") is None and "mix_every" not in self.errors:
            self.add_error("mix_every", "Say after how many steps they move, for example 50.")

    def _check_path(self, row: int, text: str) -> str:
        name = f"mix_path_{row}"
        try:
            path = checked_path(text)
        except forms.ValidationError as error:
            self.add_error(name, error)
            return text
        if not path:
            self.add_error(name, "Name the file.")
        self.cleaned_data[name] = path
        return path
