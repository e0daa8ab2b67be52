"""What components are made of, the status chip with its states, filters of pages."""

import re
from datetime import timedelta

from django.template import Context, Template
from django.test import RequestFactory
from django.utils.safestring import mark_safe
from hypothesis import given
from hypothesis import strategies as st

from webapp.core.clock import now
from webapp.core.display import DASH, NBSP, TERMS, THIN, Figure, fragment, legend, memory_row
from webapp.core.templatetags.components import LOOKS, NAVIGATION, icon_path, status
from webapp.hosts.models import HostState
from webapp.hosts.services import Contact
from webapp.jobs.models import FINAL_STATES, JobState
from webapp.plans.models import PlanState

# What the components are made of: figures on an axis, memory as segments


GIB = 1024.0**3


def figure(**changes) -> Figure:
    fields = {"label": "Speed", "value": 100.0, "unit": "tokens_per_second"}
    return Figure(**{**fields, "low": 80.0, "high": 130.0, **changes})


def test_the_axis_of_a_figure_has_the_prediction_in_its_middle_and_the_interval_as_its_band():
    assert figure().mid == 50
    assert figure(low=60.0, high=160.0).band.width > figure().band.width
    assert not figure(low=None, high=None).has_whisker
    assert figure(measured=90.0).shown.value == "90.0"


@given(st.floats(1e-6, 1e9), st.floats(0.05, 0.99), st.floats(1.01, 20.0), st.floats(0.02, 50.0))
def test_everything_stays_on_the_axis(value, low, high, measured):
    shown = figure(value=value, low=value * low, high=value * high, measured=value * measured)
    places = [shown.band.start, shown.band.end, shown.mid, shown.dot]
    assert all(-0.1 <= place <= 100.1 for place in places)


def test_an_interval_says_the_unit_above_it_only_where_it_changes():
    assert figure().interval_words == "80.0\u2013130"
    shown = figure(value=0.9, unit="seconds", low=0.5, high=1.4)
    assert shown.interval_words == "500\u00a0ms\u20131.4\u00a0s"


def row(capacity: float = 24 * GIB, **parts: float):
    return memory_row("GPU 0", {name: size * GIB for name, size in parts.items()}, capacity)


def test_the_terms_keep_their_order_and_adapters_are_weights():
    shown = row(runtime_overhead=1, kv_cache=4, weights=10)
    assert [segment.term for segment in shown.segments] == ["weights", "kv-cache", "overhead"]
    assert [segment.term for segment in row(weights=1, adapters=1).segments] == ["weights"]


def test_the_bar_is_as_wide_as_the_capacity_until_more_is_needed():
    shown = row(weights=12)
    assert shown.segments[0].span.width == 50
    assert not shown.is_over

    shown = row(weights=48)
    assert shown.is_over
    assert shown.capacity == 50


def test_a_bar_has_a_needle_at_a_measured_peak_and_words_without_a_unit_twice():
    shown = memory_row("GPU 0", {"weights": 10 * GIB}, 20 * GIB, measured_bytes=5 * GIB)
    assert shown.needle == 25
    assert row(weights=12).words == "12.0 / 24.0\u00a0GiB"

    for size in [0.5, 5.0, 23.9]:
        shown = row(weights=size, kv_cache=size, activations=size)
        assert shown.segments[-1].span.end <= 100.05, size


def test_every_tensor_class_is_drawn_and_the_legend_names_each_once():
    classes = {"weights", "kv_cache", "activations", "gradients", "optimizer_states"}
    classes |= {"adapters", "reference_weights", "buffers", "runtime_overhead"}
    assert {part for _, _, parts in TERMS for part in parts} == classes

    rows = [row(weights=1), row(weights=1, kv_cache=1)]
    assert [segment.name for segment in legend(rows)] == ["Weights", "KV cache"]


# The status chip knows every state of every machine


def chip(state: str) -> str:
    return Template("{% load components %}{% status state %}").render(Context({"state": state}))


def test_every_state_has_a_shape_and_the_state_machines_own_word():
    states = [*JobState, *HostState, *Contact, PlanState.COMPUTED]
    wrong = [
        (state, html)
        for state in states
        if "<svg" not in (html := chip(state)) or LOOKS[str(state)].word not in html
    ]
    wrong += [state for state in (*JobState, *HostState) if LOOKS[state].word != state.label]
    assert not wrong, wrong


def test_looks_of_final_states_differ_and_red_is_for_what_needs_a_person():
    looks = [LOOKS[state][:2] for state in FINAL_STATES - {JobState.ERROR}]
    assert len(set(looks)) == len(looks)

    bad = {state for state, look in LOOKS.items() if look.tone == "bad"}
    plans = {"does-not-fit", "refused", "too-long"}  # a target that is missed is amber
    assert bad == {"failed", "error", "unreachable", "failing", *plans}


