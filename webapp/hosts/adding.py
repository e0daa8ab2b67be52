"""Forms with which operators add hosts: to enrol, and for planning only."""

import re

from django import forms

from planner.catalog.devices import list_devices
from webapp.core import display
from webapp.core.names import shown_name
from webapp.core.numbers import DecimalField, WholeField
from webapp.hosts.labels import LABELS_HINT, LabelsField

POOL = re.compile(r"[a-z0-9][a-z0-9-]*")


class AddHostForm(forms.Form):
    """Name, pool and labels of a host to enrol."""

    name = forms.CharField(
        max_length=80,
        validators=[shown_name],
        help_text="Name shown on pages, such as lab-dgx or workstation-2.",
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
                f"“{pool}” is not a valid pool name. Use lower-case letters, digits and hyphens; "
                "choose a name such as lab-a."
            )
        return pool


def _devices() -> list[tuple[str, str]]:
    return sorted(
        ((device.id, f"{device.name or device.id} · {display.gib(device.memory_bytes)} GiB"))
        for device in list_devices()
    )


class VirtualHostForm(forms.Form):
    """A machine that the team considers buying or renting."""

    name = forms.CharField(
        max_length=80,
        validators=[shown_name],
        help_text="Name shown on pages, such as next-rack.",
    )
    device = forms.ChoiceField(choices=_devices)
    num_devices = WholeField(
        min_value=1, max_value=1024, initial=8, label="Devices in the machine"
    )
    memory_gib = DecimalField(
        required=False,
        min_value=1,
        max_value=1_000_000,
        label="Memory of the machine, in GiB",
        help_text="Empty: not known, so plans that need it say so.",
    )
