"""A number is what was typed, or refused by its field: in every form of the site."""

import re
from collections.abc import Iterator

import pytest
from django import forms

from planner.specs.workload import Strategy
from runners.plans.document import GOALS, HardwareChoice
from runners.plans.launch import Launch
from runners.plans.workloads import WORKLOADS
from tests.webapp.conftest import client_of
from webapp.accounts.models import AccessToken
from webapp.core.numbers import PLAIN, WHOLE, NumberText, number_fault, number_of
from webapp.hosts.adding import VirtualHostForm
from webapp.hosts.models import Host
from webapp.jobs.quota_form import QuotaForm
from webapp.pages.limits import BY_KEY, LimitForm
from webapp.pages.playground import PlaygroundForm
from webapp.wizard.forms import GoalForm, HardwareForm, ModelForm, PinsForm, form_field
from webapp.wizard.launch_form import LaunchForm, launch_form
from webapp.wizard.workload_forms import workload_form

COMMA = ["0,5", "1,5", "1,000", "1.000,5", ",5", "5,"]
OTHERS = [
    "٣",
    "\uff11",
    "1_000",
    "0x10",
    "nan",
    "inf",
    "-inf",
    "1e",
    "1 000",
    "½",
    "1.2.3",
    "--1",
    "1'000",
]
READ = {
    "0.5": 0.5,
    ".5": 0.5,
    "5.": 5.0,
    "1e-4": 1e-4,
    "-2": -2.0,
    "+3": 3.0,
    "007": 7.0,
    " 1 ": 1.0,
}


def number_fields() -> Iterator[tuple[str, forms.Field]]:
    """Yield every field of a form of the site that takes a number, by its place."""
    classes: list[type[forms.BaseForm]] = [
        QuotaForm, PlaygroundForm, VirtualHostForm, GoalForm, ModelForm,
    ]  # fmt: skip
    shown = [(each.__name__, each.base_fields) for each in classes]
    made = [
        *((goal, workload_form(goal)) for goal in GOALS),
        ("hardware", HardwareForm(hardware=HardwareChoice(), hosts=())),
        ("pins", PinsForm(pins=Strategy())),
        ("launch", launch_of_endpoint()),
    ]
    shown += [(name, form.fields) for name, form in made]
    for place, fields in shown:
        for name, field in fields.items():
            if isinstance(field, forms.IntegerField | forms.FloatField | forms.DecimalField):
                yield f"{place}.{name}", field


def launch_of_endpoint(**posted: str) -> LaunchForm:
    """Return the launch form of a plan to serve, filled by what a browser sent."""
    note = {"goal": "serve", "is_serving": True, "can_serve": True}
    return launch_form(Launch(), "chat", note, (), posted or None)


def test_what_is_read_is_what_was_typed():
    for text, number in READ.items():
        assert number_of(text) == number, text
    for text in (*COMMA, *OTHERS):
        with pytest.raises(ValueError, match="which"):
            number_of(text)
    assert all("comma" in number_fault(text) for text in COMMA)
    assert all(number_fault(text, WHOLE) for text in ("9" * 400, "9" * 5000))
    assert [text for text in ("1e2", "1E2") if not number_fault(text, PLAIN)] == []
    assert [text for text in ("1.000", "1e3", "1.5") if not number_fault(text, WHOLE)] == []


def test_every_number_of_a_form_reaches_the_site_as_it_was_typed():
    found = dict(number_fields())
    assert len(found) > 30
    for place, field in found.items():
        assert isinstance(field.widget, NumberText), place
        for text in (*COMMA, *OTHERS):
            with pytest.raises(forms.ValidationError) as refusal:
                field.clean(text)
            assert text in str(refusal.value), (place, text)
    for question in BY_KEY.values():
        for name, field in LimitForm({}, question).fields.items():
            assert not isinstance(field.widget, forms.NumberInput), (question.key, name)


def test_a_refused_number_is_named_as_typed_beside_limits_without_exponents():
    field = form_field(WORKLOADS["pretrain"], "tokens")
    with pytest.raises(forms.ValidationError) as refusal:
        field.clean("-3")
    assert refusal.value.messages == [
        "Or a number of tokens is -3. It must be a number from 0.001 to 1,000,000,000."
    ]


def test_the_launch_form_reads_no_comma_as_anything_else():
    fields = (
        ("job", "max_duration_seconds"),
        ("endpoint", "idle_stop_seconds"),
        ("load", "requests_per_repetition"),
        ("load", "repetitions"),
    )
    for text in (*COMMA, *OTHERS):
        for run, field in fields:
            errors = launch_of_endpoint(run=run, **{field: text}).errors
            assert [field] == [name for name, (said,) in errors.items() if text in said], text
    for text in ("1,5", "0,5 1,5", "1, 2,5"):
        assert "two levels" in str(launch_of_endpoint(run="load", points=text).errors["points"])
    form = launch_of_endpoint(run="load", points="1,2,4", max_duration_seconds="0.5")
    assert form.is_valid(), form.errors
    assert (form.launch.points, form.launch.max_duration_seconds) == ([1, 2, 4], 1800.0)


@pytest.mark.django_db(databases="__all__")
def test_pages_of_tokens_and_machines_make_nothing_of_an_odd_number(alice, olga):
    tokens, hosts = AccessToken.objects.count(), Host.objects.count()
    for text in ("0,5", "1e2", "٣", "1_0"):
        token = {"name": "laptop", "scope": "launch", "days": "1", "budget": "1"}
        for field in ("days", "budget"):
            answer = client_of(alice).post(
                "/settings/tokens/save/", token | {field: text}, follow=True
            )
            assert text in answer.content.decode(), (field, text)
    for text in ("0,5", "1,000", "٣"):
        machine = {"name": "next", "device": "h100-sxm", "num_devices": "8", "memory_gib": text}
        page = client_of(olga).post("/hosts/virtual/new/", machine).content.decode()
        assert re.search(rf"is {text}, which", page), text
    assert (AccessToken.objects.count(), Host.objects.count()) == (tokens, hosts)
