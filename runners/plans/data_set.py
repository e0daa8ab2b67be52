"""A data set of the Hub by name, as the workloads of plan documents have it."""

from typing import Self

from pydantic import ValidationError, model_validator

from planner.specs.base import BadRequestError, refuse
from runners.datasets.records import Format
from runners.datasets.repositories import DATA_SETS
from runners.hub.names import DataName, parse_data, reason_of
from runners.jobspec import HubData
from runners.jobspec.base import (
    LONGEST_NAME,
    MOST_RECORDS,
    SPLIT,
    SUBSET,
    USUAL_SPLIT,
    DataOptions,
)
from runners.plans.fields import Part, Path, field
from runners.plans.refusals import first_message

GROUP = "A data set of the Hub"


class DataSet(Part):
    """A split of a data set of the Hub, and what of its records is read."""

    data_repository: Path = field(
        "",
        "Data set on the Hub",
        "As owner/name, or the address of its page; “@REVISION” and “:SPLIT” may follow",
        max_length=LONGEST_NAME,
        group=GROUP,
    )
    data_split: Path = field(
        "",
        "Split",
        f"Of the data set on the Hub; empty: the one that its name states, else {USUAL_SPLIT}",
        max_length=100,
        group=GROUP,
    )
    data_subset: Path = field(
        "",
        "Subset",
        "Of the data set on the Hub; empty: its usual or only one",
        max_length=200,
        group=GROUP,
    )
    data_columns: str = field(
        "",
        "Columns",
        "Of the data set; question=prompt reads a column as another field. Empty: the fields of "
        "its format",
        max_length=1000,
        group=GROUP,
    )
    data_records: int | None = field(
        None,
        "Records",
        "The first ones, and of the Hub only the files that hold them are downloaded. Empty: all",
        ge=1,
        le=MOST_RECORDS,
        group=GROUP,
    )

    @property
    def data_name(self) -> DataName:
        """Return the data set of the Hub, with the split and the subset that are read.

        Raises:
            BadRequestError: the name is none.
        """
        name = parse_data(self.data_repository)
        return name._replace(
            split=self.data_split or name.split or USUAL_SPLIT,
            subset=self.data_subset or name.subset,
        )

    @property
    def column_names(self) -> tuple[str, ...]:
        """Return the columns that are read, each as ``DataOptions`` has it."""
        return tuple(each.strip() for each in self.data_columns.split(",") if each.strip())

    def hub_data(self, form: Format | None = None) -> HubData:
        """Return the named data set as a job's spec has it.

        Raises:
            BadRequestError: the name is none.
        """
        name = self.data_name
        return HubData(
            repository=f"{DATA_SETS}{name.repository}",
            revision=name.revision,
            subset=name.subset,
            split=name.split,
            format=form,
            columns=self.column_names,
            records=self.data_records,
        )

    @model_validator(mode="after")
    def _data_set_can_be_read(self) -> Self:
        """Refuse a name, split or subset that is none, and one that the name states otherwise."""
        try:
            DataOptions(columns=self.column_names)
        except ValidationError as error:
            refuse("data_columns", f"{first_message(error)}.")
        for name, value, form in (
            ("data_split", self.data_split, SPLIT),
            ("data_subset", self.data_subset, SUBSET),
        ):
            if value and form.fullmatch(value) is None:
                refuse(name, f"{value[:80]!r} is no name of one. Give it as its page shows it.")
        if not self.data_repository:
            return self
        try:
            stated = parse_data(self.data_repository)
        except BadRequestError as error:
            refuse("data_repository", f"{reason_of(error)}.")
        for name, own, other in (
            ("data_split", self.data_split, stated.split),
            ("data_subset", self.data_subset, stated.subset),
        ):
            if own and other and own != other:
                refuse(name, f"It is {own}, and the data set's name states {other}. Give one.")
        return self

    def refuse_without_data_set(self) -> None:
        """Refuse what is stated of a data set where none is named.

        Raises:
            ValueError: names the first such field.
        """
        for name in DataSet.model_fields if not self.data_repository else ():
            if getattr(self, name):
                refuse(name, "It is of a data set. Name one, or leave this out.")
