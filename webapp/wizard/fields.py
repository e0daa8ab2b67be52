"""Form fields of the wizard: numbers whose errors state the limits, catalog choices."""

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
MAX_DIGITS = 18  # of an integer; no model has a longer one
UNSTORABLE = re.compile("\\\\u0000|[\ud800-\udfff]")  # databases reject both
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

    def prepare_value(self, value: object) -> object:
        """Return the value to show: a whole number without a decimal point."""
        return int(value) if isinstance(value, float) and value.is_integer() else value


class Option(forms.ChoiceField):
    """An optional choice; its default is the first of its list."""

    def __init__(self, label: str, choices: Choices, hint: str = "") -> None:
        super().__init__(label=label, choices=choices, help_text=hint, required=False)
        self.usual = choices[0][0]


class OptionalText(forms.CharField):
    """Optional lines of text."""

    usual = ""

    def __init__(self, label: str, hint: str = "") -> None:
        area = forms.Textarea(attrs={"rows": 3})
        super().__init__(label=label, help_text=hint, required=False, widget=area)


def show_only_for(field: forms.Field, methods: Iterable[str]) -> None:
    """Show a field only for these choices of the form's method; always without JavaScript."""
    field.widget.attrs["data-asked-for"] = " ".join(methods)


def _name_limits(field: forms.Field, label: str, limits: str) -> None:
    """Make a field's errors state the field, the value and the limits."""
    for validator in field.validators:
        if isinstance(validator, BaseValidator):
            validator.message = f"{label} is %(show_value)s. {limits}"


class ConfigJson(forms.CharField):
    """The text of a Hugging Face ``config.json``, cleaned to a dict."""

    widget = forms.Textarea

    def __init__(self, label: str, hint: str = "", **options: Any) -> None:
        super().__init__(label=label, help_text=hint, required=False, **options)
        self.widget.attrs |= {"rows": 8, "spellcheck": "false"}

    def prepare_value(self, value: object) -> object:
        """Return the text to show for a stored object."""
        return json.dumps(value, indent=2) if isinstance(value, dict) else value

    def to_python(self, value: object) -> Any:  # noqa: ANN401 -- no text, as Django has it
        """Return the object; reject invalid JSON with the position of the error."""
        text = super().to_python(value)
        return parse_config(text) if text else {}


def parse_config(text: str) -> dict[str, Any]:
    """Return the JSON object in ``text``.

    Raises:
        ValidationError: the text is too long, invalid JSON, or not an object.
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
    """Return the error for a text over the limit, with its size rounded up to KiB."""
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
    """Return the object in an uploaded ``config.json``, or {} without an upload."""
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
    """Return every catalog device with its memory, grouped by vendor."""
    groups: dict[str, list[tuple[str, str]]] = {}
    for device in list_devices():
        label = f"{device.name or device.id} · {gib(device.memory_bytes)} GiB"
        groups.setdefault(device.vendor or "Other", []).append((device.id, label))
    return tuple(
        (vendor, sorted(group, key=lambda pair: pair[1])) for vendor, group in groups.items()
    )


@cache
def model_ids() -> tuple[str, ...]:
    """Return every catalog model's id."""
    return tuple(entry.id for entry in list_models())


FINER = (Option, OptionalText)


class FinerGroup(NamedTuple):
    """Related advanced options; the title is empty for the rest of a step's options."""

    title: str
    fields: list[forms.BoundField]


class StepForm(forms.Form):
    """Base form of a wizard step: labels without a colon, fields split into groups."""

    use_required_attribute = False
    data_names: tuple[str, ...] = ()  # fields shown in the separate data section
    finer_titles: ClassVar[Mapping[str, tuple[str, ...]]] = {}  # title -> its advanced options

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("label_suffix", "")
        super().__init__(*args, **kwargs)

    @property
    def plain_fields(self) -> list[forms.BoundField]:
        """Return the basic fields of the step."""
        return [each for each in self._own_fields() if not isinstance(each.field, FINER)]

    @property
    def finer_fields(self) -> list[forms.BoundField]:
        """Return the advanced options, which the step shows collapsed."""
        return [each for group in self.finer_groups for each in group.fields]

    @property
    def finer_groups(self) -> list[FinerGroup]:
        """Return the advanced options by title; those without a title come last."""
        rest = {each.name: each for each in self._own_fields() if isinstance(each.field, FINER)}
        titled = [
            FinerGroup(title, [rest.pop(name) for name in names])
            for title, names in self.finer_titles.items()
        ]
        return [*titled, FinerGroup("", list(rest.values()))] if rest else titled

    @property
    def finer_words(self) -> str:
        """Return the labels of the advanced options that are changed or invalid."""
        return listed([str(each.label) for each in self.finer_fields if _is_touched(each)])

    def _own_fields(self) -> list[forms.BoundField]:
        return [each for each in self if each.name not in self.data_names]


def _is_touched(bound: forms.BoundField) -> bool:
    field = bound.field
    is_other = isinstance(field, FINER) and (bound.value() or field.usual) != field.usual
    return is_other or bool(bound.errors)
