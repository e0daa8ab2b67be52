"""Forms of hosts: the enrolment form and the labels form."""

import re
from collections.abc import Mapping
from typing import Any

from django import forms

from webapp.hosts.device import wrong_price

POOL = re.compile(r"[a-z0-9][a-z0-9-]*")
MAX_LABELS = 12
LABELS_HINT = (
    "separated by spaces: gpu=4090 room=b12. usd_per_hour and usd_per_kwh price its jobs: "
    "usd_per_hour=2.50 usd_per_kwh=0.30"
)


class LabelsField(forms.CharField):
    """Labels typed as ``key=value`` separated by spaces; cleaned to a dict."""

    def __init__(self, **options: Any) -> None:
        super().__init__(max_length=400, required=False, **options)

    def clean(self, value: object) -> Any:  # noqa: ANN401 -- pairs, where the base has text
        """Return the labels as a dict.

        Raises:
            ValidationError: too many labels, one without ``=``, or an invalid price.
        """
        words = str(super().clean(value)).replace(",", " ").split()
        if len(words) > MAX_LABELS:
            raise forms.ValidationError(f"{len(words)} labels; at most {MAX_LABELS} are kept.")
        bad = [word for word in words if not re.fullmatch(r"[\w.-]+=[\w.-]+", word)]
        if bad:
            raise forms.ValidationError(f"“{bad[0]}” is not key=value; write it as gpu=4090.")
        labels = dict(word.split("=", 1) for word in words)
        if wrong := wrong_price(labels):
            raise forms.ValidationError(wrong)
        return labels


def written(labels: Mapping[str, object]) -> str:
    """Return labels as the text that people type."""
    return " ".join(f"{key}={value}" for key, value in labels.items())


class LabelsForm(forms.Form):
    """The labels of an existing host, including its prices."""

    labels = LabelsField(label="Labels", help_text=f"As key=value, {LABELS_HINT}")


class AddHostForm(forms.Form):
    """Name, pool and labels of a host to enrol."""

    name = forms.CharField(
        max_length=80,
        help_text="What people will see, such as lab-dgx or “the box under my desk”.",
    )
    pool = forms.CharField(
        max_length=40, initial="default", help_text="Hosts of one pool take the same jobs."
    )
    labels = LabelsField(help_text=f"Optional, as key=value, {LABELS_HINT}")

    def clean_pool(self) -> str:
        """Return the pool in lower case; reject one that cannot be part of a URL."""
        pool = str(self.cleaned_data["pool"]).strip().lower()
        if not POOL.fullmatch(pool):
            raise forms.ValidationError(
                f"“{pool}” holds more than lower-case letters, digits and hyphens; "
                "choose a name such as lab-a."
            )
        return pool
