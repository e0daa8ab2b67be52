"""Labels of a host: their form, and how operators change them."""

import re
from collections.abc import Mapping
from typing import Any, Self

from django import forms
from django.db import transaction

from webapp.audit.models import event_record, refuse_if_changed
from webapp.hosts.machines import HOURLY, PER_KWH, wrong_price
from webapp.hosts.models import Host

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
            raise forms.ValidationError(
                f"“Labels” has {len(words)} labels; the limit is {MAX_LABELS}. Remove some."
            )
        bad = [word for word in words if not re.fullmatch(r"[\w.-]+=[\w.-]+", word)]
        if bad:
            raise forms.ValidationError(f"“{bad[0]}” is not key=value; write it as gpu=4090.")
        labels = dict(word.split("=", 1) for word in words)
        if wrong := wrong_price(labels):
            raise forms.ValidationError(wrong)
        return labels


def labels_text(labels: Mapping[str, object]) -> str:
    """Return labels as the text that people type."""
    return " ".join(f"{key}={value}" for key, value in labels.items())


PRICES = {"hourly": HOURLY, "per_kwh": PER_KWH}  # fields of the form and their labels


class LabelsForm(forms.Form):
    """The labels of an existing host, with its prices as fields of their own."""

    labels = LabelsField(
        label="Labels", help_text="As key=value, separated by spaces: gpu=4090 room=b12."
    )
    hourly = forms.CharField(
        label="Price of an hour", required=False, max_length=20, help_text="US dollars, as 2.50"
    )
    per_kwh = forms.CharField(
        label="Price of a kWh", required=False, max_length=20, help_text="US dollars, as 0.30"
    )

    @classmethod
    def of(cls, labels: Mapping[str, object]) -> Self:
        """Return the unbound form of a host's labels."""
        own = {key: value for key, value in labels.items() if key not in PRICES.values()}
        prices = {name: labels.get(key, "") for name, key in PRICES.items()}
        return cls(initial={"labels": labels_text(own), **prices})

    def clean(self) -> dict[str, Any]:
        """Put the prices among the labels; refuse those that are none, at their field."""
        values = super().clean() or {}
        for name, key in PRICES.items():
            if price := str(values.get(name) or "").strip():
                if wrong := wrong_price({key: price}):
                    self.add_error(name, wrong)
                values.setdefault("labels", {})[key] = price
        return values


def labels_set(*, host: Host, labels: Mapping[str, str], by: str, seen: str = "") -> bool:
    """Replace a host's labels; return whether they changed.

    ``seen`` is the version mark of the labels that the page showed.

    Raises:
        ConflictProblem: another person changed the labels after the page was opened.
    """
    with transaction.atomic():
        before = Host.objects.select_for_update(no_key=True).get(pk=host.pk).labels
        if before == labels:
            return False
        refuse_if_changed(
            seen=seen,
            now_there=before,
            what=f"The labels of {host.name} were",
            subject=host.pk,
            kind="host.labels",
            reader=by,
        )
        Host.objects.filter(pk=host.pk).update(labels=dict(labels))
        event_record(host, "host.labels", by, detail={"labels": dict(labels), "before": before})
    return True
