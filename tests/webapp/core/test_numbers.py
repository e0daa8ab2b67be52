"""A number is what was typed, or refused by its field: in every form of the site."""

import re
from collections.abc import Iterator

import pytest
from django import forms

from tests.webapp.conftest import client_of
from webapp.accounts.models import AccessToken
from webapp.core.numbers import PLAIN, WHOLE, NumberText, number_fault, number_of
from webapp.core.problems import InvalidProblem
from webapp.hosts.adding import VirtualHostForm
from webapp.hosts.models import Host
from webapp.jobs.launching import launch_options_of
from webapp.jobs.quota_form import QuotaForm
from webapp.pages.limits import BY_KEY, LimitForm
from webapp.pages.playground import PlaygroundForm
from webapp.plans.predicting import measuring_of
from webapp.plans.serving import endpoint_options_of
from webapp.wizard import forms as wizard_forms
from webapp.wizard.workload_forms import WORKLOAD_FORMS

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
    shown: list[type[forms.BaseForm]] = [
        QuotaForm, PlaygroundForm, VirtualHostForm, *WORKLOAD_FORMS.values(),
        wizard_forms.GoalForm, wizard_forms.ModelForm, wizard_forms.HardwareForm,
        wizard_forms.PinsForm,
    ]  # fmt: skip
    for form in shown:
        for name, field in form.base_fields.items():
            if isinstance(field, forms.IntegerField | forms.FloatField | forms.DecimalField):
                yield f"{form.__name__}.{name}", field


def test_what_is_read_is_what_was_typed():
    for text, number in READ.items():
        assert number_of(text) == number, text
    for text in (*COMMA, *OTHERS):
        with pytest.raises(ValueError, match="which"):
            number_of(text)
    assert all("comma" in number_fault(text) for text in COMMA)
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


def test_the_launch_form_reads_no_comma_as_anything_else():
    load = {"arrivals": "closed", "points": "1, 2", "requests": "4", "repetitions": "1"}
    for text in (*COMMA, *OTHERS):
        for field, read in (
            ("hours", launch_options_of),
            ("idle", lambda posted: endpoint_options_of(posted, ())),
            ("requests", lambda posted: measuring_of(load | posted, is_load=True)),
            ("repetitions", lambda posted: measuring_of(load | posted, is_load=True)),
        ):
            with pytest.raises(InvalidProblem) as refusal:
                read({field: text})
            assert (refusal.value.code, text in refusal.value.detail) == (field, True), text
    for text in ("1,5", "0,5 1,5", "1, 2,5"):
        with pytest.raises(InvalidProblem, match="two levels"):
            measuring_of(load | {"points": text}, is_load=True)
    levels = measuring_of(load | {"points": "1,2,4"}, is_load=True).load
    assert levels is not None
    assert levels.arrivals.points == (1, 2, 4)
    assert launch_options_of({"hours": "0.5"}).max_duration_seconds == 1800.0


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