def test_an_unknown_state_is_escaped_and_every_shape_is_a_template():
    assert "&lt;b&gt;" in chip("<b>")

    for shape in sorted({look.shape for look in LOOKS.values()}):
        assert "<svg" in Template(f'{{% include "{icon_path(shape)}" %}}').render(Context()), shape


def test_a_word_that_is_kept_as_html_lets_no_other_word_be_html():
    fragment.cache_clear()
    kept = status("ready", mark_safe("<i>x</i>"))
    assert "<i>x</i>" in kept
    assert "&lt;i&gt;x&lt;/i&gt;" in status("ready", "<i>x</i>")


# Filters and components as pages use them


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


def test_a_filter_says_what_its_unit_says_and_nothing_of_nothing():
    for name in FILTERS:
        assert draw(f"{{{{ value|{name} }}}}", value=None) == "\u2014", name

    for name, value, words in [
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
    ]:
        shown = draw(f"{{{{ value|{name} }}}}", value=value)
        assert shown == words.replace("~", NBSP).replace("_", THIN), (name, value)

    shown = draw('{{ value|quantity:"bytes" }}', value=GIB)
    assert shown == '1.00<span class="unit">GiB</span>'
    assert "<b>" not in draw("{{ value|quantity:unit }}", value=1, unit="<b>")


def test_how_long_ago_is_said_coarsely_or_never():
    for seconds, words in [
        (0, "just now"),
        (4, "just now"),
        (-30, "just now"),
        (6, "6 s ago"),
        (200, "3 min ago"),
        (90_000, "1 d ago"),
    ]:
        assert draw("{{ at|ago }}", at=now() - timedelta(seconds=seconds)) == words, seconds
    assert draw("{{ at|ago }}", at=None) == "never"


def test_one_entry_of_the_navigation_is_current_and_all_are_in_order():
    for path, name in [
        ("/", "Home"),
        ("/plans/", "Plans"),
        ("/plans/01H/edit/goal/", "Plans"),
        ("/jobs/01H/", "Jobs"),
        ("/hosts/box/", "Hosts"),
        ("/models/meta-llama/Llama-3.1-8B/", "Models"),
        ("/techniques/lora/", "Techniques"),
        ("/docs/planner", "Docs"),
        ("/search/", None),
    ]:
        html = draw("{% navigation %}", request=RequestFactory().get(path))
        current = re.findall(r'aria-current="page"[^>]*>\s*([A-Z][a-z]+)', html)
        assert current == ([name] if name else []), path

    html = draw("{% navigation %}")
    places = [html.index(f">{name}<") for _, name in NAVIGATION]
    assert places == sorted(places)


def test_the_theme_is_one_of_three_words():
    for cookie, chosen in [
        ("light", "light"),
        ("dark", "dark"),
        ("", "system"),
        ('"><script>', "system"),
    ]:
        request = RequestFactory().get("/")
        request.COOKIES["theme"] = cookie
        assert draw("{% theme %}", request=request) == chosen, cookie


def test_a_bar_and_the_dot_of_a_ratio_stay_on_their_scale():
    for ratio, percent in [
        (0.5, "50.0"),
        (None, "0.0"),
        (-1, "0.0"),
        (7, "100.0"),
        (0.3333, "33.3"),
    ]:
        assert percent in draw("{% progress ratio %}", ratio=ratio), ratio

    for value in [0.01, 0.5, 1.0, 2.0, 99.0, None, 0]:
        html = draw("{% ratio value %}", value=value)
        places = [float(text) for text in re.findall(r'cx="([\d.]+)%?"', html)]
        assert all(0 <= place <= 100 for place in places), value


def test_a_figure_says_its_provenance_and_the_ends_of_its_whisker_escaped():
    for provenance in ["modelled", "published", "measured"]:
        one = Figure("Speed", 5.0, "tokens_per_second", provenance=provenance, note="here")
        assert f'class="prov {provenance}"' in draw("{% figure one %}", one=one), provenance

    assert "whisker" not in draw("{% figure one %}", one=Figure("Speed", 5.0, "seconds"))
    html = draw("{% figure one %}", one=Figure("Speed", 5.0, "seconds", 4.0, 6.0))
    assert "whisker" in html
    assert f"4.0{DASH}6.0" in html
    assert "<b>" not in draw("{% figure one %}", one=Figure("<b>", 5.0, "<b>", note="<b>"))


def test_a_memory_bar_says_in_words_what_fills_it_or_nothing():
    row = memory_row("Memory", {"weights": 15 * GIB, "kv_cache": 2 * GIB}, 24 * GIB)
    html = draw("{% memory_bar rows %}", rows=(row,))
    assert "Weights 15.0" in html
    assert "17.0 / 24.0" in html
    assert "0" in draw("{% memory_bar rows %}", rows=(memory_row("Memory", {}, 0),))
