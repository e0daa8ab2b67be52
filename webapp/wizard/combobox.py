"""Select elements, those that become comboboxes, and the models and devices they offer."""

import re
from collections.abc import Container, Iterable
from copy import copy
from functools import cache
from typing import Any, NamedTuple

from django import forms
from django.forms.renderers import BaseRenderer
from django.forms.utils import flatatt
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString

from planner.catalog.devices import devices_of_every_size, price_of
from planner.specs.cluster import DeviceSpec
from webapp.core.display import NBSP, TIMES, gib, money_an_hour, parameters, whole
from webapp.core.search import folded
from webapp.modelhub.catalog import CatalogRow, catalog_rows

Choices = list[tuple[str, Any]]
SERVER_DEVICES = 8  # of one machine, from which on whole machines are meant


class Described(str):
    """The words of an option, with what a combobox says beside them."""

    __slots__ = ("more",)
    more: str

    def __new__(cls, words: str, more: str = "") -> "Described":
        """Return the words with what is said beside them."""
        found = super().__new__(cls, words)
        found.more = more
        return found


OPTION = '<option value="{}"{}{}>{}</option>'
MORE = ' data-more="{}"'
BOX = '<div class="combobox" id="{}-box" hx-morph-skip>{}</div>'
GROUP = '<optgroup label="{}">{}</optgroup>'


class Select(forms.Select):
    """A select element, written without a template for each option.

    Django renders two for each: of the 180 devices of a list that was half of their page's time.
    """

    def render(
        self,
        name: str,
        value: Any,  # noqa: ANN401 -- as Django has it
        attrs: dict[str, Any] | None = None,
        renderer: BaseRenderer | None = None,  # noqa: ARG002 -- as Django has it
    ) -> SafeString:
        """Return the element as HTML."""
        options = self._options(self.choices, set(self.format_value(value)))
        attributes = flatatt({"name": name, **self.build_attrs(self.attrs, attrs)})
        return format_html("<select{}>{}</select>", attributes, options)

    def _options(self, choices: Iterable[tuple[Any, Any]], chosen: Container[str]) -> SafeString:
        rows = ((str(value), words) for value, words in choices)
        return format_html_join(
            "",
            "{}",
            (
                (format_html(GROUP, value, self._options(words, chosen)),)
                if isinstance(words, list | tuple)
                else (self._option(value, words, is_chosen=value in chosen),)
                for value, words in rows
            ),
        )

    @staticmethod
    def _option(value: str, words: Any, *, is_chosen: bool) -> SafeString:  # noqa: ANN401
        more = words.more if isinstance(words, Described) else ""
        described = format_html(MORE, more) if more else ""
        return format_html(OPTION, value, described, " selected" if is_chosen else "", words)


class Combobox(Select):
    """A select element that ``combobox.js`` makes a field to type in, with a list below it.

    ``notes`` names what is fetched when it first opens: the groups “Recent” and “On your hosts”,
    and what fits. ``count`` and ``nodes`` are the fields that “4x A100” fills, ``is_free`` lets a
    text be sent that no option has. A page's update leaves the element as it stands.
    """

    def __init__(
        self,
        attrs: dict[str, Any] | None = None,
        choices: Any = (),  # noqa: ANN401 -- as Django has it
        *,
        notes: str,
        example: str = "",
        is_free: bool = False,
        count: str = "",
        nodes: str = "",
    ) -> None:
        data = {"notes": notes, "example": example, "count": count, "nodes": nodes}
        own: dict[str, Any] = {f"data-{name}": value for name, value in data.items() if value}
        own |= {"data-combobox": True, "data-free": is_free}
        super().__init__({**own, **(attrs or {})}, choices)

    def render(
        self,
        name: str,
        value: Any,  # noqa: ANN401 -- as Django has it
        attrs: dict[str, Any] | None = None,
        renderer: BaseRenderer | None = None,
    ) -> SafeString:
        """Return the element; a value without an option has one of its own."""
        known = {str(key) for _, group in self.choices for key, _ in group}
        own = [(each, each) for each in self.format_value(value) if each and each not in known]
        widget = copy(self)
        widget.choices = [*([("Typed", own)] if own else []), *self.choices]
        element = super(Combobox, widget).render(name, value, attrs, renderer)
        key = (attrs or {}).get("id", name)
        return format_html(BOX, key, element)


