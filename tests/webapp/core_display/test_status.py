"""The status chip knows every state of every machine."""

import pytest
from django.template import Context, Template
from django.utils.safestring import mark_safe

from webapp.core.display import fragment
from webapp.core.templatetags.status import LOOKS, icon_path, status
from webapp.hosts.contact import Contact
from webapp.hosts.models import HostState
from webapp.jobs.models import FINAL_STATES, JobState
from webapp.plans.models import PlanState


def chip(state: str) -> str:
    return Template("{% load status %}{% status state %}").render(Context({"state": state}))


@pytest.mark.parametrize("state", [*JobState, *HostState, *Contact, PlanState.COMPUTED])
def test_every_state_has_a_shape_and_a_word(state):
    html = chip(state)

    assert "<svg" in html
    assert LOOKS[str(state)].word in html


@pytest.mark.parametrize("state", [*JobState, *HostState])
def test_the_word_is_the_state_machines_own(state):
    assert LOOKS[state].word == state.label


def test_no_two_looks_of_final_states_share_shape_and_tone_but_failures():
    looks = [LOOKS[state][:2] for state in FINAL_STATES - {JobState.ERROR}]

    assert len(set(looks)) == len(looks)


def test_an_unknown_state_is_shown_as_it_is_and_escaped():
    assert "&lt;b&gt;" in chip("<b>")


def test_red_is_for_what_needs_a_person():
    bad = {state for state, look in LOOKS.items() if look.tone == "bad"}

    plans = {"does-not-fit", "refused", "too-long"}  # a target that is missed is amber
    assert bad == {"failed", "error", "unreachable", *plans}


@pytest.mark.parametrize("shape", sorted({look.shape for look in LOOKS.values()}))
def test_every_shape_is_a_template(shape):
    assert "<svg" in Template(f'{{% include "{icon_path(shape)}" %}}').render(Context())


def test_a_word_that_is_kept_as_html_lets_no_other_word_be_html():
    fragment.cache_clear()
    kept = status("ready", mark_safe("<i>x</i>"))

    assert "<i>x</i>" in kept
    assert "&lt;i&gt;x&lt;/i&gt;" in status("ready", "<i>x</i>")
