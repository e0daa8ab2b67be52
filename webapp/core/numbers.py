"""Numbers as people type them: the site reads what was typed, not what a browser made of it.

A field of ``type=number`` hands over what its browser understood: Chromium drops a comma, so that
“0,5” arrives as 5. These fields are text, and refuse what two readers would read differently.
"""

import math
import re
from typing import Any

from django import forms
from django.core.validators import MaxValueValidator, MinValueValidator

SCIENTIFIC = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?", re.ASCII)
PLAIN = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)", re.ASCII)
WHOLE = re.compile(r"[+-]?\d+(\.0)?", re.ASCII)  # documents write 5 as 5.0 too
MOST_SHOWN = 40


def number_fault(text: str, form: re.Pattern[str] = SCIENTIFIC) -> str:
    """Return why a typed text is no number, as the end of a sentence; "" if it is one."""
    if form.fullmatch(text):
        return "" if math.isfinite(float(text)) else "which is more than any number here"
    if "," in text:
        return "which has a comma; write decimals after a point, and thousands without a sign"
    if re.fullmatch(r"\d{1,3}(\.\d{3})+", text, re.ASCII):
        return "which has a point; write thousands without a sign"
    if not text.isascii() and any(one.isdecimal() for one in text):
        return "which is not written in the digits 0 to 9"
    return "which is not a number" if form is not WHOLE else "which is not a whole number"


def number_of(text: str, form: re.Pattern[str] = SCIENTIFIC) -> float:
    """Return a typed number.

    Raises:
        ValueError: it is none; the message says why.
    """
    text = text.strip()
    if fault := number_fault(text, form):
        raise ValueError(fault)
    return float(text)


class NumberText(forms.TextInput):
    """A text field with a telephone's keys for numbers."""

    def __init__(self, mode: str = "decimal") -> None:
        super().__init__({"inputmode": mode, "autocomplete": "off"})


class _AsTyped:
    """A field of numbers that names what was typed, and why it is not read."""

    label: Any
    form: re.Pattern[str]

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        low, high = options.get("min_value"), options.get("max_value")
        limits = [f"at least {low:,.12g}"] if low is not None else []
        limits += [f"at most {high:,.12g}"] if high is not None else []
        words = f"{self.label or 'It'} is %(show_value).12g. It must be {' and '.join(limits)}."
        for each in self.validators:  # type: ignore[attr-defined]
            if isinstance(each, MinValueValidator | MaxValueValidator):
                each.message = words

    def to_python(self, value: Any) -> Any:  # noqa: ANN401 (as Django's)
        """Return the number.

        Raises:
            ValidationError: the text is no number, or two readers would read two numbers.
        """
        text = value.strip() if isinstance(value, str) else ""
        if text and (fault := number_fault(text, self.form)):
            limits = str(self.error_messages["invalid"])  # type: ignore[attr-defined]
            name = self.label or "It"
            raise forms.ValidationError(f"{name} is {text[:MOST_SHOWN]}, {fault}. {limits}")
        typed = text if isinstance(value, str) else value
        return super().to_python(typed)  # type: ignore[misc]


class WholeField(_AsTyped, forms.IntegerField):
    """A whole number as it was typed."""

    form = WHOLE
    widget = NumberText("numeric")


class DecimalField(_AsTyped, forms.FloatField):
    """A number as it was typed."""

    form = SCIENTIFIC
    widget = NumberText()
