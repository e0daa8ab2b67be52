"""The wizard's own form fields: numbers with limits in words, choices from the catalogs."""

import json
import math
import re
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, ClassVar, NamedTuple, NoReturn

from django import forms
from django.core.files.uploadedfile import UploadedFile
from django.core.validators import BaseValidator

from planner.catalog.devices import list_devices
from planner.catalog.models import list_models
from webapp.core.units import gib
from webapp.core.wording import listed

MAX_CONFIG_BYTES = 256 * 1024
MAX_DIGITS = 18  # of a whole number: what is longer counts nothing in a model
UNSTORABLE = re.compile("\\\\u0000|[\ud800-\udfff]")  # databases refuse both
Choices = list[tuple[str, Any]]


class WholeNumber(forms.IntegerField):
    """A whole number whose error names the value and the limits."""

    def __init__(self, label: str, low: int, high: int, hint: str = "", **options: Any) -> None:
        super().__init__(label=label, min_value=low, max_value=high, help_text=hint, **options)
        limits = f"It must be a whole number from {low:,} to {high:,}."
        self.error_messages |= {"required": f"{label} is missing. {limits}", "invalid": limits}
        _name_limits(self, label, limits)


class DecimalNumber(forms.FloatField):
    """A number whose error names the limits."""

    def __init__(
        self, label: str, low: float, high: float, hint: str = "", **options: Any
    ) -> None:
        super().__init__(label=label, min_value=low, max_value=high, help_text=hint, **options)
        limits = f"It must be a number from {low:g} to {high:g}."
        self.error_messages |= {"invalid": limits}
        _name_limits(self, label, limits)


class Option(forms.ChoiceField):
    """A choice that may be left alone: what then holds stands first in its list."""

    def __init__(self, label: str, choices: Choices, hint: str = "") -> None:
        super().__init__(label=label, choices=choices, help_text=hint, required=False)
        self.usual = choices[0][0]


class OptionalText(forms.CharField):
    """Lines of text that may be left out."""

    usual = ""

    def __init__(self, label: str, hint: str = "") -> None:
        area = forms.Textarea(attrs={"rows": 3})
        super().__init__(label=label, help_text=hint, required=False, widget=area)


def asked_for(field: forms.Field, methods: Iterable[str]) -> None:
    """Show a field for these choices of the form's method only; without JavaScript always."""
    field.widget.attrs["data-asked-for"] = " ".join(methods)


def _name_limits(field: forms.Field, label: str, limits: str) -> None:
    """Make a field's refusals say which value of which field is out of which limits."""
    for validator in field.validators:
        if isinstance(validator, BaseValidator):
            validator.message = f"{label} is %(show_value)s. {limits}"


class ConfigJson(forms.CharField):
    """The text of a Hugging Face ``config.json``; becomes the object that it describes."""

    widget = forms.Textarea

    def __init__(self, label: str, hint: str = "", **options: Any) -> None:
        super().__init__(label=label, help_text=hint, required=False, **options)
        self.widget.attrs |= {"rows": 8, "spellcheck": "false"}

    def prepare_value(self, value: object) -> object:
        """Return the text that the control shows for a stored object."""
        return json.dumps(value, indent=2) if isinstance(value, dict) else value

    def to_python(self, value: object) -> Any:  # noqa: ANN401 -- no text, as Django has it
        """Return the object, or refuse what is no JSON object with the place of the fault."""
        text = super().to_python(value)
        return parse_config(text) if text else {}


def parse_config(text: str) -> dict[str, Any]:
    """Return the object in ``text``.

    Raises:
        ValidationError: it is too long, no JSON, or no object; the message says where.
    """
    if len(text.encode(errors="surrogatepass")) > MAX_CONFIG_BYTES:
        raise _too_long(len(text.encode(errors="surrogatepass")))
    try:
        config = json.loads(
            text, parse_int=_whole, parse_float=_decimal, parse_constant=_refuse_number
        )
    except (ValueError, RecursionError) as error:
        where = getattr(error, "lineno", None)
        place = f" at line {where}, column {getattr(error, 'colno', 0)}" if where else ""
        raise forms.ValidationError(
            f"This is not JSON: it breaks off{place}. Paste the whole file, from {{ to }}."
        ) from error
    if not isinstance(config, dict):
        raise forms.ValidationError("A config.json is one object in braces, this is not.")
    if UNSTORABLE.search(json.dumps(config, ensure_ascii=False)):
        raise forms.ValidationError(
            "It holds a character that no text has (NUL or half of a pair). Paste the file as it "
            "is published."
        )
    return config


