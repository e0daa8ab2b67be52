"""The form fields of a training run's data."""

from collections.abc import Sequence
from typing import Any

from django import forms

from webapp.datasets.models import Dataset
from webapp.wizard.mixture_forms import NAMES, MixtureForm, checked_path

SOURCES = [
    ("host", "The host's own text"),
    ("file", "A file on the host"),
    ("upload", "An uploaded file"),
    ("mixed", "Several sources by weight"),
]
READ_AS = [
    ("", "By its first record"),
    ("text", "Text"),
    ("chat", "Chats: “messages”"),
    ("instruction", "Instructions: “instruction”, “output”"),
    ("classification", "Classes: “text”, “label”"),
    ("completion", "Prompts: “prompt”, “completion”"),
]


class DataForm(MixtureForm):
    """The fields of a training run's data; the step shows them in a section of their own."""

    data_names = (
        "data_source", "data_path", "data_format", "dataset", "rows", "too_long", *NAMES,
    )  # fmt: skip

    data_source = forms.ChoiceField(label="Training text", choices=SOURCES, required=False)
    data_path = forms.CharField(
        label="File on the host",
        required=False,
        max_length=1000,
        help_text="JSON lines, Parquet or .txt, below the host's model folder",
    )
    data_format = forms.ChoiceField(label="Read it as", choices=READ_AS, required=False)
    dataset = forms.ChoiceField(label="Uploaded file", required=False)
    rows = forms.ChoiceField(
        label="Short samples",
        choices=[("packed", "Share a row, kept apart"), ("padded", "One a row, padded")],
        required=False,
        help_text="The plan takes every row for full, which padded ones are not",
    )
    too_long = forms.ChoiceField(
        label="What is longer than a row",
        choices=[("cut", "Is cut"), ("leave_out", "Is left out")],
        required=False,
    )

    def __init__(self, *args: Any, datasets: Sequence[Dataset] = (), **kwargs: Any) -> None:
        """Add the team's uploaded files to the choices."""
        super().__init__(*args, **kwargs)
        self.datasets = datasets
        listed = [(each.pk, f"{each.name} · {each.num_records:,} records") for each in datasets]
        field = self.fields["dataset"]
        if isinstance(field, forms.ChoiceField):
            field.choices = [("", "Choose a file"), *listed]
        self.offer_sources(listed)

    @property
    def chosen(self) -> Dataset | None:
        """Return the chosen uploaded file, or None."""
        value = self["dataset"].value()
        return next((each for each in self.datasets if each.pk == value), None)

    def clean_data_path(self) -> str:
        """Return the path; reject “..” and unsupported file types."""
        return checked_path(str(self.cleaned_data.get("data_path") or ""))

    def clean(self) -> dict[str, Any]:
        """Require the file, upload or mixture that the chosen source needs."""
        values = super().clean() or self.cleaned_data
        needed = {"file": "data_path", "upload": "dataset"}.get(values.get("data_source") or "")
        if needed and not values.get(needed) and needed not in self.errors:
            sentences = {"data_path": "Name the file.", "dataset": "Choose a file, or upload one."}
            self.add_error(needed, sentences[needed])
        if values.get("data_source") == "mixed":
            self.check_mixture(values)
        return values
