"""Filters and components as pages use them."""

import re
from datetime import timedelta

import pytest
from django.template import Context, Template
from django.test import RequestFactory

from webapp.core.clock import now
from webapp.core.display import Figure, memory_row
from webapp.core.templatetags.components import NAVIGATION
from webapp.core.units import DASH, NBSP, THIN

GIB = 1024**3
FILTERS = [
    'quantity:"bytes"',
    "memory",
    "gib",
    "bandwidth",
    "flops",
    "parameters",
    "count",
    "number",
    "duration",
    "clock",
    "about",
    "percent",
]


def draw(text: str, **values) -> str:
    return Template("{% load units components %}" + text).render(Context(values))


@pytest.mark.parametrize("name", FILTERS)
def test_every_filter_says_nothing_of_nothing(name):
    assert draw(f"{{{{ value|{name} }}}}", value=None) == "\u2014"


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("memory", 21 * GIB, "21.0~GiB"),
        ("gib", 21 * GIB, "21.0"),
        ("bandwidth", 18e9, "18.0~GB/s"),
        ("flops", 1.2e12, "1.20~TFLOP/s"),
        ("parameters", 8_030_261_248, "8.03~B"),
        ("count", 131_072, "131_072"),
        ("number", 0.98214, "0.982"),
        ("duration", 0.031, "31~ms"),
        ("clock", 6000, "1 h 40 min"),
        ("about", 780, "about 13 min"),
        ("percent", 0.058, "5.8~%"),
    ],
)
def test_a_filter_says_what_its_unit_says(name, value, words):
    shown = draw(f"{{{{ value|{name} }}}}", value=value)

    assert shown == words.replace("~", NBSP).replace("_", THIN)


def test_a_quantity_has_its_unit_apart():
    shown = draw('{{ value|quantity:"bytes" }}', value=GIB)

    assert shown == '1.00<span class="unit">GiB</span>'


def test_a_hostile_unit_is_escaped():
    assert "<b>" not in draw("{{ value|quantity:unit }}", value=1, unit="<b>")


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0, "just now"),
        (4, "just now"),
        (-30, "just now"),
        (6, "6 s ago"),
        (200, "3 min ago"),
        (90_000, "1 d ago"),
    ],
)
def test_how_long_ago_is_said_coarsely(seconds, words):
    assert draw("{{ at|ago }}", at=now() - timedelta(seconds=seconds)) == words


def test_what_never_happened_was_never():
    assert draw("{{ at|ago }}", at=None) == "never"


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/", "Home"),
        ("/plans/", "Plans"),
        ("/plans/01H/edit/goal/", "Plans"),
        ("/jobs/01H/", "Jobs"),
        ("/hosts/box/", "Hosts"),
        ("/models/meta-llama/Llama-3.1-8B/", "Models"),
        ("/techniques/lora/", "Techniques"),
        ("/docs/", None),
        ("/search/", None),
    ],
)
def test_one_entry_of_the_navigation_is_current(path, name):
    html = draw("{% navigation %}", request=RequestFactory().get(path))

    current = re.findall(r'aria-current="page"[^>]*>\s*([A-Z][a-z]+)', html)
    assert current == ([name] if name else [])


def test_the_navigation_has_its_entries_in_order():
    html = draw("{% navigation %}")
    places = [html.index(f">{name}<") for _, name in NAVIGATION]

    assert places == sorted(places)


@pytest.mark.parametrize(
    ("cookie", "chosen"),
    [("light", "light"), ("dark", "dark"), ("", "system"), ('"><script>', "system")],
)
def test_the_theme_is_one_of_three_words(cookie, chosen):
    request = RequestFactory().get("/")
    request.COOKIES["theme"] = cookie

    assert draw("{% theme %}", request=request) == chosen


@pytest.mark.parametrize(
    ("ratio", "percent"),
    [(0.5, "50.0"), (None, "0.0"), (-1, "0.0"), (7, "100.0"), (0.3333, "33.3")],
)
def test_a_bar_stays_between_nothing_and_everything(ratio, percent):
    assert percent in draw("{% progress ratio %}", ratio=ratio)


@pytest.mark.parametrize("value", [0.01, 0.5, 1.0, 2.0, 99.0, None, 0])
def test_the_dot_of_a_ratio_stays_on_its_scale(value):
    html = draw("{% ratio value %}", value=value)
    places = [float(text) for text in re.findall(r'cx="([\d.]+)%?"', html)]

    assert all(0 <= place <= 100 for place in places)


@pytest.mark.parametrize("provenance", ["modelled", "published", "measured"])
def test_a_figure_says_its_provenance(provenance):
    one = Figure("Speed", 5.0, "tokens_per_second", provenance=provenance, note="here")

    assert f'class="prov {provenance}"' in draw("{% figure one %}", one=one)


def test_a_figure_without_interval_has_no_whisker():
    assert "whisker" not in draw("{% figure one %}", one=Figure("Speed", 5.0, "seconds"))


def test_a_figure_with_an_interval_says_its_ends():
    html = draw("{% figure one %}", one=Figure("Speed", 5.0, "seconds", 4.0, 6.0))

    assert "whisker" in html
    assert f"4.0{DASH}6.0" in html


def test_a_hostile_label_is_escaped():
    assert "<b>" not in draw("{% figure one %}", one=Figure("<b>", 5.0, "<b>", note="<b>"))


def test_a_memory_bar_says_in_words_what_fills_it():
    row = memory_row("Memory", {"weights": 15 * GIB, "kv_cache": 2 * GIB}, 24 * GIB)

    html = draw("{% memory_bar rows %}", rows=(row,))

    assert "Weights 15.0" in html
    assert "17.0 / 24.0" in html


def test_a_memory_bar_of_nothing_is_drawn():
    assert "0" in draw("{% memory_bar rows %}", rows=(memory_row("Memory", {}, 0),))