def _too_long(size_bytes: int) -> forms.ValidationError:
    """Return the refusal of a text, with its size rounded up: it is over the limit."""
    return forms.ValidationError(
        f"This is {-(-size_bytes // 1024):,} KiB long; a config.json has at most "
        f"{MAX_CONFIG_BYTES // 1024} KiB. Paste config.json, not the weights' index."
    )


def _whole(text: str) -> int:
    return int(text) if len(text) <= MAX_DIGITS else _refuse_number(text)


def _decimal(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _refuse_number(text)


def _refuse_number(text: str) -> NoReturn:
    raise forms.ValidationError(
        f"It holds {text[:MAX_DIGITS]}, which is no number that a model has. Paste the file as it "
        "is published."
    )


def read_upload(upload: UploadedFile[Any] | None) -> dict[str, Any]:
    """Return the object in an uploaded ``config.json``, or nothing without an upload."""
    if upload is None:
        return {}
    if upload.size and upload.size > MAX_CONFIG_BYTES:
        raise _too_long(upload.size)
    try:
        text = upload.read(MAX_CONFIG_BYTES + 1).decode()
    except UnicodeDecodeError as error:
        raise forms.ValidationError(
            "This file is not text. Upload config.json, not the weights."
        ) from error
    return parse_config(text)


@cache
def device_choices() -> tuple[tuple[str, list[tuple[str, str]]], ...]:
    """Return every catalog device with its memory, grouped by maker."""
    groups: dict[str, list[tuple[str, str]]] = {}
    for device in list_devices():
        label = f"{device.name or device.id} · {gib(device.memory_bytes)} GiB"
        groups.setdefault(device.vendor or "Other", []).append((device.id, label))
    return tuple(
        (maker, sorted(group, key=lambda pair: pair[1])) for maker, group in groups.items()
    )


@cache
def model_ids() -> tuple[str, ...]:
    """Return every catalog model's id."""
    return tuple(entry.id for entry in list_models())


FINER = (Option, OptionalText)


class FinerGroup(NamedTuple):
    """Finer choices that belong together; without a title where a step has no groups."""

    title: str
    fields: list[forms.BoundField]


class StepForm(forms.Form):
    """A step of the wizard: no colon after labels, errors linked to their fields by Django."""

    use_required_attribute = False
    data_names: tuple[str, ...] = ()  # fields that the step shows apart from the others
    finer_titles: ClassVar[Mapping[str, tuple[str, ...]]] = {}  # title -> finer choices below it

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("label_suffix", "")
        super().__init__(*args, **kwargs)

    @property
    def plain_fields(self) -> list[forms.BoundField]:
        """Return what every draft of the step is about."""
        return [each for each in self._own_fields() if not isinstance(each.field, FINER)]

    @property
    def finer_fields(self) -> list[forms.BoundField]:
        """Return what most leave alone; the step shows it folded."""
        return [each for group in self.finer_groups for each in group.fields]

    @property
    def finer_groups(self) -> list[FinerGroup]:
        """Return the finer choices below their titles; those without one come last."""
        left = {each.name: each for each in self._own_fields() if isinstance(each.field, FINER)}
        titled = [
            FinerGroup(title, [left.pop(name) for name in names])
            for title, names in self.finer_titles.items()
        ]
        return [*titled, FinerGroup("", list(left.values()))] if left else titled

    @property
    def finer_words(self) -> str:
        """Return which of the finer choices are not as they were, or wrong, by their labels."""
        return listed([str(each.label) for each in self.finer_fields if _is_touched(each)])

    def _own_fields(self) -> list[forms.BoundField]:
        return [each for each in self if each.name not in self.data_names]


def _is_touched(bound: forms.BoundField) -> bool:
    field = bound.field
    is_other = isinstance(field, FINER) and (bound.value() or field.usual) != field.usual
    return is_other or bool(bound.errors)