@cache
def model_choices() -> Choices:
    """Return every catalog model by maker, described by its parameters and context."""
    groups: dict[str, list[tuple[str, Described]]] = {}
    for row in catalog_rows():
        groups.setdefault(row.maker or "Other", []).append((row.entry.id, _described(row)))
    return sorted(groups.items(), key=lambda group: group[0].casefold())


def _described(row: CatalogRow) -> Described:
    tokens = row.shape.max_position_embeddings
    parts = [f"{parameters(row.parameters)} parameters", f"{whole(tokens)}{NBSP}tokens"]
    parts += ["mixture of experts"] if row.shape.is_moe else []
    return Described(row.entry.id, " · ".join(parts))


@cache
def device_choices() -> Choices:
    """Return every catalog device with each memory it was sold with, by vendor, with its price."""
    groups: dict[str, list[tuple[str, Described]]] = {}
    for device in devices_of_every_size():
        groups.setdefault(device.vendor or "Other", []).append((device.id, _device(device)))
    return [
        (vendor, sorted(group, key=lambda pair: str(pair[1]))) for vendor, group in groups.items()
    ]


def _device(device: DeviceSpec) -> Described:
    label = f"{device.name or device.id} · {gib(device.memory_bytes)}{NBSP}GiB"
    price = price_of(device.id).get("price_usd_per_hour")
    return Described(label, f"rented at {money_an_hour(float(str(price)))}" if price else "")


def model_combobox() -> Combobox:
    """Return the field of a catalog model."""
    return Combobox(
        choices=model_choices(), notes="models", example="llama 8b, qwen3, 70b …", is_free=True
    )


def device_combobox(groups: Choices | None = None) -> Combobox:
    """Return the field of a catalog device and how many, after groups of its form's own."""
    return Combobox(
        choices=[*(groups or []), *device_choices()],
        notes="devices",
        example="4x a100, h100, rtx 4090 …",
        count="id_devices_per_node",
        nodes="id_nodes",
    )


# Several of a device in one text: “4x A100”, “a100 x 8”.
SEVERAL_BEFORE = re.compile(rf"(\d{{1,4}})\s*[x*{TIMES}]\s*(.+)", re.IGNORECASE)
SEVERAL_AFTER = re.compile(rf"(.+?)\s*[x*{TIMES}]\s*(\d{{1,4}})", re.IGNORECASE)


class Several(NamedTuple):
    """A number of one device, as machines of a number of devices each."""

    device: str
    words: str
    devices_per_node: int
    nodes: int


def several_devices(text: str, most: int = 3) -> list[Several]:
    """Return the catalog's devices that a text such as ``4x A100`` may mean.

    More than eight are whole machines of eight, where that divides.
    """
    text = text.strip()
    if found := SEVERAL_BEFORE.fullmatch(text):
        count, name = int(found[1]), found[2]
    elif found := SEVERAL_AFTER.fullmatch(text):
        count, name = int(found[2]), found[1]
    else:
        count, name = 1, text
    words = folded(name).split()
    if not words or not count:
        return []
    is_servers = count > SERVER_DEVICES and count % SERVER_DEVICES == 0
    per_node, nodes = (SERVER_DEVICES, count // SERVER_DEVICES) if is_servers else (count, 1)
    return [
        Several(key, f"{count} {TIMES} {label}" if count > 1 else str(label), per_node, nodes)
        for _, group in device_choices()
        for key, label in group
        if all(word in folded(f"{label} {key}") for word in words)
    ][:most]
