"""Workload forms, made from the workloads of plan documents; a training's has its data."""

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

from django import forms

from runners.plans.fields import Part
from runners.plans.workloads import (
    MOST_SOURCES,
    TRAINING_GOALS,
    WORKLOADS,
    TrainingData,
)
from webapp.datasets.models import Dataset
from webapp.wizard.forms import Choice, DecimalNumber, FormOfPart
from webapp.wizard.serving_form import ServingForm

MIX_ROWS = range(1, MOST_SOURCES + 1)  # rows of a mixture in the form
FIELDS = ("source", "path", "weight", "reference")
NAMES_OF = {"reference": "reference_loss"}  # form -> document
MIXTURE = tuple(f"mix_{name}_{row}" for row in MIX_ROWS for name in FIELDS)


class Row(NamedTuple):
    """The three form fields of one source."""

    source: forms.BoundField
    path: forms.BoundField
    weight: forms.BoundField


class TrainingForm(FormOfPart):
    """A training's workload, with its data and the rows of a mixture of sources."""

    unshown: ClassVar = frozenset({"mixture"})
    data_names = (*(name for name in TrainingData.model_fields if name != "mixture"), *MIXTURE)

    def __init__(
        self,
        *args: Any,
        datasets: Sequence[Dataset] = (),
        has_gpus: bool = True,
        by_trl: bool = True,
        **kwargs: Any,
    ) -> None:
        """Offer the team's uploads, and what host and trainer have or what is chosen.

        FlexAttention needs GPUs, TRL's packing the trainer TRL.
        """
        super().__init__(*args, **kwargs)
        self.datasets = datasets
        listed = [(each.pk, f"{each.name} · {each.num_records:,} records") for each in datasets]
        self.fields["dataset"] = forms.ChoiceField(
            label=self.fields["dataset"].label,
            required=False,
            choices=[("", "Choose a file"), *listed],
        )
        self.fields["mixture_update_every_steps"].required = False  # used by moving weights
        self._offer_sources(listed)
        if not by_trl and not self["packing_strategy"].value():
            del self.fields["packing_strategy"]
        attention = self.fields["attention"]
        is_flex = self["attention"].value() == "flex"
        if isinstance(attention, Choice) and not has_gpus and not is_flex:
            attention.leave_out("flex")
        if "method" in self.fields:
            self.order_fields(["method", "lora_rank", "objective"])

    def _offer_sources(self, listed: Sequence[tuple[str, str]]) -> None:
        """Add the rows; each offers the own text, a data set, a file and the team's uploads."""
        own = [
            ("", "None"),
            ("host", "The host's own text"),
            ("hub", "A data set of the Hub"),
            ("file", "A file on the host"),
        ]
        for row in MIX_ROWS:
            self.fields[f"mix_source_{row}"] = forms.ChoiceField(
                label=f"Source {row}", choices=[*own, *listed], required=False
            )
            self.fields[f"mix_path_{row}"] = forms.CharField(
                label=f"File or data set of source {row}", required=False, max_length=1000
            )
            self.fields[f"mix_weight_{row}"] = DecimalNumber(
                f"Weight of source {row}", 0.001, 1000, required=False
            )
            self.fields[f"mix_reference_{row}"] = DecimalNumber(
                f"Reference loss of source {row}", 0, 20, required=False
            )

    def initial_of(self, part: Part) -> dict[str, Any]:
        """Return the values to show, those of the sources in their rows."""
        initial = super().initial_of(part)
        mixture = part.mixture if isinstance(part, TrainingData) else []
        for row, source in zip(MIX_ROWS, mixture, strict=False):
            for name in FIELDS:
                initial[f"mix_{name}_{row}"] = getattr(source, NAMES_OF.get(name, name))
        return initial

    def values(self) -> dict[str, Any]:
        """Return the cleaned values, those of the rows as the list of sources."""
        return {**super().values(), "mixture": [self._source(row) for row in self._filled()]}

    def _filled(self) -> list[int]:
        """Return the rows that name a source."""
        return [row for row in MIX_ROWS if self.cleaned_data.get(f"mix_source_{row}")]

    def _source(self, row: int) -> dict[str, Any]:
        given = {name: self.cleaned_data.get(f"mix_{name}_{row}") for name in FIELDS}
        return {
            NAMES_OF.get(name, name): value
            for name, value in given.items()
            if value not in (None, "")
        }

    def field_of_fault(self, name: str) -> str | None:
        """Return the form's field; of a source, the one in its row, of all the first one."""
        if name == "mixture":
            return f"mix_source_{MIX_ROWS[0]}"
        if not name.startswith("mixture."):
            return super().field_of_fault(name)
        _, number, part = name.split(".")
        rows = self._filled()
        row = rows[int(number)] if int(number) < len(rows) else MIX_ROWS[0]
        shown = {document: form for form, document in NAMES_OF.items()}.get(part, part)
        return f"mix_{shown}_{row}"

    def clean(self) -> dict[str, Any]:
        """Require a weight for each source that is named; then as the document."""
        if self.cleaned_data.get("data_source") == "mixed":
            for row in self._filled():
                name = f"mix_weight_{row}"
                if self.cleaned_data.get(name) is None and name not in self.errors:
                    self.add_error(name, "Give the source a weight, for example 1.")
        return super().clean()

    @property
    def mixture(self) -> Iterator[Row]:
        """Yield the rows in order."""
        for row in MIX_ROWS:
            yield Row(*(self[f"mix_{name}_{row}"] for name in ("source", "path", "weight")))

    @property
    def references(self) -> Iterator[forms.BoundField]:
        """Yield the reference loss fields of the rows, for dynamic weights."""
        for row in MIX_ROWS:
            yield self[f"mix_reference_{row}"]

    @property
    def chosen(self) -> Dataset | None:
        """Return the chosen uploaded file, or None."""
        value = self["dataset"].value()
        return next((each for each in self.datasets if each.pk == value), None)


def workload_form(
    goal: str,
    part: Part | None = None,
    data: Any = None,  # noqa: ANN401 -- a QueryDict or None, as Django has it
    **options: Any,
) -> FormOfPart:
    """Return the form of a goal's workload; ``options`` are of its own form."""
    forms_of: dict[str, type[FormOfPart]] = dict.fromkeys(TRAINING_GOALS, TrainingForm) | {
        "serve": ServingForm
    }
    form = forms_of.get(goal, FormOfPart)
    return form(data, part=part or WORKLOADS[goal](), **options)
